"""H2O against a NumPy float64 oracle that keeps lists: accumulated mass, kept sets, outputs."""

import numpy as np
import pytest

from kvjax import H2O, VATP, Env
from kvjax.testing.layer import Layer, Stream, capped, rotate, softmax_average


class Oracle:
  """One KV head of one row: a list of kept positions and what each has gathered."""

  def __init__(self, stream, b, h, budget, recent, cap=None):
    self.stream, self.b, self.h, self.cap = stream, b, h, cap
    self.budget, self.recent = budget, recent
    self.mass: dict[int, float] = {}

  def probabilities(self, t, kept):
    """Of every query head, over the kept positions."""
    s, rows = self.stream, []
    for g in range(s.q.shape[2]):
      q = rotate(s.q[self.b, self.h, g, t], t)
      x = np.array([q @ rotate(s.k[self.b, self.h, j], j) / np.sqrt(len(q)) for j in kept])
      x = capped(x, self.cap)
      rows.append(np.exp(x - x.max()) / np.exp(x - x.max()).sum())
    return np.array(rows)

  def cut(self, newest):
    """Evicts down to the budget: least mass first among those that are not recent."""
    while len(self.mass) > self.budget:
      old = [j for j in self.mass if j <= newest - self.recent]
      del self.mass[min(old, key=lambda j: (self.mass[j], j))]

  def prompt(self, n):
    for t in range(n):
      self.mass[t] = 0.0
      for j, p in zip(range(t + 1), self.probabilities(t, range(t + 1)).mean(0), strict=True):
        self.mass[j] += p
    self.cut(n - 1)

  def step(self, t):
    """Room is made before the new token is attended to: outputs [G, H]."""
    self.mass[t] = np.inf
    self.cut(t)
    self.mass[t] = 0.0
    kept = sorted(self.mass)
    p = self.probabilities(t, kept)
    for j, x in zip(kept, p.mean(0), strict=True):
      self.mass[j] += x
    values = np.float64(self.stream.v[self.b, self.h, kept])
    return np.array([softmax_average(np.log(row), values) for row in p])


def test_worked_example():
  """Equal keys: query t gives 1/(t+1) to each of its tokens, so the earliest gather most."""
  stream = Stream.random(0, batch=1, kv_heads=1, groups=1, tokens=6)
  stream.k[:] = 0
  layer = Layer(H2O(budget=4, recent=2), stream)
  layer.prefill([6])
  assert layer.cache.pos[0, 0].tolist() == [0, 1, 4, 5]
  np.testing.assert_allclose(
    layer.cache.slots["mass"][0, 0],
    [1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5 + 1 / 6, 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5 + 1 / 6]
    + [1 / 5 + 1 / 6, 1 / 6],
    rtol=1e-6,
  )


@pytest.mark.parametrize("cap", [None, pytest.param(1.5, marks=pytest.mark.slow)])
def test_kept_sets_and_outputs_over_a_generation(cap):
  budget, recent, lengths = 11, 5, [20, 6]
  stream = Stream.random(1, kv_heads=2, tokens=125)
  env = Env(4, impl="reference", tile=4, soft_cap=cap)
  layer = Layer(H2O(budget, recent), stream, capacity=125, env=env)
  oracles = {(b, h): Oracle(stream, b, h, budget, recent, cap) for b in range(2) for h in range(2)}
  layer.prefill(lengths)
  for (b, _), oracle in oracles.items():
    oracle.prompt(lengths[b])
  for step in range(100):
    at = [n + step for n in lengths]
    out, _ = layer.decode(at)
    for (b, h), oracle in oracles.items():
      want = oracle.step(at[b])
      pos, mass = (np.asarray(x)[b, h] for x in (layer.cache.pos, layer.cache.slots["mass"]))
      assert sorted(pos[pos >= 0].tolist()) == sorted(oracle.mass), (b, h, step)
      np.testing.assert_allclose(out[b, h], want, atol=5e-6)
      np.testing.assert_allclose(mass[pos >= 0], [oracle.mass[j] for j in pos[pos >= 0]], rtol=2e-5)


def test_a_second_turn_adds_to_the_mass():
  """Half the prompt and then the other half: cached tokens keep what they had and gather more."""
  stream = Stream.random(2, tokens=30)
  layer = Layer(H2O(budget=40), stream)
  layer.prefill([12, 9])
  first = np.asarray(layer.cache.slots["mass"])
  layer.prefill([6, 0], start=[12, 9], past=None)
  both = np.asarray(layer.cache.slots["mass"])
  assert (both[0, :, :12] > first[0, :, :12]).all()
  np.testing.assert_array_equal(both[1], first[1])
  whole = Layer(H2O(budget=40), stream)
  whole.prefill([18, 9])
  filled = np.asarray(layer.cache.pos) >= 0
  want = np.asarray(whole.cache.slots["mass"])
  np.testing.assert_allclose(both[filled], want[filled], atol=1e-5)


def test_recent_tokens_go_before_those_that_always_stay():
  """The order of ART's walk: a first token, which VATP keeps, comes after all recent ones."""
  method = VATP(8, sinks=2, recent=4)
  layer = Layer(method, Stream.random(0, tokens=8), capacity=8, env=Env(4, tile=4))
  layer.prefill([5, 5])
  first = np.asarray(method.order(layer.at, layer.cache))[..., :5]  # a slot a position
  assert (np.argsort(-first, -1, kind="stable") == [4, 3, 2, 1, 0]).all()
