"""Repair: the tiles that a prediction missed are folded into the softmax state of what it named.

Attention over the predicted tiles left, per row, either a finished state or partial ones (of some
keys each, or of one predicted tile). Each program puts those of its query head together, finds
which of the selected tiles were not predicted, adds them with the same recurrence (PRR, Eqs. 6–8),
and writes the state.

There is little to do, so what counts is how many loads wait for one another: lists and partial
states are fetched first, and then keys and values of what was missed, which come while the partial
states are joined. Missed tiles are picked out of what the program holds by a running sum.

Bytes: partial states once, and keys and values of the missed tiles, by every query head of a group
(the second one finds them in the L2 cache). The work grows with their number; there is next to none
where nothing was missed.

Grid: rows by query heads of a group. Few tiles are missed, and a launch of its own for each would
cost more than they do.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.kernels.common import backend, split_k, tiling
from kvjax.kernels.common.tiling import Carry
from kvjax.primitives.softmax_state import State

# Keys per step, for heads of 128, by bytes per element: the matrix units take no float32.
STEP = {2: 64, 4: 16}
WARPS, STAGES = 8, 2
AT_ONCE = 8192  # pairs of a selected and a predicted tile that are compared per step


def _kernel(*refs: Any, unit: int, tile: int, scale: tiling.Scale, sinks: int, stored: str) -> None:
  """q [R, G, H], k, v [R, S, H], table [R, W], guess [R, V], start, stop [R] or one per batch row,
  what `stored` says -> missed [R, W], misses [R], o [R, G, H], m, l [R, G], o rounded.

  stored: "whole", o, m, l and o rounded, in place; "pieces", acc [R P, G, H], m, l [R P, G];
  "tiles", acc [R V, G, H], m, l [R V, G], of which only those of selected tiles count.
  """
  q_ref, k_ref, v_ref, table_ref, guess_ref, start_ref, stop_ref = refs[:7]
  missed_ref, misses_ref, o_ref, m_ref, l_ref, rounded_ref = refs[-6:]
  rows, slots, head_dim = k_ref.shape
  width, predicted = table_ref.shape[1], guess_ref.shape[1]
  row, group = pl.program_id(0), pl.program_id(1)
  shared = rows // start_ref.shape[0]
  start, stop = start_ref[row // shared], jnp.minimum(stop_ref[row // shared], slots)
  columns = jnp.arange(split_k.columns_of(head_dim))
  inside = columns < head_dim
  lanes = jnp.arange(split_k.lanes_of(1))
  ours = lanes == 0  # one query; the matrix units take no fewer rows
  # Masked lanes need places of their own: the interpreter writes back what was there.
  only = lanes[:, None] + group, columns[None, :]
  real = ours[:, None] & inside[None, :]

  i = jnp.arange(pl.next_power_of_2(width))
  entry = backend.load(table_ref, row, i, mask=i < width, other=-1)
  q = backend.load(q_ref, row, *only, mask=real)

  def wanted(part: Array, keep: Array) -> Array:
    named = backend.load(guess_ref, row, part, mask=keep, other=-1)
    return (named >= 0) & (_found(named, table_ref, row, width) > 0)

  none = jnp.zeros(columns.size, jnp.float32), jnp.float32(-jnp.inf), jnp.float32(0.0)
  if stored == "whole":
    held: Any = _finished(o_ref, m_ref, l_ref, row, group, columns)
  else:
    parts = refs[7].shape[0] // rows
    states = functools.partial(
      _states, refs[7:10], row * parts, parts, group, columns, wanted if stored == "tiles" else None
    )
    held = states(0)

  hit = _found(entry, guess_ref, row, predicted)
  miss = (entry >= 0) & (hit == 0)
  place = jnp.cumsum(miss.astype(jnp.int32)) - 1
  misses = miss.astype(jnp.int32).sum()
  keys = misses * unit
  # Keys that follow one another in a step, and surely lie in the same missed tile.
  each = min(unit, tile) if unit & (unit - 1) == 0 else 1

  def fetch(n: Any) -> tiling.Tile:
    key = n * tile + jnp.arange(tile)
    index = (n * tile + jnp.arange(tile // each) * each) // unit
    picked = miss[:, None] & (place[:, None] == index[None, :])
    found = jnp.where(picked, entry[:, None], 0).sum(axis=0)
    found = jnp.broadcast_to(found[:, None], (tile // each, each)).reshape(tile)
    slot = found * unit + key % unit
    keep = (key < keys) & (slot < stop) & ((slot < sinks) | (slot >= start))
    slot = jnp.where(keep, slot, 0)
    index, mask = (row, slot[:, None], columns[None, :]), keep[:, None] & inside[None, :]
    k, v = (backend.load(ref, *index, mask=mask) for ref in (k_ref, v_ref))
    return tiling.Tile(k, v, keep)

  first = fetch(0)
  if stored != "whole":
    held = split_k.merged(none, held)
    step = lambda n, state: split_k.merged(state, states(n))  # noqa: E731
    held = lax.fori_loop(1, pl.cdiv(parts, split_k.JOINED), step, held)
  acc, m, l = held
  spread = jnp.where(ours[:, None], acc[None, :], 0.0)
  carry = Carry(spread, jnp.where(ours, m, -jnp.inf), jnp.where(ours, l, 0.0))
  carry = tiling.step(carry, q, first, scale=scale)
  # Hardly ever are there more: what fills the pipeline of a loop should not be waited for.
  walk = functools.partial(tiling.walk, q=q, fetch=fetch, first=1, last=pl.cdiv(keys, tile))
  carry = lax.cond(keys > tile, lambda x: walk(x, scale=scale), lambda x: x, carry)
  o, m, l = tiling.finish(carry)
  backend.store(o_ref, row, *only, value=o, mask=real)
  backend.store(rounded_ref, row, *only, value=o.astype(rounded_ref.dtype), mask=real)
  backend.store(m_ref, row, lanes + group, value=m, mask=ours)
  backend.store(l_ref, row, lanes + group, value=l, mask=ours)
  backend.store(missed_ref, row, jnp.where(miss, place, width), value=entry, mask=miss)
  misses_ref[row] = misses


def _found(entry: Array, list_ref: Any, row: Any, width: int) -> Array:
  """1 where an entry is in a row's list, 0 elsewhere; holes (−1) say nothing."""
  most = min(max(AT_ONCE // entry.size, 16), 128)
  some = jnp.arange(min(most, pl.next_power_of_2(width)))

  def step(n: Any, hit: Array) -> Array:
    at = n * some.size + some
    other = backend.load(list_ref, row, at, mask=at < width, other=-1)
    # Other entries along the first axis: a thread compares most of them by itself.
    return jnp.maximum(hit, (other[:, None] == entry[None, :]).astype(jnp.int32).max(axis=0))

  return lax.fori_loop(0, pl.cdiv(width, some.size), step, jnp.zeros_like(entry))


def _finished(
  o_ref: Any, m_ref: Any, l_ref: Any, row: Any, group: Any, columns: Array
) -> tuple[Array, Array, Array]:
  """A stored state of one query as unfinished softmax: acc [C], m in base 2, l."""
  l = l_ref[row, group]
  o = backend.load(o_ref, row, group, columns, mask=columns < o_ref.shape[2])
  return o * l, m_ref[row, group] * tiling.LOG2E, l


def _states(
  refs: Sequence[Any],
  first: Any,
  parts: int,
  group: Any,
  columns: Array,
  wanted: Callable[[Array, Array], Array] | None,
  n: Any,
) -> tuple[Array, Array, Array]:
  """The n-th `JOINED` partial states [first, first + parts) of one query, or the wanted ones."""
  acc_ref, m_ref, l_ref = refs
  part = n * split_k.JOINED + jnp.arange(min(split_k.JOINED, pl.next_power_of_2(parts)))
  keep = part < parts
  if wanted is not None:
    keep &= wanted(part, keep)
  part = jnp.where(keep, first + part, 0)
  m = backend.load(m_ref, part, group, mask=keep, other=-jnp.inf)
  l = backend.load(l_ref, part, group, mask=keep, other=0.0)
  mask = keep[:, None] & (columns < acc_ref.shape[2])[None, :]
  acc = backend.load(acc_ref, part[:, None], group, columns[None, :], mask=mask, other=0.0)
  return acc, m, l


def repair(
  q: Float[Array, "B K G H"],
  k: Float[Array, "B K S H"],
  v: Float[Array, "B K S H"],
  table: Int[Array, "B K W"],
  guess: Int[Array, "B K V"],
  start: Int[Array, "B #K"],
  stop: Int[Array, "B #K"],
  written: Sequence[Array],
  *,
  unit: int,
  sinks: int = 0,
  scale: float | None = None,
  soft_cap: float | None = None,
  stored: str = "whole",
  tile: int | None = None,
  interpret: bool | None = None,
) -> tuple[State, Float[Array, "B K G H"], Int[Array, "B K W"], Int[Array, "B K"]]:
  """Adds the tiles of a selection that a prediction did not name to attention over the latter.

  Args:
    q, k, v, start, stop, unit, sinks, scale, soft_cap: as in `sparse_decode`.
    table: the selection, int32; no duplicates, −1 = hole.
    guess: the prediction, int32, −1 = hole.
    written: attention over the prediction: o float32 [B K, G, H], m, l [B K, G] and o in q's dtype,
      in place; or, where `stored` is "pieces", acc [B K P, G, H], m (base 2) and l [B K P, G] of P
      parts of every row; or, where it is "tiles", what `attend_tiles` gives.
    stored: "whole", "pieces" or "tiles"; with "tiles" those that were predicted and not selected
      are left out.
    tile: keys per step; by dtype and head size if None.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    The state, o in the dtype of q, the missed tiles (undefined after their count) and the count.
  """
  batch, heads, groups, head_dim = q.shape
  rows, width = batch * heads, table.shape[-1]
  most = STEP[k.dtype.itemsize]
  tile = tile or max(16, min(most, most * 128 // split_k.columns_of(head_dim)))
  flat = [*map(backend.by_row, (q, k, v))]
  lists = [table.reshape(rows, width), guess.reshape(rows, -1)]
  operands = [*flat, *lists, start.reshape(-1), stop.reshape(-1)]
  before = len(operands)
  missed, misses, *done = backend.call(
    functools.partial(
      _kernel,
      unit=unit,
      tile=tile,
      scale=tiling.Scale.of(head_dim, scale, soft_cap),
      sinks=sinks,
      stored=stored,
    ),
    *(*operands, *written),
    grid=(rows, groups),
    out=[
      jax.ShapeDtypeStruct((rows, width), jnp.int32),
      jax.ShapeDtypeStruct((rows,), jnp.int32),
      *split_k.results(rows, groups, head_dim, 0, q.dtype),
    ],
    warps=WARPS,
    stages=STAGES,
    name="repair",
    interpret=interpret,
    aliases={before + i: 2 + i for i in range(4)} if stored == "whole" else None,
  )
  missed, misses = (x.reshape(batch, heads, *x.shape[1:]) for x in (missed, misses))
  return *split_k.finished(done, q.shape[:2]), missed, misses
