"""Sets of tiles: S, which the base selects, and Ŝ, which was foreseen (PRR, §3 and §4.1).

Of the sets of ⌊ρ·k⌋ tiles, Ŝ is to miss the fewest of S (Eq. 1): those of the highest forecasts.
First and newest tiles that the base always reads are in both and outside k.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Attended, Plan
from kvjax.families import sight
from kvjax.families.selective import Selective
from kvjax.methods.prr.forecast import Smoothed
from kvjax.primitives.trees import pytree


@pytree()
@dataclasses.dataclass(frozen=True)
class Speculation:
  """Knowledge of a plan beside the true selection.

  Attributes:
    guess: the foreseen selection Ŝ.
    hit: bool [B, K, W], which tiles of the plan are in it.
    scores: float32 [B, K, P], of all tiles, where the next Ŝ is still to be made of them.
    early: attention over Ŝ, where it has been made already.
    state, foreseen: the predictor's next state, and the next Ŝ, where they have been made already.
  """

  guess: Plan
  hit: Array
  scores: Array | None = None
  early: Attended | None = None
  state: Smoothed | None = None
  foreseen: Array | None = None


@dataclasses.dataclass(frozen=True)
class Beside:
  """Results beside attention to predicted tiles.

  Attributes:
    both: float32 [B, K, 2, P], scores and forecasts of all tiles.
    state: the predictor's, after the scores.
    stops: int32 [B, K, 2], the occupied slots that scores and forecasts are for, where known.
    early: that attention, where it has been made.
  """

  both: Array
  state: Smoothed
  stops: Array | None = None
  early: Attended | None = None


def guessed(cache: Cache, visible: Plan, unit: int) -> Plan:
  """Ŝ of this step, as the last one foresaw it."""
  table = cache.heads["foreseen"]
  return visible.listed(table, (table >= 0).sum(-1, dtype=jnp.int32), unit=unit)


def select_both(
  at: At, cache: Cache, base: Selective, beside: Beside, visible: Plan, ratio: float
) -> tuple[Plan, Plan]:
  """S, and Ŝ of the next step: alone, the second would take as long as the first."""
  plans = visible, sight.visible(at, _one_longer(cache))
  true, ahead = base._select_together(at, beside.both, plans, (1.0, ratio), beside.stops)
  return true, ahead


def foresee(
  at: At, cache: Cache, base: Selective, ahead: Float[Array, "B K P"], ratio: float
) -> Int[Array, "B K V"]:
  """Ŝ of the next step: the best of `ahead`."""
  longer = _one_longer(cache)
  guess = base._select(at, longer, ahead, sight.visible(at, longer), ratio)
  assert guess.table is not None
  return guess.table


def _one_longer(cache: Cache) -> Cache:
  """The cache as the next token will find it, but for that token."""
  return cache.put(rows={"seen": cache.seen + 1, "used": cache.used + 1})


def noted(
  cache: Cache, state: Smoothed, foreseen: Int[Array, "B K V"], selected: Int[Array, "B K W"]
) -> Cache:
  """The cache with what the next step needs."""
  new = {"level": state.level, "trend": state.trend}
  return cache.put(heads={**new, "foreseen": foreseen, "selected": selected})
