"""Expected Attention against its formulas in float64, with whole rotation matrices."""

import numpy as np
import pytest

from kvjax import ExpectedAttention
from kvjax.testing.layer import Stream, rotate
from tests.oracles import begun, follow


def rotation(position, size):
  """The matrix that turns a column vector to a position."""
  return np.stack([rotate(row, position) for row in np.eye(size)], 1)


def oracle(stream, b, h, tokens, method):
  """Scores of a row's tokens under one KV head."""
  size = stream.q.shape[-1]
  later = range(tokens, tokens + method.future)
  mean_rotation = np.mean([rotation(p, size) for p in later], 0)
  keys = np.array([rotate(np.float64(stream.k[b, h, j]), j) for j in range(tokens)])
  weights = []
  for group in range(stream.q.shape[2]):
    queries = np.float64(stream.q[b, h, group, method.sinks : tokens])
    mu = mean_rotation @ queries.mean(0)
    sigma = np.cov(queries.T, bias=True)
    sigma = mean_rotation @ sigma @ mean_rotation.T
    z = np.array([mu @ k / np.sqrt(size) + k @ sigma @ k / (2 * size) for k in keys])[
      method.sinks :
    ]
    weights.append(np.exp(z - z.max()) / np.exp(z - z.max()).sum())
  norms = np.linalg.norm(np.float64(stream.v[b, h, method.sinks : tokens]), axis=-1)
  return (np.mean(weights, 0) + method.epsilon) * norms


@pytest.mark.core(1)
@pytest.mark.parametrize("kwargs", [{}, {"epsilon": 0.02, "sinks": 1}, {"future": 7}], ids=str)
def test_scores_and_kept_tokens(kwargs):
  """First tokens stay, and generated ones take the room of the window."""
  method = ExpectedAttention(12, window_size=3, **{"future": 20, **kwargs})
  stream, lengths, stay = Stream.random(5, tokens=60), [40, 29], {}
  layer = begun(method, stream, lengths, capacity=60)
  pos, scores = np.asarray(layer.cache.pos), np.asarray(layer.cache.slots["score"])
  for b, n in enumerate(lengths):
    for h in range(3):
      want = oracle(stream, b, h, n, method)[: n - 3 - method.sinks]
      best = np.argsort(-want, kind="stable")[: 12 - 3 - method.sinks] + method.sinks
      stay[b, h] = [*range(method.sinks), *best]
      assert sorted(pos[b, h]) == sorted([*stay[b, h], *range(n - 3, n)])
      at = {int(p): float(x) for p, x in zip(pos[b, h], scores[b, h], strict=True)}
      got = [at[int(p)] for p in best]
      np.testing.assert_allclose(got, want[best - method.sinks], rtol=2e-4)
  follow(layer, lengths, 20, lambda b, h, t: [*stay[b, h], *range(t - 2, t + 1)])


def test_a_prompt_of_first_tokens_alone():
  layer = begun(ExpectedAttention(12, window_size=3), Stream.random(7, tokens=20), [3, 4])
  out, _ = layer.decode([3, 4])
  assert np.isfinite(out).all()
