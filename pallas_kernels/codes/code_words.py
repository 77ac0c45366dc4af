"""The softmax loop over tiles of keys and values in codes (`kvjax.primitives.codes`), as `tiling`.

Conversions are what it costs, so there are few. Queries are rounded to 8 bits too: q·k is a product
of integers, exact in int32. The scales a and zero points z are folded in around the softmax:

    x_s = a_q · (a_k,s · (code_q · code_k,s) + z_k,s · Σ code_q) / √H
    o = (Σ_s (p_s · a_v,s) · code_v,s + Σ_s p_s · z_v,s) / Σ_s p_s

p·v wants floats of 16 bits. The integers below 1024 are the low bits of float16 from 1024 on, so a
code is a float after one instruction for two of them and the subtraction of a constant. Values lie
in words of 16 bits because these are turned on their way out of shared memory; bytes are not, and
leave it one by one.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from kvjax.kernels.common import backend, split_k, tiling
from kvjax.primitives.codes import LARGEST, nearest

_OF_1024 = 0x6400  # float16, as bits
# Weights are float16: with scales of values from 1e-6 to 4000 they are neither lost nor infinite.
# Queries of float32 ask for more: their weights are float32, and so are codes.
_WEIGHT = 16.0


class Carry(NamedTuple):
  """As `tiling.Carry`, acc [R, C] in parts, and zero [R], Σ 2^(x − m) z."""

  acc: tuple[Array, ...]
  zero: Array
  m: Array
  l: Array


class Query(NamedTuple):
  """Codes int8 [R, Wk] in parts, and scales [R], which have the factor of base-2 logits in them
  unless these are capped.
  """

  codes: list[Array]
  scale: Array


class Tile(NamedTuple):
  """Words of keys [T, Wk] and values [T, Wv], scales and zero points float32 [T], keep bool [T], or
  [R, T] by query row.
  """

  k: Array
  v: Array
  per_slot: tuple[Array, ...]
  keep: Array


class How(NamedTuple):
  """Static settings: the scale of logits, bits of a code, the dtype of weights, whether by PTX."""

  scale: tiling.Scale
  bits: int
  weights: Any
  inline: bool


def start(lanes: int, columns: int, bits: int) -> Carry:
  """The carry before any key; `columns` of each part."""
  empty = tiling.start(lanes, columns)
  return Carry((empty.acc,) * (16 // bits), empty.l, empty.m, empty.l)


def words_of(width: int) -> Array:
  """Columns for `width` words of keys: a power of two, enough for a sum of integers."""
  return jnp.arange(max(backend.INTEGERS, split_k.columns_of(width)))


def query(q_ref: Any, row: Array, lanes: Array, words: Array, width: int, how: How) -> Query:
  """The queries of a row of q [R, G, H], rounded, whose keys have `width` words."""
  groups, queries = q_ref.shape[1], []
  for i in range(8 // how.bits):
    real = (lanes < groups)[:, None] & (words < width)[None, :]
    columns = i * width + words[None, :]
    queries.append(backend.load(q_ref, row, lanes[:, None], columns, mask=real))
  queries = [x.astype(jnp.float32) for x in queries]
  top = functools.reduce(jnp.maximum, [jnp.abs(x).max(axis=1) for x in queries])
  codes = [nearest(x, top[:, None], LARGEST).astype(jnp.int8) for x in queries]
  scale = top * (1 / LARGEST)
  return Query(codes, how.scale.base2(scale) if how.scale.soft_cap is None else scale)


def words(
  ref: Any, row: Array, slot: Array, column: Array, keep: Array, evict: str | None = None
) -> Array:
  """Words [T, W] of the slots that are kept."""
  mask = keep[:, None] & (column < ref.shape[2])[None, :]
  index = row, slot[:, None], column[None, :]
  return backend.load(ref, *index, mask=mask, other=0, evict=evict)


def walk(
  carry: Carry,
  query: Query,
  per_slot: Callable[[Any], tuple[Array, ...]],
  fetch: Callable[[Any, tuple[Array, ...]], Tile],
  first: Any,
  last: Any,
  how: How,
  *,
  see: Callable[[Any, Array], None] | None = None,
) -> Carry:
  """Adds tiles [first, last): tile i is `fetch(i, per_slot(i))`, whose scales are loaded one ahead.

  `see(i, logits)` is shown the base-2 logits [R, T] of every tile.
  """

  def body(i: Any, both: tuple[Carry, Any]) -> tuple[Carry, Any]:
    (carry, held), later = both, per_slot(i + 1)
    shown = None if see is None else functools.partial(see, i)
    return step(carry, query, fetch(i, held), how, see=shown), later

  return lax.fori_loop(first, last, body, (carry, per_slot(first)))[0]


def step(
  carry: Carry,
  query: Query,
  tile: Tile,
  how: How,
  *,
  see: Callable[[Array], None] | None = None,
) -> Carry:
  """Adds one tile. `see` is shown its base-2 logits [R, T]."""
  m, alpha, p, w = _weigh(carry.m, query, tile, how, see)
  codes = (x.astype(how.weights) for x in _values(tile.v, how.bits, how.inline))
  acc = tuple(
    old * alpha[:, None] + backend.dot(w, part) for old, part in zip(carry.acc, codes, strict=True)
  )
  zero = carry.zero
  if how.bits < 8:
    of_eight = _of_eight(tile)
    zero = zero * alpha + (p * of_eight[None, :]).sum(axis=1)
  return Carry(acc, zero, m, carry.l * alpha + p.sum(axis=1))


def step_whole(
  carry: tiling.Carry,
  query: Query,
  tile: Tile,
  how: How,
  *,
  width: int,
  see: Callable[[Array], None] | None = None,
) -> tiling.Carry:
  """As `step`, with all columns of acc in one array, for what looks at the output between tiles.

  Column c of the tile's v holds word c mod `width`, Wv: each is read once for each of its codes.
  """
  m, alpha, p, w = _weigh(carry.m, query, tile, how, see)
  parts = _values(tile.v, how.bits, how.inline)
  v = parts[0]
  column = jnp.arange(v.shape[1])
  for i, part in enumerate(parts[1:], 1):
    v = jnp.where((column >= i * width)[None, :], part, v)
  more = backend.dot(w, v.astype(how.weights)) * (1 / _WEIGHT)
  if how.bits < 8:
    more = more + (p * _of_eight(tile)[None, :]).sum(axis=1)[:, None]
  return tiling.Carry(carry.acc * alpha[:, None] + more, m, carry.l * alpha + p.sum(axis=1))


def _weigh(
  old: Array, query: Query, tile: Tile, how: How, see: Callable[[Array], None] | None
) -> tuple[Array, Array, Array, Array]:
  """m with a tile, what weighs the state before it, the tile's p, and p · a_v as weights."""
  scale, bits, weights, inline = how
  keys, k_scale, v_scale = _keys(tile.k, bits, inline), *tile.per_slot[:2]
  products = [backend.dot(a, b, trans_b=True) for a, b in zip(query.codes, keys, strict=True)]
  x = functools.reduce(jnp.add, products).astype(jnp.float32) * k_scale[None, :]
  if bits < 8:
    sums = [part.astype(jnp.int32).sum(axis=1) for part in query.codes]
    total = functools.reduce(jnp.add, sums).astype(jnp.float32)
    x = x + total[:, None] * tile.per_slot[2][None, :]
  x = x * query.scale[:, None]
  x = x if scale.soft_cap is None else scale.base2(x)
  x = jnp.where(tile.keep if tile.keep.ndim == 2 else tile.keep[None, :], x, -jnp.inf)
  if see is not None:
    see(x)
  m = jnp.maximum(old, x.max(axis=1))
  base = tiling.finite(m)
  alpha = jnp.exp2(old - base)
  p = jnp.exp2(x - base[:, None])
  return m, alpha, p, (p * (v_scale * _WEIGHT)[None, :]).astype(weights)


def _of_eight(tile: Tile) -> Array:
  """Number that code 8 stands for: codes of 4 bits have lost it."""
  return tile.per_slot[3] + 8 * tile.per_slot[1]


def store(
  piece: split_k.Piece, carry: Carry, refs: Sequence[Any], *, groups: int, head_dim: int
) -> None:
  """Writes a walked piece to the refs of `split_k.results`."""
  for i, acc in enumerate(carry.acc):
    acc = acc * (1 / _WEIGHT) + carry.zero[:, None]
    part = tiling.Carry(acc, carry.m, carry.l)
    sizes = {"groups": groups, "head_dim": head_dim, "part": i, "parts": len(carry.acc)}
    split_k.store(piece, part, refs, **sizes)


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
  return backend.inline(asm, words, jnp.float16, pack=2)


def _keys(words: Array, bits: int, inline: bool) -> list[Array]:
  """The codes in words of 8 bits, int8, a part of the channels each."""
  if bits == 8:
    return [words]
  if not inline:
    return [words & 15, (words >> 4) & 15]
  shifted = (
    f"{{ .reg .b32 t; shr.b32 t, $1, {4 * i}; and.b32 $0, t, 0x0f0f0f0f; }}" for i in (0, 1)
  )
  return [backend.inline(asm, words, jnp.int8, pack=4) for asm in shifted]
