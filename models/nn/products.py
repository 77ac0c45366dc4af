"""The decoder's matrix products and what stands between them, by rows and device.

A prompt's products are XLA's. A decode step has few rows: on a GPU its products are kernels that
read a weight once and leave their result where the next one wants it. `partial_products` leaves
the sum over its splits to `add_norm` or `qkv_heads`, which follow it anyway; XLA's has one.

`impl` is as in `kvjax.Env`; "auto" takes the kernels for 16-bit dtypes, "pallas" for all.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.ops import table

table.declare("product", pallas="kvjax.kernels.products.product:product")
table.declare("partial_products", pallas="kvjax.kernels.products.product:partial_products")
table.declare("gated_product", pallas="kvjax.kernels.products.product:gated_product")
table.declare("add_norm", pallas="kvjax.kernels.products.add_norm:add_norm")
table.declare("qkv_heads", pallas="kvjax.kernels.products.qkv_heads:qkv_heads")

# More rows than this are XLA's even in a decode step.
ROWS = 16


def kernel(operation: str, batch: tuple[int, ...], dtype: Any, impl: str) -> Any:
  """The kernel of an operation on activations of these leading sizes, or None: XLA's."""
  if len(batch) != 1 or batch[0] > ROWS or table.choose(operation, impl) != "pallas":
    return None
  if impl == "auto" and jnp.dtype(dtype).itemsize != 2:
    return None
  return table.kernel(operation, "pallas")


def partial_products(
  x: Float[Array, "*batch D"], w: Float[Array, "D F"], impl: str, axes: tuple[str, ...] = ()
) -> Float[Array, "S *batch F"]:
  """Arrays whose sum over S is x @ w.

  With mesh axes, over whose devices D is split, they are one: the all-reduce needs the sum itself.
  """
  name = "product" if axes else "partial_products"
  run = kernel(name, x.shape[:-1], x.dtype, impl)
  y = run(x, w) if run else _product(x, w)
  if axes:
    return jax.lax.psum(y, axes)[None]
  return y if run else y[None]


def gated_product(
  x: Float[Array, "*batch D"], w: Float[Array, "D 2 F"], impl: str, activation: str = "silu"
) -> Float[Array, "*batch F"]:
  """act(x @ w[:, 0]) · (x @ w[:, 1]); the kernel's act is silu, others are XLA's."""
  run = kernel("gated_product", x.shape[:-1], x.dtype, impl) if activation == "silu" else None
  if run:
    return run(x, w)
  y = _product(x, w.reshape(w.shape[0], -1))
  return gated(y[..., : w.shape[2]], y[..., w.shape[2] :], activation)


def gated(
  gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"], activation: str
) -> Float[Array, "*batch F"]:
  """The two halves of a gated MLP as one, for each of `config.ACTIVATIONS`."""
  match activation:
    case "silu":
      return jax.nn.silu(gate) * up  # SwiGLU (Shazeer, 2020)
    case "gelu_tanh":
      return jax.nn.gelu(gate, approximate=True) * up  # GEGLU, with GELU's tanh form (Gemma)
    case "clipped":  # gpt-oss: g·σ(1.702·g)·(u + 1), g at most 7, u in [−7, 7]
      gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
      return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
  raise ValueError(f"activation: found {activation!r}, expected silu, gelu_tanh or clipped")


def _product(x: Float[Array, "*batch D"], w: Float[Array, "D F"]) -> Float[Array, "*batch F"]:
  """x @ w by XLA. A lone row is doubled where it would make an elementwise product and a sum of it,
  which on an H200 happened at 8.4 M elements, at half the speed, and not at 12.6 M.
  """
  if x.size != x.shape[-1] or w.size > 10_000_000:
    return x @ w
  return (jnp.pad(x.reshape(1, -1), ((0, 1), (0, 0))) @ w)[0].reshape(*x.shape[:-1], -1)


def rms_norm(
  x: Float[Array, "*batch D"], scale: Float[Array, " D"], eps: float
) -> Float[Array, "*batch D"]:
  """Root-mean-square norm (Zhang and Sennrich, 2019), computed in float32."""
  y = x.astype(jnp.float32)
  y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
  return (y * scale).astype(x.dtype)


def add_norm(
  x: Float[Array, "*batch D"],
  parts: Float[Array, "S *batch D"],
  scale: Float[Array, " D"],
  eps: float,
  impl: str,
) -> tuple[Float[Array, "*batch D"], Float[Array, "*batch D"]]:
  """x + Σ parts, and its RMS norm."""
  if run := kernel("add_norm", x.shape[:-1], x.dtype, impl):
    return run(x, parts, scale, eps)
  x = x + parts.sum(0).astype(x.dtype)
  return x, rms_norm(x, scale, eps)


def qkv_heads(
  parts: Float[Array, "S *batch K G2 H"],
  bias: Float[Array, "K G2 H"] | None,
  scales: tuple[Float[Array, " H"], Float[Array, " H"]] | None,
  eps: float,
  dtype: Any,
  impl: str,
) -> Float[Array, "*batch K G2 H"]:
  """Σ parts + bias; with scales an RMS norm over every query and key head (not over values)."""
  if run := kernel("qkv_heads", parts.shape[1:-3], dtype, impl):
    return run(parts, bias, *(scales or (None, None)), eps=eps, dtype=dtype)
  y = parts.sum(0).astype(dtype)
  y = y if bias is None else y + bias
  if scales is None:
    return y
  q, k, v = y[..., :-2, :], y[..., -2:-1, :], y[..., -1:, :]
  q_scale, k_scale = scales
  return jnp.concatenate([rms_norm(q, q_scale, eps), rms_norm(k, k_scale, eps), v], -2)
