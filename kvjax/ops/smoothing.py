"""Forecasts of series by linear smoothing: a level that follows, and the trend of the level."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.primitives.trees import pytree

PREDICTORS = ("holt", "ema")

# What a calibration tries: α, how fast the level follows; β, how fast the trend does; γ, how far
# the trend is drawn out.
ALPHAS = tuple(i / 10 for i in range(1, 10))
BETAS = tuple(i / 10 for i in range(10))
GAMMAS = tuple(i / 4 for i in range(5))


@pytree()
@dataclasses.dataclass(frozen=True)
class Smoothed:
  """Level a and trend b of many series, float32, alike in shape."""

  level: Array
  trend: Array

  def forecast(self, gamma: Float[Array, "*#shape"]) -> Float[Array, "*shape"]:
    """ŝ = a + γ·b, the next value."""
    return self.level + gamma * self.trend

  def updated(
    self,
    value: Float[Array, "*#shape"],
    alpha: Float[Array, "*#shape"],
    beta: Float[Array, "*#shape"],
    begun: Bool[Array, "*#shape"],
    there: Bool[Array, "*#shape"],
    predictor: str = "holt",
  ) -> "Smoothed":
    """The state after a new value s.

        holt   a = α·s + (1 − α)·(a′ + b′)       ema   a = α·s + (1 − α)·a′
        b = β·(a − a′) + (1 − β)·b′

    Series that have not `begun` start with a = s, b = 0; those that are not `there` stay 0.
    """
    before = self.level + self.trend if predictor == "holt" else self.level
    level = alpha * value + (1 - alpha) * before
    trend = beta * (level - self.level) + (1 - beta) * self.trend
    start = jnp.where(there, value, 0.0)
    return Smoothed(jnp.where(begun, level, start), jnp.where(begun, trend, 0.0))


def grid() -> Float[Array, "C 3"]:
  """All (α, β, γ), the last one varying fastest."""
  axes = jnp.meshgrid(*(jnp.array(x, jnp.float32) for x in (ALPHAS, BETAS, GAMMAS)), indexing="ij")
  return jnp.stack(axes, -1).reshape(-1, 3)
