"""Your own Flax attention layer over any KV cache: hand it queries, keys and values."""

import jax
import jax.numpy as jnp
from flax import nnx

import kvjax

N, K, H, D = 4, 1, 8, 32  # query heads, key/value heads, head size, width


class Attention(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.q = nnx.LinearGeneral(D, (N, H), rngs=rngs)
    self.k, self.v = (nnx.LinearGeneral(D, (K, H), rngs=rngs) for _ in range(2))
    self.out = nnx.LinearGeneral((N, H), D, axis=(-2, -1), rngs=rngs)

  def prompt(self, x, lengths, cache):  # x [B, T, D], right-padded
    o, cache = kvjax.prefill(cache, self.q(x), self.k(x), self.v(x), lengths)
    return self.out(o), cache

  def step(self, x, cache):  # x [B, D]
    o, cache = kvjax.decode(cache, self.q(x), self.k(x), self.v(x))
    return self.out(o), cache


if __name__ == "__main__":
  x = jax.random.normal(jax.random.key(0), (2, 9, D))
  rows, lengths = jnp.arange(2), jnp.array([9, 5])
  sizes = {"batch": 2, "capacity": 16, "heads": N, "kv_heads": K, "head_dim": H}
  method = kvjax.StreamingLLM(6, sinks=2)
  (cache,) = kvjax.empty_caches(method, **sizes, rope=kvjax.Rope(), dtype=jnp.float32)
  layer = Attention(nnx.Rngs(0))
  whole, _ = jax.jit(layer.prompt)(x, lengths, cache)
  _, cache = jax.jit(layer.prompt)(x, lengths - 1, cache)
  last, cache = jax.jit(layer.step)(x[rows, lengths - 1], cache)
  error = abs(last - whole[rows, lengths - 1]).max()
  print(f"a token decoded and read in a prompt: {error:.0e} apart; {cache.cache.used} tokens kept")
