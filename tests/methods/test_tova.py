"""TOVA against a NumPy float64 oracle: shared evictions and outputs over a generation."""

import jax
import numpy as np

from kvjax import TOVA, At, Env
from kvjax.testing.layer import Layer, Stream
from tests.oracles import follow, probabilities


def mean_over_heads(stream, b, t, kept):
  heads = range(stream.q.shape[1])
  return np.mean([probabilities(stream, b, h, t, kept) for h in heads], (0, 1))


def test_worked_example():
  """Budget 2 of 3 tokens: the two that the last query likes best."""
  stream = Stream.random(0, batch=1, tokens=3)
  layer = Layer(TOVA(budget=2), stream)
  layer.prefill([3])
  want = sorted(np.argsort(-mean_over_heads(stream, 0, 2, range(3)))[:2].tolist())
  assert [row.tolist() for row in np.asarray(layer.cache.pos)[0]] == [want] * 3


def test_kept_sets_and_outputs_over_a_generation():
  budget, lengths = 9, [16, 5]
  stream = Stream.random(1, tokens=120)
  layer = Layer(TOVA(budget), stream, capacity=120)
  layer.prefill(lengths)
  shared, least = [], []
  for b, n in enumerate(lengths):
    p = mean_over_heads(stream, b, n - 1, range(n))
    shared.append(sorted(range(n), key=lambda j, p=p: (-p[j], j))[:budget])
    least.append(min(shared[b], key=lambda j, p=p: (p[j], j)))

  def kept(b, h, t):
    mine = shared[b]
    if h == 0:  # for all heads of the row
      if len(mine) == budget:
        mine.remove(least[b])
      mine.append(t)
      least[b] = mine[int(np.argmin(mean_over_heads(stream, b, t, mine)))]
    return mine

  follow(layer, lengths, 100, kept)


def test_the_mean_is_over_the_heads_of_all_devices():
  """Two devices of two heads each say what one of four says: an axis of vmap stands for them."""
  p = np.random.default_rng(0).random((2, 4, 5), np.float32)
  at = At(0, Env(1, impl="reference", head_axis="heads"), TOVA(8))
  parted = np.moveaxis(p.reshape(2, 2, 2, 5), 1, 0)  # [devices, B, K/2, S]
  split = jax.vmap(lambda x: TOVA(8)._over_heads(at, x), axis_name="heads")(parted)
  want = np.broadcast_to(p.mean(1, keepdims=True), (2, 2, 5))
  for device in split:
    np.testing.assert_allclose(device, want, rtol=1e-6)
