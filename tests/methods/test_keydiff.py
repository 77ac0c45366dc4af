"""KeyDiff against sums of pairwise cosines, which rank as its anchor does."""

import numpy as np
import pytest

from kvjax import KeyDiff
from kvjax.testing.layer import Layer, Stream
from tests.oracles import follow, keys


def likeness(keys):
  """Σ_j cos(k_i, k_j) of every key."""
  unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
  return np.array([sum(float(a @ b) for b in unit) for a in unit])


def test_worked_example():
  """Cosines to the anchor 0.949, 0.949, 0.316, 0.949: position 2 is kept first."""
  keys = np.array([[1.0, 0], [2, 0], [0, 1], [3, 0]])
  stream = Stream.random(0, batch=1, kv_heads=1, groups=2, tokens=4)
  stream.k[:] = 0
  # The slowest pair of channels hardly turns within four tokens.
  stream.k[0, 0, :, 7], stream.k[0, 0, :, 15] = keys.T
  layer = Layer(KeyDiff(1), stream)
  layer.prefill([4])
  assert np.asarray(layer.cache.pos)[0, 0, 0] == 2


def test_lengths_of_keys_change_nothing():
  stream = Stream.random(1, tokens=40)
  kept = []
  for factor in (1.0, np.random.default_rng(3).uniform(0.1, 9, stream.k.shape[:3])[..., None]):
    layer = Layer(KeyDiff(9), Stream(stream.q, np.float32(stream.k * factor), stream.v))
    layer.prefill([30, 21])
    kept.append(np.asarray(layer.cache.pos))
  np.testing.assert_array_equal(*kept)


def test_a_zero_key_is_like_nothing():
  stream = Stream.random(2, batch=1, kv_heads=1, tokens=12)
  stream.k[:, :, 5] = 0
  stream.k[:, :, 6:] = stream.k[:, :, :1]
  layer = Layer(KeyDiff(6), stream)
  layer.prefill([12])
  assert 5 in np.asarray(layer.cache.pos)[0, 0]


@pytest.mark.parametrize("recent", [0, 4])
def test_kept_sets_over_a_generation(recent):
  """The most like the others leaves, of those that are not among the newest."""
  budget, lengths = 9, [16, 5]
  stream = Stream.random(4, tokens=70)
  layer = Layer(KeyDiff(budget, recent=recent), stream, capacity=70)
  layer.prefill(lengths)
  lists = {}
  for b, n in enumerate(lengths):
    for h in range(3):
      like = likeness(keys(stream, b, h, range(n)))
      order = sorted(range(n), key=lambda j, like=like, n=n: (j < n - recent, like[j]))
      lists[b, h] = sorted(order[:budget])

  def kept(b, h, t):
    mine = lists[b, h]
    if len(mine) == budget:
      like = likeness(keys(stream, b, h, mine))
      del mine[max((i for i, j in enumerate(mine) if j <= t - recent), key=lambda i: like[i])]
    mine.append(t)
    return mine

  follow(layer, lengths, 50, kept)
