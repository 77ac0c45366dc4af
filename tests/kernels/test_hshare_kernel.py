"""HShare on kernels against its reference: the same sets and lists in all layers, at every step.

On a GPU the same tests run the compiled kernels.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Carry, Env, HShare, Rope
from kvjax.kernels.selection.hshare import listed
from tests.selection import Watched
from tests.streams import Stack, columns, similar_streams


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
  streams = similar_streams(1, 4, 60)
  run = Stack(Watched(method), streams, capacity=64)
  run.prefill(lengths)
  caches, live = run.caches, jnp.ones(2, bool)

  @functools.partial(jax.jit, static_argnums=0)
  def step(impl, caches, new):
    env, carry, found = Env(4, Rope(), impl=impl), Carry(), []
    for layer, (cache, token) in enumerate(zip(caches, new, strict=True)):
      at = method.at(env, layer)
      out, cache, carry, aux = method.decode_step(at, cache, *token, live, carry)
      heavy = jnp.sort(cache.heads["heavy"], -1) if "heavy" in cache.heads else out
      found.append((cache, out, (heavy, aux["retrieved"], aux["visited"])))
    caches, outs, sets = zip(*found, strict=True)
    return caches, outs, sets

  retrieved = []
  for i in range(9):
    new = [columns(stream, [n + i for n in lengths]) for stream in streams]
    _, want, sets = step("reference", caches, new)
    caches, out, found = step("pallas", caches, new)
    for layer in range(4):
      np.testing.assert_allclose(out[layer], want[layer], atol=1e-5)
      for a, b in zip(found[layer], sets[layer], strict=True):
        if a.dtype != jnp.float32:
          np.testing.assert_array_equal(a, b)
    retrieved.append([np.asarray(x[1]).mean() for x in found])
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
