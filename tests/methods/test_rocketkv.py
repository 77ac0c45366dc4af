"""RocketKV: the choice within what SnapKV keeps, against a NumPy float64 oracle.

Which positions stand in which slots is taken from the base alone, whose own file tests it.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Cache, CacheSpec, Env, Full, RocketKV, Rope, SnapKV
from kvjax.families import sight
from kvjax.methods.rocketkv import kept
from kvjax.testing.layer import Layer, Stream, capped
from tests.oracles import attend, begun, keys, queries, softmax
from tests.selection import Watched, check

ATTENDED = 5e-6  # float32 against NumPy's float64


def sizes(slots, budget, channels):
  """Page and number of channels."""
  ratio = slots / budget
  page = next(g for g in range(1, slots + 1) if g * g >= ratio)
  page = 1 if page > ratio else page
  return page, min(channels, math.floor(channels * page / ratio))


def weights(q, held, page, count, cap=None):
  """What the tokens of slots that hold the keys `held` count, summed over a group q [G, H]."""
  size = np.abs(q).sum(0)
  chosen = sorted(range(len(size)), key=lambda d: (-size[d], d))[:count]
  bounds = []
  for i in range(len(held)):
    near = held[i // page * page : (i // page + 1) * page]
    bounds.append([near[:, d].max() if q[:, d].sum() > 0 else near[:, d].min() for d in chosen])
  total = np.zeros(len(held))
  for row in q:
    share = np.abs(row[chosen]).sum() / np.abs(row).sum()
    logits = [np.dot(row[chosen], bound) / np.sqrt(len(row) * share) for bound in bounds]
    total += softmax(capped(logits, cap))
  return total


def test_worked_example():
  """c = 64: ρ = 0.56, stage 1 keeps a 10.27th, stage 2 reads a 6.23th; pages of 3, 61 of 128."""
  context, budget = 64 * 1024, 1024
  held = kept(context, budget)
  assert context / held == pytest.approx(10.27, abs=5e-3)
  assert held / budget == pytest.approx(6.23, abs=5e-3)
  method = RocketKV(budget, base=SnapKV(held))
  assert {method._page(slots) for slots in (held, 2048)} == {3}  # whatever the capacity
  assert sizes(held, budget, 128) == (3, 61)
  assert kept(100, 200) == kept(100, 100) == 100


def test_pages_are_roots_rounded_up_unless_that_exceeds_the_ratio():
  """Where all slots may be read nobody searches, and one page is all."""
  for budget in (2, 3, 10, 64):
    for slots in range(1, 300):
      want = sizes(slots, budget, 8)[0] if slots > budget else slots
      assert RocketKV(budget, base=Full())._page(slots) == want, (slots, budget)


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "size", "cap"), [(6, 25, None), (7, 12, 0.7), (4, 38, None)])
def test_a_generation(budget, size, cap):
  """Every slot after the selected ones is used again; one row starts below the base's budget."""
  stream, base = Stream.random(1, tokens=90), SnapKV(size, 4, 5)
  env = Env(4, impl="reference", tile=4, soft_cap=cap)
  alone = Layer(base, stream, capacity=84, layer=2, env=env)
  page, count = sizes(size, budget, 16)

  def oracle(b, h, t):
    pos = np.asarray(alone.cache.pos)[b, h]
    held = pos[pos >= 0]
    total = weights(queries(stream, b, h, t), keys(stream, b, h, held), page, count, cap)
    # Tokens of a page are alike but for rounding, here of float64.
    order = sorted(range(len(held)), key=lambda i: (-round(total[i], 12), i))
    return sorted(order[: budget // 2] if len(held) > budget else order)

  method, how = RocketKV(budget, base=base), {"cap": cap, "alone": alone, "ordered": False}
  check(method, stream, [44, 9], 40, oracle, **how)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [20, 40])
def test_rows_within_the_budget_are_attended_to_as_a_whole(capacity):
  """Whatever the capacity, which may be the budget: then there is nothing to search."""
  stream = Stream.random(2, tokens=40)
  layer = begun(Watched(RocketKV(20, base=SnapKV(30, 4))), stream, [15, 12], capacity=capacity)
  for step in range(4):
    at = [15 + step, 12 + step]
    out, aux = layer.decode(at)
    for b, h in np.ndindex(2, 3):
      assert aux["visited"][b, h] == at[b] + 1
      expected = attend(stream, b, h, at[b], list(range(at[b] + 1)))
      np.testing.assert_allclose(out[b, h], expected, atol=ATTENDED)


def test_of_channels_that_weigh_the_same_the_first_are_looked_at():
  """Two of four, in which the second page is the best; the sixth is in the others."""
  method = RocketKV(4, base=Full())
  at = method.at(Env(1, Rope.none(), impl="reference"), 0)
  k = np.zeros((1, 1, 16, 4), np.float32)
  k[0, 0, 3, :2], k[0, 0, 10, 2:] = 1, 2

  @jax.jit
  def scores(k):
    cache = Cache.empty(method, CacheSpec(1, 16, 1, 1, 4, 1, jnp.float32), 0)
    counts = dict.fromkeys(("seen", "used"), jnp.full(1, 16, jnp.int32))
    held = {"k": k, "pos": jnp.arange(16, dtype=jnp.int32)[None, None]}
    cache = method.summarise(cache.put(slots=held, rows=counts), jnp.zeros(1, jnp.int32), 16)
    return method.score(at, cache, jnp.ones((1, 1, 1, 4)), sight.visible(at, cache))

  found = np.asarray(scores(jnp.asarray(k)))[0, 0]
  assert np.flatnonzero(found == found.max()).tolist() == [2, 3]


@pytest.mark.slow
def test_a_query_of_zeros_reads_the_first_slots():
  stream = Stream.random(3, tokens=20)
  stream.q[:, :, :, 14] = 0
  layer = begun(Watched(RocketKV(6, base=SnapKV(9, 2))), stream, [14, 14])
  out, aux = layer.decode([14, 14])
  assert np.isfinite(out).all()
  assert np.sort(np.asarray(aux["slots"]), -1)[..., -3:].tolist() == [[[0, 1, 2]] * 3] * 2
