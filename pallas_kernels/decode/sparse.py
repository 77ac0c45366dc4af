"""Sparse decode: one query token per row against the slots that a plan's table names.

Bytes: keys and values of the listed slots once, and the table. Tiles of the walk hold a fixed
number of keys whatever the plan's unit is: a tile takes part of one listed block, or many of them,
down to single tokens, by pointer.

Grid: as in dense decode, pieces of about equal size of all rows' lists (`split_k`): a short list of
one row still fills the device, and ragged counts do not leave a long row to one program. Where
there are about as many rows as programs run at once, each row is one program's, and nothing is
left to be joined: lists that were selected are of about one length.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.kernels.common import backend, listed, split_k, tiling
from kvjax.kernels.common.config import Config, choose
from kvjax.kernels.decode.dense import check
from kvjax.primitives.softmax_state import State


def attend_kernel(
  *refs: Any,
  groups: int,
  unit: int,
  config: Config,
  scale: tiling.Scale,
  sinks: int,
  whole: bool = False,
  alone: bool = False,
  parts: int = 1,
) -> None:
  """q [R, G, H], k, v [R, S, H], table [R, W], count [R], start, stop [R] or one per batch row ->
  what `split_k.results` lists. `whole`: a program per row, and only its first four. `alone`: G = 1,
  and no matrix units, of tiles in so many `parts` (`walk_lanes`).
  """
  q_ref, k_ref, v_ref, table_ref, count_ref, start_ref, stop_ref, *outs = refs
  slots, head_dim = k_ref.shape[1:]
  piece, keys, find = listed.of_program(
    *(table_ref, count_ref, start_ref, stop_ref),
    slots=slots,
    unit=unit,
    sinks=sinks,
    config=config,
    whole=whole,
  )
  row = piece.row
  lanes, columns = jnp.arange(split_k.lanes_of(groups)), jnp.arange(split_k.columns_of(head_dim))
  inside = (columns < head_dim)[None, :]

  def fetch(slot: Array) -> tuple[Array, Array]:
    index, mask = (row, jnp.maximum(slot, 0)[:, None], columns[None, :]), (slot >= 0)[:, None]
    k, v = (backend.load(ref, *index, mask=mask & inside) for ref in (k_ref, v_ref))
    return k, v

  def tile_of(i: Any) -> tiling.Tile:
    slot = find(i)
    return tiling.Tile(*fetch(slot), slot >= 0)

  share = piece.share(pl.cdiv(keys, config.tile))
  if alone:
    q = backend.load(q_ref, row, 0, columns, mask=columns < head_dim)

    def find_parts(i: Any) -> list[Array]:
      return [find(i, part, parts) for part in range(parts)]

    carry = tiling.walk_lanes(q, find_parts, fetch, *share, scale=scale)
    like = tiling.start(lanes.size, columns.size)
    carry = tiling.Carry(*(jnp.broadcast_to(x, y.shape) for x, y in zip(carry, like, strict=True)))
  else:
    real = (lanes < groups)[:, None] & inside
    q = backend.load(q_ref, row, lanes[:, None], columns[None, :], mask=real)
    carry = tiling.start(lanes.size, columns.size)
    carry = tiling.walk(carry, q, tile_of, *share, scale=scale)
  split_k.store(piece, carry, outs, groups=groups, head_dim=head_dim)


def sparse_decode(
  q: Float[Array, "B K G H"],
  k: Float[Array, "B K S H"],
  v: Float[Array, "B K S H"],
  table: Int[Array, "B K W"],
  count: Int[Array, "B K"],
  start: Int[Array, "B #K"],
  stop: Int[Array, "B #K"],
  *,
  unit: int,
  sinks: int = 0,
  scale: float | None = None,
  soft_cap: float | None = None,
  config: Config | None = None,
  interpret: bool | None = None,
) -> tuple[State, Float[Array, "B K G H"]]:
  """Attention over the listed slots of [0, min(sinks, stop)) ∪ [max(start, sinks), stop).

  Slots that are not listed, or lie outside, are never read: they may hold NaN.

  Args:
    q: queries, rotated; bfloat16, float16 or float32, H ≤ 256, G ≤ 128.
    k, v: cached keys and values in the dtype of q.
    table: int32 indices of tiles of `unit` slots, no duplicates; negative ones are holes.
    count: int32, how many entries of a list are valid, holes included.
    start, stop: int32, the range of slots that may be read at all, see `decode_attention`.
    unit: slots per tile of the plan, 1 to 256.
    sinks: leading slots that may be read whatever `start` is.
    scale: factor of the logits; H^−½ if None.
    soft_cap: c of logits c·tanh(x/c); None: x itself.
    config: how the work is cut; by device and shape if None.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    The softmax state, float32: o [B, K, G, H], m and l [B, K, G]; and o in the dtype of q.

  Raises:
    TypeError, ValueError, NotImplementedError: as `decode_attention`, or a bad table or unit.
  """
  check(q, k, v, start, stop, sinks, None)
  check_table(table, count, unit, q.shape[:2])
  batch, heads, groups, head_dim = q.shape
  rows = batch * heads
  config = config or settings(
    rows=rows,
    groups=groups,
    slots=table.shape[2] * unit,
    head_dim=head_dim,
    itemsize=q.dtype.itemsize,
    unit=unit,
    interpret=backend.interpreted(interpret),
  )
  whole = is_whole(rows, config)
  flat = [x.reshape(rows, *x.shape[2:]) for x in (q, k, v, table, count)]
  written = backend.call(
    functools.partial(
      attend_kernel,
      groups=groups,
      unit=unit,
      config=config,
      scale=tiling.Scale.of(head_dim, scale, soft_cap),
      sinks=sinks,
      whole=whole,
      alone=is_alone(groups, unit, config),
    ),
    *flat,
    *(start.reshape(-1), stop.reshape(-1)),
    grid=(rows if whole else split_k.most_pieces(rows, config.programs),),
    out=split_k.results(rows, groups, head_dim, 0 if whole else config.programs, q.dtype),
    warps=config.warps,
    stages=config.stages,
    name="sparse_attend",
    interpret=interpret,
  )
  split = not whole and table.shape[2] * unit > config.tile
  o, m, l, rounded = split_k.join(written, split=split, interpret=interpret)
  o, m, l, rounded = (x.reshape(batch, heads, *x.shape[1:]) for x in (o, m, l, rounded))
  return State(o, m, l), rounded


def settings(*, rows: int, unit: int, interpret: bool = False, **shape: Any) -> Config:
  """Cut of the work, by device and shape, see `config.choose`.

  A tile that gathers several entries waits for the table before its slots are known: of the
  stages that keep n tiles in flight, half are the table's. Of as many rows as programs, each with
  half the tile, twice as many run at once: no second wave is left with a few of them.
  """
  config = choose("sparse_decode", rows=rows, interpret=interpret, **shape)
  if interpret or unit % config.tile == 0:
    return config
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


def is_whole(rows: int, config: Config) -> bool:
  """True if every row is one program's: hardly fewer of them than programs that run at once."""
  return 4 * rows >= 3 * config.programs


def is_alone(groups: int, unit: int, config: Config) -> bool:
  """True if a tile is gathered for a single query head, which needs no matrix units."""
  return groups == 1 and unit % config.tile > 0


def check_table(table: Any, count: Any, unit: int, heads: tuple[int, ...]) -> None:
  """Raises on a plan that the kernel does not take; the message names the argument."""
  if table.ndim != 3 or table.shape[:2] != heads or table.shape[2] == 0:
    raise ValueError(f"table: found shape {table.shape}, expected [{heads[0]}, {heads[1]}, W ≥ 1]")
  if count.shape != heads:
    raise ValueError(f"count: found shape {count.shape}, expected {list(heads)}")
  for name, x in (("table", table), ("count", count)):
    if x.dtype != "int32":
      raise TypeError(f"{name}: found dtype {x.dtype.name}, expected int32")
  if not 1 <= unit <= 256:
    raise ValueError(f"unit: found {unit}, expected 1 to 256")
