"""Operands of dense decode and their oracles: exact in float64, plain in the kernel's dtype."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

# Where the plain reference happens to be exact, rounding of a different order is still allowed.
FLOOR = 2e-6


def visible(start, stop, sinks, slots):
  """The slots of one row."""
  return [s for s in range(slots) if s < stop and (s < sinks or s >= start)]


def oracle(q, k, v, start, stop, sinks, q_sinks):
  """(o, m, l) in float64, one query head at a time."""
  q, k, v, q_sinks = (np.asarray(x, np.float64) for x in (q, k, v, q_sinks))
  start, stop = np.asarray(start), np.asarray(stop)
  o, m, l = np.zeros(q.shape), np.full(q.shape[:3], -np.inf), np.zeros(q.shape[:3])
  for b, h, g in np.ndindex(*q.shape[:3]):
    slots = visible(start[b, h], stop[b, h], sinks, k.shape[2])
    if slots:
      logits = np.array([(q_sinks if s < sinks else q)[b, h, g] @ k[b, h, s] for s in slots])
      logits /= math.sqrt(q.shape[3])
      m[b, h, g] = logits.max()
      p = np.exp(logits - m[b, h, g])
      l[b, h, g] = p.sum()
      o[b, h, g] = p @ v[b, h, slots] / l[b, h, g]
  return o, m, l


def plain(q, k, v, start, stop, sinks, q_sinks):
  """(o, m, l) as a plain low-precision implementation has them: products of the operands' dtype
  summed in float32, probabilities rounded to the dtype before they meet the values.
  """
  seen = np.zeros(k.shape[:3], bool)
  start, stop = np.asarray(start), np.asarray(stop)
  for b, h in np.ndindex(*start.shape):
    seen[b, h, visible(start[b, h], stop[b, h], sinks, k.shape[2])] = True
  return _plain(q, k, v, seen, sinks, q_sinks)


@functools.partial(jax.jit, static_argnames="sinks")
def _plain(q, k, v, seen, sinks, q_sinks):
  k, v = (jnp.where(seen[..., None], x, 0) for x in (k, v))
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, precision="highest")
  of_sink = np.arange(k.shape[2]) < sinks
  x = jnp.where(of_sink, product("bkgh,bksh->bkgs", q_sinks, k), product("bkgh,bksh->bkgs", q, k))
  x = jnp.where(seen[:, :, None], x * q.shape[3] ** -0.5, -jnp.inf)
  m = x.max(-1)
  p = jnp.exp(x - jnp.where(m == -jnp.inf, 0, m)[..., None])
  l = p.sum(-1)
  # Not astype: XLA may leave a rounding out when its result is widened again.
  kind = jnp.finfo(v.dtype)
  p = jax.lax.reduce_precision(p, kind.nexp, kind.nmant)
  o = product("bkgs,bksh->bkgh", p, v.astype(jnp.float32)) / jnp.where(l == 0, 1, l)[..., None]
  return o, m, l


def make(groups, heads, head_dim, slots, dtype, seed=0):
  """Operands with one row of every kind; slots that no row of them may read hold NaN."""
  rng = np.random.default_rng(seed)
  ranges = [(0, slots), (0, 1), (0, 0), (7, 7), (slots - 2, 5), (slots // 3, slots - 1)]
  start, stop = (
    np.broadcast_to(np.array(x, np.int32)[:, None], (len(ranges), heads)).copy()
    for x in zip(*ranges, strict=True)
  )
  # Heads of one row differ too.
  stop[0] = np.maximum(stop[0] - 3 * np.arange(heads), 1)

  def normal(*shape):
    return jnp.asarray(rng.normal(size=(len(ranges), heads, *shape)), dtype)

  q, q_sinks = normal(groups, head_dim), normal(groups, head_dim)
  k, v = normal(slots, head_dim), normal(slots, head_dim)
  return q, k, v, jnp.asarray(start), jnp.asarray(stop), q_sinks


def poison(x, start, stop, sinks):
  """x with NaN in every slot outside the ranges."""
  x, start, stop = np.asarray(x).copy(), np.asarray(start), np.asarray(stop)
  for b, h in np.ndindex(*start.shape):
    outside = np.ones(x.shape[2], bool)
    outside[visible(start[b, h], stop[b, h], sinks, x.shape[2])] = False
    x[b, h, outside] = np.nan
  return jnp.asarray(x)
