"""How a program of ART's walk reads a row's tiles, wherever the walk is judged."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from . import _art_order, _backend, _split, _tiles


class Sources(NamedTuple):
  """Refs: q [R, G, H], k, v [R, S, H], `Ring` or None, `Table` or None, start, stop [R] or [B]."""

  q: Any
  k: Any
  v: Any
  ring: _art_order.Ring | None
  table: _art_order.Table | None
  start: Any
  stop: Any


class Reading(NamedTuple):
  """A row's tiles.

  tiles: how many the order has.
  add: (t, j, carry, going) -> the softmax state with part j of tile t of the order, and the largest
    logit of each query head there; `going`: heads that take part [lanes] or all of them, 1 or 0.
  """

  tiles: Array
  add: Callable[..., tuple[_tiles.Carry, Array]]


def reading(
  sources: Sources, row: Array, *, sizes: _art_order.Sizes, sinks: int, scale: _tiles.Scale
) -> Reading:
  """The tiles of one row (batch row and KV head) of the `sources`."""
  q_ref, k_ref, v_ref, ring, table, start_ref, stop_ref = sources
  rows, slots, head_dim = k_ref.shape
  groups = q_ref.shape[1]
  shared = rows // start_ref.shape[0]  # rows of one range: all heads of a batch row, or one
  start, stop = start_ref[row // shared], jnp.minimum(stop_ref[row // shared], slots)
  lanes, columns = jnp.arange(_split.lanes_of(groups)), jnp.arange(_split.columns_of(head_dim))
  inside = (columns < head_dim)[None, :]
  if table is not None:
    order = _art_order.listed(table, row, sizes)
  elif ring is not None:
    order = _art_order.around(ring, row, rows, slots, start, stop, sizes)
  else:
    order = _art_order.newest_first(start, stop, sizes)

  def fetch(t: Any, j: Any) -> _tiles.Tile:
    slot, real = order.slots(t, j)
    keep = real & (slot < stop) & ((slot < sinks) | (slot >= start))
    if not order.run:
      slot = jnp.where(keep, slot, 0)
    index, mask = (row, slot[:, None], columns[None, :]), keep[:, None] & inside
    k, v = (_backend.load(ref, *index, mask=mask, evict="evict_first") for ref in (k_ref, v_ref))
    return _tiles.Tile(k, v, keep)

  real = (lanes < groups)[:, None] & inside
  q = _backend.load(q_ref, row, lanes[:, None], columns[None, :], mask=real)

  def add(
    t: Any, j: Any, carry: _tiles.Carry, going: Array | None = None
  ) -> tuple[_tiles.Carry, Array]:
    tile = fetch(t, j)
    keep = tile.keep
    if going is not None:
      keep = keep & (going > 0) if going.ndim == 0 else keep[None, :] & (going > 0)[:, None]
    logits: list[Array] = []
    carry = _tiles.step(carry, q, tile._replace(keep=keep), scale=scale, see=logits.append)
    return carry, logits[0].max(axis=1)

  return Reading(order.tiles, add)
