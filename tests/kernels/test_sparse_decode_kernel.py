"""Sparse decode over floats and codes against NumPy's float64: units, ragged counts, holes, ranges,
and NaN in all that no list names.

On a GPU the same tests run the compiled kernel.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels.common.config import Config
from kvjax.kernels.common.operands import check_table
from kvjax.kernels.decode.sparse import settings, sparse_decode
from tests.cover import pairwise
from tests.kernels.decode_oracle import drawn, held_to, read_of, same_bits
from tests.kernels.listed import plan, slots_of

WIDTH = {1: 90, 3: 60, 16: 30, 64: 11, 256: 3}  # of a table, by the unit of its entries
SLOTS, SINKS = 700, 5


@pytest.mark.slow
def test_worked_example_of_codes():
  # q = (2, −1) has codes (127, −64) and scale 2 / 127. Entry 1 of two slots names slots 2 and 3.
  q = jnp.asarray([[[[2.0, -1.0]]]])
  k = jnp.asarray([[[[99, 99], [99, 99], [10, 0], [99, 99], [0, 4]]]], jnp.int8)
  # Words of 16 bits, channel 0 in the lower byte: slot 2 has values (2, 4), slot 4 has (−6, 1).
  v = jnp.asarray([[[[0], [0], [2 + 4 * 256], [0], [(-6 & 255) + 256]]]], jnp.int32)
  k_scale = jnp.asarray([[[jnp.nan, jnp.nan, 1.0, jnp.nan, 2.0]]])
  v_scale = jnp.asarray([[[jnp.nan, jnp.nan, 0.5, jnp.nan, 1.0]]])
  run = functools.partial(sparse_decode, q, k, v.astype(jnp.int16), unit=2, scale=1e-3)
  run = functools.partial(run, per_slot=(k_scale, v_scale))
  count, start = jnp.full((1, 1), 2), jnp.zeros((1, 1), jnp.int32)
  # After a hole, before an entry that does not count; slot 3 is out of the range.
  state, out = run(jnp.asarray([[[-1, 1, 0]]]), count, start, start + 3)
  np.testing.assert_allclose(state.m, [[[127 * 10 * 2 / 127 * 1e-3]]], rtol=1e-6)
  np.testing.assert_allclose(out[0, 0, 0], [1, 2], rtol=1e-6)
  # Entry 2 names slots 4 and 5, of which there is one; slots 2 and 3 are out of the range.
  state, out = run(jnp.asarray([[[2, 1, 0]]]), count, start + 4, start + 9)
  np.testing.assert_allclose(state.m, [[[-64 * 4 * 2 * 2 / 127 * 1e-3]]], rtol=1e-6)
  np.testing.assert_allclose(out[0, 0, 0], [-6, 1], rtol=1e-6)


SWEEP = pairwise(
  (1, 3, 4, 7, 16),  # G
  (1, 2, 3),  # K
  (24, 64, 128),  # H
  ("float32", "bfloat16", "float16"),
  (1, 3, 16, 64, 256),  # unit
  (None, 8, 4),  # bits: None are floats
  (None, 1, 7, 64),  # programs: None is one for every row, with larger tiles
  (None, 0.7),  # soft cap
)


@pytest.mark.rest(12)
@pytest.mark.core(2)
@pytest.mark.parametrize(
  ("groups", "heads", "head_dim", "dtype", "unit", "bits", "programs", "cap"),
  SWEEP,
  ids=["G{}-K{}-H{}-{}-unit{}-bits{}-programs{}-cap{}".format(*row) for row in SWEEP],
)
def test_equals_oracle(groups, heads, head_dim, dtype, unit, bits, programs, cap):
  where = plan(unit, 2, heads, SLOTS, unit, WIDTH[unit])
  case = drawn(np.random.default_rng(unit), (2, heads), groups, SLOTS, head_dim, dtype, bits)
  listed = functools.partial(slots_of, *where, unit, SINKS)
  config = Config(tile=16 if programs else 64, programs=programs or 1, warps=4, stages=2)
  how = {"unit": unit, "sinks": SINKS, "soft_cap": cap, "config": config}
  run = case.kernel(sparse_decode, read_of(listed, (2, heads, SLOTS)), **how)
  made = run(*where)
  held_to(made, case, listed, cap)
  same_bits(made, run(*where))


@pytest.mark.parametrize("unit", [1, 16])
def test_ranges_are_clipped_to_the_slots(unit):
  """The last tile of a table ends with the slots, whatever the range says."""
  slots = 55
  operands = drawn(np.random.default_rng(0), (1, 2), 3, slots, 24, "float32").arrays
  tiles = -(-slots // unit) + (unit == 1)  # one that there is not
  table = jnp.broadcast_to(jnp.arange(tiles, dtype=jnp.int32), (1, 2, tiles))
  count = jnp.full((1, 2), tiles, jnp.int32)
  run = jax.jit(functools.partial(sparse_decode, unit=unit))
  stops = [jnp.full((1, 1), n, jnp.int32) for n in (slots, 3 * slots)]
  same_bits(*(run(*operands, table, count, stops[0] * 0, stop) for stop in stops))


@pytest.mark.parametrize("shape", [(8, 1, 16), (64, 4, 128), (512, 4, 1)])
@pytest.mark.parametrize("bits", [8, 4])
def test_cuts_over_codes_fit_small_devices(shape, bits):
  """And a tile that is one part of an entry takes no stage for the table."""
  rows, groups, unit = shape
  for head_dim in (64, 128, 256):
    how = {"rows": rows, "groups": groups, "slots": 4096, "head_dim": head_dim, "bits": bits}
    cut = settings(**how, itemsize=2, unit=unit, kind="NVIDIA RTX A6000")
    assert cut.tile * 2 * head_dim * bits // 8 <= 16 << 10 and cut.tile <= 64
    assert cut.stages == (3 if unit == 128 else 5)


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


@pytest.mark.parametrize(
  ("change", "message"), [({"sinks": -1}, "sinks: found -1"), ({"unit": 0}, "unit: found 0")]
)
def test_operands_are_checked(change, message):
  operands = drawn(np.random.default_rng(0), (1, 2), 3, 9, 24, "float32").arrays
  where = map(jnp.asarray, plan(0, 1, 2, 9, 3, 3))
  with pytest.raises(ValueError, match=message):
    sparse_decode(*operands, *where, **{"unit": 3} | change)
