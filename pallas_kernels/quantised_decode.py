"""Dense decode over keys and values in 8 or 4 bits (`kvjax.ops.quantised`), as `decode` is.

Bytes: the codes of every visible slot, and its float32 scales and zero points, once: 0.52 of what
bfloat16 moves with 8 bits and H = 128, 0.28 with 4. At that rate conversions are what it costs, so
there are few. Queries are rounded to 8 bits too: q·k is a product of integers, exact in int32. The
scales a and zero points z are folded in around the softmax:

    x_s = a_q · (a_k,s · (code_q · code_k,s) + z_k,s · Σ code_q) / √H
    o = (Σ_s (p_s · a_v,s) · code_v,s + Σ_s p_s · z_v,s) / Σ_s p_s

p·v wants floats of 16 bits. The integers below 1024 are the low bits of float16 from 1024 on, so a
code is a float after one instruction for two of them and the subtraction of a constant. Values lie
in words of 16 bits because these are turned on their way out of shared memory; bytes are not, and
leave it one by one.

The grid and the second kernel are those of `decode`: programs for pieces of rows, then the join.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from ..ops.quantised import LARGEST, nearest
from ..softmax_state import State
from . import _backend, _split, _tiles
from .config import Config, choose, fitted, this_device
from .decode import _spans, check

BITS = (8, 4)
_OF_1024 = 0x6400  # float16, as bits
# Weights are float16: with scales of values from 1e-6 to 4000 they are neither lost nor infinite.
# Queries of float32 ask for more: their weights are float32, and so are codes.
_WEIGHT = 16.0


class _Carry(NamedTuple):
  """As `_tiles.Carry`, acc [R, C] in parts, and zero [R], Σ 2^(x − m) z."""

  acc: tuple[Array, ...]
  zero: Array
  m: Array
  l: Array


class _Tile(NamedTuple):
  """Words of keys [T, Wk] and values [T, Wv], scales and zero points float32 [T], keep bool [T]."""

  k: Array
  v: Array
  per_slot: tuple[Array, ...]
  keep: Array


def _values(words: Array, bits: int, inline: bool) -> list[Array]:
  """The codes in words of 16 bits, float16, a part of the channels each; of 4 bits less 8.

  Numbers around 0: sums of what is all positive would lose the digits that they differ in.
  """
  if bits == 8:
    words = words ^ jnp.int16(-0x7F80)  # codes + 128
  offset = jnp.float16(1024 + 2 ** (bits - 1))
  return [_floats(words, bits, i, inline) - offset for i in range(16 // bits)]


def _floats(words: Array, bits: int, i: int, inline: bool) -> Array:
  """1024 + the i-th number of `bits` bits of each word, float16."""
  if not inline:
    words = lax.bitcast_convert_type(words, jnp.uint16)
    part = ((words >> (bits * i)) & (2**bits - 1)) | _OF_1024
    return lax.bitcast_convert_type(part.astype(jnp.uint16), jnp.float16)
  if bits == 8:  # bytes i and i + 2 of two words, and a constant one above each
    asm = f"prmt.b32 $0, $1, 0x64646464, {0x4240 + 0x101 * i:#x};"
  else:  # (words >> 4 i) & 15 | 1024 of two words, and as one instruction
    asm = (
      f"{{ .reg .b32 t; shr.b32 t, $1, {4 * i}; lop3.b32 $0, t, 0x000f000f, 0x64006400, 0xea; }}"
    )
  return _backend.inline(asm, words, jnp.float16, pack=2)


def _keys(words: Array, bits: int, inline: bool) -> list[Array]:
  """The codes in words of 8 bits, int8, a part of the channels each."""
  if bits == 8:
    return [words]
  if not inline:
    return [words & 15, (words >> 4) & 15]
  shifted = (
    f"{{ .reg .b32 t; shr.b32 t, $1, {4 * i}; and.b32 $0, t, 0x0f0f0f0f; }}" for i in (0, 1)
  )
  return [_backend.inline(asm, words, jnp.int8, pack=4) for asm in shifted]


def _step(
  carry: _Carry,
  q: Sequence[Array],
  q_scale: Array,
  tile: _Tile,
  *,
  scale: _tiles.Scale,
  bits: int,
  weights: Any,
  inline: bool,
  see: Callable[[Array], None] | None,
) -> _Carry:
  """Adds one tile: q int8 [R, Wk] in parts; q_scale [R] has the factor of base-2 logits in it,
  unless these are capped. `see` is shown the base-2 logits [R, T].
  """
  keys, k_scale, v_scale = _keys(tile.k, bits, inline), *tile.per_slot[:2]
  products = [_backend.dot(a, b, trans_b=True) for a, b in zip(q, keys, strict=True)]
  x = functools.reduce(jnp.add, products).astype(jnp.float32) * k_scale[None, :]
  if bits < 8:
    sums = [part.astype(jnp.int32).sum(axis=1) for part in q]
    total = functools.reduce(jnp.add, sums).astype(jnp.float32)
    x = x + total[:, None] * tile.per_slot[2][None, :]
  x = x * q_scale[:, None]
  x = x if scale.soft_cap is None else scale.base2(x)
  x = jnp.where(tile.keep[None, :], x, -jnp.inf)
  if see is not None:
    see(x)
  m = jnp.maximum(carry.m, x.max(axis=1))
  base = _tiles.finite(m)
  alpha = jnp.exp2(carry.m - base)
  p = jnp.exp2(x - base[:, None])
  w = (p * (v_scale * _WEIGHT)[None, :]).astype(weights)
  codes = (x.astype(weights) for x in _values(tile.v, bits, inline))
  acc = tuple(
    old * alpha[:, None] + _backend.dot(w, part) for old, part in zip(carry.acc, codes, strict=True)
  )
  zero = carry.zero
  if bits < 8:
    of_eight = tile.per_slot[3] + 8 * v_scale
    zero = zero * alpha + (p * of_eight[None, :]).sum(axis=1)
  return _Carry(acc, zero, m, carry.l * alpha + p.sum(axis=1))


def _attend_kernel(
  *refs: Any,
  groups: int,
  config: Config,
  scale: _tiles.Scale,
  sinks: int,
  bits: int,
  inline: bool,
  logits: bool,
  whole: bool,
) -> None:
  """q [R, G, H], k int8 [R, S, Wk], v int16 [R, S, Wv], scales of k and v [R, S], (zero points of
  both,) start, stop [R] -> (logits [R, G, S],) and what `_split.results` lists. `whole`: a program
  per row, and only the first four of those.
  """
  written = 4 if whole else 8
  logits_ref = refs[-written - 1] if logits else None
  q_ref, k_ref, v_ref, *slot_refs, start_ref, stop_ref = refs[: -written - logits]
  weights = jnp.float32 if q_ref.dtype == jnp.float32 else jnp.float16
  rows, slots, _ = k_ref.shape
  head_dim = q_ref.shape[2]
  spans = functools.partial(_spans, slots=slots, sinks=sinks, joined=True)
  shared = rows // start_ref.shape[0]  # rows of one range: all heads of a batch row, or one

  def tiles_of(row: Array, real: Array) -> Array:
    at = row // shared
    start, stop = (_backend.load(ref, at, mask=real, other=0) for ref in (start_ref, stop_ref))
    _, first, stop = spans(start, stop)
    return pl.cdiv(stop - first, config.tile)

  piece = _split.whole() if whole else _split.piece(tiles_of, rows=rows, programs=config.programs)
  row = piece.row
  head, first, stop = spans(start_ref[row // shared], stop_ref[row // shared])
  lanes = jnp.arange(_split.lanes_of(groups))
  k_words, v_words = (jnp.arange(_split.columns_of(ref.shape[2])) for ref in (k_ref, v_ref))

  queries = []
  for i in range(8 // bits):
    real = (lanes < groups)[:, None] & (k_words < k_ref.shape[2])[None, :]
    columns = i * k_ref.shape[2] + k_words[None, :]
    queries.append(_backend.load(q_ref, row, lanes[:, None], columns, mask=real))
  queries = [x.astype(jnp.float32) for x in queries]
  top = functools.reduce(jnp.maximum, [jnp.abs(x).max(axis=1) for x in queries])
  q = [nearest(x, top[:, None], LARGEST).astype(jnp.int8) for x in queries]
  q_scale = top * (1 / LARGEST)
  q_scale = scale.base2(q_scale) if scale.soft_cap is None else q_scale

  def write(base: Any, end: Any, i: Any, x: Array) -> None:
    slot = base + i * config.tile + jnp.arange(config.tile)
    mask = (lanes < groups)[:, None] & (slot < end)[None, :]
    _backend.store(logits_ref, row, lanes[:, None], slot[None, :], value=x * _tiles.LN2, mask=mask)

  def walk(carry: _Carry, base: Any, end: Any, low: Any, high: Any) -> _Carry:
    def per_slot(i: Any) -> tuple[Array, ...]:
      slot = base + i * config.tile + jnp.arange(config.tile)
      keep = slot < end
      return tuple(_backend.load(x, row, slot, mask=keep, evict="evict_first") for x in slot_refs)

    def fetch(i: Any, held: tuple[Array, ...]) -> _Tile:
      slot = base + i * config.tile + jnp.arange(config.tile)
      keep = slot < end

      def words(ref: Any, column: Array) -> Array:
        mask = keep[:, None] & (column < ref.shape[2])[None, :]
        index = row, slot[:, None], column[None, :]
        return _backend.load(ref, *index, mask=mask, other=0, evict="evict_first")

      return _Tile(words(k_ref, k_words), words(v_ref, v_words), held, keep)

    def body(i: Any, both: tuple[_Carry, Any]) -> tuple[_Carry, Any]:
      (carry, held), later = both, per_slot(i + 1)
      see = functools.partial(write, base, end, i) if logits else None
      return step(carry, q, q_scale, fetch(i, held), see=see), later

    return lax.fori_loop(low, high, body, (carry, per_slot(low)))[0]

  step = functools.partial(_step, scale=scale, bits=bits, weights=weights, inline=inline)
  empty = _tiles.start(lanes.size, v_words.size)
  carry = _Carry((empty.acc,) * (16 // bits), empty.l, empty.m, empty.l)
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

  for i, acc in enumerate(carry.acc):
    acc = acc * (1 / _WEIGHT) + carry.zero[:, None]
    part = _tiles.Carry(acc, carry.m, carry.l)
    sizes = {"groups": groups, "head_dim": head_dim, "part": i, "parts": len(carry.acc)}
    _split.store(piece, part, refs[-written:], **sizes)


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
  interpret = _backend.interpreted(interpret)
  batch, heads, groups, head_dim = q.shape
  rows, slots = batch * heads, k.shape[2]
  config = config or pick(q, k, interpret)
  whole = config.programs == 1  # rows of any length are one piece each
  attend = functools.partial(
    _attend_kernel,
    groups=groups,
    config=config,
    scale=_tiles.Scale.of(head_dim, scale, soft_cap),
    sinks=sinks,
    bits=bits,
    inline=not interpret,
    logits=logits,
    whole=whole,
  )
  flat = [x.reshape(rows, *x.shape[2:]) for x in (q, k, v, *per_slot)]
  raw = [jax.ShapeDtypeStruct((rows, groups, slots), jnp.float32)] if logits else []
  results = _backend.call(
    attend,
    *flat,
    *(x.reshape(-1) for x in (start, stop)),
    grid=(rows if whole else _split.most_pieces(rows, config.programs),),
    out=[*raw, *_split.results(rows, groups, head_dim, 0 if whole else config.programs, q.dtype)],
    warps=config.warps,
    stages=config.stages,
    name=f"decode_int{bits}",
    interpret=interpret,
  )
  seen, results = results[: len(raw)], results[len(raw) :]
  results = _split.join(results, split=slots > config.tile and not whole, interpret=interpret)
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
  here, columns = this_device(), _split.columns_of(head_dim)
  warps = 4 if _split.lanes_of(groups) * columns <= 4096 else 8  # for what a program accumulates
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
