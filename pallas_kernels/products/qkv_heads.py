"""From partial products to heads: sum of the splits, bias, norm of each query and key head.

Bytes: the partial products, a few hundred KB at most; launches are the cost, and this is one.

Grid: batch rows × KV heads; a program has the G queries, the key and the value of its head.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from kvjax.kernels.common import backend

WARPS = 4


def _kernel(*refs: Any, biased: bool, normed: bool, eps: float) -> None:
  """parts [S, B, K, P, H], (bias [K, P, H],) (q_scale, k_scale [H],) -> qkv [B, K, P, H]."""
  parts_ref, *others = refs[:-1]
  out_ref = refs[-1]
  splits, _, _, count, head_dim = parts_ref.shape
  b, head = pl.program_id(0), pl.program_id(1)
  part = jnp.arange(pl.next_power_of_2(count))[:, None]
  column = jnp.arange(pl.next_power_of_2(head_dim))[None, :]
  mask = (part < count) & (column < head_dim)
  x = jnp.zeros(mask.shape, jnp.float32)
  for s in range(splits):
    x += backend.load(parts_ref, s, b, head, part, column, mask=mask).astype(jnp.float32)
  if biased:
    x += backend.load(others[0], head, part, column, mask=mask).astype(jnp.float32)
  if normed:
    q_scale, k_scale = (
      backend.load(ref, column, mask=column < head_dim).astype(jnp.float32) for ref in others[-2:]
    )
    y = x * lax.rsqrt((x * x).sum(axis=1) / head_dim + eps)[:, None]
    y *= jnp.where(part < count - 2, q_scale, k_scale)
    x = jnp.where(part < count - 1, y, x)  # values are not normed
  backend.store(out_ref, b, head, part, column, value=x.astype(out_ref.dtype), mask=mask)


def qkv_heads(
  parts: Float[Array, "S B K G2 H"],
  bias: Float[Array, "K G2 H"] | None = None,
  q_scale: Float[Array, " H"] | None = None,
  k_scale: Float[Array, " H"] | None = None,
  *,
  eps: float = 1e-6,
  dtype: Any,
  interpret: bool | None = None,
) -> Float[Array, "B K G2 H"]:
  """Σ parts + bias, with an RMS norm over every query and key head where scales are given.

  Args:
    parts: per KV head its G queries, key and value, in any number of summands.
    bias: added to them.
    q_scale, k_scale: factors of the norms; both or none.
    eps: added to the mean square.
    dtype: of the result.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.
  """
  if (q_scale is None) != (k_scale is None):
    raise ValueError("k_scale: found one of q_scale and k_scale, expected both or none")
  given = [x for x in (bias, q_scale, k_scale) if x is not None]
  return backend.call(
    functools.partial(_kernel, biased=bias is not None, normed=q_scale is not None, eps=eps),
    parts,
    *given,
    grid=parts.shape[1:3],
    out=[jax.ShapeDtypeStruct(parts.shape[1:], dtype)],
    warps=WARPS,
    stages=1,
    name="qkv_heads",
    interpret=interpret,
  )[0]
