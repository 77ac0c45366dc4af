"""`enter_token` where keys and values are stored as codes (`primitives.codes`): rotate q and k,
write the codes of k, less its mean, and of v, their scales and zero points, pos, and the counters.

Bytes: the new token's projections once in, q and one slot of codes per KV head once out; launches
are the cost here, and this is one where separate operations are a dozen.

Grid: one program per batch row, which handles all of its heads. Caches are updated in place
through input/output aliases; nothing else of them is touched. The codes of a word are of channels
far apart: parts of a head are loaded side by side, so that a thread has all of a word.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.common import backend
from kvjax.kernels.insertion.enter_token import launch, turn
from kvjax.primitives.codes import LARGEST, nearest
from kvjax.primitives.ring import place_of
from kvjax.primitives.rope import Rope


def _kernel(
  *refs: Any,
  magnitude: float,
  turned: int,
  bits: int,
  evicts: bool,
  rings: bool,
  interpret: bool,
) -> None:
  """qkv [B, K, G + 2, H], live [B], table [4, H/2], mean [B, K, H], (victim [B, K] or ring
  [B, K, 2],) and the cache as it is -> rotated q [B, K, G, H], words of k [B, K, S, Wk] and
  v [B, K, S, Wv], pos, scales of k and v (, zero points of k and v) [B, K, S], seen, used [B].
  """
  qkv_ref, live_ref, table_ref, mean_ref, given_ref = refs[:5]  # what is given, if anything is
  results = refs[-8:] if bits == 8 else refs[-10:]
  out_q_ref, words_k_ref, words_v_ref, pos_ref, *scale_refs, seen_ref, used_ref = results
  _, heads, groups, head_dim = out_q_ref.shape
  slots, half, quarter = pos_ref.shape[2], head_dim // 2, head_dim // 4
  b = pl.program_id(0)
  live, seen, used = live_ref[b].astype(jnp.int32), seen_ref[b], used_ref[b]
  column = jnp.arange(pl.next_power_of_2(half))
  inside = (column < half)[None, :]
  head = jnp.arange(pl.next_power_of_2(heads))
  row, real = head[:, None], (head < heads)[:, None]

  # All of it is on its way while the angles are worked out.
  query = jnp.arange(pl.next_power_of_2(heads * groups))
  owner, group = query[:, None] // groups, query[:, None] % groups
  asked = (query < heads * groups)[:, None] & inside
  low, high = column[None, :], column[None, :] + half

  def loaded(ref: Any, *index: Any, columns: Sequence[Array], mask: Array) -> list[Array]:
    return [backend.load(ref, b, *index, c, mask=mask) for c in columns]

  q = loaded(qkv_ref, owner, group, columns=(low, high), mask=asked)
  k = loaded(qkv_ref, row, groups, columns=(low, high), mask=real & inside)
  mean = loaded(mean_ref, row, columns=(low, high), mask=real & inside)
  part, parted, apart = low, inside, (low, high)  # of values: the parts that share a word
  if bits == 4:
    part = jnp.arange(pl.next_power_of_2(quarter))[None, :]
    parted, apart = part < quarter, tuple(part + i * quarter for i in range(4))
  v = loaded(qkv_ref, row, groups + 1, columns=apart, mask=real & parted)
  slot = jnp.full(head.shape, used)
  if evicts:
    load = functools.partial(backend.load, given_ref, b, head, mask=head < heads, other=0)
    victim = place_of(load(0), load(1), seen, slots) if rings else load()
    slot = jnp.where(used < slots, slot, victim)
  scale: Any = magnitude
  if turned < half and magnitude != 1:
    scale = jnp.where(column < turned, magnitude, 1.0)[None, :]
  cos, sin = turn(table_ref, seen, column[:, None], scale)

  def rotated(x: Array, y: Array) -> tuple[Array, Array]:
    """In the model's dtype, as keys are before they are quantised."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    both = x * cos - y * sin, y * cos + x * sin
    return both[0].astype(qkv_ref.dtype), both[1].astype(qkv_ref.dtype)

  for c, x in zip((low, high), rotated(*q), strict=True):
    backend.store(out_q_ref, b, owner, group, c, value=x, mask=asked)

  writes = (head < heads) & (live > 0) & (slot >= 0) & (slot < slots)
  k = [x.astype(jnp.float32) - y for x, y in zip(rotated(*k), mean, strict=True)]
  codes_k, *scales_k = _levels(k, inside, bits)
  codes_v, *scales_v = _levels(v, parted, bits)
  for ref, codes, c, mask in (
    (words_k_ref, codes_k, low, inside),
    (words_v_ref, codes_v, part, parted),
  ):
    words = _packed(codes, ref.dtype, bits)
    width = ref.shape[3] // len(words)
    for i, word in enumerate(words):
      index = b, row, slot[:, None], c + i * width
      backend.store(ref, *index, value=word, mask=writes[:, None] & mask)
  scales = [x for both in zip(scales_k, scales_v, strict=True) for x in both]
  for ref, x in zip(scale_refs, scales, strict=True):
    backend.store(ref, b, head, slot, value=x.astype(ref.dtype), mask=writes)
  backend.store(pos_ref, b, head, slot, value=jnp.full(head.shape, seen), mask=writes)

  if not interpret:
    backend.barrier()  # every warp has read the counters
  seen_ref[b] = seen + live
  used_ref[b] = used + jnp.where(used < slots, live, 0)


def _levels(parts: list[Array], real: Array, bits: int) -> tuple[Any, ...]:
  """`quantised.levels` of heads in parts [K, C]: codes int32 in parts, a [K] and z [K] if any."""
  parts = [x.astype(jnp.float32) for x in parts]
  most = LARGEST if bits == 8 else 2**bits - 1

  def over(combine: Any, each: list[Array], beside: float) -> Array:
    return jnp.where(real, functools.reduce(combine, each), beside)

  # On a GPU a maximum passes over NaN.
  strange = over(jnp.maximum, [jnp.where(x != x, 1, 0) for x in parts], 0).max(axis=1) > 0
  if bits == 8:
    top = over(jnp.maximum, [jnp.abs(x) for x in parts], 0.0).max(axis=1)
  else:
    least = over(jnp.minimum, parts, jnp.inf).min(axis=1)
    top = over(jnp.maximum, parts, -jnp.inf).max(axis=1) - least
    parts = [x - least[:, None] for x in parts]
  finite = ~strange & (jnp.abs(top) < jnp.inf)
  scale = jnp.where(finite, top * (1 / most), jnp.nan)
  some = (~strange & (top > 0))[:, None]
  codes = [jnp.where(some, nearest(x, top[:, None], most), 0.0) for x in parts]
  if bits == 8:
    return [x.astype(jnp.int32) for x in codes], scale
  codes = [jnp.clip(x, 0, most).astype(jnp.int32) for x in codes]
  return codes, scale, jnp.where(strange, jnp.nan, least)


def _packed(codes: list[Array], word: Any, bits: int) -> list[Array]:
  """Words in parts [K, C] of codes in parts, of which a word has every `runs`-th."""
  some = 8 * jnp.dtype(word).itemsize // bits  # codes of a word
  runs = len(codes) // some
  words = []
  for i in range(runs):
    shifted = [(x & (2**bits - 1)) << (bits * n) for n, x in enumerate(codes[i::runs])]
    words.append(functools.reduce(jnp.bitwise_or, shifted).astype(word))
  return words


def enter_codes(
  qkv: Float[Array, "B K G2 H"],
  live: Bool[Array, " B"],
  victim: Int[Array, "B K"] | None,
  words_k: Int[Array, "B K S Wk"],
  words_v: Int[Array, "B K S Wv"],
  pos: Int[Array, "B K S"],
  seen: Int[Array, " B"],
  used: Int[Array, " B"],
  *scales: Float[Array, "B K S"],
  mean: Float[Array, "B K H"],
  rope: Rope,
  bits: int,
  ring: Int[Array, "B K 2"] | None = None,
  interpret: bool | None = None,
) -> tuple[Array, ...]:
  """Rotates a new token per row at position `seen` and writes its codes into the cache.

  The slot is `used` while it is below S, else the head's victim, or the next of its ring (without
  either: none).

  Args:
    qkv: projections of the new token, not rotated: per KV head its G queries, key and value.
    live: rows that take part; of the others only q is rotated.
    victim: int32, the slot that a full cache gives up; None: full caches drop the token.
    words_k, words_v, pos, seen, used: the cache, updated in place where donated; words are int8
      for keys and int16 for values.
    scales: of keys and of values, and with 4 bits the zero points of both, updated too.
    mean: float32, what keys are stored less.
    rope: rotary embedding.
    bits: of a code, 8 or 4.
    ring: int32, of a cache whose slots are used in turn (`kvjax.primitives.ring`); without victims.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    q rotated, in its own dtype, and the cache arrays: words of k and v, pos, scales, seen, used.
  """
  if (bits, len(scales)) not in ((8, 2), (4, 4)):
    raise ValueError(
      f"bits: found {bits} and {len(scales)} scales and zero points, expected 8 and 2, or 4 and 4"
    )
  given = [x for x in (victim, ring) if x is not None]
  if len(given) > 1:
    raise ValueError("enter_codes: found victim and ring, expected one at most")
  head_dim = qkv.shape[3]
  table = jnp.asarray(rope.table(head_dim))
  kernel = functools.partial(
    _kernel,
    magnitude=rope.magnitude,
    turned=rope.turned(head_dim) // 2,
    bits=bits,
    evicts=bool(given),
    rings=ring is not None,
    interpret=backend.interpreted(interpret),
  )
  cache = [words_k, words_v, pos, *scales, seen, used]
  return launch(kernel, [qkv, live, table, mean, *given], cache, "enter_codes", interpret)
