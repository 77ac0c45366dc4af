"""Quest against a NumPy float64 oracle: the same pages every step, and attention over them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Cache, Quest, settings
from kvjax.families import sight
from kvjax.ops.extremes import coded, steps
from kvjax.primitives.outward import LEAST
from kvjax.testing.layer import Layer, Stream
from tests.selection import Watched, check, choose, page_bounds, read, tokens_of


def outward(low, high):
  """The next numbers below and above that are multiples of a power of two, 127 of it at most."""
  fraction, power = np.frexp(max(abs(low).max(), abs(high).max()))
  step = 2.0 ** (power - 7 + (fraction > 127 / 128))
  return np.floor(low / step) * step, np.ceil(high / step) * step


def oracle(stream, budget, page, group, **how):
  """Pages by their bound; the newest key is in the bounds of its page, which is always read."""

  def read(b, h, t):
    scores = page_bounds(stream, b, h, t, page, group, **how)
    return tokens_of(choose(scores, 0, 1, budget // page - 1), page, t + 1)

  return read


def test_worked_example():
  """Two pages of two keys, q = (2, −1), two channels."""
  page = np.array([[[1.0, -2.0], [0.5, 4.0]], [[-3.0, 1.0], [1.0, 1.0]]])
  low, high = (jnp.asarray(x[None, None], jnp.float32) for x in (page.min(1), page.max(1)))
  layer = Layer(Quest(page=2), Stream.random(0, 1, 1, 1, 4, 2), capacity=4, layer=2)
  cache = layer.cache.put(heads={"key_min": low, "key_max": high})
  visible = sight.visible(layer.at, cache)
  found = layer.method.score(layer.at, cache, jnp.array([[[[2.0, -1.0]]]]), visible)
  # Page 0: max(2·0.5, 2·1) + max(−1·−2, −1·4) = 4; page 1: max(−6, 2) + max(−1, −1) = 1.
  np.testing.assert_allclose(found[0, 0] * np.sqrt(2), [4, 1], rtol=1e-6)


@pytest.mark.core(1)
@pytest.mark.parametrize("group", ["mean", "max"])
@pytest.mark.parametrize(("budget", "page"), [(12, 4), (16, 5), (3, 3), (8, 1)])
def test_a_generation(group, budget, page):
  """Across page boundaries at every offset, rows apart in length, one shorter than the budget."""
  stream = Stream.random(2, tokens=60)
  check(Quest(budget, page, group), stream, [19, 4], 36, oracle(stream, budget, page, group))


@pytest.mark.core(1)
@pytest.mark.parametrize(("extremes", "how"), [("exact", {}), ("int8", {"outward": outward})])
def test_a_second_turn_and_idle_rows(extremes, how):
  """Bounds stay true over a turn that starts inside a page, and over steps of one row only."""
  stream = Stream.random(3, tokens=60)
  layer = Layer(Watched(Quest(12, 4, extremes=extremes)), stream, layer=2)
  want = oracle(stream, 12, 4, "mean", **how)
  layer.prefill([18, 7])
  for step in range(3):
    layer.decode([18, 7 + step], live=[False, True])
  layer.prefill([7, 0], start=[18, 10], past=None)
  for step in range(6):
    _, aux = layer.decode([25 + step, 10 + step])
    for b, h in np.ndindex(2, 3):
      assert read(aux, b, h) == want(b, h, (25, 10)[b] + step)


def test_codes_bound_what_they_stand_for():
  """Whatever the keys' sizes, and by the finest step that has 127 levels; else a page is NaN."""
  rng = np.random.default_rng(0)
  size = 2.0 ** rng.integers(-110, 120, (500, 1, 1)) * 2.0 ** rng.integers(-12, 1, (500, 1, 24))
  keys = np.float32(rng.standard_normal((500, 5, 24)) * size)
  keys[0], keys[1, 1:], keys[2] = 0, 0, 127 * np.sign(keys[2])
  low, high = keys.min(1), keys.max(1)
  below, above, exponent = jax.jit(coded)(low, high)
  step = np.asarray(jax.jit(steps)(exponent), np.float64)
  assert (below * step[:, None] <= low).all() and (high <= above * step[:, None]).all()
  largest = np.maximum(abs(low), abs(high)).max(-1)
  assert (largest <= 127 * step).all()
  finest = (largest > 127 * step / 2) | (exponent == LEAST)
  assert finest.all() and (exponent[0], exponent[2]) == (LEAST, 0)
  for bad in (np.nan, np.inf, -np.inf):
    low[3, 7] = bad
    below, above, exponent = coded(jnp.asarray(low), jnp.asarray(high))
    assert np.flatnonzero(np.isnan(steps(exponent))).tolist() == [3]
    assert not below[3].any() and not above[3].any()


def test_the_repositorys_smallest_budget():
  assert settings.repo(Quest, 16).tiles.best == 2  # three pages, one of them the newest


def test_bounds_are_stored_as_keys_are():
  """Extremes of bfloat16 keys are bfloat16 numbers: nothing is lost by storing them so."""
  spec = Stream.random(0).spec(40, dtype=jnp.bfloat16)
  heads = Cache.empty(Quest(), spec, 2).heads
  assert {x.dtype for x in heads.values()} == {jnp.dtype(jnp.bfloat16)}
  assert heads["key_min"].shape == (2, 3, 3, 16)
  assert not Cache.empty(Quest(), spec, 1).heads
  codes = Cache.empty(Quest(extremes="int8"), spec, 2).heads
  assert {x.dtype for x in codes.values()} == {jnp.dtype(jnp.int8)}
  assert sum(x.nbytes for x in codes.values()) * 32 == sum(x.nbytes for x in heads.values()) * 16.5
