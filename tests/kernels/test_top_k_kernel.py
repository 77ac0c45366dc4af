"""The best tiles of the kernel against the reference's, which has a loop of its own to agree with.

On a GPU the same tests run the compiled kernel, on rows as long as those of long contexts.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Span
from kvjax.kernels.selection import top_k
from kvjax.ops import tiles
from tests.kernels.decode_oracle import same_bits

ON_GPU = jax.default_backend() == "gpu"


def scores_of(rng, batch, heads, count, kind):
  """Scores with −∞ and NaN among them; "ties": few values, both zeros; "wide": all magnitudes."""
  x = rng.normal(size=(batch, heads, count))
  if kind == "ties":
    x = np.round(x * 2) / 2
  if kind == "wide":
    x = np.sign(x) * 10.0 ** rng.uniform(-38, 38, x.shape)
  x[0, 0, ::5] = -np.inf
  x[-1, -1, 3::7] = np.nan
  return x.astype(np.float32)


def both(scores, stop, start, span_sinks, limit=None, dense_below=0, ordered=True, **chosen):
  """table, count and scores of reference and kernel; entries sorted where they have no order."""
  span = Span(jnp.asarray(start), jnp.asarray(stop), span_sinks)
  each = None if limit is None else jnp.where(span.stop < dense_below, chosen["k"], limit)
  want = jax.jit(functools.partial(tiles.best, **chosen))(scores, span, limit=each)
  rows = {"limit": limit, "dense_below": dense_below, "ordered": ordered}
  run = functools.partial(top_k.best, span_sinks=span_sinks, **rows, **chosen)
  got = jax.jit(run)(scores, start, stop)
  if not ordered:
    want, got = (tuple(jnp.sort(x) for x in result) for result in (want, got))
  return want, got


@pytest.mark.core(1)
@pytest.mark.parametrize("kind", ["normal", "ties", "wide"])
@pytest.mark.parametrize(
  ("count", "unit", "sinks", "local", "k"),
  [(50, 4, 1, 2, 5), (33, 16, 0, 1, 0), (7, 1, 9, 9, 3), (300, 1, 4, 5, 64), (64, 3, 0, 0, 64)],
)
def test_equals_reference(count, unit, sinks, local, k, kind):
  rng = np.random.default_rng(count)
  scores = scores_of(rng, 3, 2, count, kind)
  stop = np.array([[count * unit], [count * unit // 2], [0]], np.int32)
  start, rows = stop // 3, {"limit": k // 2, "dense_below": count * unit * 3 // 4}
  for options in ({}, rows, {"ordered": False}):
    chosen = {"unit": unit, "sinks": sinks, "local": local, "k": k}
    same_bits(*both(scores, stop, start, 2 * unit, **options, **chosen))


@pytest.mark.slow
@pytest.mark.parametrize("k", [9, 40])
def test_long_rows_are_cut(monkeypatch, k):
  if not ON_GPU:
    monkeypatch.setattr(top_k, "LANES", 64)
  count = 70_000 if ON_GPU else 300
  scores = scores_of(np.random.default_rng(k), 1, 2, count, "ties")
  stop = np.array([[count - 3]], np.int32)
  same_bits(*both(scores, stop, stop // 4, 7, unit=1, sinks=4, local=5, k=k))


@pytest.mark.slow
def test_the_first_tile_of_a_cut_row(monkeypatch):
  """It is chosen among the best of each part as any other."""
  monkeypatch.setattr(top_k, "LANES", 64)
  scores, where = -jnp.arange(300.0).reshape(1, 1, 300), jnp.array([[300]], jnp.int32)
  table, count, _ = top_k.best(scores, where * 0, where, unit=1, sinks=0, local=0, k=3)
  assert table.tolist() == [[[0, 1, 2]]] and count.tolist() == [[3]]


@pytest.mark.rest(3)
@pytest.mark.slow
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("longest", [8192, 64])
@pytest.mark.parametrize(("k", "limit"), [((9, 20), (9, 20)), ((12, 30), (9, 20))])
def test_several_lists_by_one_search(monkeypatch, ordered, longest, k, limit):
  """Each as by a call of its own, whether rows are cut or not."""
  rng, count, unit = np.random.default_rng(3), 300, 4
  stop = np.array([[[900, 901]], [[count * unit - 1, count * unit]]], np.int32)
  start = np.zeros((2, 1), np.int32)
  scores = np.stack([scores_of(rng, 2, 3, count, kind) for kind in ("ties", "wide")], 2)
  chosen = {"unit": unit, "sinks": 1, "local": 2}
  monkeypatch.setattr(top_k, "LANES", longest)
  run = functools.partial(top_k.best_of_each, k=k, limit=limit, dense_below=1000, **chosen)
  got = jax.jit(functools.partial(run, ordered=ordered))(scores, start, stop)
  for n, lists in enumerate(got):
    each = {**chosen, "k": k[n], "limit": limit[n], "dense_below": 1000}
    want, _ = both(scores[:, :, n], stop[:, :, n], start, 0, **each)
    for a, b in zip(want, lists, strict=True):
      np.testing.assert_array_equal(*(a, b) if ordered else (np.sort(a), np.sort(b)))


@pytest.mark.core(1)
@pytest.mark.parametrize("kind", ["normal", "ties", "wide"])
@pytest.mark.parametrize("first", [1, 5, 12])
def test_the_very_best_come_first(kind, first):
  """The same entries as in order of scores, by index on both sides of a line."""
  scores = scores_of(np.random.default_rng(first), 2, 3, 100, kind)
  stop, start = jnp.array([[100], [7]], jnp.int32), jnp.zeros((2, 1), jnp.int32)
  chosen = {"unit": 1, "sinks": 2, "local": 1, "k": 12}
  run = functools.partial(top_k.others, ordered=False, first=first, **chosen)
  value, index = map(np.asarray, jax.jit(run)(scores, start, stop))
  reference = functools.partial(tiles.others, **chosen)
  want_value, want = map(np.asarray, jax.jit(reference)(scores, Span(start, stop)))
  for part in (slice(first), slice(first, None)):
    by_index = np.sort(np.where(want[..., part] < 0, 1000, want[..., part]))
    np.testing.assert_array_equal(np.where(index[..., part] < 0, 1000, index[..., part]), by_index)
    np.testing.assert_array_equal(np.sort(value[..., part]), np.sort(want_value[..., part]))


def test_rows_are_cut_where_they_are_few():
  cut = functools.partial(top_k.cuts, most=8192, cores=132)
  assert cut(8, 8192, 63) == (1024,)
  assert cut(8, 2048, 64) == cut(64, 2048, 63) == cut(8, 8192, 0) == ()
  assert cut(512, 4112, 432) == (1371,)
  assert cut(1, 70_000, 9000) is None


def test_more_than_a_program_holds():
  scores, where = jnp.zeros((1, 1, 70_000)), jnp.zeros((1, 1), jnp.int32)
  with pytest.raises(NotImplementedError, match=r"k: found 9000 of 70000 tiles, expected at most"):
    top_k.best(scores, where, where, unit=1, sinks=0, local=0, k=9000)


def test_inactive_rows_are_left_alone():
  scores = jax.random.normal(jax.random.key(0), (2, 3, 100))
  stop, start = jnp.full((2, 1), 100, jnp.int32), jnp.zeros((2, 1), jnp.int32)
  active = jnp.array([[1, 0, 1], [0, 0, 1]], jnp.int32)
  chosen = {"unit": 1, "sinks": 2, "local": 3, "k": 12}
  run = jax.jit(functools.partial(top_k.others, **chosen))
  reference = jax.jit(functools.partial(tiles.others, **chosen))
  counted = np.asarray(active) > 0
  found, wanted = run(scores, start, stop, active=active), reference(scores, Span(start, stop))
  for a, b in zip(found, wanted, strict=True):
    np.testing.assert_array_equal(np.asarray(a)[counted], np.asarray(b)[counted])


def test_bad_scores():
  scores, where = jnp.zeros((1, 1, 8), jnp.bfloat16), jnp.zeros((1, 1), jnp.int32)
  with pytest.raises(TypeError, match="scores: found dtype bfloat16, expected float32"):
    top_k.best(scores, where, where, unit=1, sinks=0, local=0, k=1)
