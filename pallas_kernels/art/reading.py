"""Reading of a row's tiles by a program of ART's walk, wherever the walk is judged."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.kernels.art import ordering
from kvjax.kernels.common import tiling
from kvjax.kernels.decode import stored


class Sources(NamedTuple):
  """Refs: `stored.Sources`, `Ring` or None, `Table` or None, start, stop [R] or [B], and how far
  the tile in each place of a walk from the last one down is from there, [R, P], or None.
  """

  held: stored.Sources
  ring: ordering.Ring | None
  table: ordering.Table | None
  start: Any
  stop: Any
  moved: Any | None = None


class Reading(NamedTuple):
  """A row's tiles.

  tiles: how many the order has.
  add: (t, j, carry, going) -> the softmax state with part j of tile t of the order, and the largest
    logit of each query head there; `going`: heads that take part [lanes] or all of them, 1 or 0.
  """

  tiles: Array
  add: Callable[..., tuple[tiling.Carry, Array]]


def reading(
  sources: Sources,
  row: Array,
  *,
  sizes: ordering.Sizes,
  sinks: int,
  scale: stored.Scale,
) -> Reading:
  """The tiles of one row (batch row and KV head) of the `sources`."""
  arrays, ring, table, start_ref, stop_ref, moved = sources
  rows, slots = arrays.k.shape[:2]
  shared = rows // start_ref.shape[0]  # rows of one range: all heads of a batch row, or one
  start, stop = start_ref[row // shared], jnp.minimum(stop_ref[row // shared], slots)
  if table is not None:
    order = ordering.listed(table, row, sizes)
  elif ring is not None:
    order = ordering.around(ring, row, rows, slots, start, stop, sizes)
  elif moved is not None:  # every tile has a place, those before `start` too
    order = ordering.newest_first(0 * start, stop, sizes, moved=lambda place: moved[row, place])
  else:
    order = ordering.newest_first(start, stop, sizes)
  held: Any = stored.of_row(arrays, row, scale, evict="evict_first", whole=True)
  q = held.query()

  def add(
    t: Any, j: Any, carry: tiling.Carry, going: Array | None = None
  ) -> tuple[tiling.Carry, Array]:
    slot, real = order.slots(t, j)
    keep = real & (slot < stop) & ((slot < sinks) | (slot >= start))
    if not order.run:
      slot = jnp.where(keep, slot, 0)
    tile = held.fetch(slot, keep)
    if going is not None:
      keep = keep & (going > 0) if going.ndim == 0 else keep[None, :] & (going > 0)[:, None]
    logits: list[Array] = []
    carry = held.step(carry, q, tile._replace(keep=keep), logits.append)
    return carry, logits[0].max(axis=1)

  return Reading(order.tiles, add)
