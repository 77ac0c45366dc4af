"""KeyDiff against sums of pairwise cosines, which rank as its anchor does."""

import numpy as np
import pytest

from kvjax import KeyDiff
from kvjax.testing.layer import Stream
from tests.oracles import begun, generation, keys


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
  layer = begun(KeyDiff(1), stream, [4])
  assert np.asarray(layer.cache.pos)[0, 0, 0] == 2


def test_a_zero_key_is_like_nothing():
  stream = Stream.random(2, batch=1, kv_heads=1, tokens=12)
  stream.k[:, :, 5] = 0
  stream.k[:, :, 6:] = stream.k[:, :, :1]
  layer = begun(KeyDiff(6), stream, [12])
  assert 5 in np.asarray(layer.cache.pos)[0, 0]


@pytest.mark.core(1)
@pytest.mark.parametrize("recent", [0, 4])
def test_kept_sets_over_a_generation(recent):
  """The most like the others leaves, of those that are not among the newest."""
  stream, budget = Stream.random(4, tokens=70), 9

  def prompt(b, h, n):
    like = likeness(keys(stream, b, h, range(n)))
    return sorted(sorted(range(n), key=lambda j: (j < n - recent, like[j]))[:budget])

  def step(kept, b, h, t):
    if len(kept) == budget:
      like = likeness(keys(stream, b, h, kept))
      del kept[max((i for i, j in enumerate(kept) if j <= t - recent), key=lambda i: like[i])]
    kept.append(t)

  generation(KeyDiff(budget, recent=recent), stream, [16, 5], 50, prompt, step)
