"""SnapKV against a NumPy float64 oracle: scores, pooling, selection, eviction, later turns."""

import numpy as np
import pytest

from kvjax import SnapKV, settings
from kvjax.testing.layer import Layer, Stream, rotate, softmax_average


def row_probabilities(stream, b, h, g, t, kept):
  q = rotate(stream.q[b, h, g, t], t)
  x = np.array([q @ rotate(stream.k[b, h, j], j) / np.sqrt(len(q)) for j in kept])
  return np.exp(x - x.max()) / np.exp(x - x.max()).sum()


def selected(stream, b, h, held, n, method):
  """What stays of the positions `held` after a turn that ends before n: (heavy, others)."""
  w, pool = method.window_size, method.pool
  past = [j for j in held if j < n - w]
  mass = dict.fromkeys(past, 0.0)
  for t in range(max(0, n - w), n):
    kept = [j for j in held if j <= t]
    for g in range(stream.q.shape[2]):
      for j, p in zip(kept, row_probabilities(stream, b, h, g, t, kept), strict=True):
        if j in mass:
          mass[j] += p / stream.q.shape[2]
  scores = {}
  for i, j in enumerate(past):
    near = [mass[past[k]] for k in range(i - pool // 2, i + pool // 2 + 1) if 0 <= k < len(past)]
    scores[j] = sum(near) / pool if method.reduce == "avg" else max(near)
  best = sorted(past, key=lambda j: (-scores[j], j))[: method.budget - w]
  return best, [j for j in held if j >= n - w]


def test_worked_example():
  """Window 1, no pooling, budget 3: the last query's two favourites stay beside it."""
  stream = Stream.random(0, batch=1, kv_heads=1, groups=1, tokens=6, head_dim=2)
  p = row_probabilities(stream, 0, 0, 0, 5, range(6))
  layer = Layer(SnapKV(3, window_size=1, pool=1), stream)
  layer.prefill([6])
  want = sorted([*np.argsort(-p[:5])[:2].tolist(), 5])
  assert layer.cache.pos[0, 0].tolist() == want


@pytest.mark.core(1)
@pytest.mark.parametrize(("reduce", "pool"), [("avg", 5), ("max", 7), ("avg", 1)])
def test_prompt_and_long_decode(reduce, pool):
  method = SnapKV(12, 4, pool, reduce)
  stream, lengths = Stream.random(1, kv_heads=2, tokens=90), [31, 9]
  layer = Layer(method, stream, capacity=90)
  layer.prefill(lengths)
  held = {
    (b, h): selected(stream, b, h, list(range(n)), n, method)
    for b, n in enumerate(lengths)
    for h in range(2)
  }
  for step in range(55):
    at = [n + step for n in lengths]
    out, _ = layer.decode(at)
    pos = np.asarray(layer.cache.pos)
    for (b, h), (heavy, others) in held.items():
      if len(heavy) + len(others) == method.budget:
        others.pop(0)
      others.append(at[b])
      kept = sorted(heavy + others)
      assert sorted(pos[b, h][pos[b, h] >= 0].tolist()) == kept, (b, h, step)
      p = row_probabilities(stream, b, h, step % 3, at[b], kept)
      want = softmax_average(np.log(p), np.float64(stream.v[b, h, kept]))
      np.testing.assert_allclose(out[b, h, step % 3], want, atol=5e-6)


@pytest.mark.slow
def test_a_second_turn_selects_anew():
  """The new turn's window ranks what the first left, and the first turn's answer, with its own."""
  method = SnapKV(12, 4, 3)
  stream = Stream.random(2, batch=1, kv_heads=2, tokens=60)
  layer = Layer(method, stream, capacity=60)
  layer.prefill([30])
  for t in range(30, 40):
    layer.decode([t])
  before = np.asarray(layer.cache.pos)[0]
  layer.prefill([9], start=[40], past=None)
  for h in range(2):
    heavy, others = selected(
      stream, 0, h, sorted([*before[h].tolist(), *range(40, 49)]), 49, method
    )
    assert np.asarray(layer.cache.pos)[0, h].tolist() == sorted(heavy + others)


def test_repository_setting():
  assert settings.repo(SnapKV, 100) == SnapKV(100, window_size=32, pool=7, reduce="max")
