"""Scores of pages and keys from the kernels, against the references of the methods.

On a GPU the same tests run the compiled kernels.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheSpec, Env, InfLLMv2, Quest, Rope, TopKOracle
from kvjax.families import sight
from kvjax.kernels.selection import key_weights as weights
from kvjax.kernels.selection.key_weights import key_logits, key_weights
from kvjax.kernels.selection.page_bounds import page_bounds
from kvjax.methods.prr.forecast import Smoothed
from kvjax.ops import scores
from kvjax.ops.extremes import coded
from scripts.benches._layer import holding

SHAPES = [
  (2, 3, 3, 300, 24, "float32"),
  (1, 2, 4, 1000, 64, "bfloat16"),
  (1, 2, 1, 90, 64, "float32"),
]
CLOSE = {"float32": 1e-4, "bfloat16": 1e-2}


def setting(method, shape, seen):
  """Where a method's reference runs, its cache of `seen` tokens, and queries."""
  batch, heads, groups, slots, head_dim, dtype = shape
  spec = CacheSpec(batch, slots, heads, groups, head_dim, 4, jnp.dtype(dtype))
  q = 2 * jax.random.normal(jax.random.key(1), (batch, heads, groups, head_dim), dtype)
  cache = jax.tree.map(jnp.copy, holding(method, spec, seen))
  return method.at(Env(4, Rope(), impl="reference"), 3), cache, q


def bounds(cache):
  """start, stop [B, 1] of a cache."""
  return jnp.zeros_like(cache.used)[:, None], cache.used[:, None]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", ["mean", "max"])
def test_page_bounds(shape, group):
  seen = shape[3] // 2
  at, cache, q = setting(Quest(64, group=group, dense_layers=0), shape, seen)
  a, b = (jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(cache.heads.values()))
  low, high = (f(a, b).astype(shape[-1]) for f in (jnp.minimum, jnp.maximum))
  cache = cache.put(heads={"key_min": low, "key_max": high})
  want = jax.jit(lambda cache, q: at.top.score(at, cache, q, sight.visible(at, cache)))(cache, q)
  held = jnp.arange(low.shape[2]) * 16 < seen
  low, high = (jnp.where(held[:, None], x, jnp.nan).astype(x.dtype) for x in (low, high))
  run = functools.partial(page_bounds, unit=16, group=group)
  start, stop = bounds(cache)
  got = jax.jit(run)(q, low, high, start, stop)
  np.testing.assert_allclose(got[..., held], want[..., held], atol=1e-5, rtol=1e-5)
  # A span that begins within the third page, and has some first tokens: of both pages a part.
  held &= jnp.arange(low.shape[2]) != 1
  low, high = (jnp.where(held[:, None], x, jnp.nan).astype(x.dtype) for x in (low, high))
  got = jax.jit(functools.partial(run, span_sinks=3))(q, low, high, start + 37, stop)
  np.testing.assert_allclose(got[..., held], want[..., held], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", ["mean", "max"])
def test_page_bounds_of_codes(shape, group):
  """One page has keys that are not finite."""
  at, cache, q = setting(Quest(64, group=group, extremes="int8", dense_layers=0), shape, shape[3])
  a, b = (jax.random.normal(jax.random.key(i), cache.heads["key_min"].shape) for i in range(2))
  codes = jax.jit(coded)(jnp.minimum(a, b).at[0, 1, 3, 5].set(jnp.nan), jnp.maximum(a, b))
  cache = cache.put(heads=dict(zip(("key_min", "key_max", "key_exponent"), codes, strict=True)))
  want = jax.jit(lambda cache, q: at.top.score(at, cache, q, sight.visible(at, cache)))(cache, q)
  assert np.argwhere(np.isnan(want)).tolist() == [[0, 1, 3]]
  low, high, exponent = codes
  run = functools.partial(page_bounds, unit=16, group=group)
  got = jax.jit(run)(q, low, high, *bounds(cache), exponent)
  np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_compressed_keys(shape):
  method = InfLLMv2(top=4, block=16, local=32, kernel=8, stride=4, dense_below=0)
  for seen in (shape[3], shape[3] // 2, 3):
    at, cache, q = setting(method, shape, seen)
    keys = jax.random.normal(jax.random.key(2), cache.heads["compressed"].shape, shape[-1])
    held = cache.put(heads={"compressed": keys})
    want = method.score(at, held, q, sight.visible(at, held))
    start, stop = bounds(cache)
    how = {"newest": 1, "stride": 4, "width": 8, "block": 16}
    run = functools.partial(key_weights, blocks=want.shape[2], programs=7, **how)
    got = jax.jit(run)(q, keys, start, stop, stop)
    np.testing.assert_allclose(got, want, atol=1e-6, rtol=CLOSE[shape[-1]])


@pytest.mark.core(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_token_weights(shape):
  """ln of probabilities; a NaN stays where it is; heads that are not active cost nothing."""
  at, cache, q = setting(TopKOracle(32), shape, shape[3] - 7)
  k = cache.slots["k"].at[0, 0, 5].set(jnp.nan)
  cache = cache.put(slots={"k": k})
  reference = functools.partial(scores.token_weights, at)
  want = jax.jit(lambda cache, q: reference(cache, sight.visible(at, cache), q))(cache, q)
  run = functools.partial(key_weights, blocks=k.shape[2], log=True)
  start, stop = bounds(cache)
  active = np.ones(k.shape[:2], np.int32)
  active[0, 1] = 0
  got = jax.jit(run)(q, k, start, stop, stop, active=active)
  got, want = (np.asarray(x)[active > 0] for x in (got, want))
  np.testing.assert_allclose(got, want, atol=CLOSE[shape[-1]])


@pytest.mark.slow
def test_a_program_may_weigh_several_times(monkeypatch):
  at, cache, q = setting(TopKOracle(32), SHAPES[1], 977)
  monkeypatch.setattr(weights, "MOST", 128)
  assert weights._cut_blocks(2, 1000, 2) == (128, 3)
  k, (start, stop) = cache.slots["k"], bounds(cache)
  got = key_weights(q, k, start, stop, stop, blocks=1000, log=True, programs=2)
  want = scores.token_weights(at, cache, sight.visible(at, cache), q)
  np.testing.assert_allclose(got, want, atol=CLOSE["bfloat16"])


@pytest.mark.slow
def test_forecasts_of_keys():
  """Of more blocks than a program has; the second row begins a block, and its last one is new."""
  rng, unit = np.random.default_rng(0), 4
  q, k = (jnp.asarray(rng.normal(size=(2, 2, n, 16)), jnp.float32) for n in (3, 600))
  old = Smoothed(*(jnp.asarray(rng.normal(size=(2, 2, 150)), jnp.float32) for _ in range(2)))
  factors, stop = jnp.asarray(rng.uniform(size=(2, 3)), jnp.float32), jnp.array([598, 33])
  start, known = jnp.zeros((2, 1), jnp.int32), stop[:, None]
  partial = key_logits(q, k, start, known, known)
  both, stops, level, trend = weights.forecasts(
    partial, stop, 150, old.level, old.trend, factors, stride=1, width=1, unit=unit
  )
  logits = jnp.where(jnp.arange(600) < known[:, None, None], jnp.log(2) * partial[0], -jnp.inf)
  score = jax.nn.softmax(logits, -1).sum(2).reshape(2, 2, 150, unit).max(-1)
  alpha, beta, gamma = factors.T[:, :, None, None]
  tile, full = jnp.arange(150), ((stop[:, None, None] - n) // unit for n in (2, 1))
  begun, there = (tile < n for n in full)
  new = old.updated(score, alpha, beta, begun, there)
  ahead = jnp.where(there, new.forecast(gamma), jnp.inf)
  seen = jnp.broadcast_to(tile * unit < known[:, None], score.shape)
  np.testing.assert_allclose(both[:, :, 0][seen], score[seen], atol=1e-6)
  for got, want in ((both[:, :, 1], ahead), (level, new.level), (trend, new.trend)):
    np.testing.assert_allclose(got, want, atol=1e-5)
  np.testing.assert_array_equal(stops[:, 1], known + jnp.arange(2))


@pytest.mark.core(1)
@pytest.mark.parametrize(
  "method",
  [
    Quest(64, page=16, dense_layers=0),
    Quest(64, page=5, dense_layers=0),
    Quest(64, page=5, extremes="int8", dense_layers=0),
    InfLLMv2(top=4, block=16, local=32, kernel=8, stride=4, dense_below=0),
  ],
)
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_summaries_of_the_newest_token(method, shape):
  """Wherever it stands; other summaries, and those of empty rows, stay as they are."""
  at, cache, _ = setting(method, shape, 0)
  kernels = method.at(Env(4, Rope(), impl="pallas"), 3)
  held = {
    n: (9 * jax.random.normal(jax.random.key(3), x.shape)).astype(x.dtype)
    for n, x in cache.heads.items()
  }
  want, got = (jax.jit(functools.partial(method._renewed, where)) for where in (at, kernels))
  for seen in (0, 1, 5, 8, 12, 16, 17, 80, shape[3] - 1, shape[3]):
    counted = {n: jnp.full(shape[0], seen, jnp.int32) for n in ("seen", "used")}
    now = cache.put(heads=held, rows=counted)
    for name, x in want(now).heads.items():
      found, x = np.float32(got(now).heads[name]), np.float32(x)
      np.testing.assert_allclose(found, x, atol=1e-6, rtol=CLOSE[shape[-1]])
