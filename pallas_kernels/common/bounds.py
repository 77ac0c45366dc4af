"""Tiles of a row that may be chosen, how many are, and those that are given without choice."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class Bounds:
  """Slots per tile, first slots that are always visible, first and newest tiles that are forced."""

  unit: int
  span_sinks: int
  sinks: int
  local: int


class Sight(NamedTuple):
  """A row's tiles: those of the slots [0, span_sinks) ∪ [start, stop) are visible."""

  bounds: Bounds
  start: Array
  stop: Array
  newest: Array

  @staticmethod
  def of(bounds: Bounds, start: Array, stop: Array) -> "Sight":
    newest = lax.div(stop + (bounds.unit - 1), jnp.int32(bounds.unit)) - 1
    return Sight(bounds, start, stop, newest)

  def visible(self, tile: Array) -> Array:
    unit, sinks = self.bounds.unit, self.bounds.span_sinks
    return (tile * unit < self.stop) & ((tile * unit < sinks) | ((tile + 1) * unit > self.start))

  def seen(self, first: Any, last: Any) -> Array:
    """Number of visible tiles of [first, last), where the newest one is not before the last.

    Those before the `early` ones end, and from the first one of the window on.
    """
    early = jnp.int32(pl.cdiv(self.bounds.span_sinks, self.bounds.unit))
    window = lax.div(self.start, jnp.int32(self.bounds.unit))
    after = jnp.maximum(jnp.maximum(window, early), first)
    return jnp.maximum(jnp.minimum(last, early) - first, 0) + jnp.maximum(last - after, 0)

  def forced(self) -> tuple[Array, Array, Array, Array]:
    """First tiles, then newest ones backwards; which are there, their places, and how many are."""
    sinks, local, newest = self.bounds.sinks, self.bounds.local, self.newest
    i = jnp.arange(pl.next_power_of_2(sinks + local))
    tile = jnp.where(i < sinks, i, newest - (i - sinks))
    ok = self.visible(tile) & (i < sinks + local) & ((i < sinks) | (tile >= sinks))
    early = self.seen(0, jnp.minimum(sinks, newest + 1))
    oldest = jnp.maximum(newest + 1 - local, sinks)
    head = early + self.seen(oldest, newest + 1)
    place = jnp.where(i < sinks, self.seen(0, tile), early + self.seen(tile + 1, newest + 1))
    return tile, ok, place, head


@dataclasses.dataclass(frozen=True)
class Wanted:
  """Number of chosen tiles: `k` for each list, `limit` in rows of `dense_below` slots and more.

  The `first` best of them stand before the others. Up to `room` may be given instead; 0: just k.
  """

  k: tuple[int, ...]
  limit: tuple[int, ...]
  dense_below: int = 0
  first: int = 0
  room: int = 0

  def of(self, row: Array, stop: Array) -> Array:
    """The number for a row, which is of list row % N."""

    def of_list(values: Sequence[int]) -> Array:
      mine = jnp.int32(values[-1])
      for n in range(len(values) - 1):
        mine = jnp.where(row % len(values) == n, jnp.int32(values[n]), mine)
      return mine

    want = of_list(self.k)
    if self.dense_below or self.limit != self.k:
      want = jnp.where(stop < self.dense_below, want, of_list(self.limit))
    return want
