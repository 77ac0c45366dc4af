"""ART's walk with many programs: tiles are read ahead of the detector, which then finds the stop.

One program that walks alone takes two microseconds a tile, for it has one multiprocessor. Here
`share` consecutive tiles of the order are one program's, which leaves the softmax state of its own
tiles after each of them. A second launch goes over these in order (`_art_settle`) and ends at the
tile at which Algorithm 1 ends, however many programs have read. What was read behind the stop is
dropped. Nothing waits for anything, and a second run is equal to the bit.

Where more tiles than programs are left, there are several such pairs of launches, each twice as
long as the one before; rows that have stopped are passed over.

Bytes: keys and values of the tiles read, and of each tile the output, 4·G·H.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from . import _art_order, _art_read, _art_settle, _backend, _split, _tiles, config
from ._art_settle import NEVER, Left, Walks
from ._art_stop import Stop, divided

SHARE = 8  # tiles of a program: fewer take the detector more rounds, more take a program longer
WAVES = 4  # pairs of launches, at most
WARPS = 8  # of the detector


def waves(tiles: int, rows: int, share: int, programs: int) -> list[tuple[int, int]]:
  """(first tile, shares) of each wave: as many shares as run at once, then twice as many, …"""
  found: list[tuple[int, int]] = []
  first, size = 0, max(1, programs // rows)
  while first < tiles:
    left = pl.cdiv(tiles - first, share)
    count = left if len(found) == WAVES - 1 else min(size, left)
    found.append((first, count))
    first, size = first + count * share, 2 * size
  return found


def walk(
  sources: _art_read.Sources,
  until: Stop | None,
  tiles: int,
  *,
  share: int,
  sizes: _art_order.Sizes,
  sinks: int,
  scale: _tiles.Scale,
  cut: config.Config,
  loaded: bool,
  interpret: bool | None,
) -> tuple[Array, Array, Array, Array, Array]:
  """o [R, G, H], m, l [R, G], o in the dtype of q, and tiles walked [R, G], or with `loaded` read.

  Args:
    sources: as arrays.
    until: a detector's; None: nothing is looked at, and no walk ends.
    tiles: of the longest order that there can be.
    share: tiles of a program.
    sizes, sinks, scale, cut, loaded, interpret: as in `art.walk`.
  """
  (rows, groups, head_dim), of = sources.q.shape, jax.ShapeDtypeStruct
  f32, i32 = jnp.float32, jnp.int32
  programs = 3 * rows if _backend.interpreted(interpret) else 2 * config.this_device().cores
  parts = waves(tiles, rows, share, programs)
  how: dict[str, Any] = {"sizes": sizes, "sinks": sinks, "scale": scale}
  walks: Walks | None = None
  for first, shares in parts:
    size = shares * share
    left, count = _backend.call(
      functools.partial(_read_kernel, first=first, share=share, **how),
      *(sources, None if walks is None else walks.walked),
      grid=(rows, shares),
      out=[
        Left(of((rows, size, groups, head_dim), f32), *3 * [of((rows, size, groups), f32)]),
        of((rows,), i32),
      ],
      warps=cut.warps,
      stages=cut.stages,
      name="art_read",
      interpret=interpret,
    )
    last = first + size >= tiles
    walks, done = _backend.call(
      functools.partial(_art_settle.kernel, until=until, first=first, share=share, last=last),
      *(left, count, walks),
      grid=(rows,),
      out=[
        Walks(*_split.state_shapes(rows, groups, head_dim), *2 * [of((rows, groups), i32)]),
        tuple(_split.results(rows, groups, head_dim, 0, sources.q.dtype)),
      ],
      warps=WARPS,
      stages=1,
      name="art_settle",
      interpret=interpret,
    )
  assert walks is not None
  walked = walks.walked
  if loaded:
    ends = jnp.array([first + shares * share for first, shares in parts])
    read = jnp.where(ends >= walked.max(1, keepdims=True), ends, NEVER).min(-1, keepdims=True)
    walked = jnp.broadcast_to(jnp.minimum(read, count[:, None]), walked.shape)
  return *done, walked


def _read_kernel(
  sources: _art_read.Sources,
  walked_ref: Any | None,
  left: Left,
  count_ref: Any,
  *,
  first: int,
  share: int,
  sizes: _art_order.Sizes,
  sinks: int,
  scale: _tiles.Scale,
) -> None:
  """`Sources`, (tiles walked [R, G]; 0: goes on) -> `Left`, and the tiles of each order [R].

  This program's share of the tiles from `first` on.
  """
  groups, head_dim = sources.q.shape[1:]
  row, piece = pl.program_id(0), pl.program_id(1)
  lanes, columns = jnp.arange(_split.lanes_of(groups)), jnp.arange(_split.columns_of(head_dim))
  real = lanes < groups
  read = _art_read.reading(sources, row, sizes=sizes, sinks=sinks, scale=scale)
  parts, begin = pl.cdiv(sizes.tile, sizes.part), piece * share
  mine = jnp.clip(read.tiles - first - begin, 0, share)
  if walked_ref is not None:
    walked = _backend.load(walked_ref, row, lanes, mask=real, other=NEVER)
    mine = jnp.where(walked.min() == 0, mine, 0)

  def step(n: Any, state: tuple[_tiles.Carry, Array]) -> tuple[_tiles.Carry, Array]:
    i, j = divided(n, parts)
    carry, top = read.add(first + begin + i, j, state[0])
    top = jnp.maximum(top, state[1])
    whole = real & (j == parts - 1)
    index = row, begin + i, lanes[:, None], columns[None, :]
    mask = whole[:, None] & (columns < head_dim)[None, :]
    _backend.store(left.acc, *index, value=carry.acc, mask=mask)
    for ref, value in zip(left[1:], (carry.m, carry.l, top), strict=True):
      _backend.store(ref, row, begin + i, lanes, value=value, mask=whole)
    return carry, jnp.where(j == parts - 1, -jnp.inf, top)

  none = jnp.full(lanes.shape, -jnp.inf, jnp.float32)
  lax.fori_loop(0, mine * parts, step, (_tiles.start(lanes.size, columns.size), none))

  @pl.when(piece == 0)
  def _() -> None:
    count_ref[row] = read.tiles
