"""A minimal decoder after jax-llm-examples' Llama 3 (jax-ml), which is on no package index.

The signatures and names are theirs, the code is not: all is functions over pytrees, heads lead
before tokens, [B, N, T, H], and a cache is a dataclass of lists over layers. Prompts are padded on
the left, each by its own, and on the right, all alike. Segment ids are 0 where there is padding.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.tree_util.register_static)
@dataclasses.dataclass(frozen=True)
class Config:
  embed: int
  q_heads: int
  kv_heads: int
  num_layers: int
  head_dim: int
  vocab_size: int
  rope_theta: float = 500000.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
  q: jax.Array  # [D, N, H]
  k: jax.Array  # [D, K, H]
  v: jax.Array
  o: jax.Array  # [N, H, D]
  attn_pre_gamma: jax.Array  # [D]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Weights:
  layers: list[Layer]
  embedding: jax.Array  # [V, D]
  gamma_final: jax.Array  # [D]
  lm_head: jax.Array  # [D, V]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class KVCache:
  k: list[jax.Array]  # [B, K, S, H] of each layer
  v: list[jax.Array]
  iter: jax.Array  # the slot of the next token
  starts: jax.Array  # [B], padding on the left; -1: no prompt yet

  def fill_len(self):
    return jnp.where(self.starts < 0, 0, self.iter - self.starts)

  def after(self, updates, segment_ids):
    """The cache after all layers have updated theirs."""
    size = (segment_ids * (1 + jnp.arange(segment_ids.shape[1]))).max()
    starts = jnp.where(self.starts < 0, segment_ids.argmax(-1), self.starts)
    k, v = (list(x) for x in zip(*updates, strict=True))
    return KVCache(k, v, self.iter + size, starts)


def apply_rotary_embedding(x, sin, cos):
  a, b = jnp.split(x, 2, -1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def rms_norm(x, gamma):
  return gamma * x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def attention_block(x, segment_ids, layer: Layer, sin, cos, cfg: Config, cache, idx: int):
  q, k, v = (jnp.einsum("btd,dnh->bnth", x, w) for w in (layer.q, layer.k, layer.v))
  q, k = apply_rotary_embedding(q, sin, cos), apply_rotary_embedding(k, sin, cos)
  write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=cache.iter, axis=2)
  k, v = write(cache.k[idx], k), write(cache.v[idx], v)

  starts = jnp.where(cache.starts < 0, segment_ids.argmax(-1), cache.starts)[:, None]
  slot = jnp.arange(k.shape[2]) - starts  # [B, S]
  at = cache.iter + jnp.arange(x.shape[1]) - starts  # [B, T]
  seen = (slot >= 0)[:, None] & (slot[:, None] <= at[..., None])
  q = q.reshape(len(x), cfg.kv_heads, -1, *q.shape[2:])
  weights = jnp.einsum("bkgth,bksh->bkgts", q, k) * cfg.head_dim**-0.5
  weights = jax.nn.softmax(jnp.where(seen[:, None, None], weights, -1e30), -1)
  out = jnp.einsum("bkgts,bksh->bkgth", weights, v).reshape(len(x), cfg.q_heads, -1, cfg.head_dim)
  return jnp.einsum("bnth,nhd->btd", out, layer.o), (k, v)


def forward(x, segment_ids, weights: Weights, cfg: Config, cache, block=attention_block):
  """Logits [B, T, V] of tokens x [B, T], and the cache; `block` is the attention."""
  at = jnp.arange(x.shape[1]) - segment_ids.argmax(-1)[:, None] + cache.fill_len()[:, None]
  angle = at[:, None, :, None] / cfg.rope_theta ** (jnp.arange(0, 1, 2 / cfg.head_dim))
  sin, cos = jnp.sin(angle), jnp.cos(angle)  # [B, 1, T, H / 2]
  x, updates = weights.embedding[x], []
  for idx, layer in enumerate(weights.layers):
    normed = rms_norm(x, layer.attn_pre_gamma)
    out, update = block(normed, segment_ids, layer, sin, cos, cfg, cache, idx)
    x = x + out
    updates.append(update)
  logits = rms_norm(x, weights.gamma_final) @ weights.lm_head
  return logits, cache.after(updates, segment_ids)
