"""Random eviction: the control that every informed policy must beat."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core import settings, slots
from kvjax.core.cache import Cache
from kvjax.core.context import At, Turn
from kvjax.core.fields import expect, least
from kvjax.families.bounded import Bounded


@dataclasses.dataclass(frozen=True)
class Random(Bounded):
  """Keeps the newest `recent` tokens and a uniformly random sample of the older ones.

  Every (position, head, layer, seed) has a fixed pseudo-random priority; the older tokens of
  highest priority stay. So the sample is uniform at every length, differs between heads and
  layers, and needs no random key in the cache. Prefill attention is dense.

  Attributes:
    budget: tokens kept per KV head, the recent ones included.
    recent: newest tokens that are not drawn; None: an eighth of the budget, at least one.
    seed: chooses the sample.
  """

  recent: int | None = least(1, None)
  seed: int = 0

  def __post_init__(self):
    recent = self._window_size
    expect(self, "budget", self.budget > recent, f"more than recent = {recent}")

  @property
  def _window_size(self) -> int:
    return max(1, self.budget // 8) if self.recent is None else self.recent

  def victim(self, at: At, cache: Cache) -> Int[Array, "B K"]:
    """The lowest priority once the new token, position `seen`, is in the recent window."""
    priority = self._priority(at, cache.pos, cache.seen + 1)
    return jnp.argmin(priority, -1).astype(jnp.int32)

  def rank(self, at: At, turn: Turn) -> tuple[Float[Array, "B K S"], slots.Slots]:
    end = turn.staged["pos"][:, 0].max(-1) + 1
    return self._priority(at, turn.staged["pos"], end), turn.staged

  def _priority(
    self, at: At, pos: Int[Array, "B K S"], end: Int[Array, " B"]
  ) -> Float[Array, "B K S"]:
    """Uniform in [0, 1) for older tokens, infinite for the newest ones before `end`."""
    head = at.head_index(pos.shape[1])[:, None]
    stream = _mix(
      jnp.uint32(self.seed) ^ _mix(jnp.uint32(at.layer) ^ _mix(head.astype(jnp.uint32)))
    )
    draw = _mix(pos.astype(jnp.uint32) ^ stream) >> 8  # 24 bits: exact in float32
    return slots.sparing(draw.astype(jnp.float32) * 2.0**-24, pos, end, self._window_size)


settings.register(Random, neutral=lambda cls, length: cls(budget=length + 1))


def _mix(x: Array) -> Array:
  """A bijection of uint32 that scatters neighbours (multiply, xor-shift)."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
  x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
  return x ^ (x >> 16)
