"""Your own Flax attention layer over any KV cache: hand it queries, keys and values."""

import jax
import jax.numpy as jnp
from flax import nnx

import kvjax

K, G, H, D = 1, 4, 8, 32  # key/value heads, query heads of each, head size, width


class Attention(nnx.Module):
  def __init__(self, method: kvjax.Method, rngs: nnx.Rngs):
    self.at = method.at(kvjax.Env(layers=1, rope=kvjax.Rope()), layer=0)
    self.qkv = nnx.LinearGeneral(D, (K, G + 2, H), rngs=rngs)
    self.out = nnx.LinearGeneral((K, G, H), D, axis=(-3, -2, -1), rngs=rngs)

  def prompt(self, x, lengths, cache):  # x [B, T, D], right-padded
    qkv = jnp.moveaxis(self.qkv(x), 1, 3)  # [B, K, G + 2, T, H], which the method rotates
    qkv = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
    prompt = kvjax.Prompt(lengths, lengths, index=None, tokens=x.shape[1], past=0)
    o, cache, *_ = self.at.top.prefill(self.at, cache, *qkv, prompt, kvjax.Carry())
    return self.out(jnp.moveaxis(o, 3, 1)), cache

  def step(self, x, cache):  # x [B, D]
    qkv, live = self.qkv(x), jnp.ones(x.shape[0], bool)
    qkv = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
    o, cache, *_ = self.at.top.decode_step(self.at, cache, *qkv, live, kvjax.Carry())
    return self.out(o), cache


if __name__ == "__main__":
  method, x = kvjax.StreamingLLM(6, sinks=2), jax.random.normal(jax.random.key(0), (2, 9, D))
  layer, rows, lengths = Attention(method, nnx.Rngs(0)), jnp.arange(2), jnp.array([9, 5])
  (cache,) = method.init_caches(kvjax.CacheSpec(2, 16, K, G, H, layers=1, dtype=jnp.float32))
  whole, _ = jax.jit(layer.prompt)(x, lengths, cache)
  _, cache = jax.jit(layer.prompt)(x, lengths - 1, cache)
  last, cache = jax.jit(layer.step)(x[rows, lengths - 1], cache)
  error = abs(last - whole[rows, lengths - 1]).max()
  print(f"a token decoded and read in a prompt: {error:.0e} apart; {cache.used} tokens kept")
