"""The parts of a decoder layer: norm, attention projections, gated MLP.

Every product is one matrix product on a contiguous weight: the reshapes around it are free, and a
fused weight lets XLA run one GEMM where three would each pay their own launch and tail.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kvjax.models.nn import products
from kvjax.models.nn.config import ModelConfig


def _init(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int, dtype: Any) -> nnx.Param:
  return nnx.Param(
    jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(fan_in**-0.5, dtype)
  )


class RMSNorm(nnx.Module):
  """Root-mean-square norm (Zhang and Sennrich, 2019), computed in float32; scale float32 [D]."""

  def __init__(self, dim: int, eps: float):
    self.eps = eps
    self.scale = nnx.Param(jnp.ones(dim, jnp.float32))

  def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    return products.rms_norm(x, self.scale[...], self.eps)

  def after(
    self, x: Float[Array, "*batch D"], parts: Float[Array, "S *batch D"] | None, impl: str
  ) -> tuple[Float[Array, "*batch D"], Float[Array, "*batch D"]]:
    """x + Σ parts, and its norm; None: nothing to add."""
    if parts is None:
      return x, self(x)
    return products.add_norm(x, parts, self.scale[...], self.eps, impl)


class Projections(nnx.Module):
  """Attention's products.

  `wqkv` [D, K, G + 2, H] holds per KV head its G queries, key and value; `wo` is [K, G, H, D].
  Some families add biases `bqkv` [K, G + 2, H] and `bo` [D], or norm each query and key head, or
  give each head a `sinks` logit, float32 [K, G].
  """

  def __init__(self, config: ModelConfig, *, dtype: Any, rngs: nnx.Rngs):
    D, K, G, H = config.dim, config.kv_heads, config.groups, config.head_dim
    self.wqkv = _init(rngs, (D, K, G + 2, H), D, dtype)
    self.wo = _init(rngs, (K, G, H, D), K * G * H, dtype)
    if config.qkv_bias:
      self.bqkv = nnx.Param(jnp.zeros((K, G + 2, H), dtype))
    if config.qk_norm:
      self.q_norm = RMSNorm(H, config.norm_eps)
      self.k_norm = RMSNorm(H, config.norm_eps)
    if config.out_bias:
      self.bo = nnx.Param(jnp.zeros(D, dtype))
    if config.sinks:
      self.sinks = nnx.Param(jnp.zeros((K, G), jnp.float32))

  def qkv(
    self, x: Float[Array, "*batch D"], impl: str
  ) -> tuple[Float[Array, "*batch K G H"], Float[Array, "*batch K H"], Float[Array, "*batch K H"]]:
    """Queries, key and value of each KV head, not yet rotated."""
    w = self.wqkv[...]
    flat, heads = w.reshape(w.shape[0], -1), (*x.shape[:-1], *w.shape[1:])
    bias = self.bqkv[...] if hasattr(self, "bqkv") else None
    norms = (self.q_norm, self.k_norm) if hasattr(self, "q_norm") else None
    parts = products.partial_products(x, flat, impl).reshape(-1, *heads)
    scales = None if norms is None else (norms[0].scale[...], norms[1].scale[...])
    eps = 0.0 if norms is None else norms[0].eps
    y = products.qkv_heads(parts, bias, scales, eps, x.dtype, impl)
    return y[..., :-2, :], y[..., -2, :], y[..., -1, :]

  def qkv_apart(
    self, x: Float[Array, "*batch D"], every: Float[Array, "*other D"]
  ) -> tuple[Float[Array, "*batch K G H"], Float[Array, "*other K H"], Float[Array, "*other K H"]]:
    """Queries of some tokens of a prompt, keys and values of others."""
    q, kv = self._part(x, slice(-2)), self._part(every, slice(-2, None))
    k, v = kv[..., 0, :], kv[..., 1, :]
    if hasattr(self, "q_norm"):
      q, k = self.q_norm(q), self.k_norm(k)
    return q, k, v

  def _part(self, x: Float[Array, "*batch D"], part: slice) -> Float[Array, "*batch K P H"]:
    """x times a part of each KV head's G queries, key and value."""
    w = self.wqkv[...][:, :, part]
    y = (x @ w.reshape(w.shape[0], -1)).reshape(*x.shape[:-1], *w.shape[1:])
    return y + self.bqkv[...][:, part] if hasattr(self, "bqkv") else y

  @property
  def sink_logits(self) -> Float[Array, "K G"] | None:
    """Each head's logit in the denominator of its softmax; None: there is no such."""
    return self.sinks[...] if hasattr(self, "sinks") else None

  def out(
    self, o: Float[Array, "*batch K G H"], impl: str, axes: tuple[str, ...]
  ) -> Float[Array, "S *batch D"]:
    """Attention's part of the residual stream, as summands; heads are split over these axes."""
    x, w = o.reshape(*o.shape[:-3], -1), self.wo[...]
    parts = products.partial_products(x, w.reshape(-1, w.shape[-1]), impl, axes)
    return parts.at[0].add(self.bo[...].astype(parts.dtype)) if hasattr(self, "bo") else parts


class GatedMLP(nnx.Module):
  """down(act(x·gate) · (x·up)) (Shazeer, 2020); `gate_up` [D, 2, F], `down` [F, D]."""

  def __init__(self, config: ModelConfig, *, dtype: Any, rngs: nnx.Rngs):
    D, F = config.dim, config.ffn
    self.activation = config.activation
    self.gate_up = _init(rngs, (D, 2, F), D, dtype)
    self.down = _init(rngs, (F, D), F, dtype)

  def __call__(
    self, x: Float[Array, "*batch D"], impl: str, axes: tuple[str, ...]
  ) -> Float[Array, "S *batch D"]:
    """The MLP's part of the residual stream, as summands; F is split over these mesh axes."""
    y = products.gated_product(x, self.gate_up[...], impl, self.activation)
    return products.partial_products(y, self.down[...], impl, axes)
