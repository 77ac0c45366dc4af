"""PRR's predictor inside kernels: a step of it (Eqs. 2 and 3) where scores have just been made."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from kvjax.kernels.common import backend


def outputs(rows: int, tiles: int, state: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
  """Shapes of what `advance` writes: scores and forecasts, stops, and level and trend if given."""
  each = jax.ShapeDtypeStruct((rows, tiles), jnp.float32)
  both = jax.ShapeDtypeStruct((rows, 2, tiles), jnp.float32)
  return [both, jax.ShapeDtypeStruct((rows, 2), jnp.int32), *[each] * len(state[:2])]


def loaded(row: Array, batch_row: Array, tile: Array, inputs: Sequence[Any]) -> tuple[Any, ...]:
  """Level and trend of some tiles of a row, and α, β and γ, where there are any.

  inputs: level, trend [R, P] of all, factors [B, 3]; or nothing, where the score is the forecast.
  """
  if not inputs:
    return ()
  *state, factors = inputs
  old = (backend.load(ref, row, tile, mask=tile < ref.shape[1]) for ref in state)
  return *old, *(factors[batch_row, i] for i in range(3))


def advance(
  row: Array,
  tile: Array,
  score: Array,
  held: tuple[Any, ...],
  outs: Sequence[Any],
  stop: Array,
  *,
  unit: int,
  predictor: str,
) -> None:
  """Some tiles of a row: their scores are stored, and forecasts, levels and trends after them.

  held: of `loaded`. outs: both [R, 2, P] (scores, forecasts), stops [R, 2], the occupied slots that
  each of the two is for, and level, trend [R, P].
  """
  both_ref, stops_ref, *state_refs = outs
  inside = tile < both_ref.shape[2]
  newest = stop - 1  # the new token's position; the last one's is one less
  there = tile < lax.div(newest, jnp.int32(unit))
  ahead = score
  if held:
    old_level, old_trend, alpha, beta, gamma = held
    begun = tile < lax.div(jnp.maximum(newest - 1, 0), jnp.int32(unit))
    before = old_level + old_trend if predictor == "holt" else old_level
    level = alpha * score + (1 - alpha) * before
    trend = beta * (level - old_level) + (1 - beta) * old_trend
    level = jnp.where(begun, level, jnp.where(there, score, 0.0))
    trend = jnp.where(begun, trend, 0.0)
    ahead = level + gamma * trend
    for ref, value in zip(state_refs, (level, trend), strict=True):
      backend.store(ref, row, tile, value=value, mask=inside)
  seen = inside & (tile * unit < stop)
  backend.store(both_ref, row, 0, tile, value=score, mask=seen)
  backend.store(both_ref, row, 1, tile, value=jnp.where(there, ahead, jnp.inf), mask=inside)
  # By the program of a row's first tiles: thousands would queue for the place.
  backend.store(stops_ref, row, tile, value=stop + tile, mask=tile < 2)
