"""One decode step's way into the cache: rotate q and k, write k, v and pos, advance the counters.

Bytes: the new token's projections once in, q and one slot per KV head once out; launches are the
cost here, and this is one where separate operations are seven.

Grid: one program per batch row, which handles all of its heads. Caches are updated in place
through input/output aliases; nothing else of them is touched.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.common import backend
from kvjax.primitives.ring import place_of
from kvjax.primitives.rope import Rope, angles

WARPS, MANY = 4, 8192  # entries of a row's projections from which on there are twice as many


def _kernel(
  *refs: Any,
  magnitude: float,
  turned: int,
  evicts: bool,
  rings: bool,
  size: int | None,
  room: int | None,
  weighs: bool,
  interpret: bool,
) -> None:
  """qkv [B, K, G + 2, H], live [B], table [4, H/2], (victim [B, K] or ring [B, K, 2] or first
  [1],) and the cache as it is -> rotated q [B, K, G, H], cache k, v [B, K/P, S, H], pos (, norm)
  [B, K/P, S], seen, used [B]. `room`: the victim is the slot, and rows count as far as that.
  """
  qkv_ref, live_ref, table_ref, given_ref = refs[:4]  # what is given beside them, if anything is
  results = refs[-7:] if weighs else refs[-6:]
  out_q_ref, cache_k_ref, cache_v_ref, pos_ref, *norm_ref, seen_ref, used_ref = results
  _, rows, slots, head_dim = cache_k_ref.shape
  _, heads, groups, _ = out_q_ref.shape
  half = head_dim // 2
  b = pl.program_id(0)
  live, seen, used = live_ref[b].astype(jnp.int32), seen_ref[b], used_ref[b]

  column = jnp.arange(pl.next_power_of_2(half))
  inside = (column < half)[None, :]
  low, high = column[None, :], column[None, :] + half

  def halves(head: Array, row: Any, mask: Array) -> list[Array]:
    return [backend.load(qkv_ref, b, head, row, c, mask=mask) for c in (low, high)]

  # All of it is on its way while the angles are worked out.
  query, head = (jnp.arange(pl.next_power_of_2(n)) for n in (heads * groups, heads))
  owner, group = query[:, None] // groups, query[:, None] % groups
  asked, row = (query < heads * groups)[:, None] & inside, head[:, None]
  read = (head < heads)[:, None] & inside
  q = halves(owner, group, asked)
  k, v = (halves(row, groups + i, read) for i in range(2))
  slot = jnp.full(head.shape, used)
  if size is not None:
    slot -= given_ref[0]  # below 0 or from S on: another device's
  if evicts:
    load = functools.partial(backend.load, given_ref, b, head, mask=head < heads, other=0)
    victim = place_of(load(0), load(1), seen, slots) if rings else load()
    slot = victim if room is not None else jnp.where(used < slots, slot, victim)
  whole = turned == half or magnitude == 1
  scale = magnitude if whole else jnp.where(column < turned, magnitude, 1.0)[None, :]
  cos, sin = turn(table_ref, seen, column[:, None], scale)

  def rotated(x: Array, y: Array) -> tuple[Array, Array]:
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return x * cos - y * sin, y * cos + x * sin

  for c, x in zip((low, high), rotated(*q), strict=True):
    backend.store(out_q_ref, b, owner, group, c, value=x.astype(out_q_ref.dtype), mask=asked)

  writes = (head < heads) & (live > 0) & (slot >= 0) & (slot < slots)
  mask = writes[:, None] & inside
  kept, kept_row = head, row  # the row of a head's slots
  if rows != heads:
    kept = head // (heads // rows)
    kept_row = kept[:, None]
  for c, x, y in zip((low, high), rotated(*k), v, strict=True):
    x = x.astype(qkv_ref.dtype).astype(cache_k_ref.dtype)
    index = b, kept_row, slot[:, None], c
    backend.store(cache_k_ref, *index, value=x, mask=mask)
    backend.store(cache_v_ref, *index, value=y.astype(cache_v_ref.dtype), mask=mask)
  backend.store(pos_ref, b, kept, slot, value=jnp.full(head.shape, seen), mask=writes)
  if weighs:
    x, y = (jnp.abs(part.astype(jnp.float32)) for part in v)
    norm = (x + y).sum(axis=1)  # ‖v‖₁
    backend.store(norm_ref[0], b, kept, slot, value=norm, mask=writes)

  if not interpret:
    backend.barrier()  # every warp has read the counters
  seen_ref[b] = seen + live
  used_ref[b] = used + jnp.where(used < (room or size or slots), live, 0)


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
  cache_k: Float[Array, "B R S H"],
  cache_v: Float[Array, "B R S H"],
  pos: Int[Array, "B R S"],
  seen: Int[Array, " B"],
  used: Int[Array, " B"],
  norm: Float[Array, "B R S"] | None = None,
  *,
  rope: Rope,
  ring: Int[Array, "B K 2"] | None = None,
  part: tuple[Int[Array, ""], int] | None = None,
  room: int | None = None,
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
      a divisor of it will do, where K/R neighbouring heads share a row of slots.
    norm: float32 ‖v‖₁ of every slot, updated too.
    rope: rotary embedding.
    ring: int32, of a cache whose slots are used in turn (`kvjax.primitives.ring`); without victims.
    part: int32, the first slot of these S among those of all devices, and how many all have, where
      slots are split; without victims and rings. Only one device writes, all of them count.
    room: the tokens up to which `used` counts, where each victim is the slot that the token goes
      to, be it empty or not; None: as above.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    q rotated, in its own dtype, and the cache arrays: k, v, pos (, norm), seen, used.
  """
  _, kv_heads, _, head_dim = qkv.shape
  table = jnp.asarray(rope.table(head_dim))
  first, size = (None, None) if part is None else (part[0].reshape(1).astype(jnp.int32), part[1])
  given = [x for x in (victim, ring, first) if x is not None]
  if len(given) > 1:
    raise ValueError("enter_token: found several of victim, ring and part, expected one at most")
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
    weighs=norm is not None,
    interpret=backend.interpreted(interpret),
  )
  cache = [cache_k, cache_v, pos, *([] if norm is None else [norm]), seen, used]
  return launch(kernel, [qkv, live, table, *given], cache, "enter_token", interpret)


def launch(
  kernel: Callable[..., None],
  inputs: Sequence[Array],
  cache: Sequence[Array],
  name: str,
  interpret: bool | None,
) -> tuple[Array, ...]:
  """Rotated q and the cache, in place, by a program for each row; qkv is the first input."""
  qkv = inputs[0]
  batch, heads, parts, head_dim = qkv.shape
  out = backend.call(
    kernel,
    *(*inputs, *cache),
    grid=(batch,),
    out=[
      jax.ShapeDtypeStruct((batch, heads, parts - 2, head_dim), qkv.dtype),
      *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cache),
    ],
    warps=WARPS if heads * parts * head_dim < MANY else 2 * WARPS,
    stages=1,
    name=name,
    interpret=interpret,
    aliases={len(inputs) + i: 1 + i for i in range(len(cache))},
  )
  return tuple(out)
