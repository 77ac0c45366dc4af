"""ART's walk with many programs: tiles are read ahead of the detector, which then finds the stop.

One program that walks alone takes two microseconds a tile, for it has one multiprocessor. Here
`share` consecutive tiles of the order are one program's, which leaves the softmax state of its own
tiles after each of them. A second launch looks at the output after every tile (`judge`), a
third finds the tile at which Algorithm 1 ends and adds up the shares until there (`settle`):
one patience, however many programs have read. What was read behind the stop is dropped. Nothing
waits for anything, and a second run is equal to the bit.

Where more tiles than programs are left, there are several such launches, each of twice as many
shares as the one before; rows that have stopped are passed over.

Bytes: keys and values of the tiles read, and of each tile the output, 4·G·H, and its probe.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from kvjax.kernels.art import judge, ordering, reading, settle
from kvjax.kernels.art.remaining import NEVER, Left, Walks
from kvjax.kernels.art.stopping import PROBES, Detector, Stop, divided
from kvjax.kernels.common import backend, devices, split_k, tiling
from kvjax.kernels.common.config import Config
from kvjax.kernels.decode import stored

SHARE = 4  # tiles of a program: fewer are more states to add up, more take a program longer
WAVES = 4  # of launches, at most
JUDGE_WARPS = 8
SETTLE_WARPS = 8


def programs(rows: int, interpret: bool | None) -> int:
  """Number that runs at once; under the interpreter so few that there are waves."""
  return 3 * rows if backend.interpreted(interpret) else 2 * devices.this_device().cores


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
  sources: reading.Sources,
  until: Stop | None,
  tiles: int,
  *,
  share: int,
  sizes: ordering.Sizes,
  sinks: int,
  scale: stored.Scale,
  cut: Config,
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
  (rows, groups, head_dim), of = sources.held.q.shape, jax.ShapeDtypeStruct
  f32, i32 = jnp.float32, jnp.int32
  at_once = programs(rows, interpret)
  parts = waves(tiles, rows, share, at_once)
  rule = until.rule if until is not None else None
  assert rule is None or isinstance(rule, Detector)
  strided = rule is not None and not rule.full and head_dim > PROBES
  walks: Walks | None = None
  for first, shares in parts:
    size = shares * share
    per_tile = of((rows, size, groups), f32)
    probe = of((rows, size, groups, PROBES), f32) if strided else None
    left, count = backend.call(
      functools.partial(
        _read_kernel, rule=rule, first=first, share=share, sizes=sizes, sinks=sinks, scale=scale
      ),
      *(sources, None if walks is None else walks.walked),
      grid=(rows, shares),
      out=[
        Left(of((rows, size, groups, head_dim), f32), per_tile, per_tile, per_tile, probe),
        of((rows,), i32),
      ],
      warps=cut.warps,
      stages=cut.stages,
      name="art_read",
      interpret=interpret,
    )
    calm = None
    if rule is not None:
      width, most = PROBES if strided else head_dim, max(1, 2 * at_once // rows)
      looked = judge.cut_of(shares, share, groups, width, most)
      (calm,) = backend.call(
        functools.partial(judge.kernel, rule=rule, first=first, share=share, cut=looked),
        *(left, count, walks),
        grid=(rows, looked.pieces, pl.cdiv(groups, looked.lanes)),
        out=[of((rows, size, groups), i32)],
        warps=JUDGE_WARPS,
        stages=1,
        name="art_judge",
        interpret=interpret,
      )
    how: dict[str, Any] = {"until": until, "first": first, "share": share}
    how |= {"last": first + size >= tiles, "cut": settle.cut_of(shares, share, groups)}
    walks, done = backend.call(
      functools.partial(settle.kernel, **how),
      *(left, count, calm, walks),
      grid=(rows, pl.cdiv(head_dim, settle.COLUMNS)),
      out=[
        Walks(*split_k.state_shapes(rows, groups, head_dim), *2 * [of((rows, groups), i32)]),
        tuple(split_k.results(rows, groups, head_dim, 0, sources.held.q.dtype)),
      ],
      warps=SETTLE_WARPS,
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
  sources: reading.Sources,
  walked_ref: Any | None,
  left: Left,
  count_ref: Any,
  *,
  rule: Detector | None,
  first: int,
  share: int,
  sizes: ordering.Sizes,
  sinks: int,
  scale: stored.Scale,
) -> None:
  """`Sources`, (tiles walked [R, G]; 0: goes on) -> `Left`, and the tiles of each order [R].

  This program's share of the tiles from `first` on; `rule` says which columns are looked at.
  """
  groups, head_dim = sources.held.q.shape[1:]
  row, piece = pl.program_id(0), pl.program_id(1)
  lanes, columns = jnp.arange(split_k.lanes_of(groups)), jnp.arange(split_k.columns_of(head_dim))
  real = lanes < groups
  read = reading.reading(sources, row, sizes=sizes, sinks=sinks, scale=scale)
  parts, begin = pl.cdiv(sizes.tile, sizes.part), piece * share
  mine = jnp.clip(read.tiles - first - begin, 0, share)
  if walked_ref is not None:
    walked = backend.load(walked_ref, row, lanes, mask=real, other=NEVER)
    mine = jnp.where(walked.min() == 0, mine, 0)

  def step(n: Any, state: tuple[tiling.Carry, Array]) -> tuple[tiling.Carry, Array]:
    i, j = divided(n, parts)
    carry, top = read.add(first + begin + i, j, state[0])
    top = jnp.maximum(top, state[1])
    whole = real & (j == parts - 1)
    index = row, begin + i, lanes[:, None], columns[None, :]
    mask = whole[:, None] & (columns < head_dim)[None, :]
    backend.store(left.acc, *index, value=carry.acc, mask=mask)
    if left.probe is not None:
      assert rule is not None
      probed = whole[:, None] & rule.probed(columns, head_dim)[None, :]
      place = (columns * PROBES + head_dim - 1) // head_dim
      backend.store(left.probe, *index[:3], place[None, :], value=carry.acc, mask=probed)
    for ref, value in zip(left[1:4], (carry.m, carry.l, top), strict=True):
      backend.store(ref, row, begin + i, lanes, value=value, mask=whole)
    return carry, jnp.where(j == parts - 1, -jnp.inf, top)

  none = jnp.full(lanes.shape, -jnp.inf, jnp.float32)
  lax.fori_loop(0, mine * parts, step, (tiling.start(lanes.size, columns.size), none))

  @pl.when(piece == 0)
  def _() -> None:
    count_ref[row] = read.tiles
