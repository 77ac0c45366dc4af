"""TOVA against a NumPy float64 oracle: shared evictions and outputs over a generation."""

import jax
import numpy as np

from kvjax import TOVA, At, Env
from kvjax.testing.layer import Layer, Stream, rotate, softmax_average


def probabilities(stream, b, h, g, t, kept):
  q = rotate(stream.q[b, h, g, t], t)
  x = np.array([q @ rotate(stream.k[b, h, j], j) / np.sqrt(len(q)) for j in kept])
  return np.exp(x - x.max()) / np.exp(x - x.max()).sum()


def mean_over_heads(stream, b, t, kept):
  heads, groups = stream.q.shape[1:3]
  rows = [probabilities(stream, b, h, g, t, kept) for h in range(heads) for g in range(groups)]
  return np.mean(rows, 0)


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
  kept, least = [], []
  for b, n in enumerate(lengths):
    p = mean_over_heads(stream, b, n - 1, range(n))
    best = sorted(range(n), key=lambda j, p=p: (-p[j], j))[:budget]
    kept.append(sorted(best))
    least.append(min(best, key=lambda j, p=p: (p[j], j)))
  for step in range(100):
    at = [n + step for n in lengths]
    out, _ = layer.decode(at)
    for b, t in enumerate(at):
      if len(kept[b]) == budget:
        kept[b].remove(least[b])
      kept[b].append(t)
      pos = np.asarray(layer.cache.pos)[b]
      assert all(sorted(row[row >= 0].tolist()) == sorted(kept[b]) for row in pos), (b, step)
      p = mean_over_heads(stream, b, t, kept[b])
      least[b] = kept[b][int(np.argmin(p))]
      h, g = divmod(step % 9, 3)
      own = probabilities(stream, b, h, g, t, kept[b])
      want = softmax_average(np.log(own), np.float64(stream.v[b, h, kept[b]]))
      np.testing.assert_allclose(out[b, h, g], want, atol=5e-6)


def test_the_mean_is_over_the_heads_of_all_devices():
  """Two devices of two heads each say what one of four says: an axis of vmap stands for them."""
  p = np.random.default_rng(0).random((2, 4, 5), np.float32)
  at = At(0, Env(1, impl="reference", head_axis="heads"), TOVA(8))
  parted = np.moveaxis(p.reshape(2, 2, 2, 5), 1, 0)  # [devices, B, K/2, S]
  split = jax.vmap(lambda x: TOVA(8)._over_heads(at, x), axis_name="heads")(parted)
  want = np.broadcast_to(p.mean(1, keepdims=True), (2, 2, 5))
  for device in split:
    np.testing.assert_allclose(device, want, rtol=1e-6)
