"""One attention layer under a method, fed with given q, k, v: what oracles are compared with."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Carry, Env, Prompt
from kvjax.families.method import Method
from kvjax.ops import offload
from kvjax.primitives.rope import Rope


@dataclasses.dataclass(frozen=True)
class Stream:
  """Projections of whole sequences, not rotated: q [B, K, G, T, H], k and v [B, K, T, H]."""

  q: np.ndarray
  k: np.ndarray
  v: np.ndarray

  @classmethod
  def random(cls, seed, batch=2, kv_heads=3, groups=3, tokens=40, head_dim=16):
    """Normal numbers of a seed, queries half as large again as keys."""
    rng = np.random.default_rng(seed)
    kv = (batch, kv_heads, tokens, head_dim)
    q = rng.normal(size=(batch, kv_heads, groups, tokens, head_dim))
    arrays = (q * 1.5, rng.normal(size=kv), rng.normal(size=kv))
    return cls(*(x.astype(np.float32) for x in arrays))

  def poisoned(self, which, row, token):
    """A copy in which one token's q, k or v is NaN."""
    x = getattr(self, which).copy()
    x[row, ..., token, :] = np.nan
    return dataclasses.replace(self, **{which: x})

  def spec(self, capacity, layers=4, dtype=jnp.float32):
    """The sizes of caches with room for `capacity` of its tokens."""
    batch, kv_heads, groups, _, head_dim = self.q.shape
    return CacheSpec(batch, capacity, kv_heads, groups, head_dim, layers, dtype)


@functools.cache
def driver(at: At, move: str) -> Any:
  """`at.top.decode_step` or `prefill`, jitted: one program for all layers that are alike.

  Returns the error, if there can be one (`env.check_nan`), and the driver's result.
  """

  def run(*args: Any) -> Any:
    return offload.settled(getattr(at.top, move)(at, *args))

  return jax.jit(checkify.checkify(run) if at.env.check_nan else lambda *args: (None, run(*args)))


class Layer:
  """Runs one layer of a method, jitted, row by row at its own positions."""

  def __init__(
    self,
    method: Method,
    stream: Stream,
    capacity: int = 64,
    layer: int = 1,
    env: Env | None = None,
  ):
    self.method, self.stream = method, stream
    env = env or Env(4, Rope(), impl="reference", tile=4)
    self.spec = stream.spec(capacity, env.layers)
    self.at = method.at(env, layer)
    self.cache = Cache.empty(method, self.spec, layer)
    self.wo = None
    if method.traits.weighs_outputs:  # an output projection of its own
      shape = *stream.q.shape[1:3], stream.q.shape[-1], 24
      self.wo = np.random.default_rng(7).normal(size=shape).astype(np.float32)
    self._decode, self._prefill = driver(self.at, "decode_step"), driver(self.at, "prefill")

  def prefill(self, valid, start=None, tokens=None, past=0, total=None):
    """A chunk of each row: stream tokens start … start + valid. Returns out [B, K, G, T, H].

    `total` is the length of each row's turn; None: the chunk is the end of the first one.
    """
    valid = np.asarray(valid, np.int32)
    start = np.zeros_like(valid) if start is None else np.asarray(start, np.int32)
    tokens = int(valid.max()) if tokens is None else tokens
    index = np.minimum(start[:, None] + np.arange(tokens), self.stream.k.shape[2] - 1)
    cut = [
      np.take_along_axis(x, index.reshape(len(valid), *(1,) * (x.ndim - 3), tokens, 1), -2)
      for x in (self.stream.q, self.stream.k, self.stream.v)
    ]
    total = np.asarray(start + valid if total is None else total, np.int32)
    prompt = Prompt(jnp.asarray(valid), jnp.asarray(total), None, tokens, past)
    if self.wo is not None:
      prompt = dataclasses.replace(prompt, wo=jnp.asarray(self.wo))
    error, (out, self.cache, _, _) = self._prefill(self.cache, *cut, prompt, Carry())
    if error is not None:
      error.throw()
    return np.asarray(out)

  def decode(self, at, live=None):
    """Stream token at[b] of each row. Returns out [B, K, G, H] and the diagnostics."""
    rows = range(len(at))
    q, k, v = (
      np.stack([x[b][..., at[b], :] for b in rows])
      for x in (self.stream.q, self.stream.k, self.stream.v)
    )
    live = jnp.ones(len(at), bool) if live is None else jnp.asarray(live)
    error, (out, self.cache, _, aux) = self._decode(self.cache, q, k, v, live, Carry())
    if error is not None:
      error.throw()
    return np.asarray(out), aux


@functools.lru_cache(maxsize=4096)
def _turn(pos, half, theta):
  """cos and sin of a position's angles, or of several positions'."""
  angle = np.array(pos)[..., None] * theta ** (-np.arange(half) / half)
  return np.cos(angle), np.sin(angle)


def rotate(x, pos, theta=10000.0):
  """Rotated vectors [..., H] in float64 (half-split), at `pos` or each at its own; for oracles."""
  x = np.asarray(x, np.float64)
  half = x.shape[-1] // 2
  cos, sin = _turn(tuple(pos) if np.ndim(pos) else pos, half, theta)
  a, b = x[..., :half], x[..., half:]
  return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def capped(logits, cap):
  """NumPy float64 c·tanh(x/c) under a soft cap c; None: x itself."""
  return np.asarray(logits) if cap is None else cap * np.tanh(np.asarray(logits) / cap)


def softmax_average(logits, values):
  """NumPy float64 Σ softmax(logits)·values."""
  w = np.exp(logits - np.max(logits))
  return (w[:, None] * values).sum(0) / w.sum()
