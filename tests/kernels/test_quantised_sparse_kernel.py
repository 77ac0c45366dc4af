"""Sparse decode over quantised keys and values: a worked example, then a float64 oracle.

Units, ragged counts, holes, ranges, and NaN in all that no list names. On a GPU the same tests run
the compiled kernel.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kvjax.kernels.codes.sparse import settings, sparse_decode
from kvjax.kernels.common.config import Config
from kvjax.primitives import codes as quantised
from tests.compiled import compiled
from tests.cover import pairwise
from tests.kernels import coded_oracle
from tests.kernels.dense_oracle import no_worse, same_bits
from tests.kernels.listed import plan, slots_of

quantise = compiled(quantised.quantise)
WIDTH = {1: 90, 3: 60, 16: 30, 64: 11, 256: 3}  # of a table, by the unit of its entries
SLOTS, SINKS = 700, 5


def test_worked_example():
  # q = (2, −1) has codes (127, −64) and scale 2 / 127. Entry 1 of two slots names slots 2 and 3.
  q = jnp.asarray([[[[2.0, -1.0]]]])
  k = jnp.asarray([[[[99, 99], [99, 99], [10, 0], [99, 99], [0, 4]]]], jnp.int8)
  # Words of 16 bits, channel 0 in the lower byte: slot 2 has values (2, 4), slot 4 has (−6, 1).
  v = jnp.asarray([[[[0], [0], [2 + 4 * 256], [0], [(-6 & 255) + 256]]]], jnp.int32)
  k_scale = jnp.asarray([[[jnp.nan, jnp.nan, 1.0, jnp.nan, 2.0]]])
  v_scale = jnp.asarray([[[jnp.nan, jnp.nan, 0.5, jnp.nan, 1.0]]])
  run = functools.partial(sparse_decode, q, k, v.astype(jnp.int16), (k_scale, v_scale), unit=2)
  count, start = jnp.full((1, 1), 2), jnp.zeros((1, 1), jnp.int32)
  # After a hole, before an entry that does not count; slot 3 is out of the range.
  state, out = run(jnp.asarray([[[-1, 1, 0]]]), count, start, start + 3, scale=1e-3)
  np.testing.assert_allclose(state.m, [[[127 * 10 * 2 / 127 * 1e-3]]], rtol=1e-6)
  np.testing.assert_allclose(out[0, 0, 0], [1, 2], rtol=1e-6)
  # Entry 2 names slots 4 and 5, of which there is one; slots 2 and 3 are out of the range.
  state, out = run(jnp.asarray([[[2, 1, 0]]]), count, start + 4, start + 9, scale=1e-3)
  np.testing.assert_allclose(state.m, [[[-64 * 4 * 2 * 2 / 127 * 1e-3]]], rtol=1e-6)
  np.testing.assert_allclose(out[0, 0, 0], [-6, 1], rtol=1e-6)


def make(groups, heads, head_dim, dtype, bits, unit, seed=0):
  """Two rows of queries, quantised keys and values and plans, and the slots that each row reads."""
  rng, batch = np.random.default_rng(seed + unit), 2
  where = plan(unit + seed, batch, heads, SLOTS, unit, WIDTH[unit])
  listed = {(b, h): slots_of(*where, unit, SINKS, b, h) for b, h in np.ndindex(batch, heads)}
  q = jnp.asarray(rng.normal(size=(batch, heads, groups, head_dim)), dtype)
  k, v, per_slot = coded_oracle.coded(rng, (batch, heads, SLOTS, head_dim), bits)
  unread = np.ones((batch, heads, SLOTS), bool)
  for head, slots in listed.items():
    unread[head][slots] = False
  per_slot = [np.where(unread, np.nan, x) for x in per_slot]
  return (q, k, v, per_slot, *where), listed


def oracle(operands, listed, bits, weights=np.float64, cap=None):
  """(o, m, l) of the slots that are listed."""

  def slots(b, h):
    return listed[b, h]

  return coded_oracle.oracle(*operands[:4], slots, bits, weights, cap)[:3]


SWEEP = pairwise(
  (1, 3, 4, 16),  # G
  (1, 3),  # K
  (24, 64, 128),  # H
  ("float32", "bfloat16", "float16"),
  (1, 3, 16, 64, 256),  # unit
  (8, 4),
  (None, 7, 64),  # programs: None is one for every row
)


@pytest.mark.core(2)
@pytest.mark.parametrize(
  ("groups", "heads", "head_dim", "dtype", "unit", "bits", "programs"),
  SWEEP,
  ids=["G{}-K{}-H{}-{}-unit{}-int{}-programs{}".format(*row) for row in SWEEP],
)
def test_equals_oracle(groups, heads, head_dim, dtype, unit, bits, programs):
  operands, listed = make(groups, heads, head_dim, dtype, bits, unit)
  config = Config(tile=16 if programs else 64, programs=programs or 1, warps=4, stages=2)
  run = functools.partial(sparse_decode, unit=unit, bits=bits, sinks=SINKS, config=config)
  run = jax.jit(run)
  state, out = run(*operands)
  exact = oracle(operands, listed, bits)
  rough = oracle(operands, listed, bits, np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
  no_worse((state.o, state.m, state.l), exact, rough)
  np.testing.assert_array_equal(out, state.o.astype(dtype))
  same_bits((state, out), run(*operands))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_logits_may_be_capped(bits):
  operands, listed = make(3, 3, 24, "float32", bits, 16)
  run = functools.partial(sparse_decode, unit=16, bits=bits, sinks=SINKS, soft_cap=0.7)
  state, _ = jax.jit(run)(*operands)
  for got, want in zip(
    (state.o, state.m, state.l), oracle(operands, listed, bits, cap=0.7), strict=True
  ):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(8, 1, 16), (64, 4, 128), (512, 4, 1)])
@pytest.mark.parametrize("bits", [8, 4])
def test_cuts_fit_small_devices(shape, bits):
  """And a tile that is one part of an entry takes no stage for the table."""
  rows, groups, unit = shape
  for head_dim in (64, 128, 256):
    how = {"rows": rows, "groups": groups, "slots": 4096, "head_dim": head_dim, "bits": bits}
    cut = settings(**how, itemsize=2, unit=unit, kind="NVIDIA RTX A6000")
    assert cut.tile * 2 * head_dim * bits // 8 <= 16 << 10 and cut.tile <= 64
    assert cut.stages == (3 if unit == 128 else 5)


@pytest.mark.parametrize(
  ("change", "error", "message"),
  [
    ({"bits": 3}, ValueError, "bits: found 3, expected one of 8, 4"),
    ({"k": jnp.zeros((2, 3, 9, 64), jnp.int16)}, TypeError, "k: found dtype int16, expected int8"),
    ({"v": jnp.zeros((2, 3, 9, 64), jnp.int16)}, ValueError, r"v: found .*\[2, 3, 9, 32\]"),
    ({"per_slot": [jnp.zeros((2, 3, 9))]}, ValueError, "per_slot: found 1 arrays, expected 2"),
    ({"table": jnp.zeros((2, 3, 0), jnp.int32)}, ValueError, r"table: found shape .*W ≥ 1"),
    (
      {"count": jnp.zeros((2, 3), jnp.int16)},
      TypeError,
      "count: found dtype int16, expected int32",
    ),
    ({"unit": 512}, ValueError, "unit: found 512, expected 1 to 256"),
    ({"sinks": -1}, ValueError, "sinks: found -1"),
  ],
)
def test_bad_operands_raise(change, error, message):
  operands = {
    "q": jnp.zeros((2, 3, 4, 64)),
    "k": jnp.zeros((2, 3, 9, 64), jnp.int8),
    "v": jnp.zeros((2, 3, 9, 32), jnp.int16),
    "per_slot": [jnp.zeros((2, 3, 9))] * 2,
    "table": jnp.zeros((2, 3, 4), jnp.int32),
    "count": jnp.zeros((2, 3), jnp.int32),
    "start": jnp.zeros((2, 3), jnp.int32),
    "stop": jnp.zeros((2, 3), jnp.int32),
    "unit": 2,
  }
  with pytest.raises(error, match=message):
    sparse_decode(**operands | change)
