"""Repair: the tiles that a prediction missed are folded into the softmax state of what it named.

Attention over the predicted tiles left, per row, either a finished state or partial ones (`_split`,
or one per predicted tile). Each program puts those of its query head together, finds which of the
selected tiles were not predicted, adds them with the same recurrence (PRR, Eqs. 6–8), and writes
the state where it was.

Bytes: partial states once, and keys and values of the missed tiles, by every query head of a group
(the second one finds them in the L2 cache). The work grows with their number; there is next to none
where nothing was missed.

Grid: rows by query heads of a group. Few tiles are missed, and a launch of its own for each would
cost more than they do.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.softmax_state import State
from pallas_kernels import _backend, _split, _tiles
from pallas_kernels._tiles import Carry

STEP, STAGES = 32 << 10, 3  # bytes of keys and values per step of the walk
AT_ONCE = 8192  # pairs of a selected and a predicted tile that are compared per step


def _kernel(
  *refs: Any, unit: int, tile: int, scale: float, sinks: int, stored: str, interpret: bool
) -> None:
  """q [R, G, H], k, v [R, S, H], table [R, W], count [R], guess [R, V], start, stop [R] or one per
  batch row, what `stored` says -> missed [R, W], misses [R], and in place o [R, G, H], m, l [R, G],
  o rounded.

  stored: "whole", the state alone; "pieces", acc [P, G, H], m, l [P, G], cut [R, 2] too (rows of
  one piece are finished); "tiles", acc [R V, G, H], m, l [R V, G], of which only those of selected
  tiles count.
  """
  q_ref, k_ref, v_ref, table_ref, count_ref, guess_ref, start_ref, stop_ref = refs[:8]
  missed_ref, misses_ref, o_ref, m_ref, l_ref, rounded_ref = refs[-6:]
  rows, slots, head_dim = k_ref.shape
  width = table_ref.shape[1]
  row, group = pl.program_id(0), pl.program_id(1)

  i = jnp.arange(pl.next_power_of_2(width))
  here = i < jnp.minimum(count_ref[row], width)
  entry = _backend.load(table_ref, row, i, mask=here, other=-1)
  columns = jnp.arange(_split.columns_of(head_dim))
  # What needs nothing is fetched before anything is waited for.
  if stored != "tiles":
    done = _finished(o_ref, m_ref, l_ref, row, group, columns)
  if stored == "pieces":
    first, pieces = refs[11][row, 0], refs[11][row, 1]
  hit = _found(entry, guess_ref, row, guess_ref.shape[1])
  miss = (entry >= 0) & (hit == 0)
  place = jnp.cumsum(miss.astype(jnp.int32)) - 1
  misses = miss.astype(jnp.int32).sum()
  _backend.store(missed_ref, row, jnp.where(miss, place, width), value=entry, mask=miss)
  misses_ref[row] = misses
  if not interpret:
    _backend.barrier()  # other threads wrote what is read below

  lanes = jnp.arange(_split.lanes_of(1))
  inside = columns < head_dim
  ours = lanes == 0  # one query; the matrix units take no fewer rows
  if stored == "whole":
    acc, m, l = done
  elif stored == "pieces":
    parts = jnp.where(pieces > 1, pieces, 0)
    none = jnp.zeros_like(done[0]), jnp.float32(-jnp.inf), jnp.float32(0.0)
    acc, m, l = (jnp.where(pieces > 1, a, b) for a, b in zip(none, done, strict=True))
    acc, m, l = _parts(refs[8:11], (acc, m, l), first, parts, group, columns, None)
  else:
    none = jnp.zeros(columns.size, jnp.float32), jnp.float32(-jnp.inf), jnp.float32(0.0)
    predicted = guess_ref.shape[1]

    def wanted(part: Array, keep: Array) -> Array:
      tile = _backend.load(guess_ref, row, part, mask=keep, other=-1)
      return (tile >= 0) & (_found(tile, table_ref, row, width) > 0)

    acc, m, l = _parts(refs[8:11], none, row * predicted, predicted, group, columns, wanted)

  spread = jnp.where(ours[:, None], acc[None, :], 0.0)
  carry = Carry(spread, jnp.where(ours, m, -jnp.inf), jnp.where(ours, l, 0.0))
  shared = rows // start_ref.shape[0]
  start, stop = start_ref[row // shared], jnp.minimum(stop_ref[row // shared], slots)
  keys = misses * unit

  def fetch(i: Any) -> _tiles.Tile:
    key = i * tile + jnp.arange(tile)
    entry = _backend.load(missed_ref, row, key // unit, mask=key < keys, other=-1)
    slot = entry * unit + key % unit
    keep = (entry >= 0) & (slot < stop) & ((slot < sinks) | (slot >= start))
    slot = jnp.where(keep, slot, 0)
    index, mask = (row, slot[:, None], columns[None, :]), keep[:, None] & inside[None, :]
    k, v = (_backend.load(ref, *index, mask=mask) for ref in (k_ref, v_ref))
    return _tiles.Tile(k, v, keep)

  # Masked lanes need places of their own: the interpreter writes back what was there.
  only = lanes[:, None] + group, columns[None, :]
  real = ours[:, None] & inside[None, :]
  q = _backend.load(q_ref, row, *only, mask=real)
  carry = _tiles.walk(carry, q, fetch, 0, pl.cdiv(keys, tile), scale=scale)
  o, m, l = _tiles.finish(carry)
  _backend.store(o_ref, row, *only, value=o, mask=real)
  _backend.store(rounded_ref, row, *only, value=o.astype(rounded_ref.dtype), mask=real)
  _backend.store(m_ref, row, lanes + group, value=m, mask=ours)
  _backend.store(l_ref, row, lanes + group, value=l, mask=ours)


def _found(entry: Array, list_ref: Any, row: Any, width: int) -> Array:
  """1 where an entry is in a row's list, 0 elsewhere; holes (−1) say nothing."""
  most = min(max(AT_ONCE // entry.size, 16), 128)
  some = jnp.arange(min(most, pl.next_power_of_2(width)))

  def step(n: Any, hit: Array) -> Array:
    at = n * some.size + some
    other = _backend.load(list_ref, row, at, mask=at < width, other=-1)
    return jnp.maximum(hit, (entry[:, None] == other[None, :]).astype(jnp.int32).max(axis=1))

  return lax.fori_loop(0, pl.cdiv(width, some.size), step, jnp.zeros_like(entry))


def _finished(
  o_ref: Any, m_ref: Any, l_ref: Any, row: Any, group: Any, columns: Array
) -> tuple[Array, Array, Array]:
  """A stored state of one query as unfinished softmax: acc [C], m in base 2, l."""
  l = l_ref[row, group]
  o = _backend.load(o_ref, row, group, columns, mask=columns < o_ref.shape[2])
  return o * l, m_ref[row, group] * _tiles.LOG2E, l


def _parts(
  refs: Sequence[Any],
  start: tuple[Array, Array, Array],
  first: Any,
  parts: Any,
  group: Any,
  columns: Array,
  wanted: Any,
) -> tuple[Array, Array, Array]:
  """Adds the partial states [first, first + parts) of one query, or the wanted ones of them."""
  acc_ref, m_ref, l_ref = refs
  inside = columns < acc_ref.shape[2]

  def body(n: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    acc, m, l = carry
    part = n * _split.JOINED + jnp.arange(_split.JOINED)
    keep = part < parts
    if wanted is not None:
      keep &= wanted(part, keep)
    part = jnp.where(keep, first + part, 0)
    new_m = _backend.load(m_ref, part, group, mask=keep, other=-jnp.inf)
    new_l = _backend.load(l_ref, part, group, mask=keep, other=0.0)
    mask = keep[:, None] & inside[None, :]
    new = _backend.load(acc_ref, part[:, None], group, columns[None, :], mask=mask, other=0.0)
    top = jnp.maximum(m, new_m.max())
    base = _tiles.finite(top)
    old, weight = jnp.exp2(m - base), jnp.exp2(new_m - base)
    acc = acc * old + (new * weight[:, None]).sum(axis=0)
    return acc, top, l * old + (new_l * weight).sum()

  return lax.fori_loop(0, pl.cdiv(parts, _split.JOINED), body, start)


def repair(
  q: Float[Array, "B K G H"],
  k: Float[Array, "B K S H"],
  v: Float[Array, "B K S H"],
  table: Int[Array, "B K W"],
  count: Int[Array, "B K"],
  guess: Int[Array, "B K V"],
  start: Int[Array, "B #K"],
  stop: Int[Array, "B #K"],
  written: Sequence[Array],
  *,
  unit: int,
  sinks: int = 0,
  scale: float | None = None,
  stored: str = "whole",
  tile: int | None = None,
  interpret: bool | None = None,
) -> tuple[State, Float[Array, "B K G H"], Int[Array, "B K W"], Int[Array, "B K"]]:
  """Adds the tiles of a selection that a prediction did not name to attention over the latter.

  Args:
    q, k, v, start, stop, unit, sinks, scale: as in `sparse_decode`.
    table, count: the selection, int32; no duplicates, −1 behind the count.
    guess: the prediction, int32, −1 = hole.
    written: attention over the prediction: o float32 [B K, G, H], m, l [B K, G] and o in q's dtype,
      in place; then, where `stored` is "pieces", acc, m, l and cut of `_split.results`, and where
      it is "tiles", acc, m and l of `attend_tiles`.
    stored: "whole", "pieces" or "tiles"; with "tiles" those that were predicted and not selected
      are left out, and what o, m and l hold does not count.
    tile: keys per step; as many as `STEP` holds if None.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    The state, o in the dtype of q, the missed tiles (undefined behind their count) and the count.
  """
  batch, heads, groups, head_dim = q.shape
  rows, width = batch * heads, table.shape[-1]
  interpret = _backend.interpreted(interpret)
  tile = tile or max(16, STEP // (2 * _split.columns_of(head_dim) * k.dtype.itemsize))
  flat = [x.reshape(rows, *x.shape[2:]) for x in (q, k, v)]
  lists = [table.reshape(rows, width), count.reshape(rows), guess.reshape(rows, -1)]
  operands = [*flat, *lists, start.reshape(-1), stop.reshape(-1), *written[4:], *written[:4]]
  done = len(operands) - 4
  missed, misses, o, m, l, rounded = _backend.call(
    functools.partial(
      _kernel,
      unit=unit,
      tile=tile,
      scale=head_dim**-0.5 if scale is None else scale,
      sinks=sinks,
      stored=stored,
      interpret=interpret,
    ),
    *operands,
    grid=(rows, groups),
    out=[
      jax.ShapeDtypeStruct((rows, width), jnp.int32),
      jax.ShapeDtypeStruct((rows,), jnp.int32),
      *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written[:4]),
    ],
    warps=4 if k.dtype.itemsize == 2 else 8,
    stages=STAGES,
    name="repair",
    interpret=interpret,
    aliases={done + i: 2 + i for i in range(4)},
  )
  o, m, l, rounded, missed, misses = (
    x.reshape(batch, heads, *x.shape[1:]) for x in (o, m, l, rounded, missed, misses)
  )
  return State(o, m, l), rounded, missed, misses
