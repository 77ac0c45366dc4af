"""The softmax state is a commutative monoid, and merging disjoint sets is attention over both."""

import chex
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvjax.primitives import softmax_state as plain
from kvjax.primitives.softmax_state import empty
from tests.compiled import of

softmax_state = of(plain)


def test_worked_example():
  """Logits ln 1 and ln 3 over values 0 and 4: weights ¼ and ¾, output 3."""
  state = softmax_state.of_logits(jnp.log(jnp.array([[[1.0, 3.0]]])), jnp.array([[[[0.0], [4.0]]]]))
  np.testing.assert_allclose(state.o, [[[3.0]]], rtol=1e-6)
  np.testing.assert_allclose(state.m, [[np.log(3)]], rtol=1e-6)
  np.testing.assert_allclose(state.l, [[4 / 3]], rtol=1e-6)
  np.testing.assert_allclose(state.lse, [[np.log(4)]], rtol=1e-6)


def _state(rng, keys, scale=3.0):
  logits = rng.normal(size=(2, 1, 3, keys)) * scale
  logits = np.where(rng.random(logits.shape) < 0.2, -np.inf, logits)
  v = rng.normal(size=(2, 1, keys, 4))
  return np.float32(logits), np.float32(v)


# Of few shapes, since each has programs of its own.
KEYS_AND_CUTS = [(1, 0), (2, 1), (9, 0), (9, 4), (9, 8)]


@given(st.integers(0, 2**31), st.sampled_from(KEYS_AND_CUTS), st.sampled_from([1.0, 40.0]))
def test_merge_of_parts_is_the_whole(seed, sizes, scale):
  keys, cut = sizes
  logits, v = _state(np.random.default_rng(seed), keys, scale)
  parts = [(logits[..., :cut], v[:, :, :cut]), (logits[..., cut:], v[:, :, cut:])]
  none = empty((2, 1, 3), 4)
  states = [softmax_state.of_logits(*p) if p[0].shape[-1] else none for p in parts]
  whole = softmax_state.of_logits(logits, v)
  for a, b in (states, states[::-1]):
    merged = softmax_state.merge(a, b)
    np.testing.assert_array_equal(merged.m, whole.m)
    np.testing.assert_allclose(merged.l, whole.l, rtol=2e-6)
    np.testing.assert_allclose(merged.o, whole.o, atol=5e-6)


def test_identity_and_no_nan():
  logits, v = _state(np.random.default_rng(0), 5)
  state, none = softmax_state.of_logits(logits, v), empty((2, 1, 3), 4)
  chex.assert_trees_all_close(softmax_state.merge(state, none), state, rtol=1e-6)
  chex.assert_trees_all_equal(softmax_state.merge(none, none), none)
  masked = softmax_state.of_logits(np.full((2, 1, 3, 5), -np.inf, np.float32), v)
  chex.assert_trees_all_equal(masked, none)


def test_probabilities_sum_to_one():
  logits, v = _state(np.random.default_rng(2), 6)
  p = softmax_state.probabilities(softmax_state.of_logits(logits, v), logits)
  seen = np.isfinite(logits).any(-1)
  np.testing.assert_allclose(p.sum(-1), np.float32(seen), rtol=1e-6)
