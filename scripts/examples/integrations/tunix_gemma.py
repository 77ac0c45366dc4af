"""Gemma 3 of google-tunix under any KV cache: its attention is wrapped, all else stays its own."""

import jax.numpy as jnp
import tyro
from flax import nnx
from tunix.generate import utils
from tunix.models.gemma3 import model as gemma3

import kvjax
from scripts.examples.integrations import beside


class Attention(nnx.Module):
  """An attention layer of tunix, its signature and its parameters, over a cache of kvjax."""

  def __init__(self, attn: gemma3.Attention):
    self.attn = attn

  def __call__(self, x, segment_pos, cache, attn_mask):
    a = self.attn
    q, k, v = a.qkv_einsum(x) if a.use_qkv_einsum else (a.q_einsum(x), *a.kv_einsum(x))
    turn = {"base_frequency": a.rope_base_frequency, "scale_factor": a.rope_scale_factor}
    q = gemma3.apply_rope(a._query_norm(q), segment_pos, head_dim=a.head_dim, **turn)
    k = gemma3.apply_rope(a._key_norm(k), segment_pos, head_dim=a.head_dim, **turn)
    if x.shape[1] == 1:
      out, cache = kvjax.decode(cache, q, k, v)
    else:  # the prompt's last query sees all tokens of its row, and no padding
      seen = attn_mask[:, x.shape[1] - 1]
      out, cache = kvjax.prefill(cache, q, k, v, seen.sum(-1), starts=seen.argmax(-1))
    return cache, a.attn_vec_einsum(out)


class Kept(nnx.Module):
  """A model of tunix under a method, for text; tunix's `Sampler` asks it for its caches."""

  def __init__(self, model: gemma3.Gemma3, method: kvjax.Method):
    self.model, self.method = nnx.clone(model), method
    for layer in self.model.layers:
      layer.attn = Attention(layer.attn)

  def init_cache(self, batch_size, cache_size, dtype):
    layers = [layer.attn.attn for layer in self.model.layers]
    local = gemma3.AttentionType.LOCAL_SLIDING
    caches = kvjax.empty_caches(
      self.method,
      batch=batch_size,
      capacity=cache_size,
      heads=layers[0].num_heads,
      kv_heads=layers[0].num_kv_heads,
      head_dim=layers[0].head_dim,
      layers=len(layers),
      windows=[a.sliding_window_size if a.attn_type == local else None for a in layers],
      scale=layers[0].query_pre_attn_scalar,
      dtype=dtype,
    )
    return {f"layer_{i}": cache for i, cache in enumerate(caches)}

  @property
  def num_embed(self):
    return self.model.num_embed

  def __call__(self, last_tokens, positions, cache, attention_mask):
    return self.model(last_tokens, positions, cache, attention_mask)


# ---- a tiny model, its own full cache, and calls of it as the sampler makes them


def tiny(kv_heads=2, layers=6) -> gemma3.Gemma3:
  """Five layers with a window and one without, six query heads, a scale of its own."""
  scale = gemma3.QueryPreAttentionNormalisation.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS
  config = gemma3.ModelConfig(
    num_layers=layers,
    num_embed=beside.VOCAB,
    embed_dim=48,
    hidden_dim=64,
    num_heads=6,
    num_kv_heads=kv_heads,
    head_dim=16,
    sliding_window_size=8,
    query_pre_attn_norm=scale,
    param_dtype=jnp.float32,
  )
  return beside.randomised(gemma3.Gemma3(config, rngs=nnx.Rngs(0)))


def logits(model, cache, prompt, steps):
  """[B, T + S, V]: of a prompt [B, T], padded with 0 on the left, and of steps [B, S] after it."""
  size, whole = prompt.shape[1], prompt.shape[1] + steps.shape[1]
  mask = jnp.pad(prompt != 0, ((0, 0), (0, steps.shape[1])), constant_values=True)
  positions = utils.build_positions_from_mask(mask)
  visible = utils.make_causal_attn_mask(mask[:, :size], whole)
  out, cache = beside.called(model, prompt, positions[:, :size], cache, visible)
  outs = [out]
  for i in range(size, whole):
    visible = utils.compute_attention_masks(i, whole, ~mask)
    token = steps[:, i - size, None]
    out, cache = beside.called(model, token, positions[:, i, None], cache, visible)
    outs.append(out)
  return jnp.concatenate(outs, 1)


def own(model, prompt, steps):
  attn, rows = model.layers[0].attn, len(prompt)
  shape = (rows, prompt.shape[1] + steps.shape[1], attn.num_kv_heads, attn.head_dim)
  arrays = {"k": jnp.zeros(shape), "v": jnp.zeros(shape), "end_index": jnp.zeros(rows, int)}
  return logits(model, {f"layer_{i}": arrays for i in range(model.num_layers)}, prompt, steps)


def kept(model, method, prompt, steps):
  model = Kept(model, method)
  cache = model.init_cache(len(prompt), prompt.shape[1] + steps.shape[1], jnp.float32)
  return logits(model, cache, prompt, steps)


def main() -> None:
  """Gemma 3 of google-tunix under SnapKV, Quest and ART, beside its own cache."""
  beside.report(tiny(), own, kept)


if __name__ == "__main__":
  tyro.cli(main)
