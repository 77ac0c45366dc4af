"""Operands of dense decode and their oracles: exact in float64, plain in the kernel's dtype."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.testing.layer import capped

# Where the plain reference happens to be exact, rounding of a different order is still allowed.
FLOOR = 2e-6


def visible(start, stop, sinks, slots):
  """The slots of one row."""
  return [s for s in range(slots) if s < stop and (s < sinks or s >= start)]


def exact(q, k, v, slots, cap=None, sinks=0, q_sinks=None):
  """(o, m, l, logits) in float64 of queries [B, K, G, H] over the slots that slots(b, h) lists.

  The first `sinks` slots are seen by `q_sinks`, if there are any.
  """
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  o, m, l = np.zeros(q.shape), np.full(q.shape[:3], -np.inf), np.zeros(q.shape[:3])
  logits = np.full((*q.shape[:3], k.shape[2]), -np.inf)
  for b, h in np.ndindex(*q.shape[:2]):
    if not len(at := np.array(slots(b, h), int)):
      continue
    x = q[b, h] @ k[b, h, at].T
    if q_sinks is not None:
      x = np.where(at < sinks, np.asarray(q_sinks[b, h], np.float64) @ k[b, h, at].T, x)
    x = capped(x / math.sqrt(q.shape[3]), cap)
    logits[b, h][:, at], m[b, h] = x, x.max(-1)
    p = np.exp(x - x.max(-1, keepdims=True))
    l[b, h] = p.sum(-1)
    o[b, h] = p @ v[b, h, at] / p.sum(-1, keepdims=True)
  return o, m, l, logits


def oracle(q, k, v, start, stop, sinks, q_sinks):
  """(o, m, l) of spans."""
  start, stop = np.asarray(start), np.asarray(stop)

  def slots(b, h):
    return visible(start[b, h], stop[b, h], sinks, k.shape[2])

  return exact(q, k, v, slots, sinks=sinks, q_sinks=q_sinks)[:3]


def no_worse(made, right, rough):
  """Errors of arrays are at most twice those of a rough implementation; −∞ stands in its places."""
  for i, (got, want, other) in enumerate(zip(made, right, rough, strict=True)):
    empty = np.isneginf(want)
    np.testing.assert_array_equal(np.isneginf(got), empty, err_msg=str(i))
    got, want, other = (np.where(empty, 0, np.asarray(x, np.float64)) for x in (got, want, other))
    allowed = 2 * np.abs(other - want).max() + FLOOR * np.abs(want).max(initial=1)
    assert np.abs(got - want).max() <= allowed, i


def same_bits(first, second):
  for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
    np.testing.assert_array_equal(np.float64(a), np.float64(b))


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


def ranges(heads, slots):
  """Ranges [6, K] of one row of every kind; heads of the first one differ too."""
  rows = [(0, slots), (0, 1), (0, 0), (7, 7), (slots - 2, 5), (slots // 3, slots - 1)]
  start, stop = np.repeat(np.array(rows, np.int32).T[..., None], heads, 2)
  stop[0] = np.maximum(stop[0] - 3 * np.arange(heads), 1)
  return start, stop


def make(groups, heads, head_dim, slots, dtype, seed=0):
  """Operands with one row of every kind; slots that no row of them may read hold NaN."""
  rng = np.random.default_rng(seed)
  start, stop = ranges(heads, slots)

  def normal(*shape):
    return jnp.asarray(rng.normal(size=(len(start), heads, *shape)), dtype)

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
