"""Spans of attention maps against loops in float64, and planted structure found again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.families import retrieval
from kvjax.methods.ltri import evidence
from kvjax.methods.ltri import spans as plain
from kvjax.methods.ltri import vectors as plain_vectors
from tests.compiled import of
from tests.slow_spans import (
  slow_candidates,
  slow_counts,
  slow_divide,
  slow_elect,
  slow_nms,
  slow_ratio,
  slow_scores,
)

spans = of(plain)
vectors = of(plain_vectors)
AT = kvjax.Full().at(kvjax.Env(1), 0)
threshold = jax.jit(functools.partial(plain.threshold, AT))


def random_maps(seed, count, size):
  """Causal softmax maps with some structure, float32 [count, U, U]."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(count, size, size)) * 2
  x = np.where(np.tril(np.ones((size, size), bool)), x, -np.inf)
  p = np.exp(x - x.max(-1, keepdims=True))
  return (p / p.sum(-1, keepdims=True)).astype(np.float32)


def test_worked_example():
  """Two runs that attend to themselves: exactly these are found, the larger first."""
  a = np.zeros((6, 6), np.float32)
  a[0:2, 0:2] = a[2:5, 2:5] = 1
  a[5, 5] = 0.1
  scores = spans.triangle_scores(jnp.tril(a), jnp.float32(0.5))
  assert float(scores[2, 4]) == 6 * 0.5
  assert float(scores[0, 4]) == 9 - 15 * 0.5
  assert float(scores[4, 2]) == -np.inf
  start, stop = spans.suppress(*spans.candidates(scores), 0.1, 3)
  assert (start.tolist(), stop.tolist()) == ([2, 0, 0], [5, 2, 0])


@pytest.mark.core(1)
@pytest.mark.parametrize("size", [1, 2, 7, 12])
def test_scores_candidates_and_suppression(size):
  maps = random_maps(size, 6, size)
  theta = np.asarray(threshold(maps, 0.8, np.full(6, size)))
  scores = np.asarray(spans.triangle_scores(maps, theta))
  found = jax.tree.map(np.asarray, spans.candidates(scores))
  assert found[0].shape == (6, 2 * size - 1)
  for i, a in enumerate(maps):
    want = slow_scores(np.float64(a), float(theta[i]))
    np.testing.assert_allclose(scores[i], want, atol=1e-5)
    boxes = slow_candidates(scores[i])
    for mine, wanted in zip(found, zip(*boxes, strict=True), strict=True):
      np.testing.assert_array_equal(mine[i], wanted)
    for overlap in (0.0, 0.1, 0.6):
      start, stop = spans.suppress(*(x[i] for x in found), overlap, 4)
      wanted = slow_nms(boxes, overlap, 4)
      assert list(zip(start.tolist(), stop.tolist(), strict=True)) == wanted


def test_of_equal_scores_the_longest_span_is_the_candidate():
  scores = np.where(np.triu(np.ones((6, 6), bool)), 1.0, -np.inf).astype(np.float32)
  found = zip(*(x.tolist() for x in spans.candidates(jnp.asarray(scores))), strict=True)
  assert list(found) == slow_candidates(scores)


def divided(maps, quantile, length=None):
  """Spans of maps [B, heads, U, U], one block a row."""
  maps, quantile = maps[:, None, :, None], np.full(len(maps), quantile, np.float32)
  length = None if length is None else length[:, None]

  @jax.jit
  def run(maps, quantile, length):
    every, theta = plain.summed(AT, maps, quantile, length)
    return plain.divide(every, theta, 0.1, 4, length)

  found = jax.device_get(run(maps, quantile, length))
  return [list(zip(*(x[i, 0].tolist() for x in found), strict=True)) for i in range(len(maps))]


def test_whole_division_against_loops():
  """Of three heads, each with a threshold of its own."""
  maps = random_maps(3, 60, 16).reshape(20, 3, 16, 16) * np.array([1, 3, 9])[:, None, None]
  maps = maps.astype(np.float32)
  found = divided(maps, 0.85)
  assert found == [slow_divide(heads, 0.85, 0.1, 4) for heads in maps]
  assert found != divided(maps.sum(1, keepdims=True), 0.85)


def test_a_block_that_is_not_full():
  """Rows and columns after the end count for nothing, whatever they hold."""
  maps = random_maps(4, 24, 16).reshape(12, 2, 16, 16)
  length = np.array([0, 1, 2, 3, 5, 7, 8, 9, 11, 13, 15, 16], np.int32)
  for spans_, heads, n in zip(divided(maps, 0.8, length), maps, length.tolist(), strict=True):
    assert spans_ == (slow_divide(heads[:, :n, :n], 0.8, 0.1, 4) if n else [(0, 0)] * 4)


@pytest.mark.parametrize("mode", vectors.MODES)
def test_ratios_and_counts(mode):
  maps = random_maps(5, 10, 16)
  theta = threshold(maps, 0.9, np.full(10, 16))
  start, stop = map(np.asarray, spans.divide(maps, theta, 0.1, 4))
  ratio = np.asarray(vectors.ratios(maps, start, stop, mode))
  counts = [np.asarray(vectors.vector_counts(stop - start, ratio, 1.0, most)) for most in (6, 16)]
  seen = set()
  for i, a in enumerate(maps):
    lengths = (stop - start)[i].tolist()
    pairs = zip(start[i].tolist(), stop[i].tolist(), strict=True)
    want = [slow_ratio(np.float64(a), x, y, mode) for x, y in pairs]
    np.testing.assert_allclose(ratio[i], want, rtol=1e-5)
    for count, most in zip(counts, (6, 16), strict=True):
      assert count[i].tolist() == slow_counts(lengths, want, 1.0, most)
      assert count[i].sum() <= most
    seen |= {*counts[1][i].tolist()}
  assert len(seen) > 2
  assert float(vectors.ratios(jnp.eye(4), jnp.array([0]), jnp.array([4]), mode)[0]) == 1
  assert float(vectors.ratios(jnp.zeros((4, 4)), jnp.array([1]), jnp.array([2]), mode)[0]) == 1


def test_a_block_has_at_most_so_many_vectors():
  """By hand: 5, 3, 2 and no tokens beyond the first of each share 12 − 4 as 4, 2, 2, 0."""
  length = jnp.array([6, 4, 3, 1])
  assert vectors.vector_counts(length, jnp.ones(4), 3.0, 14).tolist() == [6, 4, 3, 1]
  assert vectors.vector_counts(length, jnp.ones(4), 3.0, 12).tolist() == [5, 3, 3, 1]
  assert vectors.vector_counts(length, jnp.ones(4), 3.0, 4).tolist() == [1] * 4
  assert vectors.static_counts(length, 12).tolist() == [3, 3, 3, 1]


def test_more_vectors_for_lower_rates():
  """λ → 0 keeps every token that it may, λ → ∞ one vector a span."""
  ratio, length = jnp.linspace(0.1, 0.9, 5), jnp.full(5, 40)
  totals = [
    int(vectors.vector_counts(length, ratio, rate, 24).sum())
    for rate in (0.0, 8.0, 10.0, 20.0, 99.0)
  ]
  assert totals == sorted(totals, reverse=True) and len({*totals}) > 3
  assert totals[0] == 24 and totals[-1] == 5


def test_elected_tokens():
  rng = np.random.default_rng(0)
  votes = rng.integers(0, 5, (8, 20)).astype(np.float32)  # with ties
  start = jnp.asarray(rng.integers(0, 10, (8, 3)))
  stop = start + jnp.asarray(rng.integers(0, 10, (8, 3)))
  counts = jnp.asarray(rng.integers(0, 6, (8, 3)))
  chosen = retrieval.elect(jnp.asarray(votes), vectors.inside(start, stop, 20), counts)
  for i in range(8):
    for c in range(3):
      want = slow_elect(votes[i], int(start[i, c]), int(stop[i, c]), int(counts[i, c]))
      assert sorted(want) == np.flatnonzero(chosen[i, c]).tolist()


def planted(rng, size=128, count=4):
  """A block of `count` spans with other tokens between them, and its map of attention.

  The spans cover about an eighth of the triangle, so that a 90th percentile lies within their
  values, as it is meant to.
  """
  lengths = rng.integers(20, 27, count)
  spare = size - lengths.sum() - 2 * (count - 1)
  cuts = np.diff(np.sort(np.concatenate([[0, spare], rng.integers(0, spare + 1, count)])))
  owner, where, stop = np.full(size, -1), [], -2
  for c, length in enumerate(lengths):
    start = stop + 2 + cuts[c]
    stop = start + length
    owner[start:stop] = c
    where.append((int(start), int(stop)))
  x = rng.normal(size=(size, size)) * 0.5 + 3.0 * ((owner[:, None] == owner) & (owner >= 0))
  p = np.where(np.tril(np.ones((size, size), bool)), np.exp(x), 0)
  # Most of the probability goes out of the block, as in a window of thousands of tokens.
  return (p / (p.sum(-1, keepdims=True) + 1000)).astype(np.float32), where


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_planted_spans_are_found_again(count):
  """Boundaries within one token in at least 95 % of the maps."""
  rng = np.random.default_rng(0)
  maps, wanted = zip(*(planted(rng) for _ in range(count)), strict=True)
  size = jnp.full(100, 128)
  divide = jax.jit(lambda a: plain.divide(a, plain.threshold(AT, a, 0.9, size), 0.1, 4))
  good = 0
  for i in range(0, count, 100):
    start, stop = divide(jnp.asarray(np.stack(maps[i : i + 100])))
    for a, b, truth in zip(np.asarray(start), np.asarray(stop), wanted[i : i + 100], strict=True):
      found = [(x, y) for x, y in zip(a, b, strict=True) if y > x]
      near = [any(abs(x - s) <= 1 and abs(y - e) <= 1 for x, y in found) for s, e in truth]
      good += all(near)
  assert good >= 0.95 * count, good


def test_of_equal_scores_the_first_in_any_order():
  """Reductions of a GPU compare in an order of their own."""
  early, late, less = ((jnp.float32(s), jnp.int32(i)) for s, i in ((2, 1), (2, 3), (1, 0)))
  for a, b in ((early, late), (late, early), (early, less), (less, early)):
    assert plain._better(a, b) == early


def test_a_chunk_in_pieces_has_the_same_maps(monkeypatch):
  """Ragged rows of five blocks, the last of them not whole: two blocks at a time, or all."""
  rng = np.random.default_rng(0)
  q = jnp.asarray(rng.normal(size=(2, 2, 3, 37, 8)), jnp.float32)
  k = jnp.asarray(rng.normal(size=(2, 2, 37, 8)), jnp.float32)
  t = np.arange(37)
  qpos = jnp.asarray(np.where(t < np.array([[37], [20]]), t, -1), jnp.int32)
  maps = lambda: jax.jit(functools.partial(evidence.chunk_maps, AT, size=8))(q, k, qpos)  # noqa: E731
  together = maps()
  monkeypatch.setattr(evidence, "LOGITS", 2 * 12 * 8 * 40 * 2)
  apart = maps()
  assert together[0].shape == (2, 2, 3, 5, 8, 8)
  assert together[2].tolist() == [[8, 8, 8, 8, 5], [8, 8, 4, 0, 0]]
  for one, other in zip(together, apart, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5)  # votes summed in another order
