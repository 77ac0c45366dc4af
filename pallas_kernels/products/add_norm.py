"""The end of one product and the start of the next: residual sum and RMS norm, in one launch.

Bytes: a row of activations and its partial sums, a few hundred KB at most; launches are the cost.

Grid: one program per batch row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from kvjax.kernels.common import backend

WARPS = 16


def _kernel(
  x_ref: Any, parts_ref: Any, scale_ref: Any, sum_ref: Any, y_ref: Any, *, eps: float
) -> None:
  """x [B, D], parts [S, B, D], scale [D] -> x + Σ parts, and its norm, [B, D]."""
  splits, _, dim = parts_ref.shape
  b = pl.program_id(0)
  column = jnp.arange(pl.next_power_of_2(dim))
  mask = column < dim
  x = backend.load(x_ref, b, column, mask=mask).astype(jnp.float32)
  scale = backend.load(scale_ref, column, mask=mask).astype(jnp.float32)
  added = jnp.zeros_like(x)
  for s in range(splits):
    added += backend.load(parts_ref, s, b, column, mask=mask).astype(jnp.float32)
  x = (x + added).astype(x_ref.dtype)
  backend.store(sum_ref, b, column, value=x, mask=mask)
  x = x.astype(jnp.float32)
  y = x * lax.rsqrt((x * x).sum() / dim + eps) * scale
  backend.store(y_ref, b, column, value=y.astype(y_ref.dtype), mask=mask)


def add_norm(
  x: Float[Array, "B D"],
  parts: Float[Array, "S B D"],
  scale: Float[Array, " D"],
  eps: float,
  *,
  interpret: bool | None = None,
) -> tuple[Float[Array, "B D"], Float[Array, "B D"]]:
  """x + Σ parts in the dtype of x, and its RMS norm times `scale`, computed in float32.

  Args:
    x: the residual stream.
    parts: what is to be added to it, in any number of pieces.
    scale: factor of every column.
    eps: added to the mean square.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.
  """
  out = jax.ShapeDtypeStruct(x.shape, x.dtype)
  summed, y = backend.call(
    functools.partial(_kernel, eps=eps),
    x,
    parts,
    scale,
    grid=(x.shape[0],),
    out=[out, out],
    warps=WARPS,
    stages=1,
    name="add_norm",
    interpret=interpret,
  )
  return summed, y
