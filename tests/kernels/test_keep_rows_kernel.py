"""The kernel that keeps statistics, against rows chosen one by one.

On a GPU the same tests run the compiled kernel.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import PRR, Env, Quest, Rope
from kvjax.kernels.insertion.keep_rows import keep
from kvjax.testing.layer import Layer, Stream

SHAPES = [((3, 700), jnp.float32), ((3, 5000), jnp.int32), ((), jnp.int32), ((1, 9), jnp.bfloat16)]


def test_rows_that_do_not_count_keep_theirs():
  """Idle ones, and those with a denominator of NaN or infinity on any head."""
  rng = np.random.default_rng(0)
  new, old = (
    [jnp.asarray(100 * rng.normal(size=(5, *shape)), dtype) for shape, dtype in SHAPES]
    for _ in range(2)
  )
  l = rng.uniform(1, 2, (5, 3, 4)).astype(np.float32)
  l[1, 2, 3], l[4, 0, 1] = np.nan, np.inf
  live = jnp.array([1, 1, 1, 0, 1], bool)
  for kept, x, y in zip(jax.jit(keep)(live, l, new, old), new, old, strict=True):
    assert kept.dtype == x.dtype
    for row, counts in enumerate([1, 0, 1, 0, 0]):
      np.testing.assert_array_equal(kept[row], (x if counts else y)[row])


@pytest.mark.slow
def test_statistics_of_a_layer():
  """Those of a row that is idle, and of one that meets a NaN, stay; another's move."""
  stream = Stream.random(3, batch=3, tokens=60).poisoned("q", 1, 41)
  method = PRR(Quest(16, page=4, dense_layers=0), budget=1.5)
  layer = Layer(method, stream, env=Env(4, Rope(), impl="pallas", tile=4))
  layer.prefill([40, 40, 40])
  layer.decode([40, 40, 40])
  before = layer.cache.heads
  layer.decode([41, 41, 41], live=[True, True, False])
  for name in ("level", "selected", "foreseen"):
    old, new = (np.asarray(heads[name]) for heads in (before, layer.cache.heads))
    assert (old != new).any((1, 2)).tolist() == [True, False, False]
