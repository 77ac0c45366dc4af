"""Division of maps into spans by kernels against loops in float64 and the reference.

On a GPU the same tests run the compiled kernels.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.kernels.ltri.divide import between, divide
from kvjax.methods.ltri import kernel, spans, vectors
from tests.slow_spans import slow_candidates, slow_nms, slow_ratio, slow_scores

REFERENCE, KERNELS = (
  kvjax.Full().at(kvjax.Env(1, impl=impl), 0) for impl in ("reference", "pallas")
)


def triangles(seed, count, size):
  """Lower triangular maps of multiples of 2⁻¹⁰, whose sums are exact in any order."""
  rng = np.random.default_rng(seed)
  drawn = np.float32(rng.integers(0, 1 << 10, (count, size, size)) ** 3 >> 20) / (1 << 10)
  return np.tril(drawn)


def of(*arrays):
  return tuple(jnp.asarray(x, jnp.int32) for x in arrays)


@pytest.mark.core(1)
@pytest.mark.parametrize("size", [24, 1, 7, 16, 128])
def test_entries_in_order(size):
  """Of maps with many equal numbers, and of some whose last rows do not count."""
  maps = triangles(size, 6, size)
  length = np.array([size, size, 1, 0, (size + 1) // 2, size])
  count = length * (length + 1) // 2
  place = np.maximum(count - 1, 0) * np.array([0, 0.5, 0, 0, 0.9, 1]) // 1
  following = np.minimum(place + np.array([1, 0, 0, 0, 1, 0]), np.maximum(count - 1, 0))
  garbage = np.where(np.arange(size)[:, None] < length[:, None, None], maps, 7)
  low, high = jax.jit(between)(garbage, *of(length, place, following))
  for i, n in enumerate(length.tolist()):
    if n:
      values = np.sort(maps[i, :n, :n][np.tril_indices(n)])
      assert low[i] == values[int(place[i])]
      assert high[i] == values[int(following[i])]


@pytest.mark.core(1)
@pytest.mark.parametrize(
  ("size", "count", "mode"), [(16, 4, "row"), (7, 3, "col"), (1, 2, "rowcol")]
)
def test_spans_against_loops(size, count, mode):
  maps = triangles(3 + size, 8, size)
  length = np.array([size, size, 0, 1, size, (size + 1) // 2, size, size])
  theta = np.float32([0.0625, 0.25, 0, 0, 0.5, 0.125, 0.75, 2.0])
  overlap = np.float32([0.1, 0, 0.1, 0.1, 0.6, 0.1, 0.1, 0.1])
  run = jax.jit(functools.partial(divide, count=count, mode=mode))
  start, stop, ratio = run(maps, theta, *of(length), overlap)
  for i, n in enumerate(length.tolist()):
    boxes = slow_candidates(slow_scores(np.float64(maps[i, :n, :n]), theta[i])) if n else []
    want = slow_nms(boxes, overlap[i], count)
    assert list(zip(start[i].tolist(), stop[i].tolist(), strict=True)) == want
    shares = [slow_ratio(np.float64(maps[i]), a, b, mode) for a, b in want]
    np.testing.assert_allclose(ratio[i], shares, rtol=1e-5)  # float32 beside float64


@pytest.mark.core(1)
@pytest.mark.parametrize("length", [40, 17, 33, 48])
def test_spans_that_start_late_in_a_block_that_is_not_full(length):
  """As in a question, whose tokens are fewer than a block has."""
  maps = triangles(length, 3, 80) * 0.5
  maps[:, length - 5 : length - 1, length - 5 : length - 1] += np.tril(np.ones((4, 4), np.float32))
  each, run = (
    np.float32([[0.5], [0.1]]).repeat(3, 1),
    functools.partial(divide, count=4, mode="row"),
  )
  start, stop, _ = jax.device_get(jax.jit(run)(maps, each[0], *of([length] * 3), each[1]))
  for i in range(3):
    want = slow_nms(
      slow_candidates(slow_scores(np.float64(maps[i, :length, :length]), 0.5)), 0.1, 4
    )
    assert list(zip(start[i].tolist(), stop[i].tolist(), strict=True)) == want
  assert (start >= length - 6).any()


@pytest.mark.slow
def test_a_whole_block_against_the_reference():
  """Blocks of the paper's size, two rows of two heads; one has no real token, one a few."""
  maps = jnp.asarray(triangles(1, 24, 128).reshape(2, 2, 2, 3, 128, 128))
  length, overlap = jnp.array([[128, 0, 128], [40, 128, 127]]), jnp.array([[0.1], [0.3]])
  quantile = jnp.array([0.9, 0.5])

  @functools.partial(jax.jit, static_argnums=0)
  def run(at):
    every, theta = spans.summed(at, maps, quantile, length)
    found = kernel.divide(at, every, theta, length, overlap, 4, "rowcol")
    if found is None:
      start, stop = spans.divide(every, theta, overlap, 4, length)
      found = start, stop, vectors.ratios(every, start, stop, "rowcol")
    return theta, *found

  (theta, *found), (wanted, *want) = run(KERNELS), run(REFERENCE)
  np.testing.assert_allclose(theta, wanted, rtol=1e-6)  # heads summed in another order
  for mine, other in zip(found, want, strict=True):
    # Starts and stops to the token; shares by products of a GPU's default precision.
    np.testing.assert_allclose(mine, other, rtol=2e-3)
  assert (found[1] > found[0]).any()


def test_larger_blocks_are_left_to_the_reference():
  maps, length = jnp.zeros((1, 256, 256)), jnp.array([256])
  assert kernel.between(KERNELS, maps, length, length, length) is None
  assert kernel.divide(KERNELS, maps, length * 1.0, length, jnp.zeros(1), 4, "row") is None
