"""The order that is kept from step to step against one that is sorted anew.

On a GPU the same test runs the compiled kernel.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.order import renew_order

pytestmark = pytest.mark.filterwarnings(
  "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)


def sorted_anew(pos, rank):
  held = [s for s in range(len(pos)) if pos[s] >= 0]
  held.sort(key=lambda s: (-rank[s], s))
  return held + [-1] * (len(pos) - len(held))


@pytest.mark.parametrize("kind", ["newest first", "ties", "anywhere"])
@pytest.mark.parametrize(("slots", "chunk"), [(37, 8), (64, None), (5, 32)])
def test_equals_sorting(slots, chunk, kind):
  """Filling up, overwriting any slot, idle rows: every row of every step."""
  rng = np.random.default_rng(slots)
  shape = batch, heads, _ = 3, 2, slots
  order, pos = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
  rank, seen = np.full(shape, -np.inf, np.float32), np.zeros(batch, np.int32)
  run = jax.jit(functools.partial(renew_order, chunk=chunk))
  for step in range(3 * slots):
    for b, h in np.ndindex(batch, heads):
      if b == 1 and step % 3 == 0:
        continue  # idle
      slot = seen[b] if seen[b] < slots else rng.integers(slots)
      pos[b, h, slot] = seen[b]
      draws = {"newest first": seen[b], "ties": rng.integers(3), "anywhere": rng.normal()}
      rank[b, h, slot] = draws[kind]
    live = np.array([True, step % 3 != 0, True])
    seen = seen + live.astype(np.int32)
    order = np.asarray(run(*map(jnp.asarray, (order, pos, rank, seen))))
    for b, h in np.ndindex(batch, heads):
      assert order[b, h].tolist() == sorted_anew(pos[b, h], rank[b, h]), (step, b, h)
