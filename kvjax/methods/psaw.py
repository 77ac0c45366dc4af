"""PSAW: a window that narrows with depth (PrHS, §IV-B)."""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.core import settings
from kvjax.core.context import At
from kvjax.core.fields import between, expect, least
from kvjax.core.plan import Window
from kvjax.core.traits import Traits
from kvjax.families.full import Full
from kvjax.families.wrapper import Wrapper
from kvjax.methods import depth


@dataclasses.dataclass(frozen=True)
class PSAW(Wrapper):
  """Hides the older tokens from deep layers, in prefill and decode (progressive sliding window).

  Query t of layer ℓ sees {1, …, C_sink} ∪ {P_ℓ(t), …, t} with (Eq. 15)

      P_ℓ(t) = ⌊(1 − φ^(α·(ℓ − ℓ_s)/(L − ℓ_s)))·t⌋ for ℓ ≥ ℓ_s, and 0 below,

  where layers and positions count from 1: ℓ_s itself hides nothing, and the top layer keeps the
  newest φ^α. What is hidden depends on positions only, so it also bounds the slots that attention
  reads. Nothing leaves the cache.

  Attributes:
    base: a method whose slots are positions (`positional`) and that has no window of its own.
    sinks: C_sink, first tokens that every layer sees (the paper's 8 or 16, as in CIS).
    phi: φ, share of the past that the top layer sees where α = 1, in (0, 1]; 1 hides nothing.
    alpha: α, how fast the window narrows, 0 or more; 0 hides nothing.
    start: ℓ_s = ⌊start·L⌋.
  """

  replaces: ClassVar[tuple[str, ...]] = ("window",)
  sinks: int = least(0, 16)
  phi: float = between(0, 1, 0.7, "(]")
  alpha: float = between(0, math.inf, 1.0, "[)")
  start: float = between(0, 1, 0.75)

  def __post_init__(self):
    super().__post_init__()
    expect(self, "base", self.base.traits.positional, "a method whose slots are positions")

  @property
  def traits(self) -> Traits:
    return super().traits.but(spreads=self.base.traits.spreads)

  def window(self, at: At, qpos: Int[Array, "B T"]) -> Window | None:
    layers = at.env.layers
    hidden = at.of_layer(lambda i: depth.share(self.phi, self.alpha, self.start, i, layers))
    if hidden == 0:
      return None
    t = jnp.maximum(qpos + 1, 0)  # of padding: 0
    return Window(self.sinks, depth.floor_of_each(hidden, t) - 1)  # P_ℓ(t), counted from 0


settings.register(
  PSAW,
  # The paper's window, whose size follows the context, and a 32nd of the budget as sinks.
  example=lambda cls, budget: cls(Full(), sinks=max(1, budget // 32)),
  neutral=lambda cls, length: cls(Full(), phi=1.0),
)
