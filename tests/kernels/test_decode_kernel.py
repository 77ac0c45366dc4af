"""Decode attention: a worked example, then a float64 oracle that shares no code with it.

On a GPU the same tests run the compiled kernel.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels.common import config, devices, split_k
from kvjax.kernels.common.config import Config
from kvjax.kernels.decode import dense
from kvjax.kernels.decode.dense import decode_attention
from tests.cover import pairwise
from tests.kernels.dense_oracle import make, no_worse, oracle, plain, poison, same_bits, visible


def test_worked_example():
  # Logits ln 1, ln 3 and ln 4 at scale 1. Slots 0 and 1: weights 1 : 3, values 4 and 8, so
  # o = (4 + 3·8) / 4 = 7, m = ln 3, l = 1/3 + 1. Slot 2 lies outside.
  q = jnp.asarray([[[[1.0, 0.0]]]])
  k = jnp.asarray([[[[0.0, 5.0], [math.log(3), 5.0], [math.log(4), 5.0]]]])
  v = jnp.asarray([[[[4.0, -1.0], [8.0, -1.0], [100.0, -1.0]]]])
  start, stop = jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), 2, jnp.int32)
  state = decode_attention(q, k, v, start, stop, scale=1.0)
  np.testing.assert_allclose(state.o, [[[[7.0, -1.0]]]], rtol=1e-6)
  np.testing.assert_allclose(state.m, [[[math.log(3)]]], rtol=1e-6)
  np.testing.assert_allclose(state.l, [[[4 / 3]]], rtol=1e-6)
  # Sink 0 and window [2, 3): weights 1 : 4, o = (4 + 4·100) / 5.
  state = decode_attention(q, k, v, start + 2, stop + 1, sinks=1, scale=1.0)
  np.testing.assert_allclose(state.o, [[[[80.8, -1.0]]]], rtol=1e-6)
  # The sink seen by a query of its own, with logit ln 3 · 0 + 5 · 0.2 = 1.
  own = jnp.asarray([[[[0.0, 0.2]]]])
  state = decode_attention(q, k, v, start + 2, stop + 1, sinks=1, q_sinks=own, scale=1.0)
  np.testing.assert_allclose(
    state.o, [[[[(math.e * 4 + 4 * 100) / (math.e + 4), -1.0]]]], rtol=1e-6
  )


SWEEP = pairwise(
  (1, 3, 4, 8, 16),  # G
  (1, 3, 8),  # K
  (64, 96, 128, 256),  # H
  (37, 130, 333),  # S
  ("float32", "bfloat16", "float16"),
  ("none", "shared", "own"),  # sinks: none, seen by q, seen by a query of their own
)


@pytest.mark.core(1)
@pytest.mark.parametrize(
  ("groups", "heads", "head_dim", "slots", "dtype", "sinks"),
  SWEEP,
  ids=["G{}-K{}-H{}-S{}-{}-{}".format(*row) for row in SWEEP],
)
def test_equals_oracle(groups, heads, head_dim, slots, dtype, sinks):
  q, k, v, start, stop, own = make(groups, heads, head_dim, slots, dtype)
  count = 0 if sinks == "none" else 5
  q_sinks = own if sinks == "own" else None
  k, v = (poison(x, start, stop, count) for x in (k, v))
  run = jax.jit(functools.partial(decode_attention, sinks=count))
  state = run(q, k, v, start, stop, q_sinks=q_sinks)
  operands = q, k, v, start, stop, count, q if q_sinks is None else q_sinks
  no_worse((state.o, state.m, state.l), oracle(*operands), plain(*operands))
  same_bits(state, run(q, k, v, start, stop, q_sinks=q_sinks))


@pytest.mark.core(2)
@pytest.mark.parametrize("programs", [1, 7, 100])
@pytest.mark.parametrize(("heads", "rows"), [(3, 1), (6, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_that_share_slots(heads, rows, programs, dtype):
  """Spans of unequal lengths of one row of slots; what belongs to another head, or nobody, is NaN.

  A head's own slots in an array of its own, by the oracle.
  """
  rng = np.random.default_rng(heads)
  lengths = rng.integers(0, 90, (3, rows, heads // rows))
  lengths[0, 0, 0], lengths[1, 0, -1] = 0, 150
  start = np.cumsum(lengths + 5, -1) - lengths  # gaps of 5 that no head reads
  slots = int((start + lengths).max()) + 3
  q = jnp.asarray(rng.normal(size=(3, heads, 4, 64)), dtype)
  k, v = (np.full((3, rows, slots, 64), np.nan, np.float32) for _ in range(2))
  own = [np.zeros((3, heads, slots, 64), np.float32) for _ in range(2)]
  for b, row, head in np.ndindex(*lengths.shape):
    low, high = start[b, row, head], start[b, row, head] + lengths[b, row, head]
    for x, alone in zip((k, v), own, strict=True):
      x[b, row, low:high] = rng.normal(size=(high - low, 64))
      alone[b, row * (heads // rows) + head, low:high] = x[b, row, low:high]
  k, v, *own = (jnp.asarray(x, dtype) for x in (k, v, *own))
  start, stop = (jnp.asarray(x.reshape(3, heads), jnp.int32) for x in (start, start + lengths))
  cut = Config(tile=32, programs=programs, warps=4, stages=2)
  state = decode_attention(q, k, v, start, stop, config=cut)
  operands = q, *own, start, stop, 0, q
  no_worse((state.o, state.m, state.l), oracle(*operands), plain(*operands))
  with pytest.raises(ValueError, match=r"k: found .* expected a range of each head"):
    decode_attention(q, k, v, start[:, :1], stop[:, :1])


@pytest.mark.core(1)
@pytest.mark.parametrize("programs", [1, 7, 100])
@pytest.mark.parametrize("tile", [16, 128])
def test_any_cut_gives_the_same(programs, tile):
  q, k, v, start, stop, own = make(3, 2, 64, 333, "float32")
  k, v = (poison(x, start, stop, 5) for x in (k, v))
  cut = Config(tile=tile, programs=programs, warps=4, stages=2)
  state = decode_attention(q, k, v, start, stop, sinks=5, q_sinks=own, config=cut)
  o, m, l = oracle(q, k, v, start, stop, 5, own)
  np.testing.assert_allclose(state.o, o, atol=5e-6)
  np.testing.assert_allclose(state.m, m, atol=5e-6)
  np.testing.assert_allclose(state.l, l, rtol=5e-6)


def test_ragged_rows_of_many_tiles_are_cut_finer():
  """One long row among short ones, and three pieces for each program; alike rows have one each."""
  q, k, v, _, stop, _ = make(3, 2, 64, 16 << 10, "float32")
  cut, rows = Config(tile=16, programs=6, warps=4, stages=2), stop.size
  size = {"rows": rows, "slots": k.shape[2], "tile": cut.tile, "programs": cut.programs}
  assert split_k.finer(batch=6, **size) == split_k.FINER
  assert split_k.finer(batch=1, **size) == split_k.finer(batch=6, **size | {"slots": 200}) == 1
  start = jnp.zeros_like(stop)
  for lengths in ([16 << 10, 40, 0, 900, 1, 77], [999, *5 * [1000]]):
    stop = jnp.broadcast_to(jnp.asarray(lengths, jnp.int32)[:, None], start.shape)
    state = decode_attention(q, k, v, start, stop, config=cut)
    o, m, l = oracle(q, k, v, start, stop, 0, q)
    np.testing.assert_allclose(state.o, o, atol=5e-6)
    np.testing.assert_allclose(state.m, m, atol=5e-6)
    np.testing.assert_allclose(state.l, l, rtol=5e-6)


@pytest.mark.slow
def test_ranges_are_clipped_to_the_cache():
  q, k, v, start, stop, _ = make(4, 2, 64, 70, "float32")
  inside = decode_attention(q, k, v, 0 * start, 0 * stop + 70)
  beyond = decode_attention(q, k, v, 0 * start - 9, 0 * stop + 1000)
  same_bits(inside, beyond)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="jax-triton has no CPU lowering")
@pytest.mark.parametrize(
  ("groups", "heads", "head_dim", "dtype", "own_query"),
  [(4, 8, 128, "bfloat16", False), (3, 3, 64, "bfloat16", True), (1, 2, 96, "float32", True)],
)
def test_jax_triton_equals_pallas(groups, heads, head_dim, dtype, own_query):
  pytest.importorskip("jax_triton")
  from kvjax.kernels.decode import jax_triton

  q, k, v, start, stop, own = make(groups, heads, head_dim, 1000, dtype)
  k, v = (poison(x, start, stop, 5) for x in (k, v))
  cut = Config(tile=32, programs=40, warps=4, stages=3)
  states = [
    jax.jit(functools.partial(run, sinks=5, config=cut))(
      q, k, v, start, stop, q_sinks=own if own_query else None
    )
    for run in (decode_attention, jax_triton.decode_attention)
  ]
  for first, second in zip(*map(jax.tree.leaves, states), strict=True):
    np.testing.assert_allclose(first, second, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
  ("change", "error", "message"),
  [
    ({"q": jnp.zeros((2, 3, 64))}, ValueError, r"q: found shape \(2, 3, 64\)"),
    ({"k": jnp.zeros((2, 2, 9, 64))}, ValueError, r"k: found shape .* expected \[2, 3, S"),
    ({"v": jnp.zeros((2, 3, 8, 64))}, ValueError, r"v: found shape .* expected \[2, 3, 9, 64\]"),
    ({"start": jnp.zeros((2,), jnp.int32)}, ValueError, r"start: found shape \(2,\)"),
    ({"q_sinks": jnp.zeros((2, 3, 1, 64))}, ValueError, "q_sinks: found shape"),
    ({"q": jnp.zeros((2, 3, 4, 64), jnp.int8)}, TypeError, "q: found dtype int8"),
    ({"k": jnp.zeros((2, 3, 9, 64), jnp.bfloat16)}, TypeError, "k: found dtype bfloat16"),
    ({"stop": jnp.zeros((2, 3))}, TypeError, "stop: found dtype float32, expected int32"),
    ({"sinks": -1}, ValueError, "sinks: found -1"),
    ({"head_dim": 512}, NotImplementedError, "head size 512, expected at most 256"),
    ({"groups": 256}, NotImplementedError, "256 query heads per key/value head"),
  ],
)
def test_bad_operands_raise(change, error, message):
  from kvjax.kernels.decode.dense import check

  groups, head_dim = change.pop("groups", 4), change.pop("head_dim", 64)
  operands = {
    "q": jnp.zeros((2, 3, groups, head_dim)),
    "k": jnp.zeros((2, 3, 9, head_dim)),
    "v": jnp.zeros((2, 3, 9, head_dim)),
    "start": jnp.zeros((2, 3), jnp.int32),
    "stop": jnp.zeros((2, 3), jnp.int32),
    "sinks": 0,
    "q_sinks": None,
  }
  with pytest.raises(error, match=message):
    check(**operands | change)


def test_configurations():
  shape = {"rows": 64, "groups": 4, "slots": 32 << 10, "head_dim": 128, "itemsize": 2}
  # A device without measurements: pieces of 64 rows that leave few multiprocessors idle.
  assert config.choose("decode", kind="NVIDIA A100-SXM4-80GB", **shape).programs == 324
  assert config.choose("decode", kind="Imaginary 1", **shape).tile >= 16
  # Measured: the nearest bucket, until it is too far.
  entries = config.tuned("decode", devices.device("NVIDIA H200"))
  assert {entry for _, entry in entries} >= {config.choose("decode", kind="NVIDIA H200", **shape)}
  far = config.choose("decode", kind="NVIDIA H200", **shape | {"head_dim": 48})
  assert far == config.streaming(devices.device("NVIDIA H200"), **shape | {"head_dim": 48})
  with pytest.raises(ValueError, match=r"Config\.tile: found 48, expected a power of two"):
    Config(tile=48, programs=1, warps=4, stages=2)


@pytest.mark.core(1)
@pytest.mark.parametrize("programs", [1, 40])
@pytest.mark.parametrize("sinks", [0, 5])
def test_logits(sinks, programs):
  """Every logit of the span, −inf elsewhere; empty and clipped spans too."""
  rng = np.random.default_rng(7)
  sizes = (3, 2, 3, 24), (3, 2, 150, 24), (3, 2, 150, 24)
  q, k, v = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in sizes)
  start = jnp.array([[0, 40], [70, 3], [9, 9]], jnp.int32)
  stop = jnp.array([[150, 130], [71, 90], [0, 999]], jnp.int32)
  cut = Config(tile=16, programs=programs, warps=4, stages=1)
  *_, logits = dense.decode_with_output(q, k, v, start, stop, sinks=sinks, logits=True, config=cut)
  want = np.full(logits.shape, -np.inf)
  for b, h in np.ndindex(3, 2):
    slots = visible(int(start[b, h]), int(stop[b, h]), sinks, 150)
    want[b, h][:, slots] = np.float64(q[b, h]) @ np.float64(k[b, h])[slots].T / math.sqrt(24)
  np.testing.assert_allclose(logits, want, atol=1e-5)
