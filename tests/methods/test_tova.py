"""TOVA against a NumPy float64 oracle: shared evictions and outputs over a generation."""

import numpy as np

from kvjax import TOVA
from kvjax.testing.layer import Stream
from tests.oracles import begun, generation, probabilities


def mean_over_heads(stream, b, t, kept):
  heads = range(stream.q.shape[1])
  return np.mean([probabilities(stream, b, h, t, kept) for h in heads], (0, 1))


def test_worked_example():
  """Budget 2 of 3 tokens: the two that the last query likes best."""
  stream = Stream.random(0, batch=1, tokens=3)
  layer = begun(TOVA(budget=2), stream, [3])
  want = sorted(np.argsort(-mean_over_heads(stream, 0, 2, range(3)))[:2].tolist())
  assert [row.tolist() for row in np.asarray(layer.cache.pos)[0]] == [want] * 3


def test_kept_sets_and_outputs_over_a_generation():
  """Each head has the list of its row, and what leaves it next."""
  stream, budget, least = Stream.random(1, tokens=120), 9, {}

  def prompt(b, h, n):
    p = mean_over_heads(stream, b, n - 1, range(n))
    kept = sorted(range(n), key=lambda j: (-p[j], j))[:budget]
    least[b, h] = min(kept, key=lambda j: (p[j], j))
    return kept

  def step(kept, b, h, t):
    if len(kept) == budget:
      kept.remove(least[b, h])
    kept.append(t)
    least[b, h] = kept[int(np.argmin(mean_over_heads(stream, b, t, kept)))]

  generation(TOVA(budget), stream, [16, 5], 100, prompt, step)
