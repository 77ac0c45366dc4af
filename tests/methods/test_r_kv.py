"""R-KV against a NumPy float64 oracle that keeps lists: scores, compressions, outputs, turns."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import RKV, Env
from kvjax.testing.layer import Stream, rotate
from tests.oracles import begun, follow, held, keys, logits, softmax


class Oracle:
  """One KV head of one row: the list of positions that are cached."""

  def __init__(self, stream, b, h, method, cap=None):
    self.of, self.cap, self.method, self.held = (stream, b, h), cap, method, []

  def importance(self, past, window):
    """Of every older token, before pooling: the mean over the observing queries."""
    total = np.zeros(len(past))
    for t in window:
      rows = logits(*self.of, t, past, self.cap)
      if self.method.group == "max":
        rows = rows.max(0, keepdims=True)
      total += softmax(rows).mean(0) / len(window)
    return total

  def redundancy(self):
    k = keys(*self.of, self.held)
    n, norm = len(k), np.linalg.norm(k, axis=-1)
    mean = np.zeros(n)
    for i in range(n):
      cos = np.zeros(n)
      for j in range(n):
        if i != j:
          cos[j] = k[i] @ k[j] / norm[i] / norm[j]
      similar = [j for j in range(n) if cos[j] > self.method.threshold]
      if similar:
        cos[similar[-1]] = 0
      elif self.method.spare_oldest:
        cos[0] = 0
      mean += cos / n
    return np.exp(mean) / np.exp(mean).sum()

  def compress(self):
    m, n = self.method, len(self.held)
    if n <= m.budget:
      return
    past, window = self.held[: n - m.window_size], self.held[n - m.window_size :]
    assert window == list(range(window[0], window[-1] + 1))
    raw, twice = self.importance(past, window), self.redundancy()
    score = {}
    for i, j in enumerate(past):
      near = raw[max(0, i - m.pool // 2) : i + m.pool // 2 + 1]
      score[j] = m.weight * near.max() - (1 - m.weight) * twice[i]
    best = sorted(past, key=lambda j: (-score[j], j))[: m.budget - m.window_size]
    self.held = sorted(best) + window

  def step(self, t):
    if len(self.held) == self.method.budget + self.method.buffer:
      self.compress()
    self.held.append(t)


def begun_oracles(method, stream, lengths, cap=None):
  """Those of every row and head, after prompts."""
  places = np.ndindex(stream.k.shape[:2])
  oracles = {at: Oracle(stream, *at, method, cap) for at in places}
  for (b, _), oracle in oracles.items():
    oracle.held = list(range(lengths[b]))
    oracle.compress()
  return oracles


def repetitive(seed, **kwargs):
  """Keys that are few prototypes with noise, before rotation."""
  stream = Stream.random(seed, **kwargs)
  rng = np.random.default_rng(seed)
  few = rng.normal(size=(5, stream.k.shape[-1])) * 2
  stream.k[:] = stream.k * 0.5 + few[rng.integers(0, 5, stream.k.shape[:3])]
  return stream


def test_worked_example():
  """No importance: of three like keys the two older ones go, and what resembles nothing stays."""
  stream = Stream.random(0, batch=1, kv_heads=1, groups=1, tokens=7, head_dim=4)
  a, b, c = [2, 0, 0, 0], [0, 3, 0, 0], [0, 0, 1, 0]
  stream.k[0, 0] = [rotate(x, -j) for j, x in enumerate([a, b, a, a, c, c, a])]  # once rotated
  layer = begun(RKV(4, buffer=2, window_size=1, weight=0.0), stream, [3])
  for t in (3, 4):
    layer.decode([t])
  # Mean similarity of 0, 1, 2, 3: the other two of a's kind less what is spared, over five.
  k = jnp.asarray(layer.cache.slots["k"][:, :, :5])
  twice = jax.jit(layer.method._redundancy)(k, layer.cache.pos[:, :, :5])[0, 0]
  want = np.exp([2 / 5, 0, 1 / 5, 0, 0])  # 0 and 2 spare 3, and 3 spares 2
  np.testing.assert_allclose(twice, want / want.sum(), rtol=1e-5)
  layer.decode([5])
  assert held(layer.cache, 0, 0) == [0, 1, 2, 3, 4, 5]
  layer.decode([6])  # finds the buffer full
  assert held(layer.cache, 0, 0) == [1, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("method", "cap"),
  [
    (RKV(14, buffer=6, window_size=4, pool=3), None),
    (RKV(14, buffer=6, window_size=4, pool=3, weight=0.6), 1.5),
    (RKV(14, buffer=6, window_size=4, pool=5, weight=0.6, group="max", spare_oldest=True), None),
  ],
)
def test_kept_sets_and_outputs_over_a_generation(method, cap):
  lengths = [33, 9]
  stream = repetitive(1, kv_heads=2, tokens=300)
  env = Env(4, impl="reference", tile=4, soft_cap=cap)
  layer = begun(method, stream, lengths, capacity=300, env=env)
  oracles = begun_oracles(method, stream, lengths, cap)

  def kept(b, h, t):
    oracles[b, h].step(t)
    return oracles[b, h].held

  follow(layer, lengths, 260, kept, atol=2e-5, cap=cap)


@pytest.mark.slow
def test_turns_are_ranked_with_the_newest_queries():
  """A turn of two tokens after decoding: the window's other queries come from the cache."""
  method = RKV(12, buffer=5, window_size=4, pool=3)
  stream, at = repetitive(2, tokens=60), [20, 7]
  layer = begun(method, stream, at, capacity=60)
  oracles = begun_oracles(method, stream, at)

  def kept(b, h, t):
    oracles[b, h].step(t)
    return oracles[b, h].held

  for turn in ([2, 9], [0, 3], [6, 1]):
    follow(layer, at, 3, kept, atol=2e-5)
    at = [n + 3 for n in at]
    layer.prefill(turn, start=at, tokens=9, past=None)
    for (b, h), oracle in oracles.items():
      oracle.held += range(at[b], at[b] + turn[b])
      if turn[b]:
        oracle.compress()
      assert held(layer.cache, b, h) == oracle.held
    at = [n + more for n, more in zip(at, turn, strict=True)]


@pytest.mark.core(1)
def test_a_full_row_that_is_idle_is_left_alone():
  layer = begun(RKV(10, buffer=4, window_size=2), repetitive(4, tokens=40), [10, 10])
  for step in range(4):
    layer.decode([10 + step, 10 + step])
  before = jax.tree.map(lambda x: np.asarray(x[1]), layer.cache)
  layer.decode([14, 14], live=[True, False])
  assert np.asarray(layer.cache.used).tolist() == [11, 14]
  chex.assert_trees_all_equal(jax.tree.map(lambda x: np.asarray(x[1]), layer.cache), before)


def test_long_prompts_hold_no_square_map():
  """Temporary memory of ranking T keys grows with T, not with T²."""
  method = RKV(64)

  def temporary(tokens):
    k = jax.ShapeDtypeStruct((1, 2, tokens, 16), jnp.float32)
    pos = jax.ShapeDtypeStruct((1, 2, tokens), jnp.int32)
    compiled = jax.jit(method._redundancy).lower(k, pos).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporary(4096) < 2.2 * temporary(2048) < 2048 * 2048 * 4
