"""Knorm: keys of small norm draw attention; keep those (Devoto et al., EMNLP 2024)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core import settings, slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Turn
from kvjax.core.fields import expect, least
from kvjax.core.leaves import Leaf
from kvjax.families.bounded import Bounded


@dataclasses.dataclass(frozen=True)
class Knorm(Bounded):
  """A token scores −‖k‖₂ per KV head; the lowest leaves, of a prompt and in each step (§4).

  No query is looked at. Models that normalise keys per head (Qwen3, Gemma 3) have almost equal
  norms: expect little there.

  Attributes:
    budget: tokens kept per KV head.
    skip_layers: layers that keep every token: (0, 1) in the authors' runs, none here.
    recent: newest tokens that stay. The paper protects none, and a model may lose what it has just
      said: its own tokens leave as soon as their keys are long.
  """

  skip_layers: tuple[int, ...] = ()
  recent: int = least(0, 0)

  def __post_init__(self):
    expect(self, "budget", self.budget > self.recent, f"more than recent = {self.recent}")

  def _most(self, spec: CacheSpec, layer: int) -> int:
    return spec.capacity if layer in self.skip_layers else self.budget

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    return {**super().leaves(spec, layer), "score": Leaf("slots", new=_score)}

  def victim(self, at: At, cache: Cache) -> Int[Array, "B K"]:
    score = slots.sparing(cache.slots["score"], cache.pos, cache.seen + 1, self.recent)
    return slots.lowest(score, cache.pos)

  def rank(self, at: At, turn: Turn) -> tuple[Float[Array, "B K S"], slots.Slots]:
    pos = turn.staged["pos"]
    end = pos[:, 0].max(-1) + 1
    return slots.sparing(turn.staged["score"], pos, end, self.recent), turn.staged


settings.register(Knorm, neutral=lambda cls, length: cls(budget=length))


def _score(new: slots.Slots) -> Array:
  """−‖k‖₂."""
  return -jnp.linalg.norm(new["k"].astype(jnp.float32), axis=-1)
