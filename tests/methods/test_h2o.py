"""H2O against a NumPy float64 oracle that keeps lists: accumulated mass, kept sets, outputs."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import H2O, VATP, Env
from kvjax.testing.layer import Layer, Stream
from tests.gathered import Gathered
from tests.oracles import begun, follow


def test_worked_example():
  """Equal keys: query t gives 1/(t+1) to each of its tokens, so the earliest gather most."""
  stream = Stream.random(0, batch=1, kv_heads=1, groups=1, tokens=6)
  stream.k[:] = 0
  layer = begun(H2O(budget=4, recent=2), stream, [6])
  assert layer.cache.pos[0, 0].tolist() == [0, 1, 4, 5]
  np.testing.assert_allclose(
    layer.cache.slots["mass"][0, 0],
    [1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5 + 1 / 6, 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5 + 1 / 6]
    + [1 / 5 + 1 / 6, 1 / 6],
    rtol=1e-6,
  )


class Newest(H2O):
  """Reads the tile of two slots that the newest token is in."""

  def plan(self, at, cache, q, visible, carry):
    tile = jnp.broadcast_to((cache.used - 1) // 2, cache.pos.shape[:2])[..., None]
    count = jnp.ones(tile.shape[:2], jnp.int32)
    return visible.listed(tile.astype(jnp.int32), count, unit=2), carry


def test_slots_that_a_plan_leaves_out_gather_nothing():
  """Equal keys: each step gives its tile's tokens a half each, or the newest one all."""
  stream = Stream.random(0, batch=1, kv_heads=1, groups=2, tokens=5)
  stream.k[:] = 0
  layer = Layer(Newest(budget=8), stream)
  for t in range(5):
    layer.decode([t])
  np.testing.assert_allclose(layer.cache.slots["mass"][0, 0, :5], [1.5, 0.5, 1.5, 0.5, 1.0])


@pytest.mark.parametrize("cap", [None, pytest.param(1.5, marks=pytest.mark.slow)])
def test_kept_sets_and_outputs_over_a_generation(cap):
  budget, recent, lengths = 11, 5, [20, 6]
  stream = Stream.random(1, kv_heads=2, tokens=125)
  env = Env(4, impl="reference", tile=4, soft_cap=cap)
  layer = begun(H2O(budget, recent), stream, lengths, capacity=125, env=env)
  lists = Gathered.of(stream, lengths, budget, recent, cap)

  def kept(b, h, t):
    oracle = lists[b, h]
    oracle.step(t)
    pos, mass = (np.asarray(x)[b, h] for x in (layer.cache.pos, layer.cache.slots["mass"]))
    want = [oracle.mass.get(j) for j in pos[pos >= 0]]
    np.testing.assert_allclose(mass[pos >= 0], want, rtol=2e-5)
    return oracle.mass

  follow(layer, lengths, 100, kept, cap=cap)


@pytest.mark.slow
def test_a_second_turn_adds_to_the_mass():
  """Half the prompt and then the other half: cached tokens keep what they had and gather more."""
  stream = Stream.random(2, tokens=30)
  layer = begun(H2O(budget=40), stream, [12, 9])
  first = np.asarray(layer.cache.slots["mass"])
  layer.prefill([6, 0], start=[12, 9], past=None)
  both = np.asarray(layer.cache.slots["mass"])
  assert (both[0, :, :12] > first[0, :, :12]).all()
  np.testing.assert_array_equal(both[1], first[1])
  whole = begun(H2O(budget=40), stream, [18, 9])
  filled = np.asarray(layer.cache.pos) >= 0
  want = np.asarray(whole.cache.slots["mass"])
  np.testing.assert_allclose(both[filled], want[filled], atol=1e-5)


def test_recent_tokens_go_before_those_that_always_stay():
  """The order of ART's walk: a first token, which VATP keeps, comes after all recent ones."""
  method = VATP(8, sinks=2, recent=4)
  layer = begun(method, Stream.random(0, tokens=8), [5, 5], capacity=8, env=Env(4, tile=4))
  first = np.asarray(method.order(layer.at, layer.cache))[..., :5]  # a slot a position
  assert (np.argsort(-first, -1, kind="stable") == [4, 3, 2, 1, 0]).all()
