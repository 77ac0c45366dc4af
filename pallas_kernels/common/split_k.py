"""Rows of unequal length cut over the programs of one launch, and their parts joined in another.

An attention kernel asks `piece` which part of which row it has, walks its `share` of the row's
tiles, and gives its carry to `store`. Rows of one piece are finished there; the others leave
partial softmax states, which `join` puts together, one program per query head, in a fixed order.
No atomics: a second run is equal to the bit.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from kvjax.kernels.common import backend, tiling
from kvjax.primitives.softmax_state import State

# Ragged rows are cut into so many times as many pieces: the GPU deals them out as programs end.
FINER = 3
LONG = 32  # tiles of a program, from which on programs that turn out to have no piece cost nothing
# Partial states joined per step of the second kernel: more than most rows have.
JOINED = 64


class Piece(NamedTuple):
  """Part `part` of `parts` of a row, number `pid` of all. Not `active`: nothing to do, any `row`.

  Parts are equal ones, or as `cut` says: the first tile of this one and the one after its last.
  """

  pid: Array
  row: Array
  part: Array
  parts: Array
  active: Array
  cut: tuple[Array, Array] | None = None

  def share(self, tiles: Array) -> tuple[Array, Array]:
    """First tile of this piece and the one after its last, of a row's `tiles`."""
    tiles = jnp.where(self.active, jnp.maximum(tiles, 0), 0)
    if self.cut is not None:
      return self.cut[0], jnp.where(self.part + 1 == self.parts, tiles, self.cut[1])
    parts = jnp.maximum(self.parts, 1)
    return self.part * tiles // parts, (self.part + 1) * tiles // parts


def most_pieces(rows: int, programs: int) -> int:
  """Pieces of all rows together, at most: every row has one more than its share."""
  return programs + rows


def finer(*, batch: int, rows: int, slots: int, tile: int, programs: int) -> int:
  """Factor of the pieces of ragged rows: above 1 where rows themselves are not pieces enough.

  Args:
    batch: rows that may differ in length, each of several heads.
    rows, slots: of all heads, and the slots of each.
    tile, programs: of the configuration.
  """
  long = rows * slots >= LONG * tile * programs
  return FINER if batch > 1 and rows <= 2 * programs and long else 1


def piece(
  tiles_of: Callable[[Array, Array], Array], *, rows: int, programs: int, finer: int = 1
) -> Piece:
  """This program's piece; `tiles_of(rows, mask)` gives the number of tiles of rows.

  A row of t tiles out of all rows' n gets programs · t / n pieces, and at least one. Rows of about
  one length are rounded down, since a few programs more than run at once would cost as much as a
  whole wave of them; ragged rows get `finer` times as many, rounded up, so that no piece is longer
  than its share.
  """
  pid = pl.program_id(0)
  lanes = jnp.arange(pl.next_power_of_2(rows))
  real = lanes < rows
  tiles = jnp.where(real, jnp.maximum(tiles_of(lanes, real), 0), 0)
  total = jnp.maximum(tiles.sum(), 1)
  ragged = tiles.max() * rows > total + total // 8
  wanted = programs * tiles * (1 + (finer - 1) * ragged.astype(jnp.int32))
  pieces = (wanted + jnp.where(ragged, total - 1, 0)) // total
  pieces = jnp.where(real, jnp.clip(pieces, 1, jnp.maximum(tiles, 1)), 0)
  row = jnp.minimum((jnp.cumsum(pieces) <= pid).astype(jnp.int32).sum(), rows)
  before = jnp.where(lanes < row, pieces, 0).sum()
  parts = jnp.where(lanes == row, pieces, 0).sum()
  return Piece(pid, jnp.minimum(row, rows - 1), pid - before, parts, row < rows)


def level(
  tiles_of: Callable[[Array, Array], Array],
  attend: Callable[[Piece], None],
  *,
  rows: int,
  programs: int,
) -> None:
  """Calls `attend` with each piece that this program has, of one row or of several.

  All rows' tiles stand one after another, and each of `programs` programs has as many of them,
  whatever their rows, so that all end together. Where pieces of that length can keep to a row each
  and still be no more than programs, they do: that spares second starts.
  """
  pid = pl.program_id(0)
  lanes = jnp.arange(pl.next_power_of_2(rows))
  real = lanes < rows
  tiles = jnp.where(real, jnp.maximum(tiles_of(lanes, real), 1), 0)  # an empty row has a piece too
  size = pl.cdiv(tiles.sum(), programs)
  pieces = pl.cdiv(tiles, size)
  apart = pieces.sum() <= programs
  units = jnp.where(apart, pieces, tiles)  # what is dealt out: a piece to a program, or all tiles
  total = jnp.where(apart, programs, tiles.sum())
  low, high = pid * total // programs, (pid + 1) * total // programs
  stops = jnp.cumsum(units)
  first, after = ((real & (stops <= x)).astype(jnp.int32).sum() for x in (low, high - 1))

  def one(row: Any, start: Array) -> Array:
    """The piece of a row whose units begin at `start`; where those of the next one do."""
    count = jnp.maximum(tiles_of(row, row < rows), 1)
    stop = start + jnp.where(apart, pl.cdiv(count, size), count)
    begin, end = (((at + 1) * programs - 1) // total for at in (start, stop - 1))
    part, parts = pid - begin, end - begin + 1
    low_tile = jnp.where(apart, part * count // parts, jnp.maximum(low - start, 0))
    high_tile = jnp.where(apart, (part + 1) * count // parts, jnp.minimum(high - start, count))
    number = jnp.where(apart, pid, pid + row)
    attend(Piece(number, row, part, parts, low < high, (low_tile, high_tile)))
    return stop

  after = jnp.where(low < high, jnp.minimum(after + 1, rows), first)
  lax.fori_loop(first, after, one, jnp.where(lanes < first, units, 0).sum())


def whole() -> Piece:
  """All of the row that has this program's number."""
  row = pl.program_id(0)
  return Piece(row, row, jnp.int32(0), jnp.int32(1), row >= 0)


def results(
  rows: int, groups: int, head_dim: int, programs: int, dtype: Any
) -> list[jax.ShapeDtypeStruct]:
  """Results of an attention kernel: o [R, G, H], m, l [R, G], o in `dtype`, and for the join
  acc [P, G, H], m, l [P, G] and (first program, pieces) [R, 2], unless `programs` is 0.
  """
  done = [
    *state_shapes(rows, groups, head_dim),
    jax.ShapeDtypeStruct((rows, groups, head_dim), dtype),
  ]
  if not programs:
    return done
  return [
    *done,
    *state_shapes(most_pieces(rows, programs), groups, head_dim),
    jax.ShapeDtypeStruct((rows, 2), jnp.int32),
  ]


def store(
  piece: Piece,
  carry: tiling.Carry,
  refs: Sequence[Any],
  *,
  groups: int,
  head_dim: int,
  part: int = 0,
  parts: int = 1,
) -> None:
  """Writes a walked piece to the refs of `results`.

  The carry's columns are part number `part` of a head's, which are in `parts` equal ones.
  """
  o_ref, m_ref, l_ref, rounded_ref, *part_refs = refs
  pid, row = piece.pid, piece.row
  lanes, width = jnp.arange(lanes_of(groups)), head_dim // parts
  columns = jnp.arange(columns_of(width))
  inside = (columns < width)[None, :]
  own = columns if part == 0 else part * width + columns
  of_query = lanes[:, None], own[None, :]
  real = (lanes < groups)[:, None] & inside

  @pl.when(piece.active & (piece.parts == 1))
  def _():
    o, m, l = tiling.finish(carry)
    backend.store(o_ref, row, *of_query, value=o, mask=real)
    backend.store(rounded_ref, row, *of_query, value=o.astype(rounded_ref.dtype), mask=real)
    backend.store(m_ref, row, lanes, value=m, mask=lanes < groups)
    backend.store(l_ref, row, lanes, value=l, mask=lanes < groups)

  if not part_refs:
    return
  part_acc_ref, part_m_ref, part_l_ref, cut_ref = part_refs

  @pl.when(piece.active & (piece.parts > 1))
  def _():
    backend.store(part_acc_ref, pid, *of_query, value=carry.acc, mask=real)
    backend.store(part_m_ref, pid, lanes, value=carry.m, mask=lanes < groups)
    backend.store(part_l_ref, pid, lanes, value=carry.l, mask=lanes < groups)

  @pl.when(piece.active & (piece.part == 0))
  def _():
    cut_ref[row, 0] = pid
    cut_ref[row, 1] = piece.parts


class Late(NamedTuple):
  """Further parts of rows: acc [P, G, H], m in base 2, l [P, G]; the first of a row's, and how many
  it has, [R, 2].
  """

  acc: Any
  m: Any
  l: Any
  cut: Any


def join(
  written: Sequence[Array], *, split: bool, interpret: bool | None, late: Late | None = None
) -> Sequence[Array]:
  """o, m, l and rounded o of all rows, from what the kernel wrote, and from parts that came late;
  `split`: rows may have parts.
  """
  done, parts = written[:4], written[4:]
  if not split:
    return done
  rows, groups, _ = done[0].shape
  return backend.renew(
    functools.partial(_join_kernel, late=late is not None),
    *(*parts, *(late or ())),
    held=done,
    grid=(rows, groups),
    warps=4,
    stages=1,
    name="decode_join",
    interpret=interpret,
  )


def joined(
  written: Sequence[Array], lead: tuple[int, ...], *, split: bool, interpret: bool | None
) -> tuple[State, Array]:
  """The state and o rounded of `join`, with axes [B, K] in the place of rows."""
  return finished(join(written, split=split, interpret=interpret), lead)


def finished(done: Sequence[Array], lead: tuple[int, ...]) -> tuple[State, Array]:
  """The state and o rounded of the first four `results`, with axes [B, K] in the place of rows."""
  o, m, l, rounded = [x.reshape(*lead, *x.shape[1:]) for x in done]
  return State(o, m, l), rounded


def merged(
  state: tuple[Array, Array, Array], new: tuple[Array, Array, Array]
) -> tuple[Array, Array, Array]:
  """A state, acc [C], m in base 2, l, and partial ones [P, C], [P], [P] put together."""
  (acc, m, l), (new_acc, new_m, new_l) = state, new
  top = jnp.maximum(m, new_m.max())
  base = tiling.finite(top)
  old, weight = jnp.exp2(m - base), jnp.exp2(new_m - base)
  return acc * old + (new_acc * weight[:, None]).sum(axis=0), top, l * old + (new_l * weight).sum()


def _join_kernel(*refs: Any, late: bool) -> None:
  """acc [P, G, H], m, l [P, G], cut [R, 2], `Late` where there is such, and in place o [R, G, H],
  m, l [R, G], o rounded.

  Rows of one piece and no late parts are left alone.
  """
  *parts, cut_ref = refs[:4]
  o_ref, m_ref, l_ref, rounded_ref = refs[-4:]
  row, group = pl.program_id(0), pl.program_id(1)
  first, pieces = cut_ref[row, 0], cut_ref[row, 1]
  head_dim = o_ref.shape[2]
  columns = jnp.arange(columns_of(head_dim))
  inside = columns < head_dim
  joins = pieces > 1
  if late:
    *late_parts, late_ref = refs[4:8]
    further = late_ref[row, 1]
    joins |= further > 0

  def with_parts(refs: Any, first: Any, count: Any, carry: Any) -> Any:
    acc_ref, part_m_ref, part_l_ref = refs

    def body(i, carry):
      part = i * JOINED + jnp.arange(JOINED)
      keep = part < count
      part = first + part
      new_m = backend.load(part_m_ref, part, group, mask=keep, other=-jnp.inf)
      new_l = backend.load(part_l_ref, part, group, mask=keep, other=0.0)
      mask = keep[:, None] & inside[None, :]
      new = backend.load(acc_ref, part[:, None], group, columns[None, :], mask=mask, other=0.0)
      return merged(carry, (new, new_m, new_l))

    return lax.fori_loop(0, pl.cdiv(count, JOINED), body, carry)

  @pl.when(joins)
  def _():
    if not late:
      zero = jnp.zeros(columns.size, jnp.float32), jnp.float32(-jnp.inf), jnp.float32(0.0)
      carry = with_parts(parts, first, pieces, zero)
    else:
      alone = pieces == 1  # of which the kernel has written the state itself
      o = backend.load(o_ref, row, group, columns, mask=inside & alone, other=0.0)
      l = jnp.where(alone, l_ref[row, group], 0.0)
      carry = o * l, jnp.where(alone, m_ref[row, group] / tiling.LN2, -jnp.inf), l
      carry = with_parts(parts, first, jnp.where(alone, 0, pieces), carry)
      carry = with_parts(late_parts, late_ref[row, 0], further, carry)
    acc, m, l = carry
    value = acc / tiling.nonzero(l)
    backend.store(o_ref, row, group, columns, value=value, mask=inside)
    value = value.astype(rounded_ref.dtype)
    backend.store(rounded_ref, row, group, columns, value=value, mask=inside)
    m_ref[row, group] = m * tiling.LN2
    l_ref[row, group] = l


def state_shapes(rows: int, groups: int, head_dim: int) -> list[jax.ShapeDtypeStruct]:
  """(o or acc, m, l) of that many rows."""
  sizes = (rows, groups, head_dim), (rows, groups), (rows, groups)
  return [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]


def lanes_of(groups: int) -> int:
  """Query rows of a program: the groups, padded to what the matrix units take."""
  return max(16, pl.next_power_of_2(groups))


def columns_of(head_dim: int) -> int:
  """Lanes that hold one head: values have power-of-two sizes."""
  return max(16, pl.next_power_of_2(head_dim))
