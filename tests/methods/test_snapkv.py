"""SnapKV against a NumPy float64 oracle: scores, pooling, selection, eviction, later turns."""

import numpy as np
import pytest

from kvjax import SnapKV
from kvjax.testing.layer import Stream
from tests.oracles import (
  begun,
  further_turn,
  generation,
  in_turn,
  pooled,
  probabilities,
  window_mass,
)


def selected(stream, b, h, held, n, method):
  """What stays of the positions `held` after a turn that ends before n: (heavy, others)."""
  past = [j for j in held if j < n - method.window_size]
  mass = window_mass(stream, b, h, held, n, method.window_size)
  scores = dict(zip(past, pooled(mass, method.pool, method.reduce), strict=True))
  best = sorted(past, key=lambda j: (-scores[j], j))[: method.budget - method.window_size]
  return best, [j for j in held if j not in past]


def test_worked_example():
  """Window 1, no pooling, budget 3: the last query's two favourites stay beside it."""
  stream = Stream.random(0, batch=1, kv_heads=1, groups=1, tokens=6, head_dim=2)
  p = probabilities(stream, 0, 0, 5, range(6))[0]
  layer = begun(SnapKV(3, window_size=1, pool=1), stream, [6])
  want = sorted([*np.argsort(-p[:5])[:2].tolist(), 5])
  assert layer.cache.pos[0, 0].tolist() == want


@pytest.mark.core(1)
@pytest.mark.parametrize(("reduce", "pool"), [("avg", 5), ("max", 7), ("avg", 1)])
def test_prompt_and_long_decode(reduce, pool):
  method, stay = SnapKV(12, 4, pool, reduce), {}
  stream = Stream.random(1, kv_heads=2, tokens=90)

  def prompt(b, h, n):
    stay[b, h], others = selected(stream, b, h, list(range(n)), n, method)
    return stay[b, h] + others

  generation(method, stream, [31, 9], 55, prompt, in_turn(method.budget, stay))


@pytest.mark.slow
def test_a_second_turn_selects_anew():
  """The new turn's window ranks what the first left, and the first turn's answer, with its own."""
  method, stream = SnapKV(12, 4, 3), Stream.random(2, batch=1, kv_heads=2, tokens=60)
  for b, h, text, seen, found in further_turn(method, stream, [30], 10, [9]):
    heavy, others = selected(stream, b, h, text, seen, method)
    assert found == sorted(heavy + others)
