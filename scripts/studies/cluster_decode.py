"""A trial: dense decode in Mosaic GPU, a cluster of programs per row, joined through distributed shared memory.

python -m scripts.studies.cluster_decode     on a Hopper GPU: equality, then times beside the library's kernel
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LN2 = math.log(2.0)
ALIGNED = 8


def _kernel(
  q_ref,
  k_ref,
  v_ref,
  start_ref,
  stop_ref,
  o_ref,
  out_ref,
  q_smem,
  k_smem,
  v_smem,
  p_smem,
  o_smem,
  acc_smem,
  sums_smem,
  q_here,
  k_here,
  v_here,
  written,
  read,
  *,
  pieces,
  scale,
):
  row, part = lax.axis_index("row"), lax.axis_index("part")
  (lanes, head_dim), (stages, tile, _) = q_smem.shape, k_smem.shape
  first = jnp.maximum(start_ref[row], 0)
  stop = jnp.minimum(stop_ref[row], k_ref.shape[1])
  aligned = first // ALIGNED * ALIGNED
  tiles = jnp.where(first < stop, pl.cdiv(stop - aligned, tile), 0)
  low, high = part * tiles // pieces, (part + 1) * tiles // pieces

  def fetch(ref, smem, here, i):
    @pl.when((i >= low) & (i < high))
    def _():
      stage = lax.rem(i - low, stages)
      plgpu.copy_gmem_to_smem(
        ref.at[row, pl.ds(aligned + i * tile, tile)], smem.at[stage], here.at[stage]
      )

  plgpu.copy_gmem_to_smem(q_ref.at[row, pl.ds(jnp.minimum(row, 0), lanes)], q_smem, q_here)
  for i in range(stages):
    fetch(k_ref, k_smem, k_here, low + i)
    fetch(v_ref, v_smem, v_here, low + i)
  plgpu.barrier_wait(q_here)

  def constant(value, shape, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

  def rows_of(x, rows):
    return lax.broadcast_in_dim(x, (rows, lanes), [1])

  def seen(base, columns):
    slot = base + plgpu.broadcasted_iota(jnp.int32, (tile, columns), 0, layout=plgpu.Layout.WGMMA)
    return (first <= slot) & (slot < stop)

  def attend(i, carry):
    acc, m, l = carry
    stage, base = lax.rem(i - low, stages), aligned + i * tile

    def logits(x_ref):
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
    plgpu.commit_smem()
    fetch(k_ref, k_smem, k_here, i + stages)
    pl.when(i > low)(lambda: fetch(v_ref, v_smem, v_here, i - 1 + stages))
    plgpu.barrier_wait(v_here.at[stage])

    @pl.when((base < first) | (stop < base + tile))
    def _():
      v = plgpu.layout_cast(v_smem[stage], plgpu.Layout.WGMMA)
      v_smem[stage] = jnp.where(seen(base, head_dim), v, jnp.zeros_like(v))
      plgpu.commit_smem()

    def values(o_ref):
      plgpu.wgmma(o_ref, v_smem.at[stage].transpose((1, 0)), p_smem.transpose((1, 0)))
      return o_ref[...]

    o = pl.run_scoped(values, plgpu.ACC((head_dim, lanes), jnp.float32))
    return acc * rows_of(alpha, head_dim) + o, top, l

  reduced = plgpu.Layout.WGMMA.reduce(0)
  zero = (
    constant(0.0, (head_dim, lanes), plgpu.Layout.WGMMA),
    constant(-math.inf, (lanes,), reduced),
    constant(0.0, (tile, lanes), plgpu.Layout.WGMMA),
  )
  acc, m, l = lax.fori_loop(low, high, attend, zero)
  acc_smem[...] = acc
  sums_smem[0] = m
  sums_smem[1] = l.sum(axis=0)
  plgpu.commit_smem()
  plgpu.barrier_arrive(written)
  plgpu.barrier_wait(written)

  @pl.when(part == 0)
  def _():  # the first program joins them in order
    parts = [
      (
        plgpu.load(plgpu.cluster_ref(sums_smem, {"part": jnp.int32(c)}).at[0], layout=reduced),
        plgpu.load(plgpu.cluster_ref(sums_smem, {"part": jnp.int32(c)}).at[1], layout=reduced),
      )
      for c in range(pieces)
    ]
    top = functools.reduce(jnp.maximum, [m for m, _ in parts])
    finite = jnp.where(top == -jnp.inf, 0.0, top)
    total, o = (
      constant(0.0, (lanes,), reduced),
      constant(0.0, (head_dim, lanes), plgpu.Layout.WGMMA),
    )
    for c, (m, l) in enumerate(parts):
      weight = jnp.exp2(m - finite)
      total = total + l * weight
      o = o + plgpu.load(
        plgpu.cluster_ref(acc_smem, {"part": jnp.int32(c)}), layout=plgpu.Layout.WGMMA
      ) * rows_of(weight, head_dim)
    o = o / rows_of(jnp.where(total == 0.0, 1.0, total), head_dim)
    o_smem.transpose((1, 0))[...] = plgpu.layout_cast(
      o.astype(o_smem.dtype), plgpu.Layout.WGMMA_TRANSPOSED
    )
    acc_done = top * LN2
    sums_smem[2] = acc_done
    sums_smem[3] = total
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_smem, o_ref.at[row, pl.ds(jnp.minimum(row, 0), lanes)])
    plgpu.copy_smem_to_gmem(sums_smem.at[pl.ds(2, 2)], out_ref.at[row])
    plgpu.wait_smem_to_gmem(0)

  plgpu.barrier_arrive(read)  # what the first one reads has to stay
  plgpu.barrier_wait(read)


def decode(q, k, v, start, stop, *, tile=64, stages=2, cluster=8):
  batch, heads, groups, head_dim = q.shape
  rows, slots = batch * heads, k.shape[2]
  lanes = -(-groups // ALIGNED) * ALIGNED
  queries = q.reshape(rows, groups, head_dim)
  if groups > ALIGNED:
    queries = jnp.pad(queries, ((0, 0), (0, lanes - groups), (0, 0)))
  start, stop = (jnp.broadcast_to(x, (batch, heads)).reshape(rows) for x in (start, stop))
  tiled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
  smem = functools.partial(plgpu.SMEM, dtype=q.dtype, transforms=tiled)
  of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
  o, sums = plgpu.kernel(
    functools.partial(_kernel, pieces=cluster, scale=head_dim**-0.5 / LN2),
    out_type=[jax.ShapeDtypeStruct((rows, groups, head_dim), q.dtype), of((rows, 2, lanes))],
    scratch_types=[
      smem((lanes, head_dim)),
      smem((stages, tile, head_dim)),
      smem((stages, tile, head_dim)),
      smem((lanes, tile)),
      smem((lanes, head_dim)),
      plgpu.SMEM(
        (head_dim, lanes),
        jnp.float32,
        transforms=(plgpu.TilingTransform((8, 8)), plgpu.SwizzleTransform(32)),
      ),
      plgpu.SMEM((4, lanes), jnp.float32),
      plgpu.Barrier(),
      plgpu.Barrier(num_barriers=stages),
      plgpu.Barrier(num_barriers=stages),
      plgpu.ClusterBarrier(collective_axes=("part",)),
      plgpu.ClusterBarrier(collective_axes=("part",)),
    ],
    grid=(rows,),
    grid_names=("row",),
    cluster=(cluster,),
    cluster_names=("part",),
    compiler_params=plgpu.CompilerParams(
      approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
    ),
  )(queries, *(x.reshape(rows, slots, head_dim) for x in (k, v)), start, stop)
  return o, sums


def run():
  from kvjax.kernels.decode.dense import decode_with_output
  from kvjax.programs.suites import jax_contender
  from kvjax.programs.suites.decode import reference, rotation
  from kvjax.testing.decode_cases import Shape

  SHAPES = [
    (1, 8, 4, 4),
    (1, 8, 2, 4),
    (1, 8, 4, 2),
    (1, 8, 4, 8),
    (1, 8, 4, 32),
    (1, 8, 4, 128),
    (4, 8, 4, 4),
    (8, 8, 4, 1),
    (8, 8, 4, 4),
    (8, 2, 6, 4),
    (8, 2, 6, 16),
    (1, 2, 6, 4),
    (16, 8, 4, 3),
  ]
  for b, kv, g, t in SHAPES:
    shape = Shape(b, kv, g, t << 10)
    copies, calls = rotation(shape)
    inputs = [shape.arrays(seed) for seed in range(copies)]
    want = np.asarray(reference(*inputs[0]), np.float32)
    how = {"calls": min(calls, 16), "loops": 8}
    cs = [jax_contender("triton", decode_with_output, inputs, **how)]
    for cluster, tile, stages in (
      (8, 128, 3),
      (16, 128, 3),
      (16, 64, 4),
      (8, 128, 2),
      (4, 64, 2),
      (4, 128, 3),
      (2, 64, 4),
      (8, 64, 2),
    ):
      f = functools.partial(decode, tile=tile, stages=stages, cluster=cluster)
      try:
        o, _sums = jax.jit(f)(*inputs[0][:5])
        got = np.asarray(o, np.float32).reshape(b, kv, g, 128)
        err = np.linalg.norm(got - want) / np.linalg.norm(want)
        again = jax.jit(f)(*inputs[0][:5])[0]
        print(
          f"  check cluster {cluster} tile {tile} stages {stages}: error {err:.1e}, same bits {bool((np.asarray(again) == np.asarray(o)).all())}",
          flush=True,
        )
        if err < 1e-2:
          cs.append(
            jax_contender(
              f"cluster {cluster}, tile {tile}, stages {stages}", f, [i[:5] for i in inputs], **how
            )
          )
      except Exception as e:
        print("  not run", cluster, tile, stages, str(e).splitlines()[0][:200], flush=True)
    got = {c.name: [] for c in cs}
    for _ in range(7):
      for c in cs:
        got[c.name].append(c.seconds())
    print(f"B{b} T{t}K {kv}x{g}  ({shape.kv_bytes() / 2**20:.0f} MiB)", flush=True)
    for n, s in got.items():
      x = np.percentile(s, [25, 50, 75]) * 1e6
      print(
        f"  {n:32} {x[1]:8.2f} us ({x[0]:.2f} to {x[2]:.2f}) {shape.kv_bytes() / x[1] / 1e6:6.2f} TB/s",
        flush=True,
      )


if __name__ == "__main__":
  run()
