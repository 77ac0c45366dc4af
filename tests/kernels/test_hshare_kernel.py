"""HShare on kernels against its reference: the same sets and lists in all layers, at every step.

On a GPU the same tests run the compiled kernels.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import HShare
from kvjax.kernels.selection.hshare import listed
from tests.streams import Stack, similar_streams


@pytest.mark.rest(1)
@pytest.mark.slow
@pytest.mark.parametrize(
  ("method", "lengths"),
  [
    (HShare(14, 2, 4, 0.5, 0.5, 2), [30, 21]),
    (HShare(10, 0, 3, 0.75, 0.75, 3), [25, 6]),
    (HShare(9, 1, 2, 0.5, 1.0, 2, dense_layers=1), [19, 3]),
  ],
)
def test_same_sets_as_the_reference(method, lengths):
  """Both implementations through four layers from the same caches; the kernels' caches go on."""
  streams, impls, retrieved = similar_streams(1, 4, 60), ("reference", "pallas"), []
  plain, kernels = (Stack(method, streams, capacity=64, impl=impl) for impl in impls)
  plain.prefill(lengths)
  kernels.caches = plain.caches
  for i in range(9):
    plain.caches, at = kernels.caches, [n + i for n in lengths]
    both = zip(kernels.decode(at), plain.decode(at), kernels.caches, plain.caches, strict=True)
    for (out, aux), (want, expected), mine, other in both:
      np.testing.assert_allclose(out, want, atol=1e-5)
      for name in ("retrieved", "visited"):
        np.testing.assert_array_equal(aux[name], expected[name])
      if "heavy" in other.heads:
        heavy = (np.sort(cache.heads["heavy"], -1) for cache in (mine, other))
        np.testing.assert_array_equal(*heavy)
      retrieved.append(aux["retrieved"].mean())
  assert 0 < np.mean(retrieved) < 0.9


def test_lists_by_hand():
  """Row 0 keeps its sets; row 1 makes them anew: one head its own, one its neighbour's; row 2 takes
  those of the layer below, and is too short for some of them."""
  retrieved = jnp.array([[[9] * 3] * 2, [[7, 3, 5], [4, 6, -1]], [[9] * 3] * 2], jnp.int32)
  kept = jnp.array([[[8, 5, 6], [4, -1, -1]]] * 3, jnp.int32)
  from_head = jnp.array([[0, 0]] * 3, jnp.int32)
  from_layer = jnp.array([1, 1, 0], jnp.int32)
  seen = jnp.array([13, 12, 6], jnp.int32)
  sets = jnp.full((3, 2, 2, 3), -1, jnp.int32).at[2, :, 0].set(jnp.array([[3, 2, 9], [2, -1, -1]]))
  sets = sets.at[:, :, 1].set(9)  # this layer's of the last time
  how = {"own": 1, "slots": 16, "steps": 2, "budget": 4, "sinks": 2, "local": 2}

  def run(start, **more):
    given = retrieved, kept, from_head, from_layer, seen, jnp.full((3, 1), start, jnp.int32), sets
    return jax.jit(functools.partial(listed, **how, **more))(*given)

  table, count, heavy, after = run(0)
  assert table.tolist() == [
    [[0, 1, 12, 11, 8, 5, 6], [0, 1, 12, 11, 4, -1, -1]],
    [[0, 1, 11, 10, 7, 3, 5], [0, 1, 11, 10, 7, 3, 5]],
    [[0, 1, 5, 4, 3, 2, -1], [0, 1, 5, 4, 2, -1, -1]],
  ]
  assert count.tolist() == [[7, 5], [7, 7], [6, 5]]
  assert heavy.tolist() == after[:, :, 1].tolist()
  assert heavy[0].tolist() == kept[0].tolist()
  np.testing.assert_array_equal(after[:, :, 0], sets[:, :, 0])
  # Of a span that begins at 5 the first token is read, too, and no other before it.
  table, count, *_ = run(5, span_sinks=1)
  each = [
    [x[:n] for x, n in zip(*row, strict=True)]
    for row in zip(table.tolist(), count.tolist(), strict=True)
  ]
  assert each == [
    [[0, 12, 11, 8, 5, 6], [0, 12, 11]],
    [[0, 11, 10, 7, 5]] * 2,
    [[0, 5]] * 2,
  ]
