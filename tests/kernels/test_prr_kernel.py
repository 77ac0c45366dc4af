"""PRR's kernels against NumPy float64 loops and against each other, under the interpreter or on a
GPU: repair of stored states, speculation beside scoring, attention to single tiles."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels.common import backend, tiling
from kvjax.kernels.common.config import Config
from kvjax.kernels.decode.sparse import sparse_decode
from kvjax.kernels.prr.repair import _found, repair
from kvjax.kernels.prr.speculate import attend_tiles, share, speculate
from tests.kernels.decode_oracle import exact

CLOSE = {"float32": 2e-5, "bfloat16": 1.5e-2}
CUT = Config(tile=16, programs=7, warps=4, stages=2)


def lists(seed, rows, tiles, width, predicted):
  """Selections and predictions that share from none to all of their tiles; ragged, with holes.

  But for the second row's prediction, which has none where the row's selection has some.
  """
  rng = np.random.default_rng(seed)
  table = np.full((rows, width), -1, np.int32)
  guess = np.full((rows, predicted), -1, np.int32)
  count = np.zeros(rows, np.int32)
  for r in range(rows):
    order = rng.permutation(tiles)
    count[r] = width if r == rows - 1 else rng.integers(1, width + (r != 1))
    shared = min(round(r / max(rows - 1, 1) * count[r]), predicted)  # none … all
    wasted = min(predicted - shared, tiles - count[r], predicted if r == 1 else rng.integers(0, 4))
    table[r, : count[r]] = rng.permutation(order[: count[r]])
    named = np.concatenate([order[:shared], order[count[r] : count[r] + wasted]])
    guess[r, rng.permutation(predicted)[: named.size]] = named
  return table, count, guess


def attended(q, k, v, held):
  """o and lse of one KV head's queries over some slots, float64."""
  o, m, l, _ = exact(q[None, None], k[None, None], v[None, None], lambda *_: held)
  return o[0, 0], (m + np.log(np.where(l > 0, l, 1)))[0, 0]


def slots_of(tiles, unit, stop):
  return sorted({s for j in tiles if j >= 0 for s in range(j * unit, (j + 1) * unit) if s < stop})


def test_what_is_looked_for_in_a_list_is_not_found_behind_its_end():
  """Where the next row's list begins: it holds 5 and 7."""

  def kernel(entry_ref, list_ref, out_ref):
    lanes = jnp.arange(4)
    out_ref[lanes] = _found(entry_ref[lanes], list_ref, 0, 3)

  entry, lists_ = jnp.array([4, 5, 6, 7], jnp.int32), jnp.array([[4, -1, 6, 5, 7]], jnp.int32)
  out = [jax.ShapeDtypeStruct((4,), jnp.int32)]
  (hit,) = backend.call(kernel, entry, lists_, grid=(1,), out=out, warps=1, stages=1, name="found")
  assert hit.tolist() == [1, 0, 1, 0]


@pytest.mark.core(1)
@pytest.mark.parametrize("stored", ["whole", "pieces", "tiles"])
@pytest.mark.parametrize(
  ("heads", "groups", "head_dim", "unit", "dtype"),
  [(3, 3, 24, 16, "float32"), (2, 4, 64, 64, "bfloat16"), (3, 1, 32, 4, "float32")],
)
def test_repair(heads, groups, head_dim, unit, dtype, stored):
  """Everything from no miss to nothing but misses; what is in no list holds NaN."""
  batch, tiles, width, predicted = 2, 26, 9, 16  # a list that ends where what looks at it does
  slots, rows = tiles * unit - 3, batch * heads
  rng = np.random.default_rng(0)
  table, count, guess = lists(1, rows, tiles, width, predicted)
  shapes = (batch, heads, groups, head_dim), *[(batch, heads, slots, head_dim)] * 2
  q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
  stop = np.array([[slots], [slots - unit - 1]], np.int32)
  start = np.zeros_like(stop)
  named = np.zeros((rows, slots), bool)
  for r in range(rows):
    named[r, slots_of([*table[r], *guess[r]], unit, stop[r // heads, 0])] = True
  unread = ~named.reshape(batch, heads, slots, 1)
  k, v = (jnp.where(unread, jnp.nan, x).astype(dtype) for x in (k, v))
  table_, guess_ = (jnp.asarray(x.reshape(batch, heads, -1)) for x in (table, guess))

  @jax.jit
  def run(q, k, v):
    where = (jnp.asarray(start), jnp.asarray(stop))
    if stored == "tiles":
      parts = attend_tiles(q, k, v, guess_, *where, unit=unit)
      written = parts
    else:
      full = jnp.full((batch, heads), predicted, jnp.int32)
      state, rounded = sparse_decode(q, k, v, guess_, full, *where, unit=unit, config=CUT)
      flat = [x.reshape(rows, *x.shape[2:]) for x in (state.o, state.m, state.l, rounded)]
      written = flat
      if stored == "pieces":  # two parts of every row: the state, and nothing
        acc = jnp.stack([flat[0] * flat[2][..., None], jnp.zeros_like(flat[0])], 1)
        m = jnp.stack([flat[1] * tiling.LOG2E, jnp.full_like(flat[1], -jnp.inf)], 1)
        l = jnp.stack([flat[2], jnp.zeros_like(flat[2])], 1)
        written = [x.reshape(2 * rows, *x.shape[2:]) for x in (acc, m, l)]
    return repair(q, k, v, table_, guess_, *where, written, unit=unit, stored=stored, tile=16)

  state, rounded, missed, misses = run(q, k, v)
  for r in range(rows):
    b, h = divmod(r, heads)
    true = set(table[r, : count[r]].tolist())
    absent = [j for j in table[r, : count[r]].tolist() if j not in set(guess[r].tolist())]
    assert int(misses[b, h]) == len(absent)
    assert np.asarray(missed[b, h])[: len(absent)].tolist() == absent
    read = true if stored == "tiles" else true | set(guess[r].tolist())
    held = slots_of(read, unit, stop[b, 0])
    o, lse = attended(q[b, h], k[b, h], v[b, h], held)
    np.testing.assert_allclose(state.o[b, h], o, atol=CLOSE[dtype])
    np.testing.assert_allclose(state.lse[b, h], lse, atol=CLOSE[dtype])
  np.testing.assert_array_equal(np.float32(rounded), np.float32(state.o.astype(dtype)))


@pytest.mark.core(1)
@pytest.mark.parametrize("programs", [7, 700])
@pytest.mark.parametrize("group", ["mean", "max"])
@pytest.mark.parametrize("predictor", ["holt", "ema", "last"])
@pytest.mark.parametrize(
  ("heads", "groups", "head_dim", "pages", "dtype"),
  [(3, 3, 24, 45, "float32"), (2, 4, 64, 70, "bfloat16")],
)
def test_speculate(heads, groups, head_dim, pages, dtype, predictor, group, programs):
  """One launch: the predicted pages' attention, and scores, forecasts and predictors of all."""
  batch, unit, predicted = 2, 16, 11
  slots, rows = pages * unit, batch * heads
  rng = np.random.default_rng(2)
  shapes = (batch, heads, groups, head_dim), *[(batch, heads, slots, head_dim)] * 2
  q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
  edges = rng.normal(size=(2, batch, heads, pages, head_dim))
  low, high = (jnp.asarray(x, dtype) for x in (edges.min(0), edges.max(0)))
  level, trend = (rng.normal(size=(batch, heads, pages)).astype(np.float32) for _ in range(2))
  factors = rng.uniform(size=(batch, 3)).astype(np.float32)
  stop = np.array([slots - 5, 16 * (pages // 2) + 1], np.int32)  # the second begins a page
  guess = np.stack([rng.permutation(pages // 2)[:predicted] for _ in range(rows)])
  guess[:, 7:][rng.random((rows, predicted - 7)) > 0.5] = -1
  guess = guess.astype(np.int32).reshape(batch, heads, predicted)
  how = {"unit": unit, "group": group, "predictor": predictor}
  run = jax.jit(functools.partial(speculate, **how, programs=programs))
  smoothed = () if predictor == "last" else (level, trend, factors)
  written, (both, stops, *after) = run(
    q, k, v, *map(jnp.asarray, (guess, stop)), low, high, *map(jnp.asarray, smoothed)
  )
  assert len(after) == (2 if smoothed else 0)
  none = jnp.full((batch, heads, 1), -1, jnp.int32)
  state, _, _, misses = repair(
    *(q, k, v, none, jnp.asarray(guess)),
    *(jnp.zeros((batch, 1), jnp.int32), jnp.asarray(stop)[:, None], written),
    unit=unit,
    stored="pieces",
  )
  assert not np.asarray(misses).any()
  np.testing.assert_array_equal(stops[:, 0], np.stack([stop, stop + 1], 1))
  wide = [np.asarray(x, np.float64) for x in (q, low, high)]
  for b, h in np.ndindex(batch, heads):
    held = slots_of(guess[b, h], unit, stop[b])
    o, lse = attended(q[b, h], k[b, h], v[b, h], held)
    np.testing.assert_allclose(state.o[b, h], o, atol=CLOSE[dtype])
    np.testing.assert_allclose(state.lse[b, h], lse, atol=CLOSE[dtype])
    count = -(-stop[b] // unit)
    heads_of = wide[0][b, h].mean(0, keepdims=True) if group == "mean" else wide[0][b, h]
    edge = (np.maximum(x * wide[1][b, h], x * wide[2][b, h]).sum(-1) for x in heads_of)
    s = np.max(list(edge), 0) / math.sqrt(head_dim)
    np.testing.assert_allclose(both[b, h, 0, :count], s[:count], atol=1e-4)
    full, before = (stop[b] - 1) // unit, max(stop[b] - 2, 0) // unit
    page = np.arange(pages)
    if not smoothed:
      np.testing.assert_allclose(both[b, h, 1], np.where(page < full, s, np.inf), atol=1e-4)
      continue
    alpha, beta, gamma = factors[b]
    a, c = level[b, h], trend[b, h]
    new = alpha * s + (1 - alpha) * (a + c if predictor == "holt" else a)
    slope = beta * (new - a) + (1 - beta) * c
    new = np.where(page < before, new, np.where(page < full, s, 0))
    slope = np.where(page < before, slope, 0)
    for found, want in zip(after, (new, slope), strict=True):
      np.testing.assert_allclose(found[b, h], want, atol=1e-4)
    ahead = np.where(page < full, new + gamma * slope, np.inf)
    np.testing.assert_allclose(both[b, h, 1], ahead, atol=1e-4)


def test_short_predictions_are_cut_to_single_tiles():
  """Keys per part, and parts: as many as there is room for, and as are joined at once."""
  assert share(8, 79 * 16, 32, 528) == (32, 40)
  assert share(8, 321 * 16, 32, 528) == (96, 54)
  assert share(256, 79 * 16, 32, 528) == (640, 2)
