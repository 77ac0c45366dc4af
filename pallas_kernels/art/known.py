"""ART's walk where its length is known, about: all of it is read at once, and judged by its end.

A row has the first L tiles of its order, newest first or as a table lists them, cut into pieces
that fill the device as those of dense decode do (`split_k`). Pieces with one of the last tiles
leave their state after each of these, at the columns that the detector looks at. A second launch
has a program for each row, which looks at these tiles as Algorithm 1 does. The third reads the rest
of the rows where that has not stopped, cut into pieces that fill the device again, however few
these rows are. The join is last.

Bytes: keys and values of the tiles read; of each of the last ones the probe, 4·G·32.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.kernels.art import ordering, reading, stopping
from kvjax.kernels.art.stopping import NEVER, PROBES, Detector, Stop
from kvjax.kernels.art.walk import choose_cut
from kvjax.kernels.common import backend, devices, split_k, tiling
from kvjax.kernels.common.config import Config
from kvjax.kernels.common.operands import check, check_table
from kvjax.kernels.decode import stored
from kvjax.primitives.softmax_state import State

MAX_TAIL = 62  # tiles that the detector looks at, and one before
JOINED = 32  # partial states joined per step, at the probe's columns
TOGETHER = 4  # of the pieces of a tail, that are loaded at once
VALUES = 8192  # of the probes that a program looks at at once
JUDGE_WARPS = 8
# Tiles read, those that were read at once, and those after which the detector stopped, 0 where it
# did not -> the next length.
Following = Callable[[Array, Array, Array], Array]


class Tail(NamedTuple):
  """State of a piece after each of the last tiles of a row [R, T, G(, C)]: acc at the probe's
  columns, m in base 2, l.
  """

  acc: Any
  m: Any
  l: Any


class Length(NamedTuple):
  """Tiles of the order, of which `known` are read at once, the last of them from `first` on kept
  apart: the detector looks at those after `first`.
  """

  tiles: Array
  known: Array
  first: Array


def length_of(
  sources: reading.Sources, length: Any, row: Array, mask: Any, sizes: ordering.Sizes, tail: int
) -> Length:
  """The length of a row, or of several [N]."""
  rows, slots = sources.held.k.shape[:2]
  if sources.table is None:
    at = row // (rows // sources.start.shape[0])
    bounds = (backend.load(x, at, mask=mask, other=0) for x in (sources.start, sources.stop))
    start, stop = bounds
    start = start if sources.moved is None else 0 * start  # every tile has a place
    tiles = ordering.newest_first(start, jnp.minimum(stop, slots), sizes).tiles
  else:
    tiles = ordering.tiles_listed(sources.table, row, sizes, mask)
  wanted = backend.load(length, row, mask=mask, other=0)
  known = jnp.where(wanted > 0, jnp.minimum(wanted, tiles), tiles)
  return Length(tiles, known, known - tail - 1)


def _read_kernel(
  sources: reading.Sources,
  length_ref: Any,
  outputs: tuple[Any, ...],
  tail_ref: Tail,
  *,
  rule: Detector,
  tail: int,
  sizes: ordering.Sizes,
  sinks: int,
  scale: tiling.Scale,
  programs: int,
  finer: int,
) -> None:
  """`Sources`, lengths [R] -> what `split_k.results` lists, and `Tail`."""
  rows, groups, head_dim = sources.held.q.shape
  lanes, columns = jnp.arange(split_k.lanes_of(groups)), jnp.arange(split_k.columns_of(head_dim))
  of = functools.partial(length_of, sources, length_ref, sizes=sizes, tail=tail)
  cut = {"rows": rows, "programs": programs, "finer": finer}
  piece = split_k.piece(lambda row, real: of(row, real).known, **cut)
  row = piece.row
  here = of(row, None)
  read = reading.reading(sources, row, sizes=sizes, sinks=sinks, scale=scale)
  parts = pl.cdiv(sizes.tile, sizes.part)
  low, high = piece.share(here.known)
  middle = jnp.clip(here.first, low, high)
  probed = (lanes < groups)[:, None] & rule.probed(columns, head_dim)[None, :]
  place = _place(columns, head_dim, tail_ref.acc.shape[3])

  def step(n: Any, carry: tiling.Carry) -> tiling.Carry:
    return read.add(*stopping.divided(n, parts), carry)[0]

  def kept(n: Any, carry: tiling.Carry) -> tiling.Carry:
    t, j = stopping.divided(n, parts)
    carry = read.add(t, j, carry)[0]
    whole, index = j == parts - 1, (row, t - here.first, lanes)
    backend.store(
      tail_ref.acc, row, t - here.first, lanes[:, None], place[None, :],
      value=carry.acc, mask=probed & whole,
    )  # fmt: skip
    for ref, value in ((tail_ref.m, carry.m), (tail_ref.l, carry.l)):
      backend.store(ref, *index, value=value, mask=(lanes < groups) & whole)
    return carry

  carry = tiling.start(lanes.size, columns.size)
  carry = lax.fori_loop(low * parts, middle * parts, step, carry)
  carry = lax.fori_loop(middle * parts, high * parts, kept, carry)
  split_k.store(piece, carry, outputs, groups=groups, head_dim=head_dim)


def _place(columns: Array, head_dim: int, width: int) -> Array:
  """Where a column of the probe is kept."""
  return columns if width == head_dim else (columns * PROBES + head_dim - 1) // head_dim


def _judge_kernel(
  sources: reading.Sources,
  length_ref: Any,
  parts: tuple[Any, ...],
  tail_ref: Tail,
  walked_ref: Any,
  next_ref: Any,
  *,
  until: Stop,
  following: Following,
  tail: int,
  sizes: ordering.Sizes,
) -> None:
  """`Sources`, lengths [R], partial states of `split_k.results`, `Tail` -> tiles to read, and the
  next lengths, [R].
  """
  row = pl.program_id(0)
  here = length_of(sources, length_ref, row, None, sizes, tail)
  end = _judge(parts, tail_ref, row, here, sources.held.q.shape[2], until, tail)
  walked = jnp.where(end < NEVER, here.known, here.tiles)
  walked_ref[row] = walked
  next_ref[row] = following(walked, here.known, jnp.where(end < NEVER, end, 0))


def _rest_kernel(
  sources: reading.Sources,
  length_ref: Any,
  walked_ref: Any,
  late: split_k.Late,
  *,
  tail: int,
  sizes: ordering.Sizes,
  sinks: int,
  scale: tiling.Scale,
  programs: int,
) -> None:
  """`Sources`, lengths and tiles to read [R] -> states of pieces of what is not read yet."""
  rows, groups, head_dim = sources.held.q.shape
  of = functools.partial(length_of, sources, length_ref, sizes=sizes, tail=tail)

  def left(row: Array, mask: Any) -> Array:
    return backend.load(walked_ref, row, mask=mask, other=0) - of(row, mask).known

  piece = split_k.piece(left, rows=rows, programs=programs)
  tiles = left(piece.row, None)

  @pl.when(piece.active & (piece.part == 0))
  def _() -> None:
    late.cut[piece.row, 0] = piece.pid
    late.cut[piece.row, 1] = jnp.where(tiles > 0, piece.parts, 0)

  @pl.when(piece.active & (tiles > 0))
  def _() -> None:
    lanes, columns = jnp.arange(split_k.lanes_of(groups)), jnp.arange(split_k.columns_of(head_dim))
    read = reading.reading(sources, piece.row, sizes=sizes, sinks=sinks, scale=scale)
    known, per_tile = of(piece.row, None).known, pl.cdiv(sizes.tile, sizes.part)
    low, high = ((known + n) * per_tile for n in piece.share(tiles))

    def step(n: Any, carry: tiling.Carry) -> tiling.Carry:
      return read.add(*stopping.divided(n, per_tile), carry)[0]

    carry = lax.fori_loop(low, high, step, tiling.start(lanes.size, columns.size))
    real = lanes < groups
    mask = real[:, None] & (columns < head_dim)[None, :]
    index = piece.pid, lanes[:, None], columns[None, :]
    backend.store(late.acc, *index, value=carry.acc, mask=mask)
    for ref, value in ((late.m, carry.m), (late.l, carry.l)):
      backend.store(ref, piece.pid, lanes, value=value, mask=real)


def _judge(
  parts: tuple[Any, ...],
  tail_ref: Tail,
  row: Array,
  here: Length,
  head_dim: int,
  until: Stop,
  tail: int,
) -> Array:
  """Tiles at the detector's first stop, or NEVER."""
  acc_ref, m_ref, l_ref, cut_ref = parts
  assert isinstance(until.rule, Detector)
  groups, width = tail_ref.acc.shape[2:]
  lane, tile = (jnp.arange(pl.next_power_of_2(n)) for n in (groups, tail + 1))
  real = lane < groups
  size = max(1, min(pl.next_power_of_2(width), VALUES // (lane.size * max(tile.size, JOINED))))
  first, pieces = cut_ref[row, 0], cut_ref[row, 1]

  def part_of(i: Array) -> Array:
    """The piece of the tail's tile i."""
    t = jnp.maximum(here.first + i, 0)
    return ((t + 1) * pieces - 1) // jnp.maximum(here.known, 1)

  begun, last = part_of(jnp.int32(0)), part_of(jnp.int32(tail))

  def join(own: Array, inside: Array, n: Any, carry: tiling.Carry) -> tiling.Carry:
    """With pieces n·JOINED … of those that end before the tail."""
    part = n * JOINED + jnp.arange(JOINED)
    keep = (part < begun)[:, None] & real[None, :]
    at = jnp.where(part < begun, first + part, 0)[:, None]
    m = backend.load(m_ref, at, lane[None, :], mask=keep, other=-jnp.inf)
    l = backend.load(l_ref, at, lane[None, :], mask=keep, other=0.0)
    index = at[:, :, None], lane[None, :, None], own[None, None, :]
    acc = backend.load(acc_ref, *index, mask=keep[:, :, None] & inside[None, None, :], other=0.0)
    top = jnp.maximum(carry.m, m.max(axis=0))
    base = tiling.finite(top)
    old, new = jnp.exp2(carry.m - base), jnp.exp2(m - base[None, :])
    total = carry.acc * old[:, None] + (acc * new[:, :, None]).sum(axis=0)
    return tiling.Carry(total, top, carry.l * old + (l * new).sum(axis=0))

  def probe(column: Array, before: tiling.Carry, tiles: Sequence[Array]) -> list[Array]:
    """x [T, G, C] after each of some of the tail's tiles i [T]; 0 before the first tile."""
    own, inside = _own(column, head_dim, width), column < width
    mask = real[:, None] & inside[None, :]

    def load(j: Array) -> tuple[Array, ...]:
      at = first + jnp.minimum(j, last)
      m = backend.load(m_ref, at, lane, mask=real, other=-jnp.inf)
      l = backend.load(l_ref, at, lane, mask=real, other=0.0)
      index = at, lane[:, None], own[None, :]
      return backend.load(acc_ref, *index, mask=mask, other=0.0)[None], m[None], l[None]

    def with_piece(carry: Any, i: Array, j: Array, new: tuple[Array, ...]) -> Any:
      """For tiles of later pieces."""
      (acc, m, l), later = new, (part_of(i) > j)[:, None]
      return _merged(carry, (acc, jnp.where(later, m, -jnp.inf), jnp.where(later, l, 0.0)))

    def add(n: Any, carries: Any) -> Any:
      """With pieces that are loaded together: one by one, each would wait for its own."""
      numbers = [begun + n * TOGETHER + k for k in range(TOGETHER)]
      loaded = [load(j) for j in numbers]
      for j, new in zip(numbers, loaded, strict=True):
        carries = [with_piece(x, i, j, new) for x, i in zip(carries, tiles, strict=True)]
      return carries

    def after(carry: Any, i: Array) -> Array:
      """With the tail's tile itself."""
      ok = (i >= 0) & (i <= tail) & (here.first + i >= 0)
      keep, at = ok[:, None] & real[None, :], jnp.where(ok, i, 0)[:, None]
      m = backend.load(tail_ref.m, row, at, lane[None, :], mask=keep, other=-jnp.inf)
      l = backend.load(tail_ref.l, row, at, lane[None, :], mask=keep, other=0.0)
      index = row, at[:, :, None], lane[None, :, None], column[None, None, :]
      acc = backend.load(
        tail_ref.acc, *index, mask=keep[:, :, None] & inside[None, None, :], other=0.0
      )
      acc, _, l = _merged(carry, (acc, m, l))
      return jnp.where(ok[:, None, None], acc / tiling.nonzero(l)[:, :, None], 0.0)

    shape = tile.size, lane.size
    start = (
      jnp.broadcast_to(before.acc[None], (*shape, column.size)),
      jnp.broadcast_to(before.m[None], shape),
      jnp.broadcast_to(before.l[None], shape),
    )
    carries = lax.fori_loop(0, pl.cdiv(last - begun, TOGETHER), add, [start] * len(tiles))
    return [after(carry, i) for carry, i in zip(carries, tiles, strict=True)]

  def squares(n: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
    """Sums of squares of the movement and of both probes, with columns n·size …"""
    column = n * size + jnp.arange(size)
    body = functools.partial(join, _own(column, head_dim, width), column < width)
    before = lax.fori_loop(0, pl.cdiv(begun, JOINED), body, tiling.start(lane.size, size))
    new, old = probe(column, before, (tile, tile - 1))
    return tuple(x + (y * y).sum(axis=-1) for x, y in zip(sums, (new - old, new, old), strict=True))

  zero = jnp.zeros((tile.size, lane.size), jnp.float32)
  norms = (jnp.sqrt(x) for x in lax.fori_loop(0, pl.cdiv(width, size), squares, (zero,) * 3))
  stable = until.rule.is_calm(*norms).astype(jnp.int32)
  stable = jnp.where(real[None, :], stable, 1).min(axis=1)
  stable = jnp.where((tile >= 1) & (tile <= tail), stable, 0)
  upto = tile[None, :] <= tile[:, None]
  broken = jnp.where(upto & (stable == 0)[None, :], tile[None, :], 0).max(axis=1)
  calm, ends = tile - broken, here.first + tile + 1
  done = (calm >= until.rule.patience) & (ends >= until.kept) & (tile <= tail)
  return jnp.where(done, ends, NEVER).min()


def _own(column: Array, head_dim: int, width: int) -> Array:
  """Columns of the output that the probe's are."""
  return column if width == head_dim else column * head_dim // PROBES


def _merged(a: Any, b: Any) -> Any:
  """Two states (acc [T, G, C], m, l [T, G]) in one."""
  top = jnp.maximum(a[1], b[1])
  base = tiling.finite(top)
  old, new = jnp.exp2(a[1] - base), jnp.exp2(b[1] - base)
  return a[0] * old[:, :, None] + b[0] * new[:, :, None], top, a[2] * old + b[2] * new


def read(
  q: Float[Array, "B K G H"],
  k: Float[Array, "B K S H"],
  v: Float[Array, "B K S H"],
  start: Int[Array, "B #K"],
  stop: Int[Array, "B #K"],
  length: Int[Array, "B K"],
  *,
  table: Int[Array, "B K W"] | None = None,
  count: Int[Array, "B K"] | None = None,
  unit: int = 1,
  moved: Int[Array, "B K P"] | None = None,
  following: Following,
  tail: int,
  tile: int = 128,
  tau: float | int = 1e-5,
  phi: float | int = 1e-3,
  patience: float | int,
  relative: bool = False,
  full: bool = False,
  kept: int = 0,
  sinks: int = 0,
  scale: float | None = None,
  soft_cap: float | None = None,
  cut: Config | None = None,
  interpret: bool | None = None,
) -> tuple[State, Float[Array, "B K G H"], Int[Array, "B K"], Int[Array, "B K"]]:
  """Attention over the first `length` tiles of an order; over all where none of these is a stop.

  The reference is `kvjax.methods.art.known.read`; query heads stop together.

  Args:
    q, k, v, start, stop, table, count, unit, tile, tau, phi, patience, relative, full, kept, sinks,
      scale, soft_cap, cut, interpret: as in `art.walk`.
    length: int32, tiles to read at once; 0: all.
    moved: of tiles from the first to the last, how far from its place the one is that a walk from
      the last one down takes there, int32; of `kept` tiles, all but one are first. Without a table.
    following: tiles read, those that were read at once, and those at which the detector stopped, 0
      where it did not -> the next length, int32 each; of scalars.
    tail: the last tiles of these, up to 62, at which the detector looks; any where the patience is
      infinite.

  Returns:
    The softmax state, float32; o in the dtype of q; tiles read; and the next lengths.

  Raises:
    TypeError, ValueError, NotImplementedError: as `art.walk`, or the detector looks at more tiles.
  """
  check(q, k, v, start, stop, sinks)
  if table is not None:
    check_table(table, count, unit, q.shape[:2])
  batch, heads, groups, head_dim = q.shape
  rows = batch * heads
  tail = 0 if patience >= NEVER else tail
  if not 0 <= tail <= MAX_TAIL:
    raise NotImplementedError(f"tail: found {tail}, expected up to {MAX_TAIL}")
  interpreted = backend.interpreted(interpret)
  entry = None if table is None else unit
  shape: dict[str, Any] = {"groups": groups, "unit": entry, "interpret": interpreted}
  cut = cut or choose_cut(tile, head_dim, q.dtype.itemsize, **shape)
  listed = None
  if table is not None and count is not None:
    listed = ordering.Table(table.reshape(rows, -1), count.reshape(rows))
  places = None if moved is None else moved.reshape(rows, -1)
  sources = reading.Sources(
    stored.Sources.of(q, k, v), None, listed, start.reshape(-1), stop.reshape(-1), places
  )
  lengths = length.reshape(rows)
  rule = Detector(tau, phi, int(min(patience, NEVER)), full, relative)
  until = Stop(rule, False, kept)
  first = max(kept, -(-sinks // tile)) if moved is None else kept - 1
  how: dict[str, Any] = {
    "sizes": ordering.Sizes(unit, tile, cut.tile, first),
    "sinks": sinks,
    "scale": tiling.Scale.of(head_dim, scale, soft_cap),
    "tail": tail,
  }
  programs = 2 * rows + 3 if interpreted else 2 * devices.this_device().cores
  size = {"slots": k.shape[2], "tile": cut.tile, "programs": programs}
  finer = split_k.finer(batch=batch, rows=rows, **size)
  width = head_dim if full or head_dim <= PROBES else PROBES
  of, f32 = jax.ShapeDtypeStruct, jnp.float32
  per_tile = of((rows, tail + 1, groups), f32)
  *written, left = backend.call(
    functools.partial(_read_kernel, rule=rule, programs=programs, finer=finer, **how),
    *(sources, lengths),
    grid=(split_k.most_pieces(rows, finer * programs),),
    out=[
      tuple(split_k.results(rows, groups, head_dim, finer * programs, q.dtype)),
      Tail(of((*per_tile.shape, width), f32), per_tile, per_tile),
    ],
    warps=cut.warps,
    stages=cut.stages,
    name="art_known",
    interpret=interpret,
  )
  (written,) = written
  row = of((rows,), jnp.int32)
  judge = functools.partial(_judge_kernel, until=until, following=following)
  walked, after = backend.call(
    functools.partial(judge, sizes=how["sizes"], tail=tail),
    *(sources, lengths, tuple(written[4:]), left),
    grid=(rows,),
    out=[row, row],
    warps=JUDGE_WARPS,
    stages=1,
    name="art_judge_known",
    interpret=interpret,
  )
  most = split_k.most_pieces(rows, programs)
  acc, m, l = split_k.state_shapes(most, groups, head_dim)
  (late,) = backend.call(
    functools.partial(_rest_kernel, programs=programs, **how),
    *(sources, lengths, walked),
    grid=(most,),
    out=[split_k.Late(acc, m, l, of((rows, 2), jnp.int32))],
    warps=cut.warps,
    stages=cut.stages,
    name="art_rest",
    interpret=interpret,
  )
  done = split_k.join(written, split=True, interpret=interpret, late=split_k.Late(*late))
  state, out = split_k.finished(done, q.shape[:2])
  return state, out, *(x.reshape(batch, heads) for x in (walked, after))
