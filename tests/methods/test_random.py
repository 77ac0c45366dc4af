"""Random: the kept set against sampling by hand, and the sample's uniformity."""

import numpy as np

from kvjax import Random
from kvjax.testing.layer import Stream
from tests.oracles import begun, follow

MASK = 0xFFFFFFFF


def mix(x):
  x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
  x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
  return x ^ (x >> 16)


def kept_by_hand(t, budget, recent, seed, layer, head):
  """Positions held once token t is in: the recent ones and the best draws among the older."""
  older = [j for j in range(t + 1) if j <= t - recent]
  stream = mix(seed ^ mix(layer ^ mix(head)))
  older.sort(key=lambda j: (-(mix(j ^ stream) >> 8), j))
  newest = [j for j in range(t + 1) if j > t - recent]
  return sorted(older[: budget - len(newest)] + newest)


def test_kept_positions_and_outputs():
  budget, recent, seed, lengths = 11, 3, 7, [20, 5]
  layer = begun(Random(budget, recent, seed), Stream.random(0, tokens=110), lengths, capacity=110)
  number = layer.at.layer
  follow(layer, lengths, 85, lambda b, h, t: kept_by_hand(t, budget, recent, seed, number, h))


def test_sample_is_uniform_and_differs_between_heads():
  """2,000 older positions, half of them kept: each quarter of the text gets its share."""
  kept = [set(kept_by_hand(2000, 1001, 1, 0, layer, h)) for layer in range(3) for h in range(3)]
  for sample in kept:
    quarters, _ = np.histogram([j for j in sample if j < 2000], bins=4, range=(0, 2000))
    assert np.abs(quarters - 250).max() < 60  # 5 standard deviations of the hypergeometric draw
  overlap = [len(a & b) for i, a in enumerate(kept) for b in kept[:i]]
  assert np.abs(np.mean(overlap) - 500) < 30 and max(overlap) < 620
