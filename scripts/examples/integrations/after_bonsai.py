"""A minimal decoder after bonsai's Qwen 3 (jax-ml/bonsai), whose package index entry is empty.

The signatures and names are bonsai's, the code is not: attention is (x, cache, segment_ids,
right_pads) -> out, a cache is a module that attention writes in place, and prompts are padded on
the left, each by its own, and on the right, all alike. Segment ids are 0 where there is padding.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class ModelCfg:
  vocab_size: int
  emb_dim: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int


class LayerCache(nnx.Module):
  """Keys and values [B, S, K, H] of one layer, where rows start, and where the next token goes."""

  def __init__(self, batch_size, cache_size, num_kv_heads, head_dim, dtype):
    shape = (batch_size, cache_size, num_kv_heads, head_dim)
    self.k_cache, self.v_cache = (nnx.Cache(jnp.zeros(shape, dtype)) for _ in range(2))
    self.start_ind = nnx.Variable(jnp.full(batch_size, -1))  # -1: no prompt yet
    self.cur_ind = nnx.Variable(jnp.zeros((), jnp.int32))


def apply_rope(x, positions):
  """x [B, T, N, H], rotated in halves to positions [B, T]."""
  fraction = jnp.arange(x.shape[-1] // 2) / (x.shape[-1] // 2)
  angle = (positions[..., None] / 1e6**fraction)[:, :, None]
  a, b = jnp.split(x, 2, -1)
  return jnp.concatenate(
    [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1
  )


class Attention(nnx.Module):
  def __init__(self, cfg: ModelCfg, *, rngs: nnx.Rngs):
    d, heads, kv_heads, h = cfg.emb_dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    self.q_proj = nnx.LinearGeneral(d, (heads, h), use_bias=False, rngs=rngs)
    self.k_proj = nnx.LinearGeneral(d, (kv_heads, h), use_bias=False, rngs=rngs)
    self.v_proj = nnx.LinearGeneral(d, (kv_heads, h), use_bias=False, rngs=rngs)
    self.o_proj = nnx.LinearGeneral((heads, h), d, axis=(-2, -1), use_bias=False, rngs=rngs)
    self.q_norm, self.k_norm = nnx.RMSNorm(h, rngs=rngs), nnx.RMSNorm(h, rngs=rngs)

  def __call__(self, x, cache: LayerCache, segment_ids, right_pads):
    rows, size = segment_ids.shape
    first = jnp.argmax(segment_ids != 0, -1)
    start = jnp.where(cache.start_ind[...] < 0, first, cache.start_ind[...])  # [B]
    now = cache.cur_ind[...]
    at = now + jnp.arange(size) - start[:, None]  # positions [B, T]
    q = apply_rope(self.q_norm(self.q_proj(x)), at)
    k = apply_rope(self.k_norm(self.k_proj(x)), at)
    for stored, new in ((cache.k_cache, k), (cache.v_cache, self.v_proj(x))):
      stored[...] = jax.lax.dynamic_update_slice(stored[...], new, (0, now, 0, 0))
    cache.start_ind[...], cache.cur_ind[...] = start, now + size - right_pads

    keys, values = cache.k_cache[...], cache.v_cache[...]
    slot = jnp.arange(keys.shape[1]) - start[:, None]  # [B, S]
    seen = (slot >= 0)[:, None] & (slot[:, None] <= at[..., None])  # [B, T, S]
    q = q.reshape(rows, size, keys.shape[2], -1, keys.shape[3])
    weights = jnp.einsum("BTKGH,BSKH->BKGTS", q, keys) * keys.shape[3] ** -0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], weights, -1e30), -1)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", weights, values)
    return self.o_proj(out.reshape(rows, size, -1, keys.shape[3]))


class DecoderLayer(nnx.Module):
  def __init__(self, cfg: ModelCfg, *, rngs: nnx.Rngs):
    self.input_layernorm = nnx.RMSNorm(cfg.emb_dim, rngs=rngs)
    self.attn = Attention(cfg, rngs=rngs)

  def __call__(self, x, cache, segment_ids, right_pads):
    return x + self.attn(self.input_layernorm(x), cache, segment_ids, right_pads)


class Qwen3(nnx.Module):
  def __init__(self, cfg: ModelCfg, *, rngs: nnx.Rngs):
    self.embedder = nnx.Embed(cfg.vocab_size, cfg.emb_dim, rngs=rngs)
    self.layers = nnx.List(DecoderLayer(cfg, rngs=rngs) for _ in range(cfg.num_layers))
    self.final_norm = nnx.RMSNorm(cfg.emb_dim, rngs=rngs)
    self.lm_head = nnx.Linear(cfg.emb_dim, cfg.vocab_size, use_bias=False, rngs=rngs)

  def __call__(self, tokens, segment_ids, right_pads, cache):
    x = self.embedder(tokens)
    for layer, own in zip(self.layers, cache, strict=True):
      x = layer(x, own, segment_ids, right_pads)
    return self.lm_head(self.final_norm(x))
