"""Dense decode over keys and values in 8 or 4 bits (`kvjax.primitives.codes`), as `decode` is.

Bytes: the codes of every visible slot, and its float32 scales and zero points, once: 0.52 of what
bfloat16 moves with 8 bits and H = 128, 0.28 with 4. At that rate conversions are what it costs
(`code_words`).

The grid and the second kernel are those of `decode`: programs for pieces of rows, then the join.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.kernels.codes import code_words
from kvjax.kernels.common import backend, split_k, tiling
from kvjax.kernels.common.config import Config, choose, fitted
from kvjax.kernels.common.devices import this_device
from kvjax.kernels.decode.dense import _spans, check
from kvjax.primitives.softmax_state import State

BITS = (8, 4)


def _attend_kernel(
  *refs: Any,
  groups: int,
  config: Config,
  scale: tiling.Scale,
  sinks: int,
  bits: int,
  inline: bool,
  logits: bool,
  whole: bool,
  finer: int,
) -> None:
  """q [R, G, H], k int8 [R, S, Wk], v int16 [R, S, Wv], scales of k and v [R, S], (zero points of
  both,) start, stop [R] -> (logits [R, G, S],) and what `split_k.results` lists. `whole`: a program
  per row, and only the first four of those.
  """
  written = 4 if whole else 8
  logits_ref = refs[-written - 1] if logits else None
  q_ref, k_ref, v_ref, *slot_refs, start_ref, stop_ref = refs[: -written - logits]
  how = code_words.how(q_ref.dtype, scale, bits, inline)
  rows, slots, _ = k_ref.shape
  head_dim = q_ref.shape[2]
  spans = functools.partial(_spans, slots=slots, sinks=sinks, joined=True)
  shared = rows // start_ref.shape[0]  # rows of one range: all heads of a batch row, or one

  def tiles_of(row: Array, real: Array) -> Array:
    at = row // shared
    start, stop = (backend.load(ref, at, mask=real, other=0) for ref in (start_ref, stop_ref))
    _, first, stop = spans(start, stop)
    return pl.cdiv(stop - first, config.tile)

  cut = {"rows": rows, "programs": config.programs, "finer": finer}
  piece = split_k.whole() if whole else split_k.piece(tiles_of, **cut)
  row = piece.row
  head, first, stop = spans(start_ref[row // shared], stop_ref[row // shared])
  lanes = jnp.arange(split_k.lanes_of(groups))
  k_words = code_words.words_of(k_ref.shape[2])
  v_words = jnp.arange(split_k.columns_of(v_ref.shape[2]))

  q = code_words.query(q_ref, row, lanes, k_words, k_ref.shape[2], how)

  def write(base: Any, end: Any, i: Any, x: Array) -> None:
    slot = base + i * config.tile + jnp.arange(config.tile)
    mask = (lanes < groups)[:, None] & (slot < end)[None, :]
    backend.store(logits_ref, row, lanes[:, None], slot[None, :], value=x * tiling.LN2, mask=mask)

  def walk(carry: code_words.Carry, base: Any, end: Any, low: Any, high: Any) -> code_words.Carry:
    def per_slot(i: Any) -> tuple[Array, ...]:
      slot = base + i * config.tile + jnp.arange(config.tile)
      keep = slot < end
      return tuple(backend.load(x, row, slot, mask=keep, evict="evict_first") for x in slot_refs)

    def fetch(i: Any, held: tuple[Array, ...]) -> code_words.Tile:
      slot = base + i * config.tile + jnp.arange(config.tile)
      keep = slot < end
      read = ((k_ref, k_words), (v_ref, v_words))
      k, v = (code_words.words(x, row, slot, column, keep, "evict_first") for x, column in read)
      return code_words.Tile(k, v, held, keep)

    see = functools.partial(write, base, end) if logits else None
    return code_words.walk(carry, q, per_slot, fetch, low, high, how, see=see)

  carry = code_words.start(lanes.size, v_words.size, bits)
  begins = piece.active & (piece.part == 0)
  if sinks:
    carry = walk(carry, 0, head, 0, jnp.where(begins, pl.cdiv(head, config.tile), 0))
  carry = walk(carry, first, stop, *piece.share(pl.cdiv(stop - first, config.tile)))
  # What the span leaves out: between its two parts, and after it.
  nothing = jnp.full((lanes.size, config.tile), -jnp.inf)
  for low, high in ((head, jnp.minimum(first, stop)), (stop, slots)) if logits else ():
    fill = functools.partial(write, low, high)
    tiles = jnp.where(begins, pl.cdiv(jnp.maximum(high - low, 0), config.tile), 0)
    lax.fori_loop(0, tiles, lambda i, _, fill=fill: fill(i, nothing), None)

  code_words.store(piece, carry, refs[-written:], groups=groups, head_dim=head_dim)


def decode_attention(
  q: Float[Array, "B K G H"],
  k: Int[Array, "B K S Wk"],
  v: Int[Array, "B K S Wv"],
  per_slot: Sequence[Float[Array, "B K S"]],
  start: Int[Array, "B #K"],
  stop: Int[Array, "B #K"],
  *,
  bits: int = 8,
  sinks: int = 0,
  scale: float | None = None,
  soft_cap: float | None = None,
  logits: bool = False,
  config: Config | None = None,
  interpret: bool | None = None,
) -> tuple[State, Float[Array, "B K G H"], Float[Array, "B K G S"] | None]:
  """Attention over the slots [0, min(sinks, stop)) ∪ [max(start, sinks), stop) of every row.

  Slots outside are never read: they may hold anything. Queries are rounded to 8 bits per head.

  Args:
    q: queries, rotated; bfloat16, float16 or float32, H ≤ 256 and a multiple of 16 / bits, G ≤ 128.
    k: codes of keys in words int8, Wk = H · bits / 8.
    v: codes of values in words int16, Wv = H · bits / 16.
    per_slot: float32, scales of keys and of values, each at least 0; with 4 bits then zero points
      of keys and of values.
    start: first slot of the window, int32, for each KV head or [B, 1] for all alike.
    stop: one past the last slot, int32, shaped as start; 0 gives the empty state. Ranges are
      clipped to S.
    bits: of a code.
    sinks: number of leading slots that are attended whatever `start` is.
    scale: factor of the logits; H^−½ if None.
    soft_cap: c of logits c·tanh(x/c); None: x itself.
    logits: whether these are returned too.
    config: how the work is cut; by device and shape if None.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    The softmax state, float32: o [B, K, G, H], m and l [B, K, G]; o in the dtype of q; and the
    logits, float32, −inf outside the span, or None.

  Raises:
    TypeError: an operand's dtype is not one of the above.
    ValueError: shapes do not agree, sinks < 0, or a soft cap is not above 0.
    NotImplementedError: H or G is larger than the kernel takes.
  """
  check_quantised(q, k, v, per_slot, start, stop, bits, sinks)
  interpret = backend.interpreted(interpret)
  batch, heads, groups, head_dim = q.shape
  rows, slots = batch * heads, k.shape[2]
  config = config or pick(q, k, interpret)
  whole = config.programs == 1  # rows of any length are one piece each
  size = {"rows": rows, "slots": slots, "tile": config.tile, "programs": config.programs}
  finer = split_k.finer(batch=batch, **size)
  pieces = finer * config.programs
  attend = functools.partial(
    _attend_kernel,
    groups=groups,
    config=config,
    scale=tiling.Scale.of(head_dim, scale, soft_cap),
    sinks=sinks,
    bits=bits,
    inline=not interpret,
    logits=logits,
    whole=whole,
    finer=finer,
  )
  flat = [x.reshape(rows, *x.shape[2:]) for x in (q, k, v, *per_slot)]
  raw = [jax.ShapeDtypeStruct((rows, groups, slots), jnp.float32)] if logits else []
  results = backend.call(
    attend,
    *flat,
    *(x.reshape(-1) for x in (start, stop)),
    grid=(rows if whole else split_k.most_pieces(rows, pieces),),
    out=[*raw, *split_k.results(rows, groups, head_dim, 0 if whole else pieces, q.dtype)],
    warps=config.warps,
    stages=config.stages,
    name=f"decode_int{bits}",
    interpret=interpret,
  )
  seen, results = results[: len(raw)], results[len(raw) :]
  results = split_k.join(results, split=slots > config.tile and not whole, interpret=interpret)
  o, m, l, in_dtype = (x.reshape(batch, heads, *x.shape[1:]) for x in results)
  return State(o, m, l), in_dtype, seen[0].reshape(*q.shape[:3], slots) if logits else None


def pick(q: Array, k: Array, interpret: bool) -> Config:
  """The configuration of these operands on the default device.

  Tiles twice as long as `decode`'s, of half the bytes, and three programs on each multiprocessor:
  while one converts, others wait for memory.
  """
  batch, heads, groups, head_dim = q.shape
  if interpret or q.dtype == jnp.float32:  # which has weights and codes of its size
    return choose(
      "quantised_decode",
      rows=batch * heads,
      groups=groups,
      slots=k.shape[2],
      head_dim=head_dim,
      itemsize=q.dtype.itemsize,
      interpret=interpret,
    )
  here, columns = this_device(), split_k.columns_of(head_dim)
  warps = 4 if split_k.lanes_of(groups) * columns <= 4096 else 8  # for what a program accumulates
  cut = Config(max(16, min(128, (16 << 10) // columns)), 3 * here.cores, warps, stages=3)
  return fitted(cut, here, groups=groups, head_dim=head_dim, itemsize=1)


def check_quantised(
  q: Any, k: Any, v: Any, per_slot: Sequence[Any], start: Any, stop: Any, bits: int, sinks: int
) -> None:
  """Raises on operands that the kernel does not take; the message names the argument."""
  if bits not in BITS:
    raise ValueError(f"bits: found {bits}, expected one of {', '.join(map(str, BITS))}")
  if q.ndim != 4 or q.shape[3] % (16 // bits):
    raise ValueError(
      f"q: found shape {q.shape}, expected [B, K, G, H], H a multiple of {16 // bits}"
    )
  if k.ndim != 4:
    raise ValueError(f"k: found shape {k.shape}, expected [B, K, S, {q.shape[3] * bits // 8}]")
  slots = k.shape[:3]
  floats = jax.ShapeDtypeStruct((*slots, q.shape[3]), q.dtype)
  check(q, floats, floats, start, stop, sinks, None)
  expected = {"k": (k, "int8", 8), "v": (v, "int16", 16)}
  for name, (x, dtype, size) in expected.items():
    shape = *slots, q.shape[3] * bits // size
    if x.shape != shape:
      raise ValueError(f"{name}: found shape {x.shape}, expected {list(shape)}")
    if x.dtype != dtype:
      raise TypeError(f"{name}: found dtype {x.dtype.name}, expected {dtype}")
  count = 2 if bits == 8 else 4
  if len(per_slot) != count:
    raise ValueError(f"per_slot: found {len(per_slot)} arrays, expected {count}")
  for x in per_slot:
    if x.shape != slots:
      raise ValueError(f"per_slot: found shape {x.shape}, expected {list(slots)}")
    if x.dtype != jnp.float32:
      raise TypeError(f"per_slot: found dtype {x.dtype.name}, expected float32")
