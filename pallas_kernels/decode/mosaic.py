"""`decode_attention` once more, in Pallas Mosaic GPU: a second lowering, on trial, for Hopper.

Bytes: as `kvjax.kernels.decode.dense`. Slots are the rows of both matrix products, x = K·qᵀ and o =
Vᵀ·p, since a product of a group of warps has 64 rows and queries are few; queries come in multiples
of 8.

Grid: rows × pieces, a group of four warps each. A piece has an equal share of its row's tiles; they
come by TMA, `Config.stages` ahead. Pieces leave partial softmax states, which XLA joins in order.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kvjax.kernels.common import backend, tiling
from kvjax.kernels.common.config import Config
from kvjax.kernels.decode.dense import check
from kvjax.primitives.softmax_state import State

HEAD_DIMS = 64, 128
ALIGNED = 8  # slots: copies to memory that wgmma reads begin at whole rows of its 8 × 64 tiles
MAX_GROUPS = 64
# Three programs on each of 132 multiprocessors: their tiles fill its shared memory.
DEFAULT = Config(tile=64, programs=396, warps=4, stages=2)


def _attend_kernel(
  q_ref: Any,
  k_ref: Any,
  v_ref: Any,
  start_ref: Any,
  stop_ref: Any,
  acc_ref: Any,
  sums_ref: Any,
  q_smem: Any,
  k_smem: Any,
  v_smem: Any,
  p_smem: Any,
  sums_smem: Any,
  q_here: Any,
  k_here: Any,
  v_here: Any,
  *,
  pieces: int,
  scale: float,
) -> None:
  """q [R, G, H], k, v [R, S, H], start, stop [R] -> acc [R, P, H, L], (m, l) [R, P, 2, L].

  In shared memory: q [L, H], k, v [stages, T, H], p [L, T], (m, l) [2, L], a barrier of each copy.
  L: lanes, the groups in multiples of 8.
  """
  row, part = lax.axis_index("row"), lax.axis_index("part")
  (lanes, head_dim), (stages, tile, _) = q_smem.shape, k_smem.shape
  first = jnp.maximum(start_ref[row], 0)
  stop = jnp.minimum(stop_ref[row], k_ref.shape[1])
  aligned = first // ALIGNED * ALIGNED
  tiles = jnp.where(first < stop, pl.cdiv(stop - aligned, tile), 0)
  low, high = part * tiles // pieces, (part + 1) * tiles // pieces

  def fetch(ref: Any, smem: Any, here: Any, i: Any) -> None:
    """Starts the copy of tile i, where this piece has that."""

    @pl.when((i >= low) & (i < high))
    def _():
      stage = lax.rem(i - low, stages)
      slots = pl.ds(aligned + i * tile, tile)
      plgpu.copy_gmem_to_smem(ref.at[row, slots], smem.at[stage], here.at[stage])

  # Beyond the groups the copy writes zeros. jax refuses a constant index that goes there.
  plgpu.copy_gmem_to_smem(q_ref.at[row, pl.ds(jnp.minimum(row, 0), lanes)], q_smem, q_here)
  for i in range(stages):
    fetch(k_ref, k_smem, k_here, low + i)
    fetch(v_ref, v_smem, v_here, low + i)
  plgpu.barrier_wait(q_here)

  def constant(value: float, shape: tuple[int, ...], layout: Any) -> Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

  def rows_of(x: Array, rows: int) -> Array:
    return lax.broadcast_in_dim(x, (rows, lanes), [1])

  def seen(base: Any, columns: int) -> Array:
    """True for slots of the tile that begins at `base` in the range, [T, columns]."""
    shape, layout = (tile, columns), plgpu.Layout.WGMMA
    slot = base + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    return (first <= slot) & (slot < stop)

  def attend(i: Any, carry: Any) -> Any:
    acc, m, l = carry
    stage, base = lax.rem(i - low, stages), aligned + i * tile

    def logits(x_ref: Any) -> Array:
      plgpu.wgmma(x_ref, k_smem.at[stage], q_smem.transpose((1, 0)))
      return x_ref[...]

    plgpu.barrier_wait(k_here.at[stage])
    x = pl.run_scoped(logits, plgpu.ACC((tile, lanes), jnp.float32))
    x = jnp.where(seen(base, lanes), x * scale, -jnp.inf)
    top = jnp.maximum(m, x.max(axis=0))
    finite = jnp.where(top == -jnp.inf, 0.0, top)
    alpha = jnp.exp2(m - finite)
    p = jnp.exp2(x - rows_of(finite, tile))
    l = l * rows_of(alpha, tile) + p
    p_smem.transpose((1, 0))[...] = plgpu.layout_cast(
      p.astype(p_smem.dtype), plgpu.Layout.WGMMA_TRANSPOSED
    )
    plgpu.commit_smem()  # All warps are here: they have read these keys and the values before.
    fetch(k_ref, k_smem, k_here, i + stages)
    pl.when(i > low)(lambda: fetch(v_ref, v_smem, v_here, i - 1 + stages))

    plgpu.barrier_wait(v_here.at[stage])

    @pl.when((base < first) | (stop < base + tile))
    def _():  # Slots outside may hold NaN, which no weight of 0 removes.
      v = plgpu.layout_cast(v_smem[stage], plgpu.Layout.WGMMA)
      v_smem[stage] = jnp.where(seen(base, head_dim), v, jnp.zeros_like(v))
      plgpu.commit_smem()

    def values(o_ref: Any) -> Array:
      plgpu.wgmma(o_ref, v_smem.at[stage].transpose((1, 0)), p_smem.transpose((1, 0)))
      return o_ref[...]

    o = pl.run_scoped(values, plgpu.ACC((head_dim, lanes), jnp.float32))
    return acc * rows_of(alpha, head_dim) + o, top, l

  zero = (
    constant(0.0, (head_dim, lanes), plgpu.Layout.WGMMA),
    constant(-math.inf, (lanes,), plgpu.Layout.WGMMA.reduce(0)),
    constant(0.0, (tile, lanes), plgpu.Layout.WGMMA),
  )
  acc, m, l = lax.fori_loop(low, high, attend, zero)
  acc_ref[row, part] = acc
  sums_smem[0] = m
  sums_smem[1] = l.sum(axis=0)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(sums_smem, sums_ref.at[row, part])
  plgpu.wait_smem_to_gmem(0)


def decode_attention(
  q: Float[Array, "B K G H"],
  k: Float[Array, "B K S H"],
  v: Float[Array, "B K S H"],
  start: Int[Array, "B #K"],
  stop: Int[Array, "B #K"],
  *,
  scale: float | None = None,
  config: Config = DEFAULT,
  interpret: bool | None = None,
) -> State:
  """As `kvjax.kernels.decode.dense.decode_attention` without sinks; bfloat16, H 64 or 128, G ≤ 64.

  Args:
    config: tile, a multiple of 64 slots; stages, at least 2; programs, of which every row has an
      equal part.
    interpret: run under Mosaic's interpreter (jax 0.12); None: wherever the default backend is no
      GPU.
  """
  check(q, k, v, start, stop, 0, None)
  interpreted = backend.interpreted(interpret)
  _supported(q, k, config)
  if not interpreted:
    _on_hopper()
  batch, heads, groups, head_dim = q.shape
  rows, slots, tile = batch * heads, k.shape[2], config.tile
  lanes = -(-groups // ALIGNED) * ALIGNED
  pieces = min(max(config.programs // rows, 1), -(-slots // tile))
  queries = q.reshape(rows, groups, head_dim)
  if groups > ALIGNED:  # up to as many, the copy pads
    queries = jnp.pad(queries, ((0, 0), (0, lanes - groups), (0, 0)))
  start, stop = (jnp.broadcast_to(x, (batch, heads)).reshape(rows) for x in (start, stop))
  # mypy takes them to be abstract under jax 0.12.
  tiled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)  # type: ignore[abstract]
  smem = functools.partial(plgpu.SMEM, dtype=q.dtype, transforms=tiled)
  of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
  acc, sums = plgpu.kernel(
    functools.partial(
      _attend_kernel,
      pieces=pieces,
      scale=(head_dim**-0.5 if scale is None else scale) / tiling.LN2,
    ),
    out_type=[of((rows, pieces, head_dim, lanes)), of((rows, pieces, 2, lanes))],
    scratch_types=[
      smem((lanes, head_dim)),
      smem((config.stages, tile, head_dim)),
      smem((config.stages, tile, head_dim)),
      smem((lanes, tile)),
      plgpu.SMEM((2, lanes), jnp.float32),
      plgpu.Barrier(),
      plgpu.Barrier(num_barriers=config.stages),
      plgpu.Barrier(num_barriers=config.stages),
    ],
    grid=(rows, pieces),
    grid_names=("row", "part"),
    compiler_params=plgpu.CompilerParams(
      approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
    ),
    interpret=_interpreter() if interpreted else None,
  )(queries, *(x.reshape(rows, slots, head_dim) for x in (k, v)), start, stop)
  return _join(acc, sums[:, :, 0], sums[:, :, 1], q.shape)


def _join(acc: Array, m: Array, l: Array, shape: tuple[int, ...]) -> State:
  """The state of q's shape from partial ones: acc [R, P, H, L], m, l [R, P, L], m in base 2."""
  batch, heads, groups, head_dim = shape
  top = m.max(axis=1)
  weight = jnp.exp2(m - tiling.finite(top)[:, None])
  l = (l * weight).sum(axis=1)
  o = (acc * weight[:, :, None]).sum(axis=1) / tiling.nonzero(l)[:, None]
  o = o.swapaxes(1, 2)[:, :groups].reshape(batch, heads, groups, head_dim)
  m, l = (x[:, :groups].reshape(batch, heads, groups) for x in (top * tiling.LN2, l))
  return State(o, m, l)


def _interpreter() -> Any:
  if not hasattr(plgpu, "InterpretGPUParams"):
    raise NotImplementedError(
      f"interpret: found True under jax {jax.__version__}, expected False; "
      "its Mosaic interpreter does not know this kernel's operations, that of jax 0.12 does"
    )
  return plgpu.InterpretGPUParams()


def _on_hopper() -> None:
  """Raises where the default device is a GPU without wgmma; without a GPU it can be lowered."""
  here = jax.devices()[0]
  if jax.default_backend() == "gpu" and not here.compute_capability.startswith("9."):
    raise NotImplementedError(
      f"device: found {here.device_kind} of compute capability {here.compute_capability}, "
      "expected one of 9.x, which has wgmma"
    )


def _supported(q: Array, k: Array, config: Config) -> None:
  """Raises on what `kvjax.kernels.decode.dense` takes and this kernel does not."""
  heads, groups, head_dim = q.shape[1:]
  if q.dtype != jnp.bfloat16:
    raise NotImplementedError(f"q: found dtype {q.dtype.name}, expected bfloat16")
  if head_dim not in HEAD_DIMS or groups > MAX_GROUPS:
    raise NotImplementedError(
      f"q: found {groups} query heads of size {head_dim} per key/value head, "
      f"expected at most {MAX_GROUPS} of {' or '.join(map(str, HEAD_DIMS))}"
    )
  if config.tile % 64 or config.stages < 2:
    raise NotImplementedError(
      f"config: found tile {config.tile}, stages {config.stages}, "
      "expected a multiple of 64 and at least 2"
    )
  kept, slots = k.shape[1:3]
  if kept != heads or slots < config.tile or slots % ALIGNED:
    raise NotImplementedError(
      f"k: found {kept} rows of {slots} slots, expected {heads} rows of a multiple of {ALIGNED}, "
      f"at least a tile of {config.tile}"
    )
