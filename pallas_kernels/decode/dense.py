"""Dense decode: one query token per row against the slots [0, sinks) ∪ [start, stop) of its cache.

Bytes: keys and values of every visible slot once; the rest (queries, partial states) is under 1 %.
At decode that is the whole cost, so the kernel is a stream over contiguous slots with two small
matrix products on the side, and the work is cut so that all multiprocessors read all the time.

Grid of the first kernel: one program per piece, a contiguous run of tiles of one (batch row, KV
head). Every program derives the cut from all ranges: about `Config.programs` pieces of equal size
whatever the ranges are, so one long row among short ones is read by many programs. Rows of one
piece are finished there; the others leave partial softmax states, which the second kernel, one
program per query head, joins in a fixed order (`split_k`). Asked for one piece, every row is one
program's, which then has nothing to derive. Heads that share a row of slots are cut by tiles: all
programs have as many, also of two heads.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.kernels.common import backend, split_k, tiling
from kvjax.kernels.common.config import Config, choose
from kvjax.primitives.softmax_state import State

MAX_HEAD_DIM = 256
MAX_GROUPS = 128
ALIGNED = 16  # slots
DTYPES = ("bfloat16", "float16", "float32")


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
  *refs: Any,
  groups: int,
  config: Config,
  scale: tiling.Scale,
  sinks: int,
  joined: bool,
  logits: bool,
  whole: bool,
  finer: int,
) -> None:
  """q [R, G, H], (q_sinks [R, G, H],) k, v [R/P, S, H], start, stop [R] ->
  (logits [R, G, S],) and what `split_k.results` lists. `whole`: a program per row, and only the
  first four of those.
  """
  written = 4 if whole else 8
  refs_out = refs[-written:]
  refs, logits_ref = (
    (refs[: -written - 1], refs[-written - 1]) if logits else (refs[:-written], None)
  )
  q_ref, *q_sinks_ref, k_ref, v_ref, start_ref, stop_ref = refs
  rows, (kept, slots, head_dim) = q_ref.shape[0], k_ref.shape
  sharers = rows // kept  # P, rows of queries whose slots are in one row of keys
  spans = functools.partial(_spans, slots=slots, sinks=sinks, joined=joined)
  shared = rows // start_ref.shape[0]  # rows of one range: all heads of a batch row, or one

  def tiles_of(row: Array, real: Array) -> Array:
    at = row // shared
    start, stop = (backend.load(ref, at, mask=real, other=0) for ref in (start_ref, stop_ref))
    _, first, stop = spans(start, stop)
    return pl.cdiv(stop - first, config.tile)

  def attend(piece: split_k.Piece) -> None:
    row, active = piece.row, piece.active
    head, first, stop = spans(start_ref[row // shared], stop_ref[row // shared])
    # Logits are written in vectors: tiles begin where those may; what lies outside is −inf there.
    wide = logits and not sinks
    base = first // ALIGNED * ALIGNED if wide else first

    lanes, columns = jnp.arange(split_k.lanes_of(groups)), jnp.arange(split_k.columns_of(head_dim))
    inside = columns < head_dim
    of_query = row, lanes[:, None], columns[None, :]
    real = (lanes < groups)[:, None] & inside[None, :]

    def fetch(base: Any, low: Any, end: Any, i: Any) -> tiling.Tile:
      slot = base + i * config.tile + jnp.arange(config.tile)
      keep = (slot >= low) & (slot < end) if wide else slot < end
      index = row if sharers == 1 else row // sharers, slot[:, None], columns[None, :]
      mask = keep[:, None] & inside[None, :]
      k = backend.load(k_ref, *index, mask=mask, evict="evict_first")
      v = backend.load(v_ref, *index, mask=mask, evict="evict_first")
      return tiling.Tile(k, v, keep)

    few = pl.next_power_of_2(groups)

    def write(base: Any, end: Any, i: Any, x: Array) -> None:
      slot = base + i * config.tile + jnp.arange(config.tile)
      if few < lanes.size:  # only rows of queries change threads on their way to memory
        x = jnp.where((lanes < groups)[:, None], x, 0.0)
        x = x.reshape(lanes.size // few, few, config.tile).sum(axis=0)
      lane = jnp.arange(few)
      mask = (lane < groups)[:, None] & (slot < end)[None, :]
      backend.store(logits_ref, row, lane[:, None], slot[None, :], value=x * tiling.LN2, mask=mask)

    def walk(carry: Any, q: Array, span: tuple[Any, Any, Any], low: Any, high: Any) -> Any:
      base, _, end = span
      see = functools.partial(write, base, slots if wide else end) if logits else None
      return tiling.walk(carry, q, functools.partial(fetch, *span), low, high, scale=scale, see=see)

    carry = tiling.start(lanes.size, columns.size)
    if sinks:
      query = backend.load(q_ref if joined else q_sinks_ref[0], *of_query, mask=real)
      tiles = jnp.where(active & (piece.part == 0), pl.cdiv(head, config.tile), 0)
      carry = walk(carry, query, (0, 0, head), 0, tiles)
    q = backend.load(q_ref, *of_query, mask=real)
    share = piece.share(pl.cdiv(stop - base, config.tile))
    carry = walk(carry, q, (base, first, stop), *share)
    if logits:
      nothing = jnp.full((lanes.size, config.tile), -jnp.inf)
      # What the span leaves out: between its two parts, and after it.
      for low, high in ((head, jnp.minimum(first, stop)), (stop, slots)):
        tiles = jnp.where(
          active & (piece.part == 0), pl.cdiv(jnp.maximum(high - low, 0), config.tile), 0
        )
        lax.fori_loop(0, tiles, lambda i, _, low=low, high=high: write(low, high, i, nothing), None)

    split_k.store(piece, carry, refs_out, groups=groups, head_dim=head_dim)

  cut = {"rows": rows, "programs": config.programs}
  if whole:
    attend(split_k.whole())
  elif sharers == 1:
    attend(split_k.piece(tiles_of, **cut, finer=finer))
  else:
    split_k.level(tiles_of, attend, **cut)


def decode_attention(
  q: Float[Array, "B K G H"],
  k: Float[Array, "B R S H"],
  v: Float[Array, "B R S H"],
  start: Int[Array, "B #K"],
  stop: Int[Array, "B #K"],
  *,
  sinks: int = 0,
  q_sinks: Float[Array, "B K G H"] | None = None,
  scale: float | None = None,
  soft_cap: float | None = None,
  config: Config | None = None,
  interpret: bool | None = None,
) -> State:
  """Attention over the slots [0, min(sinks, stop)) ∪ [max(start, sinks), stop) of every row.

  Slots outside are never read: they may hold NaN.

  Args:
    q: queries, rotated; bfloat16, float16 or float32, H ≤ 256, G ≤ 128.
    k: keys in the dtype of q; R = K, or a divisor of it: K/R neighbouring heads share a row of
      slots, each has a range of its own, and there are no sinks.
    v: values in the dtype of q.
    start: first slot of the window, int32, for each KV head or [B, 1] for all alike.
    stop: one past the last slot, int32, shaped as start; 0 gives the empty state. Ranges are
      clipped to S.
    sinks: number of leading slots that are attended whatever `start` is.
    q_sinks: queries for slots below `sinks`, where those are rotated otherwise; q if None.
    scale: factor of the logits; H^−½ if None.
    soft_cap: c of logits c·tanh(x/c); None: x itself.
    config: how the work is cut; by device and shape if None.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    The softmax state, float32: o [B, K, G, H], m and l [B, K, G].

  Raises:
    TypeError: an operand's dtype is not one of the above, or operands differ in dtype.
    ValueError: shapes do not agree, or sinks < 0.
    NotImplementedError: H or G is larger than the kernel takes.
  """
  return decode_with_output(
    q,
    k,
    v,
    start,
    stop,
    sinks=sinks,
    q_sinks=q_sinks,
    scale=scale,
    soft_cap=soft_cap,
    config=config,
    interpret=interpret,
  )[0]


def decode_with_output(
  q: Float[Array, "B K G H"],
  k: Float[Array, "B R S H"],
  v: Float[Array, "B R S H"],
  start: Int[Array, "B #K"],
  stop: Int[Array, "B #K"],
  *,
  sinks: int = 0,
  q_sinks: Float[Array, "B K G H"] | None = None,
  scale: float | None = None,
  soft_cap: float | None = None,
  logits: bool = False,
  config: Config | None = None,
  interpret: bool | None = None,
) -> tuple[State, Float[Array, "B K G H"], Float[Array, "B K G S"] | None]:
  """`decode_attention`, and o once more in the dtype of q: rounding it costs no launch here.

  With `logits` also the scaled logits in float32, −inf outside the span; else None.
  """
  check(q, k, v, start, stop, sinks, q_sinks)
  batch, heads, groups, head_dim = q.shape
  rows, slots = batch * heads, k.shape[2]
  config = config or pick(q, k, logits=logits, interpret=backend.interpreted(interpret))
  joined = q_sinks is None or not sinks
  whole = config.programs == 1  # rows of any length are one piece each
  finer = _finer(q, k, config)
  pieces = finer * config.programs
  queries = [q] if q_sinks is None or joined else [q, q_sinks]
  flat = [x.reshape(-1, *x.shape[2:]) for x in (*queries, k, v)]
  flat += [x.reshape(-1) for x in (start, stop)]
  attend = functools.partial(
    _attend_kernel,
    groups=groups,
    config=config,
    scale=tiling.Scale.of(head_dim, scale, soft_cap),
    sinks=sinks,
    joined=joined,
    logits=logits,
    whole=whole,
    finer=finer,
  )
  raw = [jax.ShapeDtypeStruct((rows, groups, slots), jnp.float32)] if logits else []
  results = backend.call(
    attend,
    *flat,
    grid=(rows if whole else split_k.most_pieces(rows, pieces),),
    out=[*raw, *split_k.results(rows, groups, head_dim, 0 if whole else pieces, q.dtype)],
    warps=config.warps,
    stages=config.stages,
    name="decode_attend",
    interpret=interpret,
  )
  seen, results = results[: len(raw)], results[len(raw) :]
  cut = slots > config.tile and not whole
  o, m, l, rounded = split_k.join(results, split=cut, interpret=interpret)
  o, m, l, rounded = (x.reshape(batch, heads, *x.shape[1:]) for x in (o, m, l, rounded))
  return State(o, m, l), rounded, seen[0].reshape(*q.shape[:3], slots) if logits else None


def _finer(q: Array, k: Array, config: Config) -> int:
  """Factor of the pieces of ragged rows; heads that share slots are cut by tiles."""
  if k.shape[1] < q.shape[1]:
    return 1
  size = {"slots": k.shape[2], "tile": config.tile, "programs": config.programs}
  return split_k.finer(batch=q.shape[0], rows=q.shape[0] * q.shape[1], **size)


def pick(q: Array, k: Array, *, logits: bool = False, interpret: bool) -> Config:
  """The configuration of these operands on the default device.

  Writing logits makes a tile wait in the middle: a program alone on its multiprocessor, as the
  measurements without logits like it, would leave the memory idle meanwhile.
  """
  batch, heads, groups, head_dim = q.shape
  cut = choose(
    "decode_logits" if logits else "decode",
    rows=batch * heads,
    groups=groups,
    slots=-(-k.shape[2] * k.shape[1] // heads),  # of a head
    head_dim=head_dim,
    itemsize=q.dtype.itemsize,
    interpret=interpret,
  )
  # float32 tiles and their logits do not fit the registers of four warps.
  return dataclasses.replace(cut, warps=8) if logits and q.dtype.itemsize == 4 else cut


def check(q: Any, k: Any, v: Any, start: Any, stop: Any, sinks: int, q_sinks: Any) -> None:
  """Raises on operands that the kernel does not take; the message names the argument."""
  if q.ndim != 4 or 0 in q.shape:
    raise ValueError(f"q: found shape {q.shape}, expected [B, K, G, H] without empty axes")
  batch, heads, groups, head_dim = q.shape
  shared = k.ndim == 4 and 0 < k.shape[1] < heads and heads % k.shape[1] == 0
  kept = k.shape[1] if shared else heads
  if k.ndim != 4 or k.shape[2] == 0 or (*k.shape[:2], k.shape[3]) != (batch, kept, head_dim):
    raise ValueError(f"k: found shape {k.shape}, expected [{batch}, {heads}, S ≥ 1, {head_dim}]")
  if start.shape not in ((batch, heads), (batch, 1)):
    raise ValueError(
      f"start: found shape {start.shape}, expected [{batch}, {heads}] or [{batch}, 1]"
    )
  if shared and (sinks or start.shape != (batch, heads)):
    raise ValueError(
      f"k: found {kept} rows of slots for {heads} heads, sinks = {sinks} and start {start.shape}, "
      f"expected a range of each head, [{batch}, {heads}], without sinks"
    )
  expected = {"v": (v, k.shape), "stop": (stop, start.shape)}
  if q_sinks is not None:
    expected["q_sinks"] = (q_sinks, q.shape)
  for name, (x, shape) in expected.items():
    if x.shape != shape:
      raise ValueError(f"{name}: found shape {x.shape}, expected {list(shape)}")
  if q.dtype.name not in DTYPES:
    raise TypeError(f"q: found dtype {q.dtype.name}, expected one of {', '.join(DTYPES)}")
  dtypes = {
    "k": (k, q.dtype),
    "v": (v, q.dtype),
    "start": (start, "int32"),
    "stop": (stop, "int32"),
  }
  if q_sinks is not None:
    dtypes["q_sinks"] = (q_sinks, q.dtype)
  for name, (x, dtype) in dtypes.items():
    if x.dtype != dtype:
      raise TypeError(f"{name}: found dtype {x.dtype.name}, expected {jnp.dtype(dtype).name}")
  if sinks < 0:
    raise ValueError(f"sinks: found {sinks}, expected at least 0")
  if head_dim > MAX_HEAD_DIM:
    raise NotImplementedError(f"q: found head size {head_dim}, expected at most {MAX_HEAD_DIM}")
  if groups > MAX_GROUPS:
    raise NotImplementedError(
      f"q: found {groups} query heads per key/value head, expected at most {MAX_GROUPS}"
    )
