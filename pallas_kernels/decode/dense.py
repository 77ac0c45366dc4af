"""Dense decode: one query token per row against the slots [0, sinks) ∪ [start, stop) of its cache.

Bytes: keys and values of every visible slot once; the rest (queries, partial states) is under 1 %.
At decode that is the whole cost, so the kernel is a stream over contiguous slots with two small
matrix products on the side, and the work is cut so that all multiprocessors read all the time.
Codes, with their float32 scales and zero points, are 0.52 of what bfloat16 moves with 8 bits and
H = 128, 0.28 with 4; at that rate conversions are what it costs (`codes.code_words`).

Grid of the first kernel: one program per piece, a contiguous run of tiles of one (batch row, KV
head). Every program derives the cut from all ranges: about `Config.programs` pieces of equal size
whatever the ranges are, so one long row among short ones is read by many programs. Rows of one
piece are finished there; the others leave partial softmax states, which the second kernel, one
program per query head, joins in a fixed order (`split_k`). Asked for one piece, every row is one
program's, which then has nothing to derive. Heads that share a row of slots are cut level, others
where their configuration says so: all programs have as many tiles, also of two rows.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.kernels.common import backend, split_k, tiling
from kvjax.kernels.common.config import Config, choose, fitted
from kvjax.kernels.common.devices import this_device
from kvjax.kernels.common.operands import check
from kvjax.kernels.decode import stored
from kvjax.primitives.softmax_state import State

ALIGNED = 16  # slots


def _spans(start: Any, stop: Any, *, slots: int, sinks: int, joined: bool) -> tuple[Any, Any, Any]:
  """(head, first, stop): the slots of a row are [0, head) ∪ [first, stop).

  Ranges are clipped to the array. `joined`: both parts have one query, so that sinks which touch
  the window are a part of it and the first is empty.
  """
  stop = jnp.clip(stop, 0, slots)
  first = jnp.maximum(start, sinks)
  head = jnp.minimum(sinks, stop)
  if joined:
    touching = start <= sinks
    first, head = jnp.where(touching, 0, first), jnp.where(touching, 0, head)
  return head, first, stop


def _attend_kernel(
  sources: stored.Sources,
  q_sinks_ref: Any | None,
  start_ref: Any,
  stop_ref: Any,
  logits_ref: Any | None,
  outs: tuple[Any, ...],
  *,
  config: Config,
  scale: stored.Scale,
  sinks: int,
  ring: int | None,
  whole: bool,
  level: bool,
  finer: int,
) -> None:
  """`Sources`, (queries of the sinks [R, G, H],) start, stop [R] or one per batch row ->
  (logits [R, G, S],) and what `split_k.results` lists. `whole`: a program per row, and only the
  first four of those.
  """
  rows, groups, _ = sources.q.shape
  slots = sources.k.shape[1]
  turn = 0 if ring is None else slots - ring  # slots of the ring, by which `stop` may exceed S
  spans = functools.partial(_spans, slots=slots + turn, sinks=sinks, joined=q_sinks_ref is None)
  shared = rows // start_ref.shape[0]  # rows of one range: all heads of a batch row, or one
  logits, coded = logits_ref is not None, bool(sources.per_slot)

  def tiles_of(row: Array, real: Array) -> Array:
    at = row // shared
    start, stop = (backend.load(ref, at, mask=real, other=0) for ref in (start_ref, stop_ref))
    _, first, stop = spans(start, stop)
    return pl.cdiv(stop - first, config.tile)

  def attend(piece: split_k.Piece) -> None:
    row, active = piece.row, piece.active
    head, first, stop = spans(start_ref[row // shared], stop_ref[row // shared])
    # Logits are written in vectors: tiles begin where those may; what lies outside is −inf there.
    wide = logits and not sinks and not coded and ring is None
    base = first // ALIGNED * ALIGNED if wide else first
    held: Any = stored.of_row(sources, row, scale, evict="evict_first")
    lanes = held.lanes
    few = lanes.size if coded else pl.next_power_of_2(groups)

    def placed(index: Array, end: Any) -> Array:
      """Slots of indices below `end`."""
      again = (index >= slots) & (index < end)
      return index if ring is None else jnp.where(again, index - turn, index)

    def find(base: Any, low: Any, end: Any, i: Any) -> tuple[Array, Array]:
      index = base + i * config.tile + jnp.arange(config.tile)
      return placed(index, end), (index >= low) & (index < end) if wide else index < end

    def write(base: Any, end: Any, i: Any, x: Array) -> None:
      index = base + i * config.tile + jnp.arange(config.tile)
      slot, real = placed(index, end), index < end
      if few < lanes.size:  # only rows of queries change threads on their way to memory
        x = jnp.where((lanes < groups)[:, None], x, 0.0)
        x = x.reshape(lanes.size // few, few, config.tile).sum(axis=0)
      lane = jnp.arange(few)
      mask = (lane < groups)[:, None] & real[None, :]
      backend.store(logits_ref, row, lane[:, None], slot[None, :], value=x * tiling.LN2, mask=mask)

    def walk(carry: Any, q: Any, span: tuple[Any, Any, Any], low: Any, high: Any) -> Any:
      base, _, end = span
      see = functools.partial(write, base, slots if wide else end) if logits else None
      return held.walk(carry, q, functools.partial(find, *span), low, high, see=see)

    carry = held.start()
    if sinks:
      query = held.query(q_sinks_ref)
      tiles = jnp.where(active & (piece.part == 0), pl.cdiv(head, config.tile), 0)
      carry = walk(carry, query, (0, 0, head), 0, tiles)
    q = held.query()
    share = piece.share(pl.cdiv(stop - base, config.tile))
    carry = walk(carry, q, (base, first, stop), *share)
    if logits:
      nothing = jnp.full((lanes.size, config.tile), -jnp.inf)
      # What the span leaves out: between its two parts, and after it.
      hidden: list[Any] = [(head, jnp.minimum(first, stop)), (stop, jnp.int32(slots))]
      if ring is not None:  # around its end: what is before the ring, and what of it is free
        around = [(head, jnp.int32(ring)), (stop - turn, first)]
        hidden = jax.tree.map(lambda x, y: jnp.where(stop > slots, x, y), around, hidden)
      for low, high in hidden:
        tiles = jnp.where(
          active & (piece.part == 0), pl.cdiv(jnp.maximum(high - low, 0), config.tile), 0
        )
        lax.fori_loop(0, tiles, lambda i, _, low=low, high=high: write(low, high, i, nothing), None)

    held.store(piece, carry, outs)

  cut = {"rows": rows, "programs": config.programs}
  if whole:
    attend(split_k.whole())
  elif level:
    split_k.level(tiles_of, attend, **cut)
  else:
    attend(split_k.piece(tiles_of, **cut, finer=finer))


def decode_attention(*operands: Array, **how: Any) -> State:
  """The softmax state alone of `decode_with_output`, with its arguments."""
  return decode_with_output(*operands, **how)[0]


def decode_with_output(
  q: Float[Array, "B K G H"],
  k: Float[Array, "B R S H"] | Int[Array, "B K S Wk"],
  v: Float[Array, "B R S H"] | Int[Array, "B K S Wv"],
  start: Int[Array, "B #K"],
  stop: Int[Array, "B #K"],
  *,
  sinks: int = 0,
  q_sinks: Float[Array, "B K G H"] | None = None,
  ring: int | None = None,
  per_slot: Sequence[Float[Array, "B K S"]] | None = None,
  bits: int = 8,
  scale: float | None = None,
  soft_cap: float | None = None,
  logits: bool = False,
  config: Config | None = None,
  interpret: bool | None = None,
) -> tuple[State, Float[Array, "B K G H"], Float[Array, "B K G S"] | None]:
  """Attention over the slots [0, min(sinks, stop)) ∪ [max(start, sinks), stop) of every row.

  Slots outside are never read: they may hold NaN.

  Args:
    q: queries, rotated; bfloat16, float16 or float32, H ≤ 256, G ≤ 128.
    k: keys in the dtype of q; R = K, or a divisor of it: K/R neighbouring heads share a row of
      slots, each has a range of its own, and there are no sinks. With `per_slot`: their codes in
      words int8, Wk = H · bits / 8.
    v: values in the dtype of q, or their codes in words int16, Wv = H · bits / 16.
    start: first slot of the window, int32, for each KV head or [B, 1] for all alike.
    stop: one past the last slot, int32, shaped as start; 0 gives the empty state. Ranges are
      clipped to S.
    sinks: number of leading slots that are attended whatever `start` is.
    q_sinks: queries for slots below `sinks`, where those are rotated otherwise; q if None. Not
      over codes.
    ring: slot from which on slots are a ring: `stop` may be up to S − ring beyond S, where those
      from `ring` on come again, and start is in the ring then. Without sinks. None: no ring.
    per_slot: of codes, float32: scales of keys and of values, each at least 0; with 4 bits then
      zero points of keys and of values. Queries are rounded to 8 bits per head then, and H is a
      multiple of 16 / bits.
    bits: of a code.
    scale: factor of the logits; H^−½ if None.
    soft_cap: c of logits c·tanh(x/c); None: x itself.
    logits: whether these are returned too.
    config: how the work is cut; by device and shape if None.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    The softmax state, float32: o [B, K, G, H], m and l [B, K, G]; o in the dtype of q, rounding
    which costs no launch here; and the logits, float32, −inf outside the span, or None.

  Raises:
    TypeError: an operand's dtype is not one of the above, or operands differ in dtype.
    ValueError: shapes do not agree, sinks < 0, sinks of a ring, or a soft cap is not above 0.
    NotImplementedError: H or G is larger than the kernel takes.
  """
  check(q, k, v, start, stop, sinks, q_sinks, per_slot, bits)
  if ring is not None and (sinks or not 0 <= ring < k.shape[2]):
    raise ValueError(
      f"ring: found {ring} and sinks = {sinks}, expected a slot of {k.shape[2]} and no sinks"
    )
  coded = per_slot is not None
  batch, heads, groups, head_dim = q.shape
  rows, slots = batch * heads, k.shape[2]
  interpret = backend.interpreted(interpret)
  config = config or pick(q, k, logits=logits, coded=coded, interpret=interpret)
  whole = config.programs == 1  # rows of any length are one piece each
  size = {"slots": slots, "tile": config.tile, "programs": config.programs}
  level = config.level or k.shape[1] < heads
  finer = 1 if level else split_k.finer(batch=batch, rows=rows, **size)
  pieces = finer * config.programs
  attend = functools.partial(
    _attend_kernel,
    config=config,
    scale=stored.scale_of(q, scale, soft_cap, bits if coded else None, interpret),
    sinks=sinks,
    ring=ring,
    whole=whole,
    level=level,
    finer=finer,
  )
  raw = jax.ShapeDtypeStruct((rows, groups, slots), jnp.float32) if logits else None
  seen, results = backend.call(
    attend,
    stored.Sources.of(q, k, v, per_slot),
    q_sinks.reshape(rows, groups, head_dim) if sinks and q_sinks is not None else None,
    start.reshape(-1),
    stop.reshape(-1),
    grid=(rows if whole else split_k.most_pieces(rows, pieces),),
    out=[raw, tuple(split_k.results(rows, groups, head_dim, 0 if whole else pieces, q.dtype))],
    warps=config.warps,
    stages=config.stages,
    name=f"decode_int{bits}" if coded else "decode_attend",
    interpret=interpret,
  )
  split = slots > config.tile and not whole
  state, rounded = split_k.joined(results, q.shape[:2], split=split, interpret=interpret)
  return state, rounded, None if seen is None else seen.reshape(*q.shape[:3], slots)


def pick(
  q: Array, k: Array, *, logits: bool = False, coded: bool = False, interpret: bool
) -> Config:
  """The configuration of these operands on the default device.

  Writing logits makes a tile wait in the middle: a program alone on its multiprocessor, as the
  measurements without logits like it, would leave the memory idle meanwhile. Codes have tiles twice
  as long, of half the bytes, and three programs on each multiprocessor: while one converts, others
  wait for memory.
  """
  batch, heads, groups, head_dim = q.shape
  if coded and not interpret and q.dtype.itemsize == 2:  # float32 has weights and codes of its size
    here, columns = this_device(), split_k.columns_of(head_dim)
    warps = 4 if split_k.lanes_of(groups) * columns <= 4096 else 8  # for what a program accumulates
    cut = Config(max(16, min(128, (16 << 10) // columns)), 3 * here.cores, warps, stages=3)
    return fitted(cut, here, groups=groups, head_dim=head_dim, itemsize=1)
  cut = choose(
    "quantised_decode" if coded else "decode_logits" if logits else "decode",
    rows=batch * heads,
    groups=groups,
    slots=-(-k.shape[2] * k.shape[1] // heads),  # of a head
    head_dim=head_dim,
    itemsize=q.dtype.itemsize,
    interpret=interpret,
  )
  if k.shape[1] < heads and cut.programs == 1:  # of heads that share slots one may have nearly all
    cut = dataclasses.replace(cut, programs=2 * this_device().cores)
  # float32 tiles and their logits do not fit the registers of four warps.
  wide = logits and not coded and q.dtype.itemsize == 4
  return dataclasses.replace(cut, warps=8) if wide else cut
