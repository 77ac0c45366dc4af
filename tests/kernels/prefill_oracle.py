"""Prompts for kernels, and attention over them in float64."""

import math

import jax.numpy as jnp
import numpy as np

from kvjax.testing.layer import softmax_average

CLOSE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


def arrays(seed, heads, groups, head_dim, dtype, queries, slots, batch=2):
  rng = np.random.default_rng(seed)
  kv = batch, heads, slots, head_dim
  shapes = (batch, heads, groups, queries, head_dim), kv, kv
  return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def oracle(q, k, v, qpos, pos, first=None, sinks=0, q_sinks=None):
  """o and log-sum-exp of every query, the probabilities' column sums, and the slots seen."""
  wide = [None if x is None else np.array(x, np.float64) for x in (q, k, v, q_sinks)]
  q, k, v, q_sinks = wide
  batch, heads, groups, queries, head_dim = q.shape
  o, lse = np.zeros(q.shape), np.full(q.shape[:-1], -np.inf)
  mass, seen = np.zeros(pos.shape), np.zeros(pos.shape, bool)
  for b, h, t in np.ndindex(batch, heads, queries):
    held = [
      s
      for s, p in enumerate(pos[b, h])
      if 0 <= p <= qpos[b, t] and (first is None or p < sinks or p >= first[b, t])
    ]
    seen[b, h, held] = True
    for g in range(groups) if held else ():
      x = k[b, h, held] @ q[b, h, g, t] / math.sqrt(head_dim)
      if q_sinks is not None:
        turned = k[b, h, held] @ q_sinks[b, h, g, t] / math.sqrt(head_dim)
        x = np.where(pos[b, h, held] < sinks, turned, x)
      o[b, h, g, t] = softmax_average(x, v[b, h, held])
      lse[b, h, g, t] = x.max() + np.log(np.exp(x - x.max()).sum())
      mass[b, h, held] += np.exp(x - lse[b, h, g, t]) / groups
  return o, lse, mass, seen
