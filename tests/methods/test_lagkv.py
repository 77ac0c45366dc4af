"""LagKV against a NumPy float64 oracle: scores, partitions, what stays, later turns."""

import itertools

import numpy as np
import pytest

from kvjax import LagKV
from kvjax.testing.layer import Stream
from tests.oracles import begun, further_turn, generation, in_turn, keys


def weights(tokens, judge):
  """u of a partition's tokens, beside the next one's."""
  low, high = judge.min(0), judge.max(0)
  spread = []
  for x in tokens:
    scaled = [(a - m) / (n - m) if n > m else 0.0 for a, m, n in zip(x, low, high, strict=True)]
    mean = sum(scaled) / len(scaled)
    spread.append(np.sqrt(sum((y - mean) ** 2 for y in scaled) / (len(scaled) - 1)))
  spread = np.exp(np.array(spread) - max(spread))
  return spread / spread.sum()


def selected(stream, b, h, held, method):
  """What stays of the positions `held`: (for good, in turn)."""
  lag, sinks = method.window_size, method.sinks
  parts = [held[i : i + lag] for i in range(sinks, len(held) - lag + 1, lag)]
  rounds = [[] for _ in range(lag)]
  for part, judge in itertools.pairwise(parts):
    k, next_k = (keys(stream, b, h, x) for x in (part, judge))
    v, next_v = (np.float64(stream.v[b, h, x]) for x in (part, judge))
    score = weights(k, next_k) + weights(v, next_v)
    for place, i in enumerate(np.argsort(-score, kind="stable")):
      rounds[place].append(part[i])
  judged = max(len(parts) - 1, 0) * lag
  others = held[sinks + judged :]
  room = method.budget - sinks - len(others)
  return [*held[:sinks], *[j for each in rounds for j in each][:room]], others


def test_worked_example():
  """{(0, 0), (2, 0)} beside {(0, 0), (2, 2)}: d = 0 and 0.7071, u = 0.330 and 0.670."""
  part, judge = np.array([[0.0, 0], [2, 0]]), np.array([[0.0, 0], [2, 2]])
  np.testing.assert_allclose(weights(part, judge), [0.330, 0.670], atol=5e-4)
  # By values alone: all keys are alike, and so every channel of theirs is scaled to 0.
  stream = Stream.random(0, batch=1, kv_heads=1, groups=1, tokens=8, head_dim=2)
  stream.k[:] = 0
  stream.v[0, 0] = [*part, *judge, *part, *judge]
  layer = begun(LagKV(6, window_size=2, sinks=0), stream, [8])
  # The best of three partitions and the last one whole; the sixth slot is the first partition's.
  assert layer.cache.pos[0, 0].tolist() == [0, 1, 3, 5, 6, 7]


@pytest.mark.core(1)
@pytest.mark.parametrize("kwargs", [{}, {"sinks": 0}, {"window_size": 3, "budget": 12}], ids=str)
def test_prompt_and_long_decode(kwargs):
  method, stay = LagKV(**{"budget": 19, "window_size": 5, "sinks": 2, **kwargs}), {}
  stream = Stream.random(1, tokens=90)

  def prompt(b, h, n):
    stay[b, h], others = selected(stream, b, h, list(range(n)), method)
    return stay[b, h] + others

  generation(method, stream, [43, 11], 40, prompt, in_turn(method.budget, stay))


def test_keeps_what_kvpress_keeps():
  """kvpress 0.5.5's LagKVPress on the same keys and values, where no ranks tie at the cut."""
  theirs = [
    [4, 5, 8, 12, 13, 18, 21, 22, 27],
    [4, 8, 9, 12, 15, 17, 20, 21, 26],
    [5, 6, 7, 13, 15, 18, 20, 21, 22],
  ]
  stream = Stream.random(7, batch=1, kv_heads=3, groups=1, tokens=36)
  layer = begun(LagKV(4 + 3 * 3 + 8, window_size=8, sinks=4), stream, [36])
  want = [[*range(4), *middle, *range(28, 36)] for middle in theirs]
  assert np.asarray(layer.cache.pos)[0].tolist() == want


@pytest.mark.slow
def test_a_second_turn_cuts_anew():
  """Partitions of what the first turn left, its answer, and what is new."""
  method, stream = LagKV(17, window_size=4, sinks=2), Stream.random(5, kv_heads=2, tokens=60)
  for b, h, text, _, found in further_turn(method, stream, [30, 7], 5, [9, 14]):
    stay, others = selected(stream, b, h, text, method)
    assert found == sorted(stay + others)
