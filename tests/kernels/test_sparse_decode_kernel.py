"""Sparse decode against a NumPy float64 loop: units, ragged counts, holes, ranges, NaN poison.

On a GPU the same tests run the compiled kernel.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels.common.config import Config
from kvjax.kernels.decode.sparse import check_table, sparse_decode
from tests.kernels.dense_oracle import exact, same_bits
from tests.kernels.listed import plan, slots_of

CLOSE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


@pytest.mark.core(2)
@pytest.mark.rest
@pytest.mark.parametrize("programs", [1, 7, 64])
@pytest.mark.parametrize("unit", [1, 3, 16, 64, 256])
@pytest.mark.parametrize(
  ("heads", "groups", "head_dim", "dtype"),
  [(3, 3, 24, "float32"), (2, 4, 64, "bfloat16"), (1, 7, 64, "float16")],
)
def test_against_oracle(heads, groups, head_dim, dtype, unit, programs):
  batch, slots, sinks = 2, 700, 5
  width = {1: 90, 3: 60, 16: 30, 64: 11, 256: 3}[unit]
  table, count, start, stop = plan(unit, batch, heads, slots, unit, width)
  rng = np.random.default_rng(1)
  shapes = (batch, heads, groups, head_dim), *[(batch, heads, slots, head_dim)] * 2
  q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
  listed = functools.partial(slots_of, table, count, start, stop, unit, sinks)
  o, m, l, logits = exact(q, k, v, listed)
  unread = np.isneginf(logits[:, :, 0])[..., None]
  k, v = (jnp.where(unread, jnp.nan, x).astype(dtype) for x in (k, v))
  config = Config(tile=16, programs=programs, warps=4, stages=2)
  run = jax.jit(functools.partial(sparse_decode, unit=unit, sinks=sinks, config=config))
  state, rounded = run(q, k, v, *map(jnp.asarray, (table, count, start, stop)))
  np.testing.assert_allclose(state.o, o, atol=CLOSE[dtype])
  lse = m + np.log(l, out=np.zeros_like(l), where=l > 0)
  np.testing.assert_allclose(state.lse, lse, atol=CLOSE[dtype])
  np.testing.assert_array_equal(np.float32(rounded), np.float32(state.o.astype(dtype)))


@pytest.mark.parametrize("unit", [1, 16])
def test_ranges_are_clipped_to_the_slots(unit):
  """The last tile of a table ends with the slots, whatever the range says."""
  slots = 55
  q, k, v = (
    jax.random.normal(jax.random.key(i), (1, 2, n, 24), jnp.float32)
    for i, n in enumerate((3, slots, slots))
  )
  tiles = -(-slots // unit) + (unit == 1)  # one that there is not
  table = jnp.broadcast_to(jnp.arange(tiles, dtype=jnp.int32), (1, 2, tiles))
  count = jnp.full((1, 2), tiles, jnp.int32)
  run = jax.jit(functools.partial(sparse_decode, unit=unit))
  stops = [jnp.full((1, 1), n, jnp.int32) for n in (slots, 3 * slots)]
  (want, _), (got, _) = (run(q, k, v, table, count, stops[0] * 0, stop) for stop in stops)
  np.testing.assert_array_equal(got.o, want.o)
  np.testing.assert_array_equal(got.lse, want.lse)


def test_second_run_is_bit_equal():
  table, count, start, stop = map(jnp.asarray, plan(0, 3, 2, 500, 16, 20))
  q, k, v = (
    jax.random.normal(key, shape, jnp.bfloat16)
    for key, shape in zip(
      jax.random.split(jax.random.key(0), 3),
      ((3, 2, 4, 64), (3, 2, 500, 64), (3, 2, 500, 64)),
      strict=True,
    )
  )
  run = jax.jit(functools.partial(sparse_decode, unit=16))
  first, second = (run(q, k, v, table, count, start, stop) for _ in range(2))
  same_bits(first, second)


def test_bad_tables():
  table, count = np.zeros((1, 2, 3), np.int32), np.zeros((1, 2), np.int32)
  with pytest.raises(ValueError, match=r"table: found shape \(1, 2\), expected \[1, 2, W ≥ 1\]"):
    check_table(count, count, 16, (1, 2))
  with pytest.raises(ValueError, match=r"count: found shape \(2,\), expected \[1, 2\]"):
    check_table(table, count[0], 16, (1, 2))
  with pytest.raises(TypeError, match="count: found dtype int64, expected int32"):
    check_table(table, count.astype(np.int64), 16, (1, 2))
  with pytest.raises(ValueError, match="unit: found 512, expected 1 to 256"):
    check_table(table, count, 512, (1, 2))
