"""PRR's predictor inside kernels: a step of it (Eqs. 2 and 3) where scores have just been made."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from kvjax.kernels.common import backend


def state(row: Array, tile: Array, inputs: Sequence[Any]) -> tuple[Array, Array]:
  """Level and trend of some tiles of a row; inputs: level, trend [R, P] of all."""
  level, trend = (backend.load(ref, row, tile, mask=tile < ref.shape[1]) for ref in inputs)
  return level, trend


def factors(factors_ref: Any, batch_row: Array) -> tuple[Array, Array, Array]:
  """α, β and γ of a row; factors [B, 3]."""
  alpha, beta, gamma = (factors_ref[batch_row, i] for i in range(3))
  return alpha, beta, gamma


def advance(
  row: Array,
  tile: Array,
  score: Array,
  old: tuple[Array, Array],
  factors: tuple[Array, Array, Array],
  outs: Sequence[Any],
  stop: Array,
  *,
  unit: int,
  predictor: str,
) -> None:
  """Some tiles of a row: their scores are stored, and forecasts, levels and trends after them.

  outs: both [R, 2, P] (scores, forecasts), level, trend [R, P], stops [R, 2], the occupied slots
  that each of the two is for.
  """
  both_ref, new_level_ref, new_trend_ref, stops_ref = outs
  inside = tile < new_level_ref.shape[1]
  (old_level, old_trend), (alpha, beta, gamma) = old, factors
  newest = stop - 1  # the new token's position; the last one's is one less
  begun = tile < lax.div(jnp.maximum(newest - 1, 0), jnp.int32(unit))
  there = tile < lax.div(newest, jnp.int32(unit))
  before = old_level + old_trend if predictor == "holt" else old_level
  level = alpha * score + (1 - alpha) * before
  trend = beta * (level - old_level) + (1 - beta) * old_trend
  level = jnp.where(begun, level, jnp.where(there, score, 0.0))
  trend = jnp.where(begun, trend, 0.0)
  ahead = jnp.where(there, level + gamma * trend, jnp.inf)
  seen = inside & (tile * unit < stop)
  backend.store(both_ref, row, 0, tile, value=score, mask=seen)
  backend.store(both_ref, row, 1, tile, value=ahead, mask=inside)
  backend.store(new_level_ref, row, tile, value=level, mask=inside)
  backend.store(new_trend_ref, row, tile, value=trend, mask=inside)
  # By the program of a row's first tiles: thousands would queue for the place.
  backend.store(stops_ref, row, tile, value=stop + tile, mask=tile < 2)
