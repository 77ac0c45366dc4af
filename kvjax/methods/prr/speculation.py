"""Sets of tiles: S, which the base selects, and Ŝ, which was foreseen (PRR, §3 and §4.1).

Of the sets of ⌊ρ·k⌋ tiles, Ŝ is to miss the fewest of S (Eq. 1): those of the highest forecasts.
First and newest tiles that the base always reads are in both and outside k.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Attended, Plan
from kvjax.families import sight
from kvjax.families.selective import Selective
from kvjax.methods.prr.forecast import Smoothed


class Foreseen(NamedTuple):
  """Note of a step: the predictor's next state, if it has one; the next Ŝ, int32 [B, K, V]."""

  state: Smoothed | None
  table: Array


@dataclasses.dataclass(frozen=True)
class Beside:
  """Results beside attention to predicted tiles.

  Attributes:
    both: float32 [B, K, 2, P], scores and forecasts of all tiles.
    state: the predictor's, after the scores, if it has one.
    stops: int32 [B, K, 2], the occupied slots that scores and forecasts are for, where known.
    early: that attention, where it has been made.
  """

  both: Array
  state: Smoothed | None
  stops: Array | None = None
  early: Attended | None = None


def guessed(cache: Cache, plan: Plan, unit: int) -> Plan:
  """Ŝ of this step, as the last one foresaw it."""
  table = cache.heads["foreseen"]
  return plan.listed(table, (table >= 0).sum(-1, dtype=jnp.int32), unit=unit)


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


def noted(cache: Cache, foreseen: Foreseen, selected: Int[Array, "B K W"]) -> Cache:
  """The cache with what the next step needs."""
  held, state = {"foreseen": foreseen.table, "selected": selected}, foreseen.state
  return cache.put(heads=held if state is None else held | vars(state))
