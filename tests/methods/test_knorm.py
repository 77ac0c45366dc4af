"""Knorm against its definition: the longest keys leave, of a prompt and in each step."""

import numpy as np
import pytest

from kvjax import CacheSpec, Knorm
from kvjax.testing.layer import Stream
from tests.oracles import begun, generation


def test_worked_example():
  """Keys of norms 5, 1, 3, 2, in random directions."""
  stream = Stream.random(0, batch=1, kv_heads=1, groups=2, tokens=4)
  stream.k[:] *= (np.array([5, 1, 3, 2]) / np.linalg.norm(stream.k, axis=-1))[..., None]
  layer = begun(Knorm(2), stream, [4])
  assert sorted(np.asarray(layer.cache.pos)[0, 0]) == [1, 3]


@pytest.mark.core(1)
@pytest.mark.parametrize("recent", [0, 4])
def test_kept_sets_over_a_generation(recent):
  """Norms are those of keys as they came: positions turn them."""
  stream, budget = Stream.random(2, tokens=70), 9
  norms = np.linalg.norm(np.float64(stream.k), axis=-1)

  def prompt(b, h, n):
    return sorted(range(n), key=lambda j: (j < n - recent, norms[b, h, j]))[:budget]

  def step(kept, b, h, t):
    if len(kept) == budget:
      kept.remove(max((j for j in kept if j <= t - recent), key=lambda j: norms[b, h, j]))
    kept.append(t)

  generation(Knorm(budget, recent=recent), stream, [16, 5], 50, prompt, step)


def test_layers_that_are_skipped_stay_whole():
  """As the authors leave the first two."""
  spec, method = CacheSpec(1, 64, 2, 2, 16, 4), Knorm(8, skip_layers=(0, 1))
  assert [cache.size for cache in method.init_caches(spec)] == [64, 64, 8, 8]
  stream = Stream.random(3, tokens=40)
  layer = begun(method, stream, [30, 21], layer=1)
  assert sorted(np.asarray(layer.cache.pos)[0, 0])[-30:] == [*range(30)]
