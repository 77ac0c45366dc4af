"""Decode over quantised keys and values: a worked example, then a float64 oracle of its own.

On a GPU the same tests run the compiled kernel.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kvjax.kernels.codes.dense import check_quantised, decode_attention
from kvjax.kernels.common import backend
from kvjax.kernels.common.config import Config
from kvjax.primitives import codes as quantised
from tests.compiled import compiled
from tests.cover import pairwise
from tests.kernels import coded_oracle
from tests.kernels.dense_oracle import no_worse, ranges, same_bits, visible

quantise = compiled(quantised.quantise)


def test_sums_of_few_integers_are_refused():
  """A GPU's matrix units sum 32 products of bytes: 16 would be counted twice."""
  few = jnp.ones((16, 16), jnp.int8)
  with pytest.raises(ValueError, match="dot: found sums of 16 products of int8, expected 32"):
    backend.dot(few, few)


def test_worked_example():
  # q = (2, −1) has scale 2 / 127 and codes (127, −64): half to even. Keys of codes (10, 0), (0, 4)
  # with scales 1 and 2 have logits 127·10·1 and −64·4·2, times 2 / 127.
  q = jnp.asarray([[[[2.0, -1.0]]]])
  k = jnp.asarray([[[[10, 0], [0, 4], [127, 127]]]], jnp.int8)
  # Words of 16 bits: channel 0 in the lower byte. Values (2, 4), (−6, 1) with scales ½ and 1.
  v = jnp.asarray([[[[2 + 4 * 256], [(-6 & 255) + 1 * 256], [0]]]], jnp.int32).astype(jnp.int16)
  scales = jnp.asarray([[[1.0, 2.0, jnp.nan]]]), jnp.asarray([[[0.5, 1.0, jnp.nan]]])
  start, stop = jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), 2, jnp.int32)
  scale = 1e-3
  state, out, logits = decode_attention(q, k, v, scales, start, stop, scale=scale, logits=True)
  x = np.array([127 * 10, -64 * 4 * 2]) * 2 / 127 * scale
  weight = np.exp(x) / np.exp(x).sum()
  want = weight[0] * np.array([1, 2]) + weight[1] * np.array([-6, 1])
  np.testing.assert_allclose(state.o[0, 0, 0], want, rtol=1e-6)
  np.testing.assert_allclose(out[0, 0, 0], want, rtol=1e-6)
  np.testing.assert_allclose(state.m, [[[x[0]]]], rtol=1e-6)
  np.testing.assert_allclose(logits, [[[[*x, -np.inf]]]], rtol=1e-6)


def oracle(q, k, v, per_slot, start, stop, bits, sinks, weights=np.float64):
  """(o, m, l, logits) of spans."""

  def slots(b, h):
    return visible(start[b, h], stop[b, h], sinks, k.shape[2])

  return coded_oracle.oracle(q, k, v, per_slot, slots, bits, weights)


def make(groups, heads, head_dim, slots, dtype, bits, seed=0):
  """Operands with one row of every kind; slots that no row of them may read hold anything."""
  rng = np.random.default_rng(seed)
  start, stop = ranges(heads, slots)
  rows = len(start), heads
  q = jnp.asarray(rng.normal(size=(*rows, groups, head_dim)), dtype)
  return q, *coded_oracle.coded(rng, (*rows, slots, head_dim), bits), start, stop


def poisoned(per_slot, start, stop, sinks):
  """Scales with NaN in every slot outside the ranges."""
  per_slot = [np.array(x) for x in per_slot]
  for b, h in np.ndindex(*start.shape):
    outside = np.ones(per_slot[0].shape[2], bool)
    outside[visible(int(start[b, h]), int(stop[b, h]), sinks, outside.size)] = False
    for x in per_slot:
      x[b, h, outside] = np.nan
  return per_slot


SWEEP = pairwise(
  (1, 3, 4, 16),  # G
  (1, 3, 8),  # K
  (64, 96, 128, 256),  # H
  (37, 130, 333),  # S
  ("float32", "bfloat16", "float16"),
  (0, 5),  # sinks
  (8, 4),
  (True, False),  # with logits
)


@pytest.mark.rest(8)
@pytest.mark.core(2)
@pytest.mark.parametrize(
  ("groups", "heads", "head_dim", "slots", "dtype", "sinks", "bits", "logits"),
  SWEEP,
  ids=["G{}-K{}-H{}-S{}-{}-sinks{}-int{}-{}".format(*row) for row in SWEEP],
)
def test_equals_oracle(groups, heads, head_dim, slots, dtype, sinks, bits, logits):
  q, k, v, per_slot, start, stop = make(groups, heads, head_dim, slots, dtype, bits)
  exact = oracle(q, k, v, per_slot, start, stop, bits, sinks)
  weights = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
  rough = oracle(q, k, v, per_slot, start, stop, bits, sinks, weights)
  run = jax.jit(functools.partial(decode_attention, bits=bits, sinks=sinks, logits=logits))
  operands = q, k, v, poisoned(per_slot, start, stop, sinks), start, stop
  state, out, seen = run(*operands)
  assert (seen is not None) == logits
  made = state.o, state.m, state.l, seen
  count = len(made) if logits else 3
  no_worse(made[:count], exact[:count], rough[:count])
  np.testing.assert_array_equal(out, state.o.astype(dtype))
  same_bits((state, out, seen), run(*operands))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_logits_may_be_capped(bits):
  """Capped logits from uncapped states of single keys: c·tanh(m / c), weighed as they say."""
  q, k, v, per_slot, start, stop = make(3, 2, 64, 5, "float32", bits)

  def run(start, stop, **how):
    decode = jax.jit(functools.partial(decode_attention, bits=bits, **how))
    return decode(q, k, v, per_slot, start, stop)

  states = [run(0 * start + s, 0 * stop + s + 1)[0] for s in range(5)]
  x = 0.7 * np.tanh(np.stack([x.m for x in states]).astype(np.float64) / 0.7)
  p = np.exp(x) / np.exp(x).sum(0)
  want = sum(weight[..., None] * x.o for weight, x in zip(p, states, strict=True))
  state, *_ = run(0 * start, 0 * stop + 5, soft_cap=0.7)
  np.testing.assert_allclose(state.o, want, atol=5e-6)
  np.testing.assert_allclose(state.m, x.max(0), atol=5e-6)


@pytest.mark.parametrize(("programs", "tile"), [(7, 16), (1, 128)])
def test_any_cut_gives_the_same(programs, tile):
  q, k, v, per_slot, start, stop = make(3, 2, 64, 333, "float32", 8)
  cut = Config(tile=tile, programs=programs, warps=4, stages=2)
  operands = poisoned(per_slot, start, stop, 5), start, stop
  run = jax.jit(functools.partial(decode_attention, sinks=5, config=cut))
  state, *_ = run(q, k, v, *operands)
  o, m, l, _ = oracle(q, k, v, per_slot, start, stop, 8, 5)
  np.testing.assert_allclose(state.o, o, atol=5e-6)
  np.testing.assert_allclose(state.m, m, atol=5e-6)
  np.testing.assert_allclose(state.l, l, rtol=5e-6)


@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_values_of_any_size(size):
  """Weights are float16, which has few numbers; the sizes that values come in are many."""
  q, k, v, per_slot, start, stop = make(4, 2, 64, 130, "float16", 8)
  per_slot = [per_slot[0], per_slot[1] * size]
  state, *_ = jax.jit(decode_attention)(q, k, v, per_slot, start, stop)
  o, *_ = oracle(q, k, v, per_slot, start, stop, 8, 0)
  np.testing.assert_allclose(np.float64(state.o) / size, o / size, atol=3e-3)


@pytest.mark.parametrize(
  ("change", "error", "message"),
  [
    ({"bits": 3}, ValueError, "bits: found 3, expected one of 8, 4"),
    ({"q": jnp.zeros((2, 3, 64))}, ValueError, r"q: found shape \(2, 3, 64\)"),
    ({"q": jnp.zeros((2, 3, 4, 63))}, ValueError, r"q: found shape .*, H a multiple of 2"),
    ({"k": jnp.zeros((2, 3, 9, 32), jnp.int8)}, ValueError, r"k: found .*\[2, 3, 9, 64\]"),
    ({"k": jnp.zeros((2, 3, 9, 64))}, TypeError, "k: found dtype float32, expected int8"),
    ({"v": jnp.zeros((2, 3, 9, 64), jnp.int16)}, ValueError, r"v: found .*\[2, 3, 9, 32\]"),
    ({"v": jnp.zeros((2, 3, 9, 32), jnp.int8)}, TypeError, "v: found dtype int8, expected int16"),
    ({"per_slot": [jnp.zeros((2, 3, 9))]}, ValueError, "per_slot: found 1 arrays, expected 2"),
    ({"per_slot": [jnp.zeros((2, 3))] * 2}, ValueError, r"per_slot: found shape \(2, 3\)"),
    ({"per_slot": [jnp.zeros((2, 3, 9), jnp.int8)] * 2}, TypeError, "per_slot: found dtype int8"),
    ({"stop": jnp.zeros((2, 3))}, TypeError, "stop: found dtype float32, expected int32"),
    ({"sinks": -1}, ValueError, "sinks: found -1"),
  ],
)
def test_bad_operands_raise(change, error, message):
  operands = {
    "q": jnp.zeros((2, 3, 4, 64)),
    "k": jnp.zeros((2, 3, 9, 64), jnp.int8),
    "v": jnp.zeros((2, 3, 9, 32), jnp.int16),
    "per_slot": [jnp.zeros((2, 3, 9))] * 2,
    "start": jnp.zeros((2, 3), jnp.int32),
    "stop": jnp.zeros((2, 3), jnp.int32),
    "bits": 8,
    "sinks": 0,
  }
  with pytest.raises(error, match=message):
    check_quantised(**operands | change)
