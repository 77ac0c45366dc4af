"""InfLLM-v2 against a NumPy float64 oracle: the same blocks every step, and attention over them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Cache, InfLLMv2, settings
from kvjax.ops import scores as scores_ops
from kvjax.testing.layer import Layer, Stream
from tests.compiled import compiled
from tests.oracles import keys
from tests.selection import block_scores, check, choose, tokens_of

SMALL = InfLLMv2(top=2, block=8, sinks=1, local=8, kernel=4, stride=2, dense_below=0)


def oracle(stream, m, cap=None):
  """The best blocks, or all of them."""

  def read(b, h, t):
    scores = block_scores(stream, b, h, t, m, cap)
    count = len(scores) if t + 1 < m.dense_below else m.top
    order = choose(scores, m.sinks, -(-m.local // m.block), count)
    return tokens_of(order, m.block, t + 1)

  return read


def test_worked_example():
  """Keys 1, 3 | 5, 7 with kernel 2, stride 1: means 2, 4, 6; the middle one counts for both."""
  m = InfLLMv2(top=1, block=2, local=2, kernel=2, stride=1, dense_below=0)
  stream = Stream.random(0, batch=1, kv_heads=1, groups=1, tokens=5, head_dim=2)
  layer = Layer(m, stream, capacity=4)
  layer.cache = layer.cache.put(
    slots={"k": jnp.array([[[[1.0, 0], [3, 0], [5, 0], [7, 0]]]])},
    rows={"seen": jnp.array([4]), "used": jnp.array([4])},
  )
  means = compiled(m.summarise)(layer.cache, jnp.array([0]), 4).heads["compressed"]
  np.testing.assert_allclose(means[0, 0, :, 0], [2, 4, 6])
  pooled = compiled(scores_ops.pooled)(
    jnp.array([[[0.2, 0.5, 0.3]]]), 2, width=2, stride=1, block=2
  )
  np.testing.assert_allclose(pooled[0, 0], [0.5, 0.5])


def test_paper_preset():
  m = InfLLMv2()
  assert (m.sinks, *m.tiles.forced, m.tiles.best, m.tiles.unit) == (1, 1, 32, 64, 64)
  repo = settings.repo(InfLLMv2, 98 * 64)
  assert (*repo.tiles.forced, repo.tiles.best) == (1, 33, 64)
  spec = Stream.random(0, head_dim=8).spec(16384, dtype=jnp.bfloat16)
  compressed = Cache.empty(m, spec, 0).heads["compressed"]
  assert compressed.shape == (2, 3, 1023, 8) and compressed.dtype == jnp.bfloat16


@pytest.mark.core(1)
@pytest.mark.parametrize(
  ("changes", "cap"),
  [
    ({}, None),
    ({}, 0.7),  # logits of compressed keys are capped as those of keys are
    ({"top": 1, "sinks": 0, "local": 11}, None),
    ({"kernel": 8, "stride": 2, "block": 4}, None),
    ({"kernel": 4, "stride": 4}, None),
    ({"kernel": 2, "stride": 1, "block": 3, "top": 3}, None),
    ({"dense_below": 40}, None),
  ],
)
def test_a_generation(changes, cap):
  """Across block boundaries at every offset; one row starts below everything that is forced."""
  m = dataclasses.replace(SMALL, **changes)
  stream = Stream.random(1, tokens=66)
  check(m, stream, [25, 2], 41, oracle(stream, m, cap), cap=cap)


@pytest.mark.slow
def test_compressed_keys_follow_the_cache():
  """After a prompt, a second turn and every step: the means of all complete windows."""
  stream = Stream.random(2, tokens=60)
  layer = Layer(SMALL, stream, capacity=60)

  def check_means(seen):
    found = np.asarray(layer.cache.heads["compressed"])
    for b, n in enumerate(seen):
      complete = max((n - 4) // 2 + 1, 0)
      for j in range(found.shape[2]):
        want = keys(stream, b, 1, range(2 * j, 2 * j + 4)).mean(0) if j < complete else 0
        np.testing.assert_allclose(found[b, 1, j], want, atol=1e-5)

  layer.prefill([17, 3])
  check_means([17, 3])
  layer.prefill([4, 9], start=[17, 3], past=None)
  check_means([21, 12])
  for step in range(1, 6):
    layer.decode([20 + step, 12], live=[True, False])
    check_means([21 + step, 12])
