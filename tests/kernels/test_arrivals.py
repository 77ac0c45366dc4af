"""Rows that their last program finishes, launch after launch: whoever comes last, the same bits.

The interpreter runs programs in one order; on a GPU any order comes up in so many launches.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kvjax.kernels.config import Config
from kvjax.kernels.decode import decode_joined, decode_with_output
from kvjax.kernels.select import best_pages

ON_GPU = jax.default_backend() == "gpu"
TOKENS, LAUNCHES = (16384, 2000) if ON_GPU else (300, 3)


def differing(run, arrivals, factor):
  """Launches, of many over different operands before each, whose results are not the first's."""

  def turn(i, carry):
    arrivals, wrong = carry
    _, arrivals = run(factor + i, arrivals)  # other values in the memory that partial results take
    made, arrivals = run(factor, arrivals)
    same = [(a == b).all() for a, b in zip(made, first, strict=True)]
    return arrivals, wrong + 1 - jnp.stack(same).all().astype(jnp.int32)

  first, arrivals = run(factor, arrivals)
  arrivals, wrong = lax.fori_loop(1, LAUNCHES, turn, (arrivals, jnp.int32(0)))
  return first, arrivals, wrong


def setting(count, head_dim):
  """Random arrays [2, 3, ...], two of them of `count`, ranges of all, and counters."""
  keys = jax.random.split(jax.random.key(0), 3)
  q = jax.random.normal(keys[0], (2, 3, 4, head_dim))
  a, b = (jax.random.normal(key, (2, 3, count, head_dim)) for key in keys[1:])
  return q, a, b, jnp.zeros((2, 3), jnp.int32)


@pytest.mark.slow
def test_splits_joined_again_and_again():
  q, k, v, arrivals = setting(TOKENS, 64)
  start, stop = jnp.zeros((2, 3), jnp.int32), jnp.full((2, 3), TOKENS - 7, jnp.int32)
  cut = Config(tile=32, programs=264, warps=8, stages=2)

  def run(factor, arrivals):
    state, rounded, _, arrivals = decode_joined(q * factor, k, v, start, stop, arrivals, config=cut)
    return (state.o, state.m, state.l, rounded), arrivals

  (o, *_), arrivals, wrong = jax.jit(functools.partial(differing, run))(arrivals, jnp.float32(1))
  assert wrong == 0 and not arrivals.any()
  want = decode_with_output(q, k, v, start, stop, config=cut)[0].o
  np.testing.assert_allclose(o, want, atol=2e-6)


@pytest.mark.slow
def test_pages_selected_again_and_again():
  q, a, b, arrivals = setting(TOKENS // 4, 64)
  low, high = jnp.minimum(a, b), jnp.maximum(a, b)
  stop = jnp.full((2, 1), TOKENS * 4 - 5, jnp.int32)

  def run(factor, arrivals):
    how = {"unit": 16, "sinks": 1, "local": 2, "k": 40}
    return best_pages(q * factor, low, high, stop * 0, stop, arrivals, **how)

  (table, count, _), arrivals, wrong = jax.jit(functools.partial(differing, run))(
    arrivals, jnp.float32(1)
  )
  assert wrong == 0 and not arrivals.any()
  assert (count == 43).all() and all(len(set(row)) == 43 for row in table.reshape(6, -1).tolist())
