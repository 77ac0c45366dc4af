"""A mixture of experts in place of the MLP (Shazeer et al., 2017): each token's k best of E.

Many tokens, as in a prompt, are sorted by expert and computed in blocks of rows of one expert, one
after the other: beside the result [N, D] a block's rows and one expert's weights are in memory, and
N·k rows are computed plus those that fill each expert's last block.

Few tokens, as in a decode step, gather the weights of their experts on a GPU, where blocks would
wait for their launches (not timed on one yet): N·k·3·D·F elements are read, written as a copy and
read again, at most one copy of the layer's experts. A CPU takes blocks of one row and reads each
weight once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax.models.nn import products
from kvjax.models.nn.config import ModelConfig
from kvjax.models.nn.layers import _init

# Rows of a block: about an expert's share of the tokens, and no more.
BLOCK = 256


class Experts(nnx.Module):
  """Σ over a token's experts e of weight_e · down_e(act(x·gate_e) · (x·up_e)).

  `router` [D, E]; `gate_up` [E, D, 2, F], `down` [E, F, D]; with biases `router_bias` float32 [E],
  `gate_up_bias` [E, 2, F], `down_bias` [E, D].
  """

  def __init__(self, config: ModelConfig, *, dtype: Any, rngs: nnx.Rngs):
    D, F, E = config.dim, config.ffn, config.experts
    self.some, self.norm = config.experts_per_token, config.norm_experts
    self.activation = config.activation
    self.router = _init(rngs, (D, E), D, dtype)
    self.gate_up = _init(rngs, (E, D, 2, F), D, dtype)
    self.down = _init(rngs, (E, F, D), F, dtype)
    if config.mlp_bias:
      self.router_bias = nnx.Param(jnp.zeros(E, jnp.float32))
      self.gate_up_bias = nnx.Param(jnp.zeros((E, 2, F), dtype))
      self.down_bias = nnx.Param(jnp.zeros((E, D), dtype))

  def __call__(
    self, x: Float[Array, "*batch D"], impl: str, axes: tuple[str, ...]
  ) -> Float[Array, "1 *batch D"]:
    """The experts' summand of the residual stream; F is split over these mesh axes."""
    rows = x.reshape(-1, x.shape[-1])
    weight, expert = self.route(rows)
    few = expert.size <= self.router.shape[1] and jax.default_backend() != "cpu"
    y = (self._gathered if few else self._blocks)(rows, weight, expert)
    y = jax.lax.psum(y, axes) if axes else y
    if hasattr(self, "down_bias"):  # once, after the sum over devices
      share = jnp.zeros((len(rows), self.router.shape[1]), x.dtype)
      share = share.at[jnp.arange(len(rows))[:, None], expert].set(weight)
      y = y + share @ self.down_bias[...]
    return y.reshape(1, *x.shape)

  def route(self, x: Float[Array, "N D"]) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
    """Each token's experts, the best first, and their weights."""
    logits = jnp.dot(x, self.router[...], preferred_element_type=jnp.float32)
    if hasattr(self, "router_bias"):
      logits = logits + self.router_bias[...]
    weight, expert = jax.lax.top_k(jax.nn.softmax(logits), self.some)
    if self.norm:
      weight = weight / weight.sum(-1, keepdims=True)
    return weight.astype(x.dtype), expert

  def _gathered(
    self, x: Float[Array, "N D"], weight: Float[Array, "N k"], expert: Int[Array, "N k"]
  ) -> Float[Array, "N D"]:
    """Each token by the gathered weights of its experts."""
    y = jnp.einsum("nd,nkdcf->nkcf", x, self.gate_up[...][expert])
    if hasattr(self, "gate_up_bias"):
      y = y + self.gate_up_bias[...][expert]
    y = products.gated(y[:, :, 0], y[:, :, 1], self.activation)
    return jnp.einsum("nk,nkf,nkfd->nd", weight, y, self.down[...][expert])

  def _blocks(
    self, x: Float[Array, "N D"], weight: Float[Array, "N k"], expert: Int[Array, "N k"]
  ) -> Float[Array, "N D"]:
    """Tokens in blocks of R rows that share an expert, one block at a time."""
    pairs, some, experts = expert.size, expert.shape[1], self.router.shape[1]
    R = min(1 << max(1, pairs // experts).bit_length() - 1, BLOCK)
    order = jnp.argsort(expert.reshape(-1))  # pairs (token, one of its k experts) by expert
    sent = jnp.bincount(expert.reshape(-1), length=experts)
    blocks = -(-sent // R)
    ends = jnp.cumsum(blocks)
    of = expert.reshape(-1)[order]
    rank = jnp.arange(pairs) - (jnp.cumsum(sent) - sent)[of]  # within the expert's pairs
    place = (ends - blocks)[of] * R + rank
    most = (pairs + experts * (R - 1)) // R  # Σ ⌈sent/R⌉ at most
    table = jnp.full(most * R, pairs, jnp.int32).at[place].set(order.astype(jnp.int32))
    weight = weight.reshape(-1)

    def block(out: Array, given: tuple[Array, Array]) -> tuple[Array, None]:
      number, pair = given

      def add() -> Array:
        e = jnp.searchsorted(ends, number, side="right")
        rows = x.at[pair // some].get(mode="fill", fill_value=0)
        y = jnp.einsum("rd,dcf->rcf", rows, self.gate_up[...][e])
        if hasattr(self, "gate_up_bias"):
          y = y + self.gate_up_bias[...][e]
        y = products.gated(y[:, 0], y[:, 1], self.activation) @ self.down[...][e]
        y = y * weight.at[pair].get(mode="fill", fill_value=0)[:, None]
        return out.at[pair // some].add(y, mode="drop")

      return jax.lax.cond(number < ends[-1], add, lambda: out), None

    given = jnp.arange(most), table.reshape(most, R)
    return jax.lax.scan(block, jnp.zeros_like(x), given)[0]
