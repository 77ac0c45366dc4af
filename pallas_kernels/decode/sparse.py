"""Sparse decode: one query token per row against the slots that a plan's table names.

Bytes: keys and values of the listed slots once, or their codes and scales, and the table. Tiles of
the walk hold a fixed number of keys whatever the plan's unit is: a tile takes part of one listed
block, or many of them, down to single tokens, by pointer.

Grid: as in dense decode, pieces of about equal size of all rows' lists (`split_k`): a short list of
one row still fills the device, and ragged counts do not leave a long row to one program. Where
there are about as many rows as programs run at once, each row is one program's, and nothing is
left to be joined: lists that were selected are of about one length.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.kernels.common import backend, listed, split_k, tiling
from kvjax.kernels.common.config import Config, choose, fitted
from kvjax.kernels.common.devices import this_device
from kvjax.kernels.common.operands import check, check_table
from kvjax.kernels.decode import stored
from kvjax.primitives.softmax_state import State


def attend_kernel(
  sources: stored.Sources,
  table_ref: Any,
  count_ref: Any,
  start_ref: Any,
  stop_ref: Any,
  outs: tuple[Any, ...],
  *,
  unit: int,
  config: Config,
  scale: Any,
  sinks: int,
  whole: bool = False,
  alone: bool = False,
  parts: int = 1,
) -> None:
  """`Sources`, table [R, W], count [R], start, stop [R] or one per batch row -> what
  `split_k.results` lists. `whole`: a program per row, and only its first four. `alone`: G = 1, and
  no matrix units, of tiles in so many `parts` (`walk_lanes`).
  """
  piece, keys, find = listed.of_program(
    *(table_ref, count_ref, start_ref, stop_ref),
    slots=sources.k.shape[1],
    unit=unit,
    sinks=sinks,
    config=config,
    whole=whole,
  )
  held: Any = stored.of_row(sources, piece.row, scale)
  first, last = piece.share(pl.cdiv(keys, config.tile))

  def tile_of(i: Any) -> tuple[Array, Array]:
    slot = find(i)
    return jnp.maximum(slot, 0), slot >= 0

  def ahead(i: Any) -> tuple[Array, Array]:
    slot = find(jnp.minimum(i, jnp.maximum(last - 1, 0)))  # one tile ahead, of which there is none
    return jnp.maximum(slot, 0), (slot >= 0) & (i < last)

  def find_parts(i: Any) -> list[Array]:
    return [find(i, part, parts) for part in range(parts)]

  def fetch(slot: Array) -> tuple[Array, Array]:
    k, v, _ = held.fetch(jnp.maximum(slot, 0), slot >= 0)
    return k, v

  if alone:
    columns = jnp.arange(split_k.columns_of(held.head_dim))
    q = backend.load(sources.q, piece.row, 0, columns, mask=columns < held.head_dim)
    carry = tiling.walk_lanes(q, find_parts, fetch, first, last, scale=scale)
    both = zip(carry, held.start(), strict=True)
    carry = tiling.Carry(*(jnp.broadcast_to(x, like.shape) for x, like in both))
  else:
    q = held.query()
    carry = held.walk(held.start(), q, tile_of, first, last, ahead=ahead)
  held.store(piece, carry, outs)


def sparse_decode(
  q: Float[Array, "B K G H"],
  k: Float[Array, "B K S H"] | Int[Array, "B K S Wk"],
  v: Float[Array, "B K S H"] | Int[Array, "B K S Wv"],
  table: Int[Array, "B K W"],
  count: Int[Array, "B K"],
  start: Int[Array, "B #K"],
  stop: Int[Array, "B #K"],
  *,
  unit: int,
  sinks: int = 0,
  per_slot: Sequence[Float[Array, "B K S"]] | None = None,
  bits: int = 8,
  scale: float | None = None,
  soft_cap: float | None = None,
  config: Config | None = None,
  interpret: bool | None = None,
) -> tuple[State, Float[Array, "B K G H"]]:
  """Attention over the listed slots of [0, min(sinks, stop)) ∪ [max(start, sinks), stop).

  Slots that are not listed, or lie outside, are never read: they may hold NaN.

  Args:
    q, k, v, start, stop, sinks, per_slot, bits, scale, soft_cap, config, interpret: as in
      `decode_with_output`; the range is that of slots that may be read at all.
    table: int32 indices of tiles of `unit` slots, no duplicates; negative ones are holes.
    count: int32, how many entries of a list are valid, holes included.
    unit: slots per tile of the plan, 1 to 256.

  Returns:
    The softmax state, float32: o [B, K, G, H], m and l [B, K, G]; and o in the dtype of q.

  Raises:
    TypeError, ValueError, NotImplementedError: as `decode_with_output`, or a bad table or unit.
  """
  check(q, k, v, start, stop, sinks, None, per_slot, bits)
  check_table(table, count, unit, q.shape[:2])
  batch, heads, groups, head_dim = q.shape
  rows, interpret = batch * heads, backend.interpreted(interpret)
  coded = per_slot is not None
  config = config or settings(
    rows=rows,
    groups=groups,
    slots=table.shape[2] * unit,
    head_dim=head_dim,
    itemsize=q.dtype.itemsize,
    unit=unit,
    bits=bits if coded else None,
    interpret=interpret,
  )
  whole = is_whole(rows, config)
  (written,) = backend.call(
    functools.partial(
      attend_kernel,
      unit=unit,
      config=config,
      scale=stored.scale_of(q, scale, soft_cap, bits if coded else None, interpret),
      sinks=sinks,
      whole=whole,
      alone=not coded and is_alone(groups, unit, config),
    ),
    stored.Sources.of(q, k, v, per_slot),
    *(table.reshape(rows, -1), count.reshape(rows), start.reshape(-1), stop.reshape(-1)),
    grid=(rows if whole else split_k.most_pieces(rows, config.programs),),
    out=[tuple(split_k.results(rows, groups, head_dim, 0 if whole else config.programs, q.dtype))],
    warps=config.warps,
    stages=config.stages,
    name=f"sparse_int{bits}" if coded else "sparse_attend",
    interpret=interpret,
  )
  split = not whole and table.shape[2] * unit > config.tile
  return split_k.joined(written, q.shape[:2], split=split, interpret=interpret)


def settings(
  *, rows: int, unit: int, bits: int | None = None, interpret: bool = False, **shape: Any
) -> Config:
  """Cut of the work, by device and shape, see `config.choose`; `bits`: of codes.

  A tile that gathers several entries waits for the table before its slots are known: of the
  stages that keep n tiles in flight, half are the table's. Of as many rows as programs, each with
  half the tile, twice as many run at once: no second wave is left with a few of them.
  """
  config = _contiguous(rows=rows, bits=bits, interpret=interpret, **shape)
  if interpret or unit % config.tile == 0:
    return config
  if bits is not None:
    return dataclasses.replace(config, stages=2 * config.stages - 1)
  # What a single query waits for stands in registers, 2 KiB of a warp's: 64 KiB of a
  # multiprocessor's, whether two programs run there or four.
  warps = 16 if is_whole(rows, config) and rows <= config.programs else 8
  size = 2 * split_k.columns_of(shape["head_dim"]) * shape["itemsize"]
  tile = max(16, warps * (2 << 10) // size)
  gathering = dataclasses.replace(config, tile=tile, warps=warps, stages=1)
  if is_alone(shape["groups"], unit, gathering):
    return gathering
  if is_whole(rows, config):
    tile, stages = max(16, config.tile // 2), 2 * config.stages + 1
  else:
    tile, stages = config.tile, 2 * config.stages - 1
  return dataclasses.replace(config, tile=tile, stages=stages)


def _contiguous(*, rows: int, bits: int | None, interpret: bool, **shape: Any) -> Config:
  """`settings` where an entry is a whole tile. No cut of codes has been measured: three programs on
  each multiprocessor, as in `decode.dense`, of tiles of up to 16 KiB.
  """
  kernel = "sparse_decode" if bits is None else "quantised_sparse"
  if bits is None or interpret or shape["itemsize"] == 4:  # of whose size weights and codes are too
    return choose(kernel, rows=rows, interpret=interpret, **shape)
  here, size = this_device(shape.get("kind")), 2 * split_k.columns_of(shape["head_dim"]) * bits // 8
  cut = Config(max(16, min(64, (16 << 10) // size)), 3 * here.cores, warps=4, stages=3)
  return fitted(cut, here, groups=shape["groups"], head_dim=shape["head_dim"], itemsize=1)


def is_whole(rows: int, config: Config) -> bool:
  """True if every row is one program's: hardly fewer of them than programs that run at once."""
  return 4 * rows >= 3 * config.programs


def is_alone(groups: int, unit: int, config: Config) -> bool:
  """True if a tile is gathered for a single query head, which needs no matrix units."""
  return groups == 1 and unit % config.tile > 0
