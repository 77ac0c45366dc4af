"""Prompt attention on Hopper's matrix units: `dense.prefill_attention` where slots are positions.

Mosaic GPU, because Triton's lowering of such a kernel reaches little more than half of cuDNN's
speed. A library does it for plain causal attention alone; here windows differ from query to query
(sinks and [first, t]), and queries stand at any positions.

Grid: one program per query head and two blocks of queries, the last blocks, which see most, first.
Heads are neighbours, so that those of one KV head find its tiles in the L2 cache. Of a program's
three warpgroups one fetches tiles of keys and values; the two others attend, a block each, in
turns: the matrix units multiply for one while the other takes its exponentials (FlashAttention-3,
§3.1). Both walk the same tiles: those of the sinks, and those between the oldest window's begin and
the newest query. First come the ones that only some queries see, which are masked.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib import cuda_versions
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxtyping import Array, Float, Int

from kvjax.kernels.common import tiling
from kvjax.kernels.prefill.dense import check
from kvjax.primitives.softmax_state import State

plgpu: Any = mosaic_gpu  # its declared types differ between versions of jax

HEAD_DIMS = 64, 128, 256
ROWS, BLOCKS = 64, 2  # queries of a block, what a warpgroup multiplies at once; blocks of a program
ALIGNED = 8  # queries and slots come in multiples of it
LEAST = 64  # fewest queries that were timed
_FAR = 2**30
_LAYOUT = plgpu.Layout.WGMMA
_OF_ROWS = _LAYOUT.reduce(1)


@dataclasses.dataclass(frozen=True)
class Cut:
  """Cut of the slots: those of a tile, and tiles in flight."""

  tile: int
  stages: int

  @staticmethod
  def of(head_dim: int) -> "Cut":
    """The largest that the registers and the shared memory hold."""
    return {64: Cut(128, 4), 128: Cut(128, 2), 256: Cut(64, 2)}[head_dim]


def takes(q: Float[Array, "B K G A H"], dtype: Any) -> bool:
  """True if the kernel takes such queries, over keys of a dtype, on this device under this jax."""
  *_, queries, head_dim = q.shape
  fits = head_dim in HEAD_DIMS and jnp.dtype(dtype).itemsize == 2
  return fits and queries >= LEAST and _lowers()


@functools.cache
def _lowers() -> bool:
  """True on Hopper; before jax 0.11 the names of the lowering were others."""
  version = tuple(map(int, jax.__version__.split(".")[:2]))
  if version < (0, 11) or getattr(jax.devices()[0], "compute_capability", "") != "9.0":
    return False
  return cuda_versions is not None and _assembles(cuda_versions.cuda_runtime_get_version())


def _assembles(cuda: int) -> bool:
  """False for the versions whose ptxas jax says to break masks (`attention_mgpu`)."""
  return not 12080 <= cuda < 12091


def prefill_attention(
  q: Float[Array, "B K G A H"],
  k: Float[Array, "B K S H"],
  v: Float[Array, "B K S H"],
  qpos: Int[Array, "B A"],
  first: Int[Array, "B A"] | None = None,
  *,
  sinks: int = 0,
) -> tuple[State, Float[Array, "B K G A H"]]:
  """Each query over the positions below `sinks` and in [first, its own].

  Slots that no query sees may hold NaN.

  Args:
    q: queries, rotated; bfloat16 or float16, H of `HEAD_DIMS`.
    k: keys in the dtype of q; a slot is its position.
    v: values in the dtype of q.
    qpos: positions of the queries, int32; −1 = padding, whose state is empty.
    first: oldest visible position of each query beside the sinks, int32; None: 0.
    sinks: number of first positions that are visible whatever `first` is.

  Returns:
    The softmax state, float32, whose m is the log-sum-exp and whose l is 1; and o as it was
    computed, rounded to the dtype of q.

  Raises:
    TypeError: operands differ in dtype.
    ValueError: shapes do not agree, or sinks < 0.
  """
  check(q, k, v, qpos, sinks)
  batch, heads, groups, queries, head_dim = q.shape
  cut = Cut.of(head_dim)
  rows, programs = batch * heads * groups, pl.cdiv(queries, ROWS * BLOCKS)
  windows = first is not None
  begin = jnp.zeros_like(qpos) if first is None else jnp.maximum(first, sinks)
  qpos, begin = (_up_to(x, 1, ROWS * BLOCKS, value) for x, value in ((qpos, -1), (begin, 0)))
  k, v = (_up_to(x, 2, ALIGNED) for x in (k, v))
  # A value that is multiplied by 0 has to be a number; the logit of a hidden key is replaced.
  held = (jnp.arange(v.shape[2]) <= qpos.max(1, keepdims=True))[:, None, :, None]
  k, v = (x.reshape(-1, *x.shape[2:]) for x in (k, jnp.where(held, v, 0)))
  q = _up_to(q.reshape(rows, queries, head_dim), 1, ALIGNED)
  walks = _walks(qpos, begin, sinks if windows else 0, cut.tile)
  o, lse = plgpu.kernel(
    functools.partial(_kernel, groups=groups, cut=cut, sinks=sinks, windows=windows),
    out_type=[
      jax.ShapeDtypeStruct(q.shape, q.dtype),
      jax.ShapeDtypeStruct((rows, qpos.shape[1]), jnp.float32),
    ],
    scratch_types=_memory(head_dim, q.dtype, cut),
    grid=(rows, programs),
    grid_names=("row", "program"),
    num_threads=BLOCKS + 1,
    thread_name="warpgroup",
    compiler_params=plgpu.CompilerParams(approx_math=True),
  )(q, k, v, qpos, begin, walks)
  o = o[:, :queries].reshape(batch, heads, groups, queries, head_dim)
  lse = lse[:, :queries].reshape(o.shape[:-1])
  return State(o.astype(jnp.float32), lse, (lse > -jnp.inf).astype(jnp.float32)), o


def _up_to(x: Array, axis: int, multiple: int, value: int = 0) -> Array:
  """The array with its axis lengthened to a multiple."""
  more = [(0, 0)] * x.ndim
  more[axis] = 0, -x.shape[axis] % multiple
  return jnp.pad(x, more, constant_values=value)


def _walks(qpos: Array, begin: Array, sinks: int, tile: int) -> Array:
  """Tiles that each program walks, int32 [B, P, 5]: `sunk` of the sinks, and those from `low` on;
  from `edge` to `whole` every query sees all of them, the rest to `high` some see in part.
  """
  shape = qpos.shape[0], -1, BLOCKS * ROWS
  qpos, begin = qpos.reshape(shape), begin.reshape(shape)
  real = qpos >= 0
  newest, oldest = qpos.max(2), jnp.where(real, qpos, _FAR).min(2)
  narrow, wide = jnp.where(real, begin, 0).max(2), jnp.where(real, begin, _FAR).min(2)
  of_sinks, high = pl.cdiv(sinks, tile), newest // tile + 1
  low = jnp.minimum(wide // tile, high)
  apart = (low > of_sinks) & (high > 0)
  low = jnp.where(apart, low, 0)
  sunk = jnp.where(apart, of_sinks, 0)
  edge = jnp.clip(pl.cdiv(narrow, tile), low, high)
  whole = jnp.clip((oldest + 1) // tile, edge, high)
  return jnp.stack([sunk, low, edge, whole, high], -1).astype(jnp.int32)


def _order(
  sunk: Any, low: Any, edge: Any, whole: Any, high: Any, *, windows: bool
) -> tuple[Any, Any, Callable[[Any], Any]]:
  """Numbers of masked tiles, which come first, and of all tiles of a walk; the tile of a step."""
  ahead = sunk + edge - low
  masked = ahead + high - whole

  def tile_at(step: Any) -> Any:
    late = jnp.where(step < masked, step - ahead + whole, step - masked + edge)
    if not windows:
      return late
    return jnp.where(step < sunk, step, jnp.where(step < ahead, step - sunk + low, late))

  return masked, masked + whole - edge, tile_at


def _memory(head_dim: int, dtype: Any, cut: Cut) -> list[Any]:
  """Shared memory of queries, sums, keys and values, and barriers: queries are here; keys and
  values are, of each stage; a stage of keys is free, and one of values; whose turn it is.
  """
  transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
  tiles = plgpu.SMEM((cut.stages, cut.tile, head_dim), dtype, transforms=transforms)
  here = plgpu.Barrier(num_barriers=cut.stages)
  free = plgpu.Barrier(num_arrivals=BLOCKS, num_barriers=cut.stages)
  return [
    plgpu.SMEM((BLOCKS, ROWS, head_dim), dtype, transforms=transforms),
    plgpu.SMEM((BLOCKS, ROWS), jnp.float32),
    tiles,
    tiles,
    plgpu.Barrier(num_barriers=BLOCKS),
    (here, here),
    (free, free),
    plgpu.Barrier(num_arrivals=BLOCKS),
  ]


def _kernel(
  q_ref: Any,
  k_ref: Any,
  v_ref: Any,
  qpos_ref: Any,
  begin_ref: Any,
  walks_ref: Any,
  o_ref: Any,
  lse_ref: Any,
  q_smem: Any,
  lse_smem: Any,
  k_smem: Any,
  v_smem: Any,
  q_here: Any,
  here: tuple[Any, Any],
  free: tuple[Any, Any],
  turn: Any,
  *,
  groups: int,
  cut: Cut,
  sinks: int,
  windows: bool,
) -> None:
  """q [R, A, H], k, v [R/G, S, H], qpos, begin [B, P·BLOCKS·ROWS], walks of `_walks` ->
  o [R, A, H], lse [R, P·BLOCKS·ROWS].
  """
  tile, stages = cut.tile, cut.stages
  row, group = lax.axis_index("row"), lax.axis_index("warpgroup")
  program = walks_ref.shape[1] - 1 - lax.axis_index("program")
  kv, batch = row // groups, row // (q_ref.shape[0] // qpos_ref.shape[0])
  walk = [walks_ref[batch, program, i] for i in range(5)]
  masked, steps, tile_at = _order(*walk, windows=windows)
  (k_here, v_here), (k_free, v_free) = here, free

  def hand_over() -> None:
    plgpu.barrier_arrive(turn)
    plgpu.barrier_wait(turn)

  @pl.when(group == BLOCKS)
  def _fetch() -> None:
    plgpu.set_max_registers(40, action="decrease")

    def fetch(step: Any, refill: bool) -> None:
      slots, stage = pl.ds(tile_at(step) * tile, tile), lax.rem(step, jnp.int32(stages))
      for ref, smem, arrived, done in (
        (k_ref, k_smem, k_here, k_free),
        (v_ref, v_smem, v_here, v_free),
      ):
        if refill:
          plgpu.barrier_wait(done.at[stage])
        plgpu.copy_gmem_to_smem(ref.at[kv, slots], smem.at[stage], arrived.at[stage])

    for step in range(stages):
      pl.when(step < steps)(functools.partial(fetch, jnp.int32(step), refill=False))
    pl.loop(stages, steps)(functools.partial(fetch, refill=True))

  @pl.when(group < BLOCKS)
  def _attend() -> None:
    plgpu.set_max_registers(232, action="increase")
    base = (program * BLOCKS + group) * ROWS
    queries = pl.ds(base, ROWS)
    end = jnp.where(base < q_ref.shape[1], steps, 0)  # a block that is padding multiplies nothing
    q, lse = q_smem.at[group], lse_smem.at[group]
    plgpu.copy_gmem_to_smem(q_ref.at[row, queries], q, q_here.at[group])
    qpos, begin = (
      plgpu.load(ref.at[batch, queries], layout=_OF_ROWS, optimized=False)
      for ref in (qpos_ref, begin_ref)
    )
    plgpu.barrier_wait(q_here.at[group])
    pl.when(end > 0)(lambda: plgpu.barrier_wait(k_here.at[0]))
    pl.when(group == 1)(hand_over)
    tiles = k_smem, v_smem
    add = functools.partial(_step, q, tiles, here, free, turn, end=end, hand_over=hand_over)

    def seen(step: Any) -> Array:
      """Slots of a tile that queries see, [ROWS, tile]."""
      slot = tile_at(step) * tile + _iota(tile, 1)
      keep = slot <= _wide(qpos, tile)
      return keep & ((slot < sinks) | (slot >= _wide(begin, tile))) if windows else keep

    carry = _start(q_ref.shape[2])
    partly = jnp.minimum(masked, end)
    carry = lax.fori_loop(0, partly, functools.partial(add, seen=seen), carry)
    acc, m, l = lax.fori_loop(partly, end, add, carry)

    @pl.loop(end, steps)
    def _pass(step: Any) -> None:
      for done in free:
        plgpu.barrier_arrive(done.at[lax.rem(step, jnp.int32(stages))])
      hand_over()
      hand_over()

    pl.when(group == 0)(hand_over)
    l = jnp.where(qpos >= 0, l, 0.0)
    some = jnp.where(l > 0, l, 1.0)
    o = jnp.where(_wide(l, acc.shape[1]) > 0, acc * _wide(1 / some, acc.shape[1]), 0.0)
    q[...] = o.astype(q.dtype)
    lse[...] = jnp.where(l > 0, m * tiling.LN2 + jnp.log(some), -jnp.inf)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q, o_ref.at[row, queries])
    plgpu.copy_smem_to_gmem(lse, lse_ref.at[row, queries])
    plgpu.wait_smem_to_gmem(0)


def _step(
  q: Any,
  tiles: tuple[Any, Any],
  here: tuple[Any, Any],
  free: tuple[Any, Any],
  turn: Any,
  step: Any,
  carry: tuple[Array, Array, Array],
  *,
  end: Any,
  hand_over: Any,
  seen: Any = None,
) -> tuple[Array, Array, Array]:
  """Adds one tile: acc [ROWS, H], m in base 2 and l [ROWS] of its softmax so far.

  A warpgroup multiplies in its turn, and hands it over for its exponentials.
  """
  (acc, m, l), (k_smem, v_smem) = carry, tiles
  stages, tile, head_dim = k_smem.shape
  stage, factor = lax.rem(step, jnp.int32(stages)), tiling.LOG2E * head_dim**-0.5

  def scores(x_ref: Any) -> Array:
    plgpu.wgmma(x_ref, q, k_smem.at[stage].transpose((1, 0)))
    hand_over()
    return x_ref[...]

  x = pl.run_scoped(scores, plgpu.ACC((ROWS, tile), jnp.float32))
  plgpu.barrier_arrive(free[0].at[stage])
  if seen is not None:
    x = jnp.where(seen(step), x, -jnp.inf)
  top = jnp.maximum(m, x.max(axis=1) * factor)
  base = top if seen is None else jnp.where(top == -jnp.inf, 0.0, top)
  alpha = jnp.exp2(m - base)
  p = jnp.exp2(x * factor - _wide(base, tile))
  acc = acc * _wide(alpha, head_dim)
  l = l * alpha + p.sum(axis=1)
  acc, top, l, p = lax.optimization_barrier((acc, top, l, p.astype(v_smem.dtype)))
  plgpu.barrier_arrive(turn)
  plgpu.barrier_wait(here[1].at[stage])
  plgpu.barrier_wait(turn)

  def values(acc_ref: Any) -> None:
    plgpu.wgmma(acc_ref, p, v_smem.at[stage])
    after = lax.rem(step + 1, jnp.int32(stages))
    pl.when(step + 1 < end)(lambda: plgpu.barrier_wait(here[0].at[after]))

  acc = pl.run_state(values)(plgpu.ACC.init(acc))
  plgpu.barrier_arrive(free[1].at[stage])
  return acc, top, l


def _start(head_dim: int) -> tuple[Array, Array, Array]:
  """The softmax of nothing."""
  of_rows = (jnp.full((ROWS,), x, jnp.float32) for x in (-math.inf, 0.0))
  m, l = (plgpu.layout_cast(x, _OF_ROWS) for x in of_rows)
  return plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), _LAYOUT), m, l


def _wide(x: Array, columns: int) -> Array:
  """A number of each row in all of its columns."""
  return lax.broadcast_in_dim(x, (ROWS, columns), [0])


def _iota(columns: int, axis: int) -> Array:
  return plgpu.broadcasted_iota(jnp.int32, (ROWS, columns), axis, layout=_LAYOUT)
