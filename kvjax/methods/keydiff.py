"""KeyDiff: keep the keys that are least like the rest (Park et al., NeurIPS 2025)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core import settings, slots
from kvjax.core.cache import Cache
from kvjax.core.context import At, Turn
from kvjax.core.fields import expect, least
from kvjax.families.bounded import Bounded


@dataclasses.dataclass(frozen=True)
class KeyDiff(Bounded):
  """A token scores −cos(k, a) with the anchor a, the mean of all keys at length one (§3.2).

  The lowest leaves: of a prompt, which is read at once, and in each step, for which all cached keys
  are compared anew. That reads them twice beside attention, and keeps no statistic that could
  drift. No query is looked at.

  Attributes:
    budget: tokens kept per KV head.
    recent: newest tokens that stay; the paper protects none.
  """

  recent: int = least(0, 0)

  def __post_init__(self):
    expect(self, "budget", self.budget > self.recent, f"more than recent = {self.recent}")

  def victim(self, at: At, cache: Cache) -> Int[Array, "B K"]:
    score = self._score(cache.slots["k"], cache.pos)
    return slots.lowest(slots.sparing(score, cache.pos, cache.seen + 1, self.recent), cache.pos)

  def rank(self, at: At, turn: Turn) -> tuple[Float[Array, "B K S"], slots.Slots]:
    k, pos = turn.staged["k"], turn.staged["pos"]
    end = pos[:, 0].max(-1) + 1
    return slots.sparing(self._score(k, pos), pos, end, self.recent), turn.staged

  def _score(self, k: Float[Array, "B K S H"], pos: Int[Array, "B K S"]) -> Float[Array, "B K S"]:
    """−cos(k, a) over the tokens that are there; 0 where either is zero."""
    k = jnp.where((pos >= 0)[..., None], k.astype(jnp.float32), 0)
    unit = k / _length(k)
    anchor = unit.sum(2, keepdims=True)  # its length does not matter
    return -(unit * (anchor / _length(anchor))).sum(-1)


settings.register(KeyDiff, neutral=lambda cls, length: cls(budget=length))


def _length(x: Float[Array, "*batch H"]) -> Float[Array, "*batch 1"]:
  """‖x‖₂, 1 where it is 0."""
  norm = jnp.linalg.norm(x, axis=-1, keepdims=True)
  return jnp.where(norm > 0, norm, 1.0)
