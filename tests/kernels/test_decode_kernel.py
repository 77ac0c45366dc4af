"""Decode attention over floats and codes: worked examples, then an oracle in float64.

On a GPU the same tests run the compiled kernel.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels.common import backend, config, devices, split_k
from kvjax.kernels.common.config import Config
from kvjax.kernels.common.operands import check
from kvjax.kernels.decode.dense import decode_attention, decode_with_output, pick
from tests.cover import pairwise
from tests.kernels.decode_oracle import drawn, exact, held_to, ranges, read_of, same_bits, visible


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


@pytest.mark.slow
def test_worked_example_of_codes():
  # q = (2, −1) has scale 2 / 127 and codes (127, −64): half to even. Keys of codes (10, 0), (0, 4)
  # with scales 1 and 2 have logits 127·10·1 and −64·4·2, times 2 / 127.
  q = jnp.asarray([[[[2.0, -1.0]]]])
  k = jnp.asarray([[[[10, 0], [0, 4], [127, 127]]]], jnp.int8)
  # Words of 16 bits: channel 0 in the lower byte. Values (2, 4), (−6, 1) with scales ½ and 1.
  v = jnp.asarray([[[[2 + 4 * 256], [(-6 & 255) + 1 * 256], [0]]]], jnp.int32).astype(jnp.int16)
  scales = jnp.asarray([[[1.0, 2.0, jnp.nan]]]), jnp.asarray([[[0.5, 1.0, jnp.nan]]])
  start, stop = jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), 2, jnp.int32)
  how = {"per_slot": scales, "scale": 1e-3, "logits": True}
  state, out, logits = decode_with_output(q, k, v, start, stop, **how)
  x = np.array([127 * 10, -64 * 4 * 2]) * 2 / 127 * 1e-3
  weight = np.exp(x) / np.exp(x).sum()
  want = weight[0] * np.array([1, 2]) + weight[1] * np.array([-6, 1])
  np.testing.assert_allclose(state.o[0, 0, 0], want, rtol=1e-6)
  np.testing.assert_allclose(out[0, 0, 0], want, rtol=1e-6)
  np.testing.assert_allclose(state.m, [[[x[0]]]], rtol=1e-6)
  np.testing.assert_allclose(logits, [[[[*x, -np.inf]]]], rtol=1e-6)


SWEEP = pairwise(
  (1, 3, 4, 8, 16),  # G
  (1, 3, 8),  # K
  (24, 64, 96, 128, 256),  # H
  (37, 130, 333),  # S
  ("float32", "bfloat16", "float16"),
  ("none", "shared", "own"),  # sinks: none, seen by q, seen by a query of their own
  (None, 8, 4),  # bits: None are floats, whose sinks alone may have a query of their own
  (False, True),  # with logits
  (None, 0.7),  # soft cap
  (None, (1, 16), (7, 16), (7, 16, True), (100, 16), (1, 128), (7, 128)),  # programs, tile, level
)


@pytest.mark.rest(12)
@pytest.mark.core(2)
@pytest.mark.parametrize(
  ("groups", "heads", "head_dim", "slots", "dtype", "sinks", "bits", "logits", "cap", "cut"),
  SWEEP,
  ids=["G{}-K{}-H{}-S{}-{}-{}-bits{}-{}-cap{}-cut{}".format(*row) for row in SWEEP],
)
def test_equals_oracle(groups, heads, head_dim, slots, dtype, sinks, bits, logits, cap, cut):
  rng, (start, stop) = np.random.default_rng(0), ranges(heads, slots)
  case = drawn(rng, start.shape, groups, slots, head_dim, dtype, bits)
  own, count = None, 0 if sinks == "none" else 5
  if sinks == "own" and bits is None:
    own = jnp.asarray(rng.normal(size=case.arrays[0].shape), dtype)

  def listed(b, h):
    return visible(start[b, h], stop[b, h], count, slots)

  if cut and head_dim == 256 and dtype == "float32":
    cut = (cut[0], min(cut[1], 64), *cut[2:])  # two stages of more do not fit shared memory
  config = cut and Config(cut[1], cut[0], 4, 2, *cut[2:])
  read = read_of(listed, (*start.shape, slots))
  how = {"sinks": count, "logits": logits, "soft_cap": cap, "config": config}
  run = case.kernel(decode_with_output, read, **how)
  made = run(start, stop, q_sinks=own)
  assert (made[2] is not None) == logits
  held_to(made, case, listed, cap, sinks=count, q_sinks=own)
  same_bits(made, run(start, stop, q_sinks=own))


@pytest.mark.core(1)
@pytest.mark.parametrize("programs", [1, 2, 7, 23, 100])
@pytest.mark.parametrize(("heads", "rows"), [(3, 1), (6, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_that_share_slots(heads, rows, programs, dtype):
  """Spans of unequal lengths of one row of slots; what belongs to another head, or nobody, is NaN.

  A head's own slots in an array of its own, by the oracle.
  """
  rng, each = np.random.default_rng(heads), heads // rows
  lengths = rng.integers(0, 90, (3, rows, each))
  lengths[0, 0, 0], lengths[1, 0, -1] = 0, 150
  start = np.cumsum(lengths + 5, -1) - lengths  # gaps of 5 that no head reads
  slots = int((start + lengths).max()) + 3
  start, stop = (x.reshape(3, heads).astype(np.int32) for x in (start, start + lengths))

  def listed(b, h):
    return range(start[b, h], stop[b, h])

  case = drawn(rng, (3, rows), 4 * each, slots, 64, dtype)
  q = case.arrays[0].reshape(3, heads, 4, 64)
  read = read_of(listed, (3, heads, slots)).reshape(3, rows, each, slots).any(2)
  cut = Config(tile=32, programs=programs, warps=4, stages=2)
  case = case._replace(arrays=(q, *case.arrays[1:]))
  made = case.kernel(decode_with_output, read, config=cut, logits=True)(start, stop)
  own = (np.repeat(x, each, 1) for x in case.numbers[1:])
  numbers = case.numbers[0].reshape(q.shape), *own
  held_to(made, case._replace(numbers=numbers), listed)
  with pytest.raises(ValueError, match=r"k: found .* expected a range of each head"):
    decode_attention(*case.arrays, *(jnp.asarray(x[:, :1]) for x in (start, stop)))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_values_of_codes_of_any_size(size):
  """Weights are float16, which has few numbers; the sizes that values come in are many."""
  start, stop = ranges(2, 130)
  case = drawn(np.random.default_rng(0), start.shape, 4, 130, 64, "float16", 8)
  per_slot = [case.per_slot[0], case.per_slot[1] * size]
  state, *_ = jax.jit(decode_with_output)(*case.arrays, start, stop, per_slot=per_slot)
  o, *_ = exact(*case.numbers, lambda b, h: visible(start[b, h], stop[b, h], 0, 130))
  np.testing.assert_allclose(np.float64(state.o) / size, o, atol=3e-3)


def test_sums_of_few_integers_are_refused():
  """A GPU's matrix units sum 32 products of bytes: 16 would be counted twice."""
  few = jnp.ones((16, 16), jnp.int8)
  with pytest.raises(ValueError, match="dot: found sums of 16 products of int8, expected 32"):
    backend.dot(few, few)


@pytest.mark.slow
def test_ragged_rows_of_many_tiles_are_cut_finer_or_level():
  """One long row among short ones: three pieces for each program, or as many tiles; alike rows."""
  case = drawn(np.random.default_rng(0), (6, 2), 3, 16 << 10, 64, "float32")
  cut = Config(tile=16, programs=6, warps=4, stages=2)
  size = {"rows": 12, "slots": 16 << 10, "tile": cut.tile, "programs": cut.programs}
  assert split_k.finer(batch=6, **size) == split_k.FINER
  assert split_k.finer(batch=1, **size) == split_k.finer(batch=6, **size | {"slots": 200}) == 1
  start = jnp.zeros((6, 1), jnp.int32)
  for lengths in ([16 << 10, 40, 0, 900, 1, 77], [999, *5 * [1000]]):
    stop = jnp.array(lengths, jnp.int32)[:, None]
    for level in (False, True):
      config = dataclasses.replace(cut, level=level)
      made = decode_with_output(*case.arrays, start, stop, config=config)
      held_to(made, case, lambda b, _, stop=stop: range(stop[b, 0]))


@pytest.mark.core(2)
@pytest.mark.parametrize(
  ("slots", "ring", "dtype", "cut"),
  [
    (64, 16, "bfloat16", Config(16, 7, 4, 2)),
    (100, 37, "float32", Config(32, 5, 4, 2, level=True)),
    (40, 0, "float16", None),
    (33, 32, "float32", Config(16, 1, 4, 2)),
  ],
)
def test_a_ring_goes_on_at_its_beginning(slots, ring, dtype, cut):
  """Windows before the ring's end, over it, all around it, and empty ones; other slots are NaN."""
  rng, turn = np.random.default_rng(slots), slots - ring
  case = drawn(rng, (5, 2), 3, slots, 64, dtype)
  start = np.int32([0, ring, slots - 1, slots - turn // 2, ring])
  length = np.int32([slots, turn // 2, turn, turn - 1, 0])
  length[0] -= turn // 3

  def listed(b, _):
    return [s if s < slots else s - turn for s in range(start[b], start[b] + length[b])]

  run = case.kernel(
    decode_with_output, read_of(listed, (5, 2, slots)), logits=True, ring=ring, config=cut
  )
  held_to(run(start[:, None], (start + length)[:, None]), case, listed)
  with pytest.raises(ValueError, match=f"ring: found {slots} and sinks = 0, expected a slot"):
    decode_attention(*case.arrays, *[jnp.zeros((5, 1), jnp.int32)] * 2, ring=slots)


@pytest.mark.slow
def test_ranges_are_clipped_to_the_cache():
  q, k, v = drawn(np.random.default_rng(0), (6, 2), 4, 70, 64, "float32").arrays
  start, stop = jnp.zeros((6, 2), jnp.int32), jnp.full((6, 2), 70, jnp.int32)
  inside = decode_attention(q, k, v, start, stop)
  beyond = decode_attention(q, k, v, start - 9, stop + 930)
  same_bits(inside, beyond)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="jax-triton has no CPU lowering")
@pytest.mark.parametrize(
  ("groups", "heads", "head_dim", "dtype", "own_query"),
  [(4, 8, 128, "bfloat16", False), (3, 3, 64, "bfloat16", True), (1, 2, 96, "float32", True)],
)
def test_jax_triton_equals_pallas(groups, heads, head_dim, dtype, own_query):
  pytest.importorskip("jax_triton")
  from kvjax.kernels.decode import jax_triton

  rng, (start, stop) = np.random.default_rng(0), ranges(heads, 1000)
  q, k, v = drawn(rng, start.shape, groups, 1000, head_dim, dtype).arrays
  own = jnp.asarray(rng.normal(size=q.shape), dtype)
  read = read_of(lambda b, h: visible(start[b, h], stop[b, h], 5, 1000), k.shape[:3])
  k, v = (jnp.where(read[..., None], x, jnp.nan).astype(dtype) for x in (k, v))
  cut = Config(tile=32, programs=40, warps=4, stages=3)
  states = [
    jax.jit(functools.partial(run, sinks=5, config=cut))(
      q, k, v, start, stop, q_sinks=own if own_query else None
    )
    for run in (decode_attention, jax_triton.decode_attention)
  ]
  for first, second in zip(*map(jax.tree.leaves, states), strict=True):
    np.testing.assert_allclose(first, second, rtol=2e-5, atol=2e-5)


OPERANDS = {
  "q": jnp.zeros((2, 3, 4, 64)),
  "k": jnp.zeros((2, 3, 9, 64)),
  "v": jnp.zeros((2, 3, 9, 64)),
  "start": jnp.zeros((2, 3), jnp.int32),
  "stop": jnp.zeros((2, 3), jnp.int32),
}
CODED = OPERANDS | {
  "k": jnp.zeros((2, 3, 9, 64), jnp.int8),
  "v": jnp.zeros((2, 3, 9, 32), jnp.int16),
  "per_slot": [jnp.zeros((2, 3, 9))] * 2,
}
LARGE = {name: jnp.zeros((*OPERANDS[name].shape[:3], 512)) for name in "qkv"}


@pytest.mark.parametrize(
  ("operands", "change", "error", "message"),
  [
    *(
      (OPERANDS, *case)
      for case in (
        ({"q": jnp.zeros((2, 3, 64))}, ValueError, r"q: found shape \(2, 3, 64\)"),
        ({"k": jnp.zeros((2, 2, 9, 64))}, ValueError, r"k: found shape .* expected \[2, 3, S"),
        ({"v": jnp.zeros((2, 3, 8, 64))}, ValueError, r"v: found .* expected \[2, 3, 9, 64\]"),
        ({"start": jnp.zeros((2,), jnp.int32)}, ValueError, r"start: found shape \(2,\)"),
        ({"q_sinks": jnp.zeros((2, 3, 1, 64))}, ValueError, "q_sinks: found shape"),
        ({"q": jnp.zeros((2, 3, 4, 64), jnp.int8)}, TypeError, "q: found dtype int8"),
        ({"k": jnp.zeros((2, 3, 9, 64), jnp.bfloat16)}, TypeError, "k: found dtype bfloat16"),
        ({"stop": jnp.zeros((2, 3))}, TypeError, "stop: found dtype float32, expected int32"),
        ({"sinks": -1}, ValueError, "sinks: found -1"),
        (LARGE, NotImplementedError, "head size 512, expected at most 256"),
        ({"q": jnp.zeros((2, 3, 256, 64))}, NotImplementedError, "256 query heads per key/value"),
      )
    ),
    *(
      (CODED, *case)
      for case in (
        ({"bits": 3}, ValueError, "bits: found 3, expected one of 8, 4"),
        ({"q": jnp.zeros((2, 3, 4, 63))}, ValueError, "q: found head size 63, expected a multiple"),
        ({"k": jnp.zeros((2, 3, 9, 32), jnp.int8)}, ValueError, r"k: found .*\[2, 3, 9, 64\]"),
        ({"k": jnp.zeros((2, 3, 9, 64))}, TypeError, "k: found dtype float32, expected int8"),
        ({"v": jnp.zeros((2, 3, 9, 64), jnp.int16)}, ValueError, r"v: found .*\[2, 3, 9, 32\]"),
        (
          {"v": jnp.zeros((2, 3, 9, 32), jnp.int8)},
          TypeError,
          "v: found dtype int8, expected int16",
        ),
        ({"per_slot": [jnp.zeros((2, 3, 9))]}, ValueError, "per_slot: found 1 arrays, expected 2"),
        ({"per_slot": [jnp.zeros((2, 3))] * 2}, ValueError, r"per_slot: found shape \(2, 3\)"),
        (
          {"per_slot": [jnp.zeros((2, 3, 9), jnp.int8)] * 2},
          TypeError,
          "per_slot: found dtype int8",
        ),
        ({"q_sinks": jnp.zeros((2, 3, 4, 64))}, ValueError, "q_sinks: expected None with codes"),
      )
    ),
  ],
)
def test_bad_operands_raise(operands, change, error, message):
  with pytest.raises(error, match=message):
    check(**operands | change)


def test_many_short_rows_are_a_program_each(monkeypatch):
  """Heads that share slots are not: one of them may have nearly all."""
  monkeypatch.setattr(devices, "_default", lambda: devices.device("NVIDIA H100 80GB HBM3"))

  def cut(batch, rows, slots):
    shapes, found = ((batch, 8, 4, 96), (batch, rows, slots, 96)), []
    of = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes)
    jax.eval_shape(lambda q, k: found.append(pick(q, k, interpret=False)), *of)
    return found[0]

  assert cut(64, 8, 2048).programs == 1
  few, long, shared = cut(32, 8, 2048), cut(64, 8, 2049), cut(64, 1, 8 * 2048)
  assert min(few.programs, long.programs, shared.programs) >= 132
  assert cut(64, 8, 2048).tile == shared.tile == 128


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
