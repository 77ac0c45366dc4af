"""jax-llm-examples (here a minimal model after it) under any KV cache, a pytree like its own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import kvjax
from scripts.examples.integrations import after_jax_llm_examples as llama
from scripts.examples.integrations import beside

CFG = llama.Config(
  embed=32, q_heads=6, kv_heads=2, num_layers=2, head_dim=16, vocab_size=beside.VOCAB
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class KVCache:
  """A cache of kvjax for each layer, as forward() of jax-llm-examples asks for one."""

  layers: list[kvjax.LayerCache]

  def fill_len(self):
    return self.layers[0].cache.seen

  def after(self, updates, segment_ids):
    return KVCache(updates)


def attention_block(x, segment_ids, layer, sin, cos, cfg, cache, idx):
  q, k, v = (jnp.einsum("btd,dnh->bnth", x, w) for w in (layer.q, layer.k, layer.v))
  q, k = (llama.apply_rotary_embedding(each, sin, cos) for each in (q, k))
  q, k, v = (each.swapaxes(1, 2) for each in (q, k, v))  # to [B, T, N, H]
  if x.shape[1] == 1:
    out, update = kvjax.decode(cache.layers[idx], q, k, v)
  else:
    starts, lengths = segment_ids.argmax(-1), segment_ids.sum(-1)
    out, update = kvjax.prefill(cache.layers[idx], q, k, v, lengths, starts=starts)
  return jnp.einsum("btnh,nhd->btd", out, layer.o), update


def logits(weights, cache, prompt, steps, block=llama.attention_block):
  """[B, T + S, V]: of a prompt [B, T], padded with 0 on the left, and of steps [B, S] after it."""
  forward = jax.jit(functools.partial(llama.forward, cfg=CFG, block=block), donate_argnames="cache")
  padded = jnp.pad(prompt, ((0, 0), (0, 8)))
  out, cache = forward(padded, 1 * (padded != 0), weights, cache=cache)
  outs = [out[:, : prompt.shape[1]]]
  for token in jnp.split(steps, steps.shape[1], 1):
    out, cache = forward(token, jnp.ones_like(token), weights, cache=cache)
    outs.append(out)
  return jnp.concatenate(outs, 1)


def tiny():
  d, h = CFG.embed, CFG.head_dim
  wide, narrow = (d, CFG.q_heads, h), (d, CFG.kv_heads, h)
  one = llama.Layer(wide, narrow, narrow, (CFG.q_heads, h, d), (d,))
  shapes = llama.Weights([one] * CFG.num_layers, (CFG.vocab_size, d), (d,), (d, CFG.vocab_size))
  draw = np.random.default_rng(1)

  def drawn(shape):
    return jnp.asarray(0.2 * draw.normal(size=shape), jnp.float32)

  return jax.tree.map(drawn, shapes, is_leaf=lambda x: isinstance(x, tuple))


def own(weights, prompt, steps):
  k, v = (
    [jnp.zeros((len(prompt), CFG.kv_heads, 40, CFG.head_dim)) for _ in weights.layers] for _ in "kv"
  )
  cache = llama.KVCache(k, v, jnp.zeros((), jnp.int32), jnp.full(len(prompt), -1))
  return logits(weights, cache, prompt, steps)


def kept(weights, method, prompt, steps):
  caches = kvjax.empty_caches(
    method,
    batch=len(prompt),
    capacity=40,
    heads=CFG.q_heads,
    kv_heads=CFG.kv_heads,
    head_dim=CFG.head_dim,
    layers=CFG.num_layers,
    dtype=jnp.float32,
  )
  return logits(weights, KVCache([*caches]), prompt, steps, attention_block)


def main() -> None:
  """A minimal model after jax-llm-examples under SnapKV, Quest and ART, beside its own cache."""
  beside.report(tiny(), own, kept)


if __name__ == "__main__":
  tyro.cli(main)
