"""Knorm: keys of small norm draw attention; keep those (Devoto et al., EMNLP 2024)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core import settings, slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Turn
from kvjax.core.leaves import Leaf
from kvjax.families.bounded import Bounded
from kvjax.families.method import Method


@dataclasses.dataclass(frozen=True)
class Knorm(Bounded):
  """A token scores −‖k‖₂ per KV head; the lowest leaves, of a prompt and in each step (§4).

  No query is looked at. Models that normalise keys per head (Qwen3, Gemma 3) have almost equal
  norms: expect little there.

  Attributes:
    budget: tokens kept per KV head.
    skip_layers: layers that keep every token: (0, 1) in the authors' runs, none here.
  """

  skip_layers: tuple[int, ...] = ()

  def _most(self, spec: CacheSpec, layer: int) -> int:
    return spec.capacity if layer in self.skip_layers else self.budget

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    return {**super().leaves(spec, layer), "score": Leaf("slots", new=_score)}

  def victim(self, at: At, cache: Cache) -> Int[Array, "B K"]:
    return slots.lowest(cache.slots["score"], cache.pos)

  def rank(self, at: At, turn: Turn) -> tuple[Float[Array, "B K S"], slots.Slots]:
    return turn.staged["score"], turn.staged


def _neutral(cls: type[Knorm], length: int) -> Method:
  return cls(budget=length)


settings.register(Knorm, neutral=_neutral)


def _score(new: slots.Slots) -> Array:
  """−‖k‖₂."""
  return -jnp.linalg.norm(new["k"].astype(jnp.float32), axis=-1)
