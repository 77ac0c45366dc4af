"""In which order ART's walk visits the tiles of a row: listed, newest first, or around a ring."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from kvjax.kernels.common import backend
from kvjax.primitives.ring import place_of


class Sizes(NamedTuple):
  """Slots per entry of a table, keys per tile and per part of one, first tiles ahead of others."""

  unit: int
  tile: int
  part: int
  pinned: int


class Table(NamedTuple):
  """Entries [R, W] in visiting order, and how many count [R]: refs, or arrays."""

  entries: Any
  total: Any


class Ring(NamedTuple):
  """Place of the newest token in a cache whose slots are used in turn: refs, or arrays.

  ring [R, 2], of `kvjax.primitives.ring`; seen [B], the position after the newest token.
  """

  ring: Any
  seen: Any


class Order(NamedTuple):
  """Number of tiles of a row, and the slots of part j of tile t of the order.

  slots: (t, j) -> slots [part], and which of them are there.
  run: whether these are neighbours: the addresses of a run need few registers.
  """

  tiles: Array
  slots: Callable[[Any, Any], tuple[Array, Array]]
  run: bool


def is_run(unit: int, tile: int, part: int) -> bool:
  """True if all slots of a part of a tile come from one entry of a table."""
  return unit % part == 0 and tile % part == 0


def keys_listed(table: Table, row: Array, sizes: Sizes, mask: Any = None) -> Array:
  """Slots that the entries of a row, or of several [N], hold."""
  total = table.total[row] if mask is None else backend.load(table.total, row, mask=mask, other=0)
  return jnp.minimum(total, table.entries.shape[1]) * sizes.unit


def tiles_listed(table: Table, row: Array, sizes: Sizes, mask: Any = None) -> Array:
  """Tiles of these."""
  return pl.cdiv(keys_listed(table, row, sizes, mask), sizes.tile)


def listed(table: Table, row: Array, sizes: Sizes) -> Order:
  """As a table says, whose entries hold `unit` slots each; negative ones are holes."""
  unit, tile, part, _ = sizes
  keys = keys_listed(table, row, sizes)

  def slots_of_run(t: Any, j: Any) -> tuple[Array, Array]:
    key = t * tile + j * part
    entry = table.entries[row, key // unit]
    return entry * unit + key % unit + jnp.arange(part), (key < keys) & (entry >= 0)

  def slots(t: Any, j: Any) -> tuple[Array, Array]:
    lane = j * part + jnp.arange(part)
    key = t * tile + lane
    mask = (key < keys) & (lane < tile)
    entry = backend.load(table.entries, row, key // unit, mask=mask, other=-1)
    return entry * unit + key % unit, entry >= 0

  run = is_run(unit, tile, part)
  return Order(pl.cdiv(keys, tile), slots_of_run if run else slots, run)


def newest_first(
  start: Array,
  stop: Array,
  sizes: Sizes,
  newest: Callable[[], Array] | None = None,
  moved: Callable[[Array], Array] | None = None,
) -> Order:
  """First tiles, then from the last one down to that of `start`; from `newest()` on, and around.

  `moved`: place of a tile in this order -> how far from there the tile is that stands in for it.
  """
  _, tile, part, pinned = sizes
  last = (stop + tile - 1) // tile - 1
  oldest = jnp.maximum(start // tile, pinned)
  tiles = jnp.minimum(pinned, last + 1) + jnp.maximum(last - oldest + 1, 0)
  begin = last if newest is None else newest()

  def slots(t: Any, j: Any) -> tuple[Array, Array]:
    lane = j * part + jnp.arange(part)
    down = begin - (t - pinned)
    if newest is not None:
      down = jnp.where(down < pinned, down + last - pinned + 1, down)
    place = jnp.where(t < pinned, t, down)
    if moved is not None:
      place += moved(place)
    return place * tile + lane, lane < tile

  return Order(tiles, slots, True)


def around(
  ring: Ring, row: Array, rows: int, slots: int, start: Array, stop: Array, sizes: Sizes
) -> Order:
  """First tiles, then from the newest token's down, and from the last one on."""

  def newest() -> Array:
    position = ring.seen[row // (rows // ring.seen.shape[0])] - 1
    slot = place_of(ring.ring[row, 0], ring.ring[row, 1], position, slots)
    return jnp.maximum(jnp.maximum(slot, 0) // sizes.tile, sizes.pinned - 1)

  return newest_first(start, stop, sizes, newest)
