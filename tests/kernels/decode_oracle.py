"""Operands of decode attention, floats or codes, and its oracle in NumPy's float64."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.primitives.codes import rounded_query
from kvjax.testing.layer import capped
from tests.kernels.listed import coded

# Where the rough reference happens to be exact, rounding of a different order is still allowed.
FLOOR = 2e-6
_rounded = jax.jit(rounded_query)


class Case(NamedTuple):
  """Queries, keys and values as kernels take them, with `per_slot` and `bits` of codes, and the
  numbers that they stand for.
  """

  arrays: tuple[Any, Any, Any]
  numbers: tuple[np.ndarray, np.ndarray, np.ndarray]
  per_slot: list | None = None
  bits: int = 8

  def kernel(self, run: Callable, read: np.ndarray, **how: Any) -> Callable:
    """Where to attend -> what a kernel makes of it; slots that are not read [B, K, S] hold NaN."""
    (q, k, v), per_slot = self.arrays, self.per_slot
    if per_slot is None:
      k, v = (jnp.where(read[..., None], x, jnp.nan).astype(x.dtype) for x in (k, v))
    else:
      per_slot = [jnp.where(read, x, jnp.nan) for x in per_slot]
    run = jax.jit(functools.partial(run, bits=self.bits, **how))
    return lambda *where, **more: run(q, k, v, *where, per_slot=per_slot, **more)

  def rough(self) -> np.dtype:
    """The dtype of the weights of a plain implementation."""
    dtype = self.arrays[0].dtype
    return dtype if self.per_slot is None or dtype == jnp.float32 else jnp.bfloat16.dtype


def drawn(rng, lead, groups, slots, head_dim, dtype, bits=None) -> Case:
  """Random operands; `lead`: B, K."""
  q = jnp.asarray(rng.normal(size=(*lead, groups, head_dim)), dtype)
  k, v = (rng.normal(size=(*lead, slots, head_dim)).astype(np.float32) for _ in range(2))
  if bits is None:
    arrays = q, jnp.asarray(k, dtype), jnp.asarray(v, dtype)
    return Case(arrays, tuple(np.asarray(x, np.float64) for x in arrays))
  words, per_slot, numbers = coded(k + np.float32(0.3), 3 * v - 1, bits)
  return Case((q, *words), (np.asarray(_rounded(q), np.float64), *numbers), per_slot, bits)


def visible(start, stop, sinks, slots):
  """The slots of one row."""
  return [s for s in range(slots) if s < stop and (s < sinks or s >= start)]


def exact(q, k, v, slots, cap=None, sinks=0, q_sinks=None, weights=np.float64):
  """(o, m, l, logits) in float64 of queries [B, K, G, H] over the slots that slots(b, h) lists.

  The first `sinks` slots are seen by `q_sinks`, if there are any; probabilities are rounded to
  `weights` before they meet the values.
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
    o[b, h] = p.astype(weights).astype(np.float64) @ v[b, h, at] / p.sum(-1, keepdims=True)
  return o, m, l, logits


def read_of(slots, shape):
  """True [B, K, S] in the slots that slots(b, h) lists."""
  read = np.zeros(shape, bool)
  for b, h in np.ndindex(*shape[:2]):
    read[b, h, list(slots(b, h))] = True
  return read


def held_to(made, case, slots, cap=None, **how):
  """State, o in the dtype of q and logits, if there are any, are what the oracle has."""
  state, out, *logits = made
  right = exact(*case.numbers, slots, cap, **how)
  rough = exact(*case.numbers, slots, cap, **how, weights=case.rough())
  found = [state.o, state.m, state.l, *(x for x in logits if x is not None)]
  no_worse(found, right[: len(found)], rough[: len(found)])
  np.testing.assert_array_equal(out, state.o.astype(out.dtype))
  assert out.dtype == case.arrays[0].dtype


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


def ranges(heads, slots):
  """Ranges [6, K] of one row of every kind; heads of the first one differ too."""
  rows = [(0, slots), (0, 1), (0, 0), (7, 7), (slots - 2, 5), (slots // 3, slots - 1)]
  start, stop = np.repeat(np.array(rows, np.int32).T[..., None], heads, 2)
  stop[0] = np.maximum(stop[0] - 3 * np.arange(heads), 1)
  return start, stop
