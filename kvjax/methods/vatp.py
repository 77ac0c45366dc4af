"""VATP: a token matters by its attention and its value (Guo et al., EMNLP 2024)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.core import settings, slots
from kvjax.core.cache import CacheSpec
from kvjax.core.fields import expect, least
from kvjax.core.leaves import NORM, Leaf
from kvjax.methods.h2o import H2O


@dataclasses.dataclass(frozen=True)
class VATP(H2O):
  """H2O whose importance is the accumulated probability times the value's L1 norm.

  The first tokens draw much attention with small values; they are kept whatever their score.

  Attributes:
    budget: tokens kept per KV head.
    recent: newest tokens that are safe; None: half of the budget.
    sinks: first tokens that never leave (20).
  """

  sinks: int = least(0, 20)

  def __post_init__(self):
    super().__post_init__()
    recent, sinks = self._window_size, self.sinks
    expected = f"more than recent + sinks = {recent} + {sinks}"
    expect(self, "budget", self.budget > recent + sinks, expected)

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    return {**super().leaves(spec, layer), "norm": NORM}

  def _importance(self, held: slots.Slots) -> Float[Array, "B K S"]:
    return jnp.where(held["pos"] < self.sinks, jnp.inf, held["mass"] * held["norm"])


settings.register(
  VATP,
  example=lambda cls, budget: cls(budget=budget, sinks=min(20, budget // 8)),
  neutral=lambda cls, length: cls(budget=max(length, 2), recent=1, sinks=0),
)
