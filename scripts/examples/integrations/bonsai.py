"""A bonsai model (here a minimal one after it) under any KV cache, a module like its own."""

import jax.numpy as jnp
import tyro
from flax import nnx

import kvjax
from scripts.examples.integrations import after_bonsai, beside

CFG = after_bonsai.ModelCfg(
  vocab_size=beside.VOCAB, emb_dim=32, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16
)


class LayerCache(nnx.Module):
  """A cache of kvjax as bonsai has them: a module that attention writes in place."""

  def __init__(self, cache):
    self.kept = nnx.Cache(cache)


class Attention(nnx.Module):
  """An attention layer of bonsai, its signature and its parameters, over a cache of kvjax."""

  def __init__(self, attn):
    self.attn = attn

  def __call__(self, x, cache, segment_ids, right_pads):
    kept = cache.kept.get_value()
    start = segment_ids.argmax(-1)
    at = kept.cache.seen[:, None] + jnp.arange(x.shape[1]) - start[:, None]
    q = after_bonsai.apply_rope(self.attn.q_norm(self.attn.q_proj(x)), at)
    k = after_bonsai.apply_rope(self.attn.k_norm(self.attn.k_proj(x)), at)
    if x.shape[1] == 1:
      out, kept = kvjax.decode(kept, q, k, self.attn.v_proj(x))
    else:
      lengths = segment_ids.sum(-1)
      out, kept = kvjax.prefill(kept, q, k, self.attn.v_proj(x), lengths, starts=start)
    cache.kept.set_value(kept)
    return self.attn.o_proj(out)


def logits(model, cache, prompt, steps):
  """[B, T + S, V]: of a prompt [B, T], padded with 0 on the left, and of steps [B, S] after it."""
  size, right_pads = prompt.shape[1], 8
  padded = jnp.pad(prompt, ((0, 0), (0, right_pads)))
  outs = [beside.called(model, padded, 1 * (padded != 0), right_pads, cache)[:, :size]]
  for token in jnp.split(steps, steps.shape[1], 1):
    outs.append(beside.called(model, token, jnp.ones_like(token), 0, cache))
  return jnp.concatenate(outs, 1)


def tiny():
  return beside.randomised(after_bonsai.Qwen3(CFG, rngs=nnx.Rngs(0)))


def own(model, prompt, steps):
  sizes = (len(prompt), 40, CFG.num_kv_heads, CFG.head_dim, jnp.float32)
  return logits(model, [after_bonsai.LayerCache(*sizes) for _ in model.layers], prompt, steps)


def kept(model, method, prompt, steps):
  model = nnx.clone(model)
  for layer in model.layers:
    layer.attn = Attention(layer.attn)
  caches = kvjax.empty_caches(
    method,
    batch=len(prompt),
    capacity=40,
    heads=CFG.num_heads,
    kv_heads=CFG.num_kv_heads,
    head_dim=CFG.head_dim,
    layers=CFG.num_layers,
    dtype=jnp.float32,
  )
  return logits(model, [LayerCache(cache) for cache in caches], prompt, steps)


def main() -> None:
  """A minimal model after bonsai under SnapKV, Quest and ART, beside its own cache."""
  beside.report(tiny(), own, kept)


if __name__ == "__main__":
  tyro.cli(main)
