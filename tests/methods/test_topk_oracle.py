"""The top-k oracle against a NumPy float64 one: the same tokens every step, and their attention."""

import numpy as np
import pytest

from kvjax import TopKOracle
from kvjax.testing.layer import Stream
from tests.oracles import begun, probabilities
from tests.selection import Watched, check, choose


def oracle(stream, budget, sinks, local, cap=None):
  """Tokens by their probability, mean over the query heads of the group."""

  def read(b, h, t):
    p = probabilities(stream, b, h, t, range(t + 1), cap).mean(0)
    return choose(p, sinks, local, budget - sinks - local)

  return read


def test_worked_example():
  """One head of size 2 without rotation at position 0: q·k orders the tokens 2, 0, 1."""
  stream = Stream.random(0, batch=1, kv_heads=1, groups=1, tokens=4, head_dim=2)
  stream.k[0, 0] = [[2, 0], [1, 0], [3, 0], [-9, 0]]
  stream.q[0, 0, 0, 3] = [1, 0]
  # RoPE turns the single pair by the distance: 3, 2, 1 and 0 radians.
  logits = np.cos([3, 2, 1, 0]) * [2, 1, 3, -9]
  order = [int(j) for j in np.argsort(-logits)]
  assert order == [2, 1, 0, 3]
  layer = begun(Watched(TopKOracle(budget=2)), stream, [3])
  _, aux = layer.decode([3])
  assert aux["slots"][0, 0].tolist() == order[:2]


@pytest.mark.core(1)
@pytest.mark.parametrize(
  ("sizes", "cap"),
  [
    *(((7, 0, 0), None), ((12, 2, 4), None), ((9, 3, 6), None), ((1, 0, 0), None)),
    *(((1, 0, 1), None), ((7, 0, 0), 0.7)),
  ],
)
def test_a_generation(sizes, cap):
  """From prompts shorter and longer than the budget to well beyond it, rows apart in length."""
  stream = Stream.random(1, tokens=60)
  check(TopKOracle(*sizes), stream, [17, 3], 40, oracle(stream, *sizes, cap), cap=cap)


def test_equal_tokens_go_by_position():
  stream = Stream.random(2, tokens=20)
  stream.q[:] = 0
  check(TopKOracle(budget=6, sinks=1, local=2), stream, [9, 4], 8, lambda b, h, t: ties(t))


def ties(t):
  return choose([1.0] * (t + 1), 1, 2, 3)
