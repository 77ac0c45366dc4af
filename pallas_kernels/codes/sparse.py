"""Sparse decode over keys and values in 8 or 4 bits (`primitives.codes`), as `decode.sparse` is.

Bytes: the codes of the listed slots, their float32 scales and zero points once, and the table.
What a tile costs beside them is in `code_words`.

Grid: that of `sparse_decode`. A single query head has the matrix units like any other number: codes
are multiplied there as integers.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.kernels.codes import code_words
from kvjax.kernels.codes.dense import check_quantised
from kvjax.kernels.common import backend, listed, split_k, tiling
from kvjax.kernels.common.config import Config, choose, fitted
from kvjax.kernels.common.devices import this_device
from kvjax.kernels.decode.sparse import check_table, is_whole
from kvjax.primitives.softmax_state import State


def _attend_kernel(
  *refs: Any,
  groups: int,
  unit: int,
  config: Config,
  scale: tiling.Scale,
  sinks: int,
  bits: int,
  inline: bool,
  whole: bool,
) -> None:
  """q [R, G, H], k int8 [R, S, Wk], v int16 [R, S, Wv], scales of k and v [R, S], (zero points of
  both,) table [R, W], count [R], start, stop [R] or one per batch row -> what `split_k.results`
  lists. `whole`: a program per row, and only the first four of those.
  """
  written = 4 if whole else 8
  q_ref, k_ref, v_ref, *slot_refs, table_ref, count_ref, start_ref, stop_ref = refs[:-written]
  how = code_words.how(q_ref.dtype, scale, bits, inline)
  piece, keys, find = listed.of_program(
    *(table_ref, count_ref, start_ref, stop_ref),
    slots=k_ref.shape[1],
    unit=unit,
    sinks=sinks,
    config=config,
    whole=whole,
  )
  row = piece.row
  lanes = jnp.arange(split_k.lanes_of(groups))
  k_words = code_words.words_of(k_ref.shape[2])
  v_words = jnp.arange(split_k.columns_of(v_ref.shape[2]))
  first, last = piece.share(pl.cdiv(keys, config.tile))

  def per_slot(i: Any) -> tuple[Array, ...]:
    slot = find(jnp.minimum(i, jnp.maximum(last - 1, 0)))  # one tile ahead, of which there is none
    keep = (slot >= 0) & (i < last)
    return tuple(backend.load(x, row, jnp.maximum(slot, 0), mask=keep) for x in slot_refs)

  def fetch(i: Any, held: tuple[Array, ...]) -> code_words.Tile:
    slot = find(i)
    where, keep = jnp.maximum(slot, 0), slot >= 0
    read = ((k_ref, k_words), (v_ref, v_words))
    k, v = (code_words.words(x, row, where, column, keep) for x, column in read)
    return code_words.Tile(k, v, held, keep)

  q = code_words.query(q_ref, row, lanes, k_words, k_ref.shape[2], how)
  carry = code_words.start(lanes.size, v_words.size, bits)
  carry = code_words.walk(carry, q, per_slot, fetch, first, last, how)
  code_words.store(piece, carry, refs[-written:], groups=groups, head_dim=q_ref.shape[2])


def sparse_decode(
  q: Float[Array, "B K G H"],
  k: Int[Array, "B K S Wk"],
  v: Int[Array, "B K S Wv"],
  per_slot: Sequence[Float[Array, "B K S"]],
  table: Int[Array, "B K W"],
  count: Int[Array, "B K"],
  start: Int[Array, "B #K"],
  stop: Int[Array, "B #K"],
  *,
  unit: int,
  bits: int = 8,
  sinks: int = 0,
  scale: float | None = None,
  soft_cap: float | None = None,
  config: Config | None = None,
  interpret: bool | None = None,
) -> tuple[State, Float[Array, "B K G H"]]:
  """Attention over the listed slots of [0, min(sinks, stop)) ∪ [max(start, sinks), stop).

  Slots that are not listed, or lie outside, are never read: they may hold anything. Queries are
  rounded to 8 bits per head.

  Args:
    q: queries, rotated; bfloat16, float16 or float32, H ≤ 256 and a multiple of 16 / bits, G ≤ 128.
    k: codes of keys in words int8, Wk = H · bits / 8.
    v: codes of values in words int16, Wv = H · bits / 16.
    per_slot: float32, scales of keys and of values, each at least 0; with 4 bits then zero points
      of keys and of values.
    table: int32 indices of tiles of `unit` slots, no duplicates; negative ones are holes.
    count: int32, how many entries of a list are valid, holes included.
    start, stop: int32, the range of slots that may be read at all, see `decode_attention`.
    unit: slots per tile of the plan, 1 to 256.
    bits: of a code.
    sinks: leading slots that may be read whatever `start` is.
    scale: factor of the logits; H^−½ if None.
    soft_cap: c of logits c·tanh(x/c); None: x itself.
    config: how the work is cut; by device and shape if None.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    The softmax state, float32: o [B, K, G, H], m and l [B, K, G]; and o in the dtype of q.

  Raises:
    TypeError, ValueError, NotImplementedError: as `codes.dense.decode_attention`, or a bad
      table or unit.
  """
  check_quantised(q, k, v, per_slot, start, stop, bits, sinks)
  check_table(table, count, unit, q.shape[:2])
  interpret = backend.interpreted(interpret)
  batch, heads, groups, head_dim = q.shape
  rows = batch * heads
  config = config or settings(
    rows=rows,
    groups=groups,
    slots=table.shape[2] * unit,
    head_dim=head_dim,
    itemsize=q.dtype.itemsize,
    unit=unit,
    bits=bits,
    interpret=interpret,
  )
  whole = is_whole(rows, config)
  attend = functools.partial(
    _attend_kernel,
    groups=groups,
    unit=unit,
    config=config,
    scale=tiling.Scale.of(head_dim, scale, soft_cap),
    sinks=sinks,
    bits=bits,
    inline=not interpret,
    whole=whole,
  )
  flat = [x.reshape(rows, *x.shape[2:]) for x in (q, k, v, *per_slot, table, count)]
  written = backend.call(
    attend,
    *flat,
    *(start.reshape(-1), stop.reshape(-1)),
    grid=(rows if whole else split_k.most_pieces(rows, config.programs),),
    out=split_k.results(rows, groups, head_dim, 0 if whole else config.programs, q.dtype),
    warps=config.warps,
    stages=config.stages,
    name=f"sparse_int{bits}",
    interpret=interpret,
  )
  split = not whole and table.shape[2] * unit > config.tile
  written = split_k.join(written, split=split, interpret=interpret)
  o, m, l, in_dtype = (x.reshape(batch, heads, *x.shape[1:]) for x in written)
  return State(o, m, l), in_dtype


def settings(
  *,
  rows: int,
  groups: int,
  slots: int,
  head_dim: int,
  itemsize: int,
  unit: int,
  bits: int,
  interpret: bool = False,
  kind: str | None = None,
) -> Config:
  """Cut of the work, by device and shape; no cut has been measured.

  Three programs on each multiprocessor, as in `codes.dense`, of tiles of up to 16 KiB. A tile
  that gathers several entries has a stage for the table before each of its own (`sparse_decode`).
  """
  shape = {"groups": groups, "head_dim": head_dim}
  if interpret or itemsize == 4:  # float32 queries have weights and codes of their size
    shape |= {"rows": rows, "slots": slots, "itemsize": itemsize}
    cut = choose("quantised_sparse", **shape, interpret=interpret, kind=kind)
  else:
    here, size = this_device(kind), 2 * split_k.columns_of(head_dim) * bits // 8
    cut = Config(max(16, min(64, (16 << 10) // size)), 3 * here.cores, warps=4, stages=3)
    cut = fitted(cut, here, **shape, itemsize=1)
  gathers = not interpret and unit % cut.tile > 0
  return dataclasses.replace(cut, stages=2 * cut.stages - 1) if gathers else cut
