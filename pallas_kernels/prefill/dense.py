"""Prompt attention: many queries per row, each over its past or a window of it.

A library does plain causal attention; this kernel does what a library cannot: windows that differ
from query to query (sinks and [first, t]), queries at any positions (later chunks against a cache,
or a part of a prompt), slots in any order. On Hopper, where slots are positions, `hopper` does all
but the last. Its work is what the queries see, to within a tile: a
program walks the tiles between the bounds of its block of queries and masks those on the edges.

Grid: one program per query head and block of queries, the last blocks, which see most, first.
Heads are neighbours, so that those of one KV head find its tiles in the L2 cache. Compute bound:
4 · H operations per query, head and visible slot. On an H200, 32 heads of 128 over 32K tokens ran
at 344 TFLOP/s, as torch's flash attention does (360); cuDNN's in jax reached 594.

`column_mass` is a second pass for who ranks slots by the probability that queries gave them: one
program per tile of slots and KV head, over the queries that can see it; each slot's sum is written
once and no map of queries × slots is ever held.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.kernels.common import backend, tiling
from kvjax.kernels.common.devices import this_device
from kvjax.kernels.common.operands import check_cache, check_queries, expect
from kvjax.kernels.common.split_k import columns_of
from kvjax.primitives.softmax_state import State

CHUNK = 1024  # queries that smaller blocks spread over more multiprocessors
_FAR = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Blocking:
  """Cut of the work.

  Attributes:
    rows: queries of a program, a power of two, at least 16.
    tile: slots per step of its loop, a power of two, at least 16.
    warps, stages: warps per program; tiles in flight, and the one in use.
  """

  rows: int = 128
  tile: int = 64
  warps: int = 8
  stages: int = 4

  def __post_init__(self):
    for name in ("rows", "tile"):
      size = getattr(self, name)
      if size < 16 or size & (size - 1):
        raise ValueError(f"Blocking.{name}: found {size}, expected a power of two, at least 16")


def blocking(
  queries: int,
  head_dim: int,
  itemsize: int,
  *,
  mass: bool = False,
  interpret: bool = False,
) -> Blocking:
  """Blocks that fit the registers and the shared memory of a device, of `column_mass` if `mass`.

  Measured on an H200 with heads of 128: at 32K tokens 128 × 64 in a pipeline of four was first, at
  8K 3 % behind the first; the second pass, of 32 queries and 128K slots, took 186 µs at 32 × 128.
  A chunk of 512 queries over 5K slots took 131 µs at 64 × 64 and 159 at 128 × 64, its second pass
  82 at 64 × 64 and 108 at 64 × 128 (`scripts/results/nvidia-h200/stream_chunk.txt`).
  """
  if interpret:
    return Blocking(rows=32, tile=32, warps=4, stages=1)
  wide = columns_of(head_dim) > 128
  here = this_device().shared
  # Below an A100 the compiler counts on fewer registers.
  modest = here < 163 << 10
  if itemsize == 4:
    return Blocking(rows=16 if wide or mass or modest else 32, tile=16, warps=8, stages=2)
  if mass:
    if queries <= 32 or wide:
      return Blocking(rows=32, tile=64 if wide else 128, warps=4, stages=2)
    if queries <= CHUNK:
      return Blocking(rows=64, tile=64, warps=4, stages=3)
    return Blocking(rows=64, tile=128, warps=8, stages=2)
  # A100 and smaller: the tiles of an H200 would leave the registers.
  small = here < 227 << 10
  if wide:
    return Blocking(rows=32 if small else 64, tile=32, warps=4 if small else 8, stages=2)
  if small:
    return Blocking(rows=64, tile=32, warps=8 if modest else 4, stages=3)
  return Blocking(rows=64, tile=64, warps=4, stages=4) if queries <= CHUNK else Blocking()


def _step(
  carry: tiling.Carry, q: Array, k: Array, v: Array, keep: Array | None, scale: tiling.Scale
) -> tiling.Carry:
  """Adds one tile of keys; keep [R, T], None: every query sees all of it."""
  factor = scale.factor * tiling.LOG2E
  x = backend.dot(q, k, trans_b=True)
  if scale.soft_cap is not None:
    x, factor = scale.base2(x), 1.0
  if keep is not None:
    x = jnp.where(keep, x, -jnp.inf)
  m = jnp.maximum(carry.m, x.max(axis=1) * factor)
  base = m if keep is None else tiling.finite(m)
  alpha = jnp.exp2(carry.m - base)
  p = jnp.exp2(x * factor - base[:, None])
  acc = carry.acc * alpha[:, None] + backend.dot(p.astype(v.dtype), v)
  return tiling.Carry(acc, m, carry.l * alpha + p.sum(axis=1))


def _attend_kernel(
  *refs: Any, groups: int, cut: Blocking, scale: tiling.Scale, sinks: int, past: int, has: Any
) -> None:
  """q [R, A, H] (and one for sinks), k, v [R/G, S, H], qpos [B, A], first [B or R/G, A],
  pos [R/G, S], reach [A] -> o [R, A, H], m, l [R, A], with R = B·K·G; operands that `has` does not
  list are left out. `past`: see `prefill_attention`.
  """
  operands = dict(zip(has, refs[:-3], strict=True))
  q_ref, k_ref, v_ref, qpos_ref = (operands[name] for name in ("q", "k", "v", "qpos"))
  first_ref, pos_ref, reach_ref = (operands.get(name) for name in ("first", "pos", "reach"))
  o_ref, m_ref, l_ref = refs[-3:]
  queries, head_dim = q_ref.shape[1:]
  slots, tile = k_ref.shape[1], cut.tile
  row, block = pl.program_id(0), pl.num_programs(1) - 1 - pl.program_id(1)
  kv, batch = row // groups, row // (q_ref.shape[0] // qpos_ref.shape[0])

  t = block * cut.rows + jnp.arange(cut.rows)
  columns = jnp.arange(columns_of(head_dim))
  inside = columns < head_dim
  qpos = backend.load(qpos_ref, batch, t, mask=t < queries, other=-1)
  real = qpos >= 0
  begin = jnp.full(t.shape, sinks)  # first slot of each query's window
  if first_ref is not None:
    whose = batch if first_ref.shape == qpos_ref.shape else kv
    begin = jnp.maximum(begin, backend.load(first_ref, whose, t, mask=real, other=0))
  of_query = t[:, None], columns[None, :]

  def query(ref: Any) -> Array:
    return backend.load(ref, row, *of_query, mask=real[:, None] & inside[None, :])

  def walk(
    carry: tiling.Carry, q: Array, low: Any, high: Any, sees: Callable[[Array], Array] | None
  ) -> tiling.Carry:
    """Adds tiles [low, high); `sees` says which positions [T] a query sees, None: all are."""

    def body(i: Any, carry: tiling.Carry) -> tiling.Carry:
      slot = i * tile + jnp.arange(tile)
      exists = slot < slots
      keep, mask = (
        None,
        None if columns.size == head_dim else inside[None, :] & (slot >= 0)[:, None],
      )
      if sees is not None:
        at = slot
        if pos_ref is not None:
          at = backend.load(pos_ref, kv, slot, mask=exists, other=-1)
          exists &= at >= 0
        else:
          exists &= slot <= qpos.max()
        keep = exists[None, :] & sees(at)
        mask = exists[:, None] & inside[None, :]
      k = backend.load(k_ref, kv, slot[:, None], columns[None, :], mask=mask)
      v = backend.load(v_ref, kv, slot[:, None], columns[None, :], mask=mask)
      return _step(carry, q, k, v, keep, scale)

    return lax.fori_loop(low, high, body, carry)

  def in_sinks(at: Array) -> Array:
    return (at < sinks)[None, :] & (at[None, :] <= qpos[:, None])

  def in_window(at: Array) -> Array:
    return (at[None, :] >= begin[:, None]) & (at[None, :] <= qpos[:, None])

  def anything(at: Array) -> Array:
    return (at >= 0)[None, :]

  carry, exists = tiling.start(cut.rows, columns.size), t < queries
  newest = qpos.max()
  if reach_ref is None:
    high = pl.cdiv(newest + 1, tile)
  else:
    high = pl.cdiv(jnp.minimum(backend.load(reach_ref, t, mask=real, other=0).max(), slots), tile)
  if sinks:
    ends = high if pos_ref is not None else pl.cdiv(jnp.minimum(newest + 1, sinks), tile)
    turned = operands.get("q_sinks")
    carry = walk(carry, query(q_ref if turned is None else turned), 0, ends, in_sinks)
  q = query(q_ref)
  if pos_ref is not None:
    whole = jnp.minimum(past // tile, high)
    if past >= tile:
      carry = walk(carry, q, 0, whole, anything)
    carry = walk(carry, q, whole, high, in_window)
  else:
    low = jnp.minimum(jnp.where(real, begin, _FAR).min() // tile, high)
    # Tiles that all queries of the block see whole.
    whole = jnp.clip(pl.cdiv(jnp.where(real, begin, 0).max(), tile), low, high)
    end = jnp.clip((jnp.where(real, qpos, _FAR - 1).min() + 1) // tile, whole, high)
    if first_ref is not None or sinks:
      carry = walk(carry, q, low, whole, in_window)
    carry = walk(carry, q, whole, end, None)
    carry = walk(carry, q, end, high, in_window)
  o, m, l = tiling.finish(carry)
  o = jnp.where(real[:, None], o, 0)
  m, l = jnp.where(real, m, -jnp.inf), jnp.where(real, l, 0.0)
  mask = exists[:, None] & inside[None, :]
  backend.store(o_ref, row, *of_query, value=o.astype(o_ref.dtype), mask=mask)
  backend.store(m_ref, row, t, value=m, mask=exists)
  backend.store(l_ref, row, t, value=l, mask=exists)


def prefill_attention(
  q: Float[Array, "B K G A H"],
  k: Float[Array, "B K S H"],
  v: Float[Array, "B K S H"],
  qpos: Int[Array, "B A"],
  first: Int[Array, "B *K A"] | None = None,
  *,
  sinks: int = 0,
  q_sinks: Float[Array, "B K G A H"] | None = None,
  pos: Int[Array, "B K S"] | None = None,
  reach: Int[Array, " A"] | None = None,
  past: int = 0,
  soft_cap: float | None = None,
  cut: Blocking | None = None,
  interpret: bool | None = None,
) -> tuple[State, Float[Array, "B K G A H"]]:
  """Each query over the positions below `sinks` and in [first, its own].

  Slots that no query sees are not read, those of tiles beyond a block's bounds least of all: they
  may hold NaN.

  Args:
    q: queries, rotated; bfloat16, float16 or float32, H ≤ 256.
    k: keys in the dtype of q.
    v: values in the dtype of q.
    qpos: positions of the queries, int32; −1 = padding, whose state is empty.
    first: oldest visible position of each query, or of each on every key/value head, beside the
      sinks, int32; None: 0.
    sinks: number of first positions that are visible whatever `first` is.
    q_sinks: queries for positions below `sinks`, where those are rotated otherwise; q if None.
    pos: positions of the slots, int32, −1 = empty; None: a slot is its position.
    reach: with `pos`: for each query how many leading slots can hold what it sees; None: all.
    past: with `pos`: leading slots that are empty or that every query sees.
    soft_cap: c of logits c·tanh(x/c); None: x itself.
    cut: how the work is cut; by shape if None.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    The softmax state, float32, and o as it was computed, rounded to the dtype of q.

  Raises:
    TypeError: an operand's dtype is not one of the above, or operands differ in dtype.
    ValueError: shapes do not agree, or sinks < 0.
    NotImplementedError: H is larger than the kernel takes.
  """
  check(q, k, v, qpos, sinks)
  batch, heads, groups, queries, head_dim = q.shape
  rows = batch * heads * groups
  operands = {"q": q, "q_sinks": q_sinks if sinks else None, "k": k, "v": v}
  flat = {name: x.reshape(-1, *x.shape[-2:]) for name, x in operands.items() if x is not None}
  flat |= {"qpos": qpos} | ({} if first is None else {"first": first.reshape(-1, queries)})
  if pos is not None:
    reach = jnp.full(queries, k.shape[2], jnp.int32) if reach is None else reach
    flat |= {"pos": pos.reshape(-1, pos.shape[2]), "reach": reach}
  cut = cut or blocking(
    queries, head_dim, q.dtype.itemsize, interpret=backend.interpreted(interpret)
  )
  kernel = functools.partial(
    _attend_kernel,
    groups=groups,
    cut=cut,
    scale=tiling.Scale.of(head_dim, None, soft_cap),
    sinks=sinks,
    past=past,
    has=tuple(flat),
  )
  statistic = jax.ShapeDtypeStruct((rows, queries), jnp.float32)
  o, m, l = backend.call(
    kernel,
    *flat.values(),
    grid=(rows, pl.cdiv(queries, cut.rows)),
    out=[jax.ShapeDtypeStruct((rows, queries, head_dim), q.dtype), statistic, statistic],
    warps=cut.warps,
    stages=cut.stages,
    name="prefill_attend",
    interpret=interpret,
  )
  o, m, l = o.reshape(q.shape), m.reshape(q.shape[:-1]), l.reshape(q.shape[:-1])
  return State(o.astype(jnp.float32), m, l), o


def _mass_kernel(
  *refs: Any, groups: int, cut: Blocking, scale: tiling.Scale, sinks: int, past: int
) -> None:
  """q [R, A, H], k [R/G, S, H], pos [R/G, S], qpos, first [B, A], lse [R, A], start [R/G, tiles]
  -> mass [R/G, S]; lse in base 2, +∞ for queries that do not count. `past`: see `column_mass`.
  """
  q_ref, k_ref, pos_ref, qpos_ref, *first_ref, lse_ref, start_ref, mass_ref = refs
  queries, head_dim = q_ref.shape[1:]
  block, kv = pl.program_id(0), pl.program_id(1)
  batch = kv // (k_ref.shape[0] // qpos_ref.shape[0])
  slot = block * cut.tile + jnp.arange(cut.tile)
  exists = slot < k_ref.shape[1]
  columns = jnp.arange(columns_of(head_dim))
  inside = columns < head_dim
  pos = backend.load(pos_ref, kv, slot, mask=exists, other=-1)
  held = pos >= 0
  index = kv, slot[:, None], columns[None, :]
  k = backend.load(k_ref, *index, mask=held[:, None] & inside[None, :])

  def body(i: Any, mass: Array, every: bool = False) -> Array:
    row, t = kv * groups + i % groups, i // groups * cut.rows + jnp.arange(cut.rows)
    there = t < queries
    mask = there[:, None] & inside[None, :]
    q = backend.load(q_ref, row, t[:, None], columns[None, :], mask=mask)
    lse = backend.load(lse_ref, row, t, mask=there, other=jnp.inf)
    if every:
      x = scale.base2(backend.dot(k, q, trans_b=True))
      return mass + jnp.exp2(x - lse[None, :]).sum(axis=1)
    qpos = backend.load(qpos_ref, batch, t, mask=there, other=-1)
    keep = held[:, None] & (pos[:, None] <= qpos[None, :])
    if first_ref:
      first = backend.load(first_ref[0], batch, t, mask=there, other=0)
      keep &= (pos < sinks)[:, None] | (pos[:, None] >= first[None, :])
    x = scale.base2(backend.dot(k, q, trans_b=True))  # [T, R]: sums stay in a warp
    return mass + jnp.where(keep, jnp.exp2(x - lse[None, :]), 0).sum(axis=1)

  blocks = groups * pl.cdiv(queries, cut.rows)
  first_block = jnp.minimum(groups * start_ref[kv, block], blocks)
  mass = jnp.zeros(cut.tile, jnp.float32)
  if past >= cut.tile:
    seen_whole = block < past // cut.tile
    whole = jnp.where(seen_whole, blocks, first_block)
    mass = lax.fori_loop(first_block, whole, functools.partial(body, every=True), mass)
    mass, first_block = jnp.where(held, mass, 0), whole
  mass = lax.fori_loop(first_block, blocks, body, mass)
  backend.store(mass_ref, kv, slot, value=mass / groups, mask=exists)


def column_mass(
  q: Float[Array, "B K G A H"],
  k: Float[Array, "B K S H"],
  pos: Int[Array, "B K S"],
  qpos: Int[Array, "B A"],
  m: Float[Array, "B K G A"],
  l: Float[Array, "B K G A"],
  first: Int[Array, "B A"] | None = None,
  *,
  sinks: int = 0,
  past: int = 0,
  soft_cap: float | None = None,
  cut: Blocking | None = None,
  interpret: bool | None = None,
) -> Float[Array, "B K S"]:
  """Probability that the queries give to every slot: summed over queries, mean over the group.

  Args:
    q, k: as for `prefill_attention`.
    pos: positions of the slots, int32; −1 = empty.
    qpos: positions of the queries, int32; −1 = does not count.
    m, l: the queries' softmax statistics over all that they see; a query of NaN does not count.
    first, sinks: what the queries see, as for `prefill_attention`.
    past: leading slots that are empty or that every query sees that counts.
    soft_cap, cut, interpret: as for `prefill_attention`.
  """
  check(q, k, k, qpos, sinks)
  batch, heads, groups, queries, head_dim = q.shape
  slots = k.shape[2]
  cut = cut or blocking(
    queries, head_dim, q.dtype.itemsize, mass=True, interpret=backend.interpreted(interpret)
  )
  lse = (m + jnp.log(l)) * tiling.LOG2E
  lse = jnp.where(jnp.isfinite(lse) & (qpos >= 0)[:, None, None], lse, jnp.inf)
  tiles, blocks = pl.cdiv(slots, cut.tile), pl.cdiv(queries, cut.rows)
  # The first block of queries that holds one which can see a tile; blocks where there is none.
  oldest = jnp.pad(pos, ((0, 0), (0, 0), (0, tiles * cut.tile - slots)), constant_values=-1)
  oldest = jnp.where(oldest < 0, _FAR, oldest).reshape(batch, heads, tiles, -1).min(-1)
  newest = jnp.pad(qpos, ((0, 0), (0, blocks * cut.rows - queries)), constant_values=-1)
  newest = newest.reshape(batch, blocks, -1).max(-1)
  can = newest[:, None, None] >= oldest[..., None]
  start = jnp.where(can.any(-1), jnp.argmax(can, -1), blocks).astype(jnp.int32)
  kernel = functools.partial(
    _mass_kernel,
    groups=groups,
    cut=cut,
    scale=tiling.Scale.of(head_dim, None, soft_cap),
    sinks=sinks,
    past=past,
  )
  return backend.call(
    kernel,
    q.reshape(-1, queries, head_dim),
    k.reshape(-1, slots, head_dim),
    pos.reshape(-1, slots),
    qpos,
    *([] if first is None else [first]),
    lse.reshape(-1, queries),
    start.reshape(-1, tiles),
    grid=(tiles, batch * heads),
    out=[jax.ShapeDtypeStruct((batch * heads, slots), jnp.float32)],
    warps=cut.warps,
    stages=cut.stages,
    name="column_mass",
    interpret=interpret,
  )[0].reshape(pos.shape)


def check(q: Any, k: Any, v: Any, qpos: Any, sinks: int) -> None:
  """Raises on operands that the kernels do not take; the message names the argument."""
  check_queries(q, "[B, K, G, A, H]", sinks)
  check_cache(q, k, v, q.shape[1])
  expect((q.shape[0], q.shape[3]), "int32", qpos=qpos)
