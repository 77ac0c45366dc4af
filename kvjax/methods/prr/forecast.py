"""Forecasts of tiles' scores: a level that follows them, and its trend (PRR, §4.1).

The formulae of Eqs. 2 and 3 are lost in our text of the paper. They are reconstructed from its
words as Holt's linear smoothing, per KV head and tile, ′ being the value of the last step. A cache
holds the state: "level" and "trend" [B, K, P], and on the rows shelf "factors" [B, 3], α, β and γ.
The forecast "last" is the score itself, and has no state.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.core.cache import Cache
from kvjax.primitives.trees import pytree


@pytree()
@dataclasses.dataclass(frozen=True)
class Smoothed:
  """Level a and trend b of many series, float32, alike in shape."""

  level: Array
  trend: Array

  def forecast(self, gamma: Float[Array, "*#shape"]) -> Float[Array, "*shape"]:
    """ŝ = a + γ·b, the next value (Eq. 2)."""
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
    """The state after a new value s (Eq. 3).

        holt   a = α·s + (1 − α)·(a′ + b′)       ema   a = α·s + (1 − α)·a′
        b = β·(a − a′) + (1 − β)·b′

    Series that have not `begun` start with a = s, b = 0; those that are not `there` stay 0.
    """
    before = self.level + self.trend if predictor == "holt" else self.level
    level = alpha * value + (1 - alpha) * before
    trend = beta * (level - self.level) + (1 - beta) * self.trend
    start = jnp.where(there, value, 0.0)
    return Smoothed(jnp.where(begun, level, start), jnp.where(begun, trend, 0.0))


def state_of(cache: Cache) -> Smoothed:
  """Level and trend of every tile."""
  return Smoothed(cache.heads["level"], cache.heads["trend"])


@dataclasses.dataclass(frozen=True)
class Predictor:
  """Forecasts of the next step's scores of tiles of `unit` slots; `kind` as in `kvjax.PRR`.

  A tile has its first score once it is full; until it has been scored it is predicted to be chosen.
  """

  kind: str
  unit: int

  @property
  def smooths(self) -> bool:
    """True if it has a state."""
    return self.kind != "last"

  def scored(self, tiles: int, t: Int[Array, " B"]) -> Bool[Array, "B 1 P"]:
    """Of P `tiles`, those with a score once token t has attended: the full ones before its own."""
    return jnp.arange(tiles, dtype=jnp.int32) < (t // self.unit)[:, None, None]

  def advanced(
    self, cache: Cache, scores: Float[Array, "B K P"]
  ) -> tuple[Smoothed | None, Float[Array, "B K P"]]:
    """The state after the newest token, whose scores these are, and ŝ of the next step."""
    t = cache.seen - 1
    if not self.smooths:
      return None, jnp.where(self.scored(scores.shape[-1], t), scores, jnp.inf)
    alpha, beta, gamma = (cache.rows["factors"][:, i, None, None] for i in range(3))
    new = self.updated(state_of(cache), scores, alpha, beta, t - 1, t)
    return new, self.forecast(new, gamma, t)

  def updated(
    self,
    state: Smoothed,
    scores: Float[Array, "B K P"],
    alpha: Float[Array, "#B 1 1"],
    beta: Float[Array, "#B 1 1"],
    last: Int[Array, " B"],
    t: Int[Array, " B"],
  ) -> Smoothed:
    """The state after token t, given that after token `last` (−1: there was none)."""
    begun, there = (self.scored(state.level.shape[-1], x) for x in (last, t))
    return state.updated(scores, alpha, beta, begun, there, self.kind)

  def forecast(
    self, state: Smoothed, gamma: Float[Array, "#B 1 1"], last: Int[Array, " B"]
  ) -> Float[Array, "B K P"]:
    """ŝ of the step after token `last`; ∞ for tiles that have no score yet."""
    there = self.scored(state.level.shape[-1], last)
    return jnp.where(there, state.forecast(gamma), jnp.inf)
