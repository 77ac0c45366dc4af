"""Reading of a row's tiles by a program of ART's walk, wherever the walk is judged."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.kernels.art import ordering
from kvjax.kernels.codes import code_words
from kvjax.kernels.common import backend, split_k, tiling


class Sources(NamedTuple):
  """Refs: q [R, G, H], k, v [R, S, H], `Ring` or None, `Table` or None, start, stop [R] or [B].

  per_slot: of words k [R, S, Wk] and v [R, S, Wv] scales (and zero points) [R, S] of both.
  """

  q: Any
  k: Any
  v: Any
  ring: ordering.Ring | None
  table: ordering.Table | None
  start: Any
  stop: Any
  per_slot: tuple[Any, ...] | None = None


class Reading(NamedTuple):
  """A row's tiles.

  tiles: how many the order has.
  add: (t, j, carry, going) -> the softmax state with part j of tile t of the order, and the largest
    logit of each query head there; `going`: heads that take part [lanes] or all of them, 1 or 0.
  """

  tiles: Array
  add: Callable[..., tuple[tiling.Carry, Array]]


# Slots of a part of a tile and which are read -> what lies there; and how that joins the state:
# (carry, what lies there, see) -> carry.
Fetch = Callable[[Array, Array], Any]
Step = Callable[[tiling.Carry, Any, Callable[[Array], None]], tiling.Carry]


def reading(
  sources: Sources,
  row: Array,
  *,
  sizes: ordering.Sizes,
  sinks: int,
  scale: tiling.Scale | code_words.How,
) -> Reading:
  """The tiles of one row (batch row and KV head) of the `sources`; `scale`: `How` of codes."""
  q_ref, k_ref, _, ring, table, start_ref, stop_ref, _ = sources
  rows, slots = k_ref.shape[:2]
  groups, head_dim = q_ref.shape[1:]
  shared = rows // start_ref.shape[0]  # rows of one range: all heads of a batch row, or one
  start, stop = start_ref[row // shared], jnp.minimum(stop_ref[row // shared], slots)
  lanes, columns = jnp.arange(split_k.lanes_of(groups)), jnp.arange(split_k.columns_of(head_dim))
  inside = (columns < head_dim)[None, :]
  if table is not None:
    order = ordering.listed(table, row, sizes)
  elif ring is not None:
    order = ordering.around(ring, row, rows, slots, start, stop, sizes)
  else:
    order = ordering.newest_first(start, stop, sizes)
  if isinstance(scale, code_words.How):
    fetch, step = _of_codes(sources, row, lanes, columns, scale)
  else:
    fetch, step = _of_floats(sources, row, lanes, columns, inside, scale)

  def add(
    t: Any, j: Any, carry: tiling.Carry, going: Array | None = None
  ) -> tuple[tiling.Carry, Array]:
    slot, real = order.slots(t, j)
    keep = real & (slot < stop) & ((slot < sinks) | (slot >= start))
    if not order.run:
      slot = jnp.where(keep, slot, 0)
    tile = fetch(slot, keep)
    if going is not None:
      keep = keep & (going > 0) if going.ndim == 0 else keep[None, :] & (going > 0)[:, None]
    logits: list[Array] = []
    carry = step(carry, tile._replace(keep=keep), logits.append)
    return carry, logits[0].max(axis=1)

  return Reading(order.tiles, add)


def _of_floats(
  sources: Sources,
  row: Array,
  lanes: Array,
  columns: Array,
  inside: Array,
  scale: tiling.Scale,
) -> tuple[Fetch, Step]:
  """Keys and values as they are."""
  real = (lanes < sources.q.shape[1])[:, None] & inside
  q = backend.load(sources.q, row, lanes[:, None], columns[None, :], mask=real)

  def fetch(slot: Array, keep: Array) -> tiling.Tile:
    index, mask = (row, slot[:, None], columns[None, :]), keep[:, None] & inside
    refs = sources.k, sources.v
    k, v = (backend.load(ref, *index, mask=mask, evict="evict_first") for ref in refs)
    return tiling.Tile(k, v, keep)

  def step(carry: tiling.Carry, tile: Any, see: Callable[[Array], None]) -> tiling.Carry:
    return tiling.step(carry, q, tile, scale=scale, see=see)

  return fetch, step


def _of_codes(
  sources: Sources, row: Array, lanes: Array, columns: Array, how: code_words.How
) -> tuple[Fetch, Step]:
  """Their codes. The detector looks at all columns of the output at once:
  `code_words.step_whole`.
  """
  assert sources.per_slot is not None
  slot_refs, k_width, v_width = sources.per_slot, sources.k.shape[2], sources.v.shape[2]
  words = code_words.words_of(k_width)
  q = code_words.query(sources.q, row, lanes, words, k_width, how)

  def fetch(slot: Array, keep: Array) -> code_words.Tile:
    k = code_words.words(sources.k, row, slot, words, keep, "evict_first")
    v = code_words.words(sources.v, row, slot, columns % v_width, keep)
    held = (backend.load(x, row, slot, mask=keep) for x in slot_refs)
    return code_words.Tile(k, v, tuple(held), keep)

  def step(carry: tiling.Carry, tile: Any, see: Callable[[Array], None]) -> tiling.Carry:
    return code_words.step_whole(carry, q, tile, how, width=v_width, see=see)

  return fetch, step
