"""Scoring and choosing tiles in one launch: against NumPy, and index by index against two launches.

On a GPU the same tests run the compiled kernels, on rows as long as those of long contexts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Carry, InfLLMv2, Quest, sight
from kvjax.kernels import _sieve, key_weights, quest, select, top_k
from tests.kernels.test_score_kernels import SHAPES, setting

ON_GPU = jax.default_backend() == "gpu"
LONG = 8192 if ON_GPU else 600


def pages(seed, batch, heads, groups, count, head_dim, kind, dtype="float32"):
  """q, low, high. "ties": few values, exact in any order; "one": those of one page tower above."""
  rng = np.random.default_rng(seed)
  q = rng.normal(size=(batch, heads, groups, head_dim))
  a, b = rng.normal(size=(2, batch, heads, count, head_dim))
  if kind == "ties":
    q, a, b = (np.sign(np.round(x)) for x in (q, a, b))
  if kind == "one":
    a[:, :, count // 2 : count // 2 + 20] *= 30
  low, high = np.minimum(a, b), np.maximum(a, b)
  return [jnp.asarray(x, dtype) for x in (q, low, high)]


def ranges(count, unit):
  """start, stop of three rows: all tiles, a window that begins late, and none."""
  stop = np.array([[count * unit], [count * unit // 2 + 1], [0]], np.int32)
  return jnp.asarray(stop // 3), jnp.asarray(stop)


def oracle(score, start, stop, *, unit, span_sinks, sinks, local, k, limit, dense_below):
  """The list of one row: sinks, newest tiles, the best others with ties to the lowest, by index."""
  newest = -(-stop // unit) - 1

  def seen(p):
    return p * unit < stop and (p * unit < span_sinks or (p + 1) * unit > start)

  forced = [p for p in range(min(sinks, newest + 1)) if seen(p)]
  forced += [p for p in range(newest, max(newest - local, sinks - 1), -1) if p >= 0 and seen(p)]
  free = [p for p in range(sinks, newest - local + 1) if seen(p)]
  best = sorted(free, key=lambda p: (-score[p], p))[: k if stop < dense_below else limit]
  return forced + sorted(best)


CASES = [
  (50, 4, 1, 2, 5),
  (33, 16, 0, 1, 0),
  (300, 1, 4, 5, 64),
  (513, 3, 0, 0, 100),
  (7, 1, 9, 9, 3),
]


@pytest.mark.core(2)
@pytest.mark.parametrize(("count", "unit", "sinks", "local", "k"), CASES)
@pytest.mark.parametrize("groups", [1, 3])
def test_pages_equal_oracle(count, unit, sinks, local, k, groups):
  """Quarters of integers, whose sums are exact: full of ties, at the bound as well."""
  arrays = pages(count, 3, 2, groups, count, 16, "ties")
  start, stop = ranges(count, unit)
  rows = {"k": k, "limit": k // 2, "dense_below": count * unit * 3 // 4}
  chosen = {"span_sinks": 2 * unit, "sinks": sinks, "local": local, **rows}
  run = jax.jit(functools.partial(select.best_pages, unit=unit, group="max", **chosen))
  (table, number, ranked), arrivals = run(*arrays, start, stop, jnp.zeros((3, 2), jnp.int32))
  np.testing.assert_array_equal(arrivals, 0)
  q, low, high = (np.asarray(x, np.float64) for x in arrays)
  q = q[:, :, :, None]
  score = np.maximum(q * low[:, :, None], q * high[:, :, None]).sum(-1).max(2) / 4
  for b, h in np.ndindex(3, 2):
    want = oracle(score[b, h], int(start[b, 0]), int(stop[b, 0]), unit=unit, **chosen)
    assert number[b, h] == len(want)
    assert table[b, h].tolist() == want + [-1] * (table.shape[2] - len(want))
    free = np.isfinite(ranked[b, h])
    np.testing.assert_array_equal(ranked[b, h][free], score[b, h][np.asarray(table)[b, h][free]])


@pytest.mark.core(2)
@pytest.mark.parametrize("kind", ["normal", "ties", "one"])
@pytest.mark.parametrize("group", ["mean", "max"])
@pytest.mark.parametrize(("count", "k"), [(LONG, 63), (LONG, 127), (4 * LONG, 63), (90, 64)])
def test_pages_equal_two_launches(count, k, group, kind):
  """Index by index, and bit by bit in a second run that is handed the counters of the first."""
  dtype = "bfloat16" if ON_GPU else "float32"
  q, low, high = pages(k, 3, 2, 4, count, 24, kind, dtype)
  low = low.at[0, 1, 5::7].set(jnp.nan)  # chosen first
  start, stop = ranges(count, 16)
  chosen = {"span_sinks": 32, "sinks": 1, "local": 2, "k": k}
  score = jax.jit(functools.partial(quest.page_bounds, unit=16, span_sinks=32, group=group))
  best = jax.jit(functools.partial(top_k.best, unit=16, ordered=False, **chosen))
  want = best(score(q, low, high, start, stop), start, stop)
  run = jax.jit(functools.partial(select.best_pages, unit=16, group=group, **chosen))
  first, arrivals = run(q, low, high, start, stop, jnp.zeros((3, 2), jnp.int32))
  again, arrivals = run(q, low, high, start, stop, arrivals)
  np.testing.assert_array_equal(arrivals, 0)
  for a, b, c in zip(first, want, again, strict=True):
    np.testing.assert_array_equal(a, c)
    if a.dtype == jnp.int32:
      np.testing.assert_array_equal(a, b)
    else:
      np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.core(1)
@pytest.mark.parametrize(
  ("count", "k", "groups"), [(39, 5, 5), (399, 40, 4), (4 * LONG - 1, 60, 3)]
)
def test_blocks_equal_two_launches(count, k, groups):
  blocks, (keys, q) = -(-count // 2), jax.random.split(jax.random.key(k))
  keys = jax.random.normal(keys, (2, 3, count, 24))
  q = 2 * jax.random.normal(q, (2, 3, groups, 24))
  stop = jnp.array([[count * 4 + 4], [count * 2 + 3]], jnp.int32)
  start, arrivals = stop // 9, jnp.zeros((2, 3), jnp.int32)
  rows = {"k": k, "limit": k // 2, "dense_below": count * 3}
  chosen, how = {"span_sinks": 8, "sinks": 1, "local": 2, **rows}, {"stride": 4, "width": 8}
  how |= {"blocks": blocks, "newest": 1}
  weigh = jax.jit(functools.partial(key_weights.key_weights, block=8, span_sinks=8, **how))
  best = jax.jit(functools.partial(top_k.best, unit=8, ordered=False, **chosen))
  want = best(weigh(q, keys, start, stop, stop), start, stop)
  run = jax.jit(functools.partial(select.best_blocks, unit=8, **how, **chosen))
  first, arrivals = run(q, keys, start, stop, stop, arrivals)
  again, arrivals = run(q, keys, start, stop, stop, arrivals)
  np.testing.assert_array_equal(arrivals, 0)
  for a, b, c in zip(first, want, again, strict=True):
    np.testing.assert_array_equal(a, c)
    if a.dtype == jnp.int32:
      np.testing.assert_array_equal(a, b)
    else:
      np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
  "method", [Quest(64, group="max"), InfLLMv2(top=4, block=16, local=32, kernel=8, stride=4)]
)
def test_a_plan_is_the_reference_s(method, shape):
  """Of two layers, the second with the counters of the first: the same tiles and scores."""
  method = dataclasses.replace(method, dense_layers=0)
  if isinstance(method, InfLLMv2):
    method = dataclasses.replace(method, dense_below=200)
  at, cache, q = setting(method, shape, shape[3] - 7)
  held = {
    name: jax.random.normal(jax.random.key(i), x.shape).astype(x.dtype)
    for i, (name, x) in enumerate(cache.heads.items())
  }
  cache, visible = cache.put(heads=held), sight.visible(at, cache)
  want, _ = method.plan(at, cache, q, visible, Carry())
  env = dataclasses.replace(at.env, impl="pallas", fused=True)
  at, carry = method.at(env, 3), Carry()
  for _ in range(2):
    got, carry = method.plan(at, cache, q, visible, carry)
    assert set(carry.heads) == {"arrivals"} and not carry.heads["arrivals"].any()
    np.testing.assert_array_equal(got.count, want.count)
    for b, h in np.ndindex(*want.count.shape):
      count = int(want.count[b, h])
      order = np.argsort(want.table[b, h, :count]), np.argsort(got.table[b, h, :count])
      for x, y in ((want.table, got.table), (want.scores, got.scores)):
        x, y = (np.asarray(z)[b, h, :count][i] for z, i in zip((x, y), order, strict=True))
        np.testing.assert_allclose(y, x, rtol=1e-2 if "bfloat16" in shape else 1e-5)


def test_what_is_not_made_in_one_launch():
  """Unasked for, unmeasured under "auto", and where the order of the list matters."""
  at, cache, q = setting(Quest(64, dense_layers=0), SHAPES[0], 100)
  visible = sight.visible(at, cache)
  ordered = dataclasses.replace(visible, needs=dataclasses.replace(visible.needs, order=True))

  def made(visible, **env):
    env = dataclasses.replace(at.env, **env)
    return at.top._select_scored(at.top.at(env, 3), cache, q, visible, Carry())

  assert made(visible, impl="pallas", fused=True)
  assert made(visible, impl="pallas") is None
  assert made(visible, impl="auto", fused=True) is None
  assert made(visible, impl="reference", fused=True) is None
  assert made(ordered, impl="pallas", fused=True) is None


@dataclasses.dataclass(frozen=True)
class Backwards(Quest):
  """Scores of its own, which no kernel makes."""

  def score(self, at, cache, q, visible):
    return -super().score(at, cache, q, visible)


def test_a_score_of_its_own_is_heard():
  at, cache, q = setting(Backwards(64, dense_layers=0), SHAPES[0], 100)
  env = dataclasses.replace(at.env, impl="pallas", fused=True)
  assert (
    at.top._select_scored(at.top.at(env, 3), cache, q, sight.visible(at, cache), Carry()) is None
  )


def test_few_tiles_are_looked_at():
  sieve = _sieve.Sieve.of
  assert sieve(8192, 63, 32) == _sieve.Sieve(8192, 8, 128)
  assert sieve(32768, 63, 32) == _sieve.Sieve(32768, 16, 128)
  assert sieve(131072, 432, 32) is None


def test_more_than_a_program_looks_at():
  q, low, high = pages(0, 1, 1, 1, 20_000, 2, "normal")
  where, arrivals = jnp.full((1, 1), 20_000, jnp.int32), jnp.zeros((1, 1), jnp.int32)
  with pytest.raises(NotImplementedError, match="k: found 3000 of 20000 tiles, expected fewer"):
    select.best_pages(*(q, low, high, where * 0, where, arrivals), unit=1, sinks=0, local=0, k=3000)
