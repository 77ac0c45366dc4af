"""Knorm against its definition: the longest keys leave, of a prompt and in each step."""

import numpy as np
import pytest

from kvjax import CacheSpec, Knorm
from kvjax.testing.layer import Layer, Stream
from tests.oracles import follow


def of_norms(norms):
  """One row, one head, keys of these norms, in random directions."""
  stream = Stream.random(0, batch=1, kv_heads=1, groups=2, tokens=len(norms))
  stream.k[:] *= (np.array(norms) / np.linalg.norm(stream.k, axis=-1))[..., None]
  return stream


def test_worked_example():
  layer = Layer(Knorm(2), of_norms([5, 1, 3, 2]))
  layer.prefill([4])
  assert sorted(np.asarray(layer.cache.pos)[0, 0]) == [1, 3]


def test_scale_of_a_head_and_rotation_change_nothing():
  """Positions turn keys and leave their norms: far from the start the same are kept."""
  stream = Stream.random(1, tokens=40)
  kept = []
  for scale in (1.0, 7.0):
    layer = Layer(Knorm(9), Stream(stream.q, stream.k * scale, stream.v))
    layer.prefill([30, 21])
    kept.append(np.asarray(layer.cache.pos))
  np.testing.assert_array_equal(*kept)


@pytest.mark.parametrize("recent", [0, 4])
def test_kept_sets_over_a_generation(recent):
  budget, lengths = 9, [16, 5]
  stream = Stream.random(2, tokens=70)
  layer = Layer(Knorm(budget, recent=recent), stream, capacity=70)
  layer.prefill(lengths)
  norms = np.linalg.norm(np.float64(stream.k), axis=-1)
  lists = {
    (b, h): sorted(range(n), key=lambda j, b=b, h=h, n=n: (j < n - recent, norms[b, h, j]))[:budget]
    for b, n in enumerate(lengths)
    for h in range(3)
  }

  def kept(b, h, t):
    mine = lists[b, h]
    if len(mine) == budget:
      older = [j for j in mine if j <= t - recent]
      mine.remove(max(older, key=lambda j: norms[b, h, j]))
    mine.append(t)
    return mine

  follow(layer, lengths, 50, kept)


def test_layers_that_are_skipped_stay_whole():
  """As the authors leave the first two."""
  spec, method = CacheSpec(1, 64, 2, 2, 16, 4), Knorm(8, skip_layers=(0, 1))
  assert [cache.size for cache in method.init_caches(spec)] == [64, 64, 8, 8]
  stream = Stream.random(3, tokens=40)
  layer = Layer(method, stream, layer=1)
  layer.prefill([30, 21])
  assert sorted(np.asarray(layer.cache.pos)[0, 0])[-30:] == [*range(30)]
