"""One decode step's way into the cache: rotate q and k, write k, v and pos, advance the counters.

Keys and values are stored as they are, or as codes (`primitives.codes`): those of k, less its mean,
and of v, their scales and zero points. The extremes of the token's page may be brought up to date
by the same launch: those of a page's keys with one more are those of the two, codes included.

Bytes: the new token's projections once in, q and one slot per KV head once out; launches are the
cost here, and this is one where separate operations are seven, with codes a dozen.

Grid: one program per batch row, which handles all of its heads. Caches are updated in place
through input/output aliases; nothing else of them is touched.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.codes.levels import levels, packed
from kvjax.kernels.common import backend
from kvjax.primitives import outward
from kvjax.primitives.ring import place_of
from kvjax.primitives.rope import Rope, angles

WARPS, MANY = 4, 8192  # entries of a row's projections from which on there are twice as many


class _Cache(NamedTuple):
  """Cache k, v [B, K/P, S, H], pos and what is `beside` it [B, K/P, S], seen, used [B]; of codes
  words k [B, K, S, Wk] and v [B, K, S, Wv], and beside pos the scales (and zero points) of both.
  extremes: of pages [B, K, P, H], low and high, or nothing; of codes their exponents [B, K, P] too.
  """

  k: Any
  v: Any
  pos: Any
  beside: tuple[Any, ...]
  seen: Any
  used: Any
  extremes: tuple[Any, ...] = ()


def _kernel(
  qkv_ref: Any,
  live_ref: Any,
  table_ref: Any,
  mean_ref: Any | None,
  given_ref: Any | None,
  _: _Cache,
  out_q_ref: Any,
  cache: _Cache,
  *,
  magnitude: float,
  turned: int,
  evicts: bool,
  rings: bool,
  size: int | None,
  room: int | None,
  bits: int | None,
  unit: int,
  interpret: bool,
) -> None:
  """qkv [B, K, G + 2, H], live [B], table [4, H/2], (mean [B, K, H],) (victim [B, K] or ring
  [B, K, 2] or first [1],) and the cache as it is -> rotated q [B, K, G, H] and the cache.
  `room`: the victim is the slot, and rows count as far as that.
  """
  _, heads, groups, head_dim = out_q_ref.shape
  rows, slots = cache.pos.shape[1:]
  half, quarter = head_dim // 2, head_dim // 4
  b = pl.program_id(0)
  live, seen, used = live_ref[b].astype(jnp.int32), cache.seen[b], cache.used[b]

  column = jnp.arange(pl.next_power_of_2(half))
  inside = (column < half)[None, :]
  low, high = column[None, :], column[None, :] + half

  def loaded(ref: Any, *index: Any, columns: Sequence[Array], mask: Array) -> list[Array]:
    return [backend.load(ref, b, *index, c, mask=mask) for c in columns]

  # All of it is on its way while the angles are worked out.
  query, head = (jnp.arange(pl.next_power_of_2(n)) for n in (heads * groups, heads))
  owner, group = query[:, None] // groups, query[:, None] % groups
  asked, row, real = (
    (query < heads * groups)[:, None] & inside,
    head[:, None],
    (head < heads)[:, None],
  )
  q = loaded(qkv_ref, owner, group, columns=(low, high), mask=asked)
  k = loaded(qkv_ref, row, groups, columns=(low, high), mask=real & inside)
  mean = []
  if mean_ref is not None:
    mean = loaded(mean_ref, row, columns=(low, high), mask=real & inside)
  part, parted, apart = low, inside, (low, high)  # of values: the parts that share a word
  if bits == 4:
    part = jnp.arange(pl.next_power_of_2(quarter))[None, :]
    parted, apart = part < quarter, tuple(part + i * quarter for i in range(4))
  v = loaded(qkv_ref, row, groups + 1, columns=apart, mask=real & parted)
  slot = jnp.full(head.shape, used)
  if size is not None:
    assert given_ref is not None
    slot -= given_ref[0]  # below 0 or from S on: another device's
  if evicts:
    load = functools.partial(backend.load, given_ref, b, head, mask=head < heads, other=0)
    victim = place_of(load(0), load(1), seen, slots) if rings else load()
    slot = victim if room is not None else jnp.where(used < slots, slot, victim)
  whole = turned == half or magnitude == 1
  scale = magnitude if whole else jnp.where(column < turned, magnitude, 1.0)[None, :]
  cos, sin = turn(table_ref, seen, column[:, None], scale)

  def rotated(x: Array, y: Array) -> list[Array]:
    """In the model's dtype, as keys are before they are quantised."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return [z.astype(qkv_ref.dtype) for z in (x * cos - y * sin, y * cos + x * sin)]

  for c, x in zip((low, high), rotated(*q), strict=True):
    backend.store(out_q_ref, b, owner, group, c, value=x, mask=asked)

  writes = (head < heads) & (live > 0) & (slot >= 0) & (slot < slots)
  page, first = slot // unit, (slot % unit == 0)[:, None]
  kept = head if rows == heads else head // (heads // rows)  # the row of a head's slots

  def put(ref: Any, column: Array, value: Array, mask: Array) -> None:
    index, mask = (b, kept[:, None], slot[:, None], column), writes[:, None] & mask
    backend.store(ref, *index, value=value.astype(ref.dtype), mask=mask)

  def put_each(refs: Sequence[Any], values: Sequence[Array]) -> None:
    for ref, x in zip(refs, values, strict=True):
      backend.store(ref, b, kept, slot, value=x.astype(ref.dtype), mask=writes)

  k = rotated(*k)
  if bits is None:
    for c, x, y in zip((low, high), k, v, strict=True):
      put(cache.k, c, x, inside)
      put(cache.v, c, y, inside)
    if cache.extremes:
      stored = [x.astype(cache.k.dtype).astype(jnp.float32) for x in k]
      index = b, head[:, None], page[:, None]
      new = _Keys(stored, index, (low, high), first, writes[:, None], inside)
      (_renew_codes if len(cache.extremes) == 3 else _renew)(cache.extremes, new, interpret)
  else:
    k = [x.astype(jnp.float32) - y for x, y in zip(k, mean, strict=True)]
    codes_k, *scales_k = levels(k, inside, bits)
    codes_v, *scales_v = levels(v, parted, bits)
    for ref, codes, c, mask in (
      (cache.k, codes_k, low, inside),
      (cache.v, codes_v, part, parted),
    ):
      words = packed(codes, ref.dtype, bits)
      width = ref.shape[3] // len(words)
      for i, word in enumerate(words):
        put(ref, c + i * width, word, mask)
    put_each(cache.beside, [x for both in zip(scales_k, scales_v, strict=True) for x in both])
  put_each([cache.pos], [jnp.full(head.shape, seen)])
  if bits is None and cache.beside:
    x, y = (jnp.abs(half.astype(jnp.float32)) for half in v)
    put_each(cache.beside, [(x + y).sum(axis=1)])  # ‖v‖₁

  backend.barrier(interpret)  # every warp has read the counters
  cache.seen[b] = seen + live
  cache.used[b] = used + jnp.where(used < (room or size or slots), live, 0)


class _Keys(NamedTuple):
  """A key of each head in two halves, the pages that they enter, first or not, and where."""

  k: Sequence[Array]
  where: tuple[Any, ...]
  columns: Sequence[Array]
  first: Array
  writes: Array
  inside: Array

  def held(self, ref: Any) -> list[Array]:
    """Both halves of what the pages have, anything where the key is their first."""
    mask = self.writes & self.inside & ~self.first
    return [backend.load(ref, *self.where, c, mask=mask, other=0) for c in self.columns]

  def put(self, ref: Any, halves: Sequence[Array]) -> None:
    for c, x in zip(self.columns, halves, strict=True):
      mask = self.writes & self.inside
      backend.store(ref, *self.where, c, value=x.astype(ref.dtype), mask=mask)


def _renew(refs: tuple[Any, ...], new: _Keys, _: bool) -> None:
  """Low and high of pages with one more key each; a thread may find what another has written."""
  for ref, extreme in zip(refs, (jnp.minimum, jnp.maximum), strict=True):
    halves = []
    for old, x in zip(new.held(ref), new.k, strict=True):
      old = jnp.where(new.first, x, old.astype(jnp.float32))
      bad = (x != x) | (old != old)  # NaN stays NaN
      halves.append(jnp.where(bad, jnp.nan, extreme(old, x)))
    new.put(ref, halves)


def _renew_codes(refs: tuple[Any, ...], new: _Keys, interpret: bool) -> None:
  """As `_renew`, of codes, whose step may grow: ⌊⌊x / a⌋ / b⌋ = ⌊x / ab⌋ for powers of two."""
  *sides, exponent_ref = refs
  mask = new.writes & ~new.first
  before = backend.load(exponent_ref, *new.where, mask=mask, other=0).astype(jnp.int32)
  held = [[x.astype(jnp.int32) for x in new.held(ref)] for ref in sides]
  backend.barrier(interpret)  # several threads hold the same code, and shift it once
  sizes = [jnp.where(new.inside, jnp.abs(x), 0.0) for x in new.k]
  bad = [(1 - (x < jnp.inf).astype(jnp.int32)).max(axis=1)[:, None] for x in sizes]
  largest = [jnp.where(x < jnp.inf, x, 0.0).max(axis=1)[:, None] for x in sizes]
  exponent = outward.exponent_of(jnp.maximum(*largest), jnp.maximum(*bad) > 0)
  before = jnp.where(new.first, exponent, before)
  exponent = jnp.maximum(exponent, before)
  backend.store(exponent_ref, *new.where, value=exponent.astype(jnp.int8), mask=new.writes)
  shift = jnp.minimum(exponent - before, 31)
  rounding = (outward.floor, 1, jnp.minimum), (outward.ceil, -1, jnp.maximum)
  for ref, old, (rounded, sign, extreme) in zip(sides, held, rounding, strict=True):
    halves = []
    for x, code in zip(new.k, old, strict=True):
      own = rounded(x, exponent)
      both = jnp.where(new.first, own, extreme(sign * ((sign * code) >> shift), own))
      halves.append(jnp.where(exponent == outward.BAD, 0, both))
    new.put(ref, halves)


def turn(table_ref: Any, seen: Array, column: Array, scale: Any) -> tuple[Array, Array]:
  """cos and sin of every column's angle, times `scale`, [1, C].

  Columns stand alone in a maximum over nothing, which keeps them one to a thread: where they are
  used a thread has eight, and a cosine is a hundred instructions.
  """
  half = table_ref.shape[1]
  rows = (backend.load(table_ref, i, column, mask=column < half, other=0) for i in range(4))
  angle = angles(tuple(rows), seen)
  cos, sin = jnp.cos(angle).max(axis=1), jnp.sin(angle).max(axis=1)
  return cos[None, :] * scale, sin[None, :] * scale


def enter_token(
  qkv: Float[Array, "B K G2 H"],
  live: Bool[Array, " B"],
  victim: Int[Array, "B K"] | None,
  cache_k: Float[Array, "B R S H"] | Int[Array, "B K S Wk"],
  cache_v: Float[Array, "B R S H"] | Int[Array, "B K S Wv"],
  pos: Int[Array, "B R S"],
  seen: Int[Array, " B"],
  used: Int[Array, " B"],
  *beside: Float[Array, "B R S"],
  rope: Rope,
  ring: Int[Array, "B K 2"] | None = None,
  part: tuple[Int[Array, ""], int] | None = None,
  room: int | None = None,
  mean: Float[Array, "B K H"] | None = None,
  bits: int | None = None,
  pages: tuple[Array, ...] = (),
  unit: int = 1,
  interpret: bool | None = None,
) -> tuple[Array, ...]:
  """Rotates a new token per row at position `seen` and writes it into the cache.

  The slot is `used` while it is below S, else the head's victim, or the next of its ring (without
  either: none).

  Args:
    qkv: projections of the new token, not rotated: per KV head its G queries, key and value.
    live: rows that take part; of the others only q is rotated.
    victim: int32, the slot that a full cache gives up; None: full caches drop the token.
    cache_k, cache_v, pos, seen, used: the cache, updated in place where donated. R = K; with `room`
      a divisor of it will do, where K/R neighbouring heads share a row of slots. With `bits` keys
      and values are words of codes, int8 and int16 (`kvjax.primitives.codes`).
    beside: float32, updated too: ‖v‖₁ of every slot, or nothing; of codes the scales of keys and of
      values, and with 4 bits the zero points of both.
    rope: rotary embedding.
    ring: int32, of a cache whose slots are used in turn (`kvjax.primitives.ring`); without victims.
    part: int32, the first slot of these S among those of all devices, and how many all have, where
      slots are split; without victims and rings. Only one device writes, all of them count.
    room: the tokens up to which `used` counts, where each victim is the slot that the token goes
      to, be it empty or not; None: as above.
    mean: float32, what keys are stored less, of codes.
    bits: of a code, 8 or 4; None: keys and values are stored as they are.
    pages: extremes of the keys of every page of `unit` slots, updated too where slots are appended
      to: low and high [B, K, P, H], or codes int8 and their exponents int8 [B, K, P]
      (`kvjax.ops.extremes`). Without `bits` and `room`.
    unit: slots per page.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    q rotated, in its own dtype, and the cache arrays: k, v, pos, those beside, seen, used, pages.
  """
  batch, kv_heads, parts, head_dim = qkv.shape
  table = jnp.asarray(rope.table(head_dim))
  first, size = (None, None) if part is None else (part[0].reshape(1).astype(jnp.int32), part[1])
  given = [x for x in (victim, ring, first) if x is not None]
  if len(given) > 1:
    raise ValueError("enter_token: found several of victim, ring and part, expected one at most")
  if bits is not None and (bits, len(beside)) not in ((8, 2), (4, 4)):
    raise ValueError(
      f"bits: found {bits} and {len(beside)} scales and zero points, expected 8 and 2, or 4 and 4"
    )
  rows = cache_k.shape[1]
  if rows != kv_heads and (room is None or kv_heads % rows):
    raise ValueError(
      f"cache_k: found {rows} rows of slots for {kv_heads} heads and room = {room}, expected as "
      "many rows, or a divisor and room"
    )
  if room is not None and victim is None:
    raise ValueError("victim: found None, expected with room the slot that each token goes to")
  kernel = functools.partial(
    _kernel,
    magnitude=rope.magnitude,
    turned=rope.turned(head_dim) // 2,
    evicts=victim is not None or ring is not None,
    rings=ring is not None,
    size=size,
    room=room,
    bits=bits,
    unit=unit,
    interpret=backend.interpreted(interpret),
  )
  cache = _Cache(cache_k, cache_v, pos, beside, seen, used, pages)
  inputs = [qkv, live, table, mean, *given, *[None] * (not given)]
  held = len(jax.tree.leaves(cache))
  ahead = len(jax.tree.leaves(inputs))
  q, entered = backend.call(
    kernel,
    *(*inputs, cache),
    grid=(batch,),
    out=[
      jax.ShapeDtypeStruct((batch, kv_heads, parts - 2, head_dim), qkv.dtype),
      jax.eval_shape(lambda: cache),
    ],
    warps=WARPS if kv_heads * parts * head_dim < MANY else 2 * WARPS,
    stages=1,
    name="enter_token" if bits is None else "enter_codes",
    interpret=interpret,
    aliases=dict(zip(range(ahead, ahead + held), range(1, 1 + held), strict=True)),
  )
  return q, *jax.tree.leaves(entered)
