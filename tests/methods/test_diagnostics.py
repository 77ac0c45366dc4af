"""Diagnostics: exact changes against naive loops, and bounds that hold on whatever is tried."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.analysis import diagnostics
from tests.activations import activations


def naive_output(q, k, v):
  s = np.array([q @ key / np.sqrt(len(q)) for key in k])
  w = np.exp(s - s.max()) if len(s) else s
  return (w[:, None] * v).sum(0) / w.sum() if len(s) else np.zeros(v.shape[1])


def naive_changes(q, k, v):
  """Δo_i by computing attention once more without each token."""
  whole, n = naive_output(q, k, v), len(k)
  return np.array(
    [whole - naive_output(q, np.delete(k, i, 0), np.delete(v, i, 0)) for i in range(n)]
  )


def call(function, *args, dtype=np.float32, **kwargs):
  arrays = (x if x.dtype == bool else jnp.asarray(x, dtype) for x in map(np.asarray, args))
  return np.asarray(jax.jit(functools.partial(function, **kwargs))(*arrays))


@jax.jit
def everything(q, q_next, k, v):
  """All diagnostics of two steps."""
  both = {"tight": True, "loose": False}
  return {
    "change": diagnostics.eviction_change(q_next, k, v),
    "part": diagnostics.contribution(q, k, v),
    "part_next": diagnostics.contribution(q_next, k, v),
    "weight": diagnostics.weights(q, k),
    "weight_next": diagnostics.weights(q_next, k),
    "remainder": {n: diagnostics.remainder_bound(q_next, k, v, tight=x) for n, x in both.items()},
    "drift": diagnostics.logit_drift(q, q_next, k),
    "drift_bound": diagnostics.logit_drift_bound(q, q_next, k),
    "error": diagnostics.score_error(q, q_next, k, v),
    "bound": {n: diagnostics.score_error_bound(q, q_next, k, v, tight=x) for n, x in both.items()},
  }


def test_worked_example():
  """Two tokens of weight ½, values (4, 0) and (0, 2): without one, (2, 1) becomes the other's."""
  q, k, v = np.zeros(2), np.ones((2, 2)), np.array([[4.0, 0], [0, 2]])
  np.testing.assert_allclose(call(diagnostics.eviction_change, q, k, v), [[2, -1], [-2, 1]])
  np.testing.assert_allclose(call(diagnostics.contribution, q, k, v), [[2, 0], [0, 1]])
  np.testing.assert_allclose(call(diagnostics.remainder_bound, q, k, v), [8, 8])  # 2·4·½ / ½
  np.testing.assert_allclose(call(diagnostics.remainder_bound, q, k, v, tight=True), [2, 2])
  np.testing.assert_allclose(
    call(diagnostics.logit_drift, q, q + [3, 1], k), 4 / np.sqrt(2), rtol=1e-6
  )
  np.testing.assert_allclose(
    call(diagnostics.logit_drift_bound, q, q + [3, 1], k), np.sqrt(10), rtol=1e-6
  )


def test_changes_against_naive_loops():
  """Grouped queries over a cache with empty slots that hold NaN."""
  rng = np.random.default_rng(0)
  q, k, v = (rng.normal(size=s) * 2 for s in ((2, 3, 4, 8), (2, 3, 11, 8), (2, 3, 11, 8)))
  held = rng.random((2, 3, 11)) < 0.7
  k[~held], v[~held] = np.nan, np.nan
  with jax.enable_x64(True):
    change, part = (
      call(f, q, k[:, :, None], v[:, :, None], held[:, :, None], dtype=np.float64)
      for f in (diagnostics.eviction_change, diagnostics.contribution)
    )
  assert change.shape == part.shape == (2, 3, 4, 11, 8)
  for b, h, g in np.ndindex(2, 3, 4):
    ok = held[b, h]
    want = naive_changes(q[b, h, g], k[b, h, ok], v[b, h, ok])
    np.testing.assert_allclose(change[b, h, g, ok], want, atol=1e-12)
    assert (change[b, h, g, ~ok] == 0).all() and (part[b, h, g, ~ok] == 0).all()
    np.testing.assert_allclose(
      part[b, h, g].sum(0), naive_output(q[b, h, g], k[b, h, ok], v[b, h, ok])
    )


def test_a_token_that_has_nearly_all_weight():
  """1 − α close to the rounding of α: the change is exact, in float32 too."""
  q, k = np.array([22.0, 0]), np.array([[1.0, 0], [0, 0], [-0.1, 0]])
  v = np.array([[1.0, 2], [3, 4], [5, 6]])
  want = naive_changes(np.float64(q), k, v)
  got = call(diagnostics.eviction_change, q, k, v)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  alone = call(diagnostics.eviction_change, q, k[:1], v[:1])
  np.testing.assert_allclose(alone, v[:1])
  assert np.isinf(call(diagnostics.remainder_bound, q, k[:1], v[:1]))


def check_bounds(q, q_next, k, v):
  """Every inequality of Eqs. 7 to 15, at every token, in float64."""
  with jax.enable_x64(True):
    got = jax.tree.map(np.asarray, everything(*(jnp.asarray(x) for x in (q, q_next, k, v))))
  # A logit of size s is known to s·ε only, and so is a weight, relatively.
  largest = np.abs(k).max() * max(np.abs(q).max(), np.abs(q_next).max())
  rounding = 1e-14 * (1 + q.shape[-1] * largest)
  slack = 10 * rounding * (1 + np.linalg.norm(v, axis=-1).max()) ** 2

  def at_most(small, large, slack):
    assert (small <= large * (1 + 1e-9) + slack).all()

  remainder = np.linalg.norm(got["change"] - got["part_next"], axis=-1)
  at_most(remainder, got["remainder"]["tight"], slack)  # Eq. 12
  at_most(got["remainder"]["tight"], got["remainder"]["loose"], 0)  # Eq. 13

  s, s_next = (np.einsum("...h,...sh->...s", x, k) / q.shape[-1] ** 0.5 for x in (q, q_next))
  np.testing.assert_allclose(got["drift"], np.abs(s_next - s).max(-1), rtol=1e-9, atol=rounding)
  moved = np.abs(got["weight_next"] - got["weight"])
  at_most(moved, got["drift"][..., None], 10 * rounding)  # Eqs. 9, 14
  at_most(got["drift"], got["drift_bound"], 0)  # Eqs. 10, 15

  error = np.abs((got["change"] ** 2).sum(-1) - (got["part"] ** 2).sum(-1))
  np.testing.assert_allclose(got["error"], error, rtol=1e-9, atol=slack)  # Eq. 7
  for bound in got["bound"].values():
    at_most(error, bound, slack)  # Eqs. 8, 11


scales = st.integers(-6, 4).map(lambda e: 10.0**e)


@pytest.mark.slow
@settings(max_examples=100)
@given(st.integers(0, 2**31), st.sampled_from([1, 2, 5, 12]), scales, scales, scales, scales)
def test_bounds_hold(seed, tokens, q_scale, k_scale, v_scale, drift):
  """Logits from 1e-12 to 1e8, queries that hardly move or are others, like and zero keys."""
  rng = np.random.default_rng(seed)
  q, q_next = rng.normal(size=(2, 3, 6)) * q_scale
  if rng.random() < 0.7:
    q_next = q + drift * rng.normal(size=q.shape)
  k = rng.normal(size=(tokens, 6)) * k_scale
  v = rng.normal(size=(tokens, 6)) * v_scale * 10.0 ** rng.integers(-3, 3, (tokens, 1))
  k[rng.random(tokens) < 0.2] = k[0]
  k[rng.random(tokens) < 0.1] = 0
  v[rng.random(tokens) < 0.1] = 0
  check_bounds(q, q_next, k, v)


def test_the_drift_bound_is_reached():
  """A query that moves along the longest key, and one that only grows: no cosine sees it."""
  k = np.array([[3.0, 4], [1, 0]])
  q = np.array([0.3, 0.4])
  for q_next in (q + 2 * k[0], q * 7):
    drift = call(diagnostics.logit_drift, q, q_next, k)
    bound = call(diagnostics.logit_drift_bound, q, q_next, k)
    np.testing.assert_allclose(bound, drift, rtol=1e-6)
    assert drift > 1
  cosine = q @ (q * 7) / np.linalg.norm(q) / np.linalg.norm(q * 7)
  np.testing.assert_allclose(np.sqrt(2 * max(0, 1 - cosine)), 0, atol=1e-7)  # the paper's factor


@pytest.mark.slow
def test_bounds_hold_on_real_activations(smollm2):
  """Neighbouring queries of every layer and head of SmolLM2 over a speech, the same keys."""
  q, k, v = map(np.float64, activations(smollm2, 2))
  check_bounds(q[..., 0, :], q[..., 1, :], k[:, :, None, :-1], v[:, :, None, :-1])
