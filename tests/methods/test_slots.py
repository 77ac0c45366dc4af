"""Writing, compacting and choosing slots."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvjax.core import slots as plain
from tests.compiled import of

slots = of(plain)


def test_put_drops_out_of_range():
  x = jnp.zeros((1, 2, 3))
  out = slots.put(x, jnp.array([[[1], [3]]]), jnp.array([[[5.0], [7.0]]]))
  np.testing.assert_array_equal(out, [[[0, 5, 0], [0, 0, 0]]])


def test_what_is_laid_over_comes_entry_by_entry():
  x, value = np.zeros((2, 4, 3)), np.arange(1, 13.0).reshape(2, 2, 3)
  out = slots.overlaid(jnp.asarray(x), jnp.array([[3, 1], [4, 0]]), jnp.asarray(value))
  x[0, 3], x[0, 1], x[1, 0] = value[0, 0], value[0, 1], value[1, 1]  # one entry is beyond x
  np.testing.assert_array_equal(out, x)


def test_slots_are_cut_or_lengthened_by_empty_ones():
  held = {"pos": jnp.array([[[4, 7, 5]]]), "x": jnp.ones((1, 1, 3, 2))}
  for size in (2, 3, 5):
    found = slots.resize(held, size)
    assert found["pos"][0, 0].tolist() == [4, 7, 5, -1, -1][:size]
    assert found["x"][0, 0, :, 0].tolist() == [1, 1, 1, 0, 0][:size]


def test_append_static_and_scattered_agree():
  rng = np.random.default_rng(0)
  old = {
    "k": jnp.asarray(rng.normal(size=(2, 3, 8, 4)), jnp.float32),
    "pos": jnp.full((2, 3, 8), -1, jnp.int32),
  }
  pos = np.where(np.arange(5) < np.array([[5], [2]]), np.arange(5), -1)
  new = {
    "k": jnp.asarray(rng.normal(size=(2, 3, 5, 4)), jnp.float32),
    "pos": jnp.broadcast_to(jnp.asarray(pos, jnp.int32)[:, None], (2, 3, 5)),
  }
  a = slots.append(old, new, jnp.zeros(2, jnp.int32), 0)
  b = slots.append(old, new, jnp.zeros(2, jnp.int32), None)
  for name in old:
    np.testing.assert_array_equal(a[name], b[name])
  np.testing.assert_array_equal(a["k"][1, :, 2:], old["k"][1, :, 2:])  # padding writes nothing


# Fewer slots than tokens, as many, more; of few shapes, since each has a program of its own.
@given(st.integers(0, 2**31), st.sampled_from([1, 5, 12]), st.sampled_from([1, 5, 12, 14]))
def test_keep_best(seed, n, size):
  """Against sorting by hand; equal priorities go to the lowest position, empty slots never win."""
  rng = np.random.default_rng(seed)
  pos = rng.permutation(n) * 2
  pos[rng.random(n) < 0.3] = -1
  priority = rng.integers(0, 3, n).astype(np.float32)
  priority[rng.random(n) < 0.2] = np.inf
  payload = np.where(pos >= 0, pos * 10.0, np.nan)
  arrays = {"pos": pos.astype(np.int32), "x": payload.astype(np.float32)}
  held = {name: x[None, None] for name, x in arrays.items()}
  out = jax.tree.map(np.asarray, slots.keep_best(held, priority[None, None], size))
  best = sorted((-priority[i], pos[i]) for i in range(n) if pos[i] >= 0)[:size]
  kept = sorted(p for _, p in best)
  np.testing.assert_array_equal(out["pos"][0, 0], kept + [-1] * (size - len(kept)))
  np.testing.assert_array_equal(out["x"][0, 0, : len(kept)], np.array(kept) * 10.0)


def test_the_lowest_score_and_of_equal_ones_the_oldest_token():
  """Wherever it lies: slots are used again, and then not in order of position."""
  pos = np.array([[[5, 9, 3, 4], [8, 2, 7, 6], [0, 3, 1, 2]]], np.int32)
  scores = np.array([[[1, 0, 0, 0], [2, 2, 2, 2], [5, np.nan, 1, np.nan]]], np.float32)
  assert slots.lowest(jnp.asarray(scores), jnp.asarray(pos)).tolist() == [[2, 1, 3]]


def test_neighbours_are_those_in_time():
  """Pooled over three: of what is not ok nothing counts, wherever it lies and whatever it says."""
  pos = jnp.array([[[4, 1, 9, 3, 0, 2]]])
  x = jnp.array([[[16.0, 2, 99, 8, 1, 4]]])  # 2 to the power of the position
  ok = pos < 9
  for how, want in (("max", [16, 4, 16, 2, 8]), ("avg", [8, 7 / 3, 28 / 3, 1, 14 / 3])):
    found = np.asarray(slots.pool(x, pos, ok, 3, how))[0, 0]
    np.testing.assert_allclose(found[[0, 1, 3, 4, 5]], want, rtol=1e-6)
