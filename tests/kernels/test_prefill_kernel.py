"""Prompt attention against a NumPy float64 loop: windows, chunks, ragged rows, queries apart.

On a GPU the same tests run the compiled kernels, and cuDNN's at its own shapes.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels.prefill import cudnn
from kvjax.kernels.prefill.dense import Blocking, check, column_mass, prefill_attention
from tests.kernels.decode_oracle import same_bits
from tests.kernels.prefill_oracle import CLOSE, arrays, oracle

SMALL = Blocking(rows=16, tile=16, warps=4, stages=2)


def positions(seed, case, batch, queries, slots):
  """Positions of queries, and of slots (None: a slot is its position), for a case's name."""
  rng = np.random.default_rng(seed)
  if case == "prompt":  # ragged, right-padded
    valid = np.array([queries, queries // 3][:batch])
    t = np.arange(queries)
    return np.where(t < valid[:, None], t, -1), None
  if case == "chunk":  # after different numbers of cached tokens
    past, valid = np.array([[slots - queries], [7]]), np.array([[queries], [queries // 2]])
    t = np.arange(queries)
    return np.where(t < valid, past + t, -1), None
  if case == "apart":  # the first ones and the end of a prompt
    total = np.array([[slots], [slots - 9]])
    t = np.arange(queries)
    index = np.where(t < 5, t, slots // 2 + t - 5)
    return np.where(index < total, index, -1), None
  order = np.stack([rng.permutation(slots) for _ in range(batch)])[:, None]
  pos = np.where(order < slots - 11, order, -1)  # any order, with holes
  return np.sort(rng.integers(0, slots, (batch, queries)), 1), pos


@pytest.mark.core(1)
@pytest.mark.rest
@pytest.mark.parametrize("window", ["none", "narrowing", "sliding", "turned"])
@pytest.mark.parametrize("case", ["prompt", "chunk", "apart", "any order"])
@pytest.mark.parametrize(
  ("heads", "groups", "head_dim", "dtype"),
  [(3, 3, 24, "float32"), (2, 4, 64, "bfloat16"), (1, 7, 64, "float16")],
)
def test_against_oracle(heads, groups, head_dim, dtype, case, window):
  queries, slots, batch = 70, (70 if case == "prompt" else 150), 2
  qpos, pos = positions(3, case, batch, queries, slots)
  q, k, v = arrays(1, heads, groups, head_dim, dtype, queries, slots)
  first, sinks, q_sinks = None, 0, None
  if window != "none":
    sinks = 20 if window == "sliding" else 3
    first = np.where(qpos < 0, 0, qpos * 3 // 8 if window == "narrowing" else qpos - 21)
  if window == "turned":
    q_sinks = arrays(2, heads, groups, head_dim, dtype, queries, slots)[0]
  every = np.arange(slots) if pos is None else pos
  every = np.broadcast_to(every, (batch, heads, slots))
  o, lse, mass, seen = oracle(q, k, v, qpos, every, first, sinks, q_sinks)
  # NaN in what no query sees. Where slots are positions, a window's edges share tiles with it.
  unseen = ~seen if window == "none" else every > qpos.max(1)[:, None, None]
  k, v = (jnp.where(jnp.asarray(unseen)[..., None], jnp.nan, x).astype(dtype) for x in (k, v))
  q = jnp.where(jnp.asarray(qpos < 0)[:, None, None, :, None], jnp.nan, q).astype(dtype)
  of = functools.partial(jnp.asarray, dtype=jnp.int32)
  options = {"sinks": sinks, "cut": SMALL}
  run = jax.jit(functools.partial(prefill_attention, **options))
  operands = q, k, v, of(qpos), None if first is None else of(first)
  apart = {"q_sinks": q_sinks, "pos": None if pos is None else of(every)}
  state, rounded = run(*operands, **apart)
  same_bits((state, rounded), run(*operands, **apart))
  np.testing.assert_allclose(state.o, o, atol=CLOSE[dtype])
  np.testing.assert_allclose(state.lse, lse, atol=CLOSE[dtype])
  np.testing.assert_array_equal(np.float32(rounded), np.float32(state.o))
  if window == "turned":
    return
  sums = jax.jit(functools.partial(column_mass, **options))(
    jnp.where(jnp.isnan(q), 0, q),
    k,
    of(np.where(unseen, -1, every)),
    of(qpos),
    state.m,
    state.l,
    None if first is None else of(first),
  )
  np.testing.assert_allclose(sums, mass, atol=queries * CLOSE[dtype] / 4)


@pytest.mark.core(1)
@pytest.mark.parametrize("past", [15, 33, 80])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slots_that_all_queries_see_are_not_compared(dtype, past):
  """A chunk after slots in any order, some of them empty; padding, and NaN in what is empty."""
  rng = np.random.default_rng(past)
  queries, slots, heads = 40, 120, 2
  held = np.where(rng.random((2, heads, 80)) < 0.8, rng.integers(0, 900, (2, heads, 80)), -1)
  held[1, 0, :32] = -1  # whole tiles
  valid = np.array([[40], [17]])
  qpos = np.where(np.arange(queries) < valid, 900 + np.arange(queries), -1)
  every = np.concatenate([held, np.repeat(qpos[:, None], heads, 1)], 2)
  q, k, v = arrays(5, heads, 3, 24, dtype, queries, slots)
  o, lse, mass, _ = oracle(q, k, v, qpos, every)
  empty = jnp.asarray(every < 0)[..., None]
  k, v = (jnp.where(empty, jnp.nan, x).astype(dtype) for x in (k, v))
  of = functools.partial(jnp.asarray, dtype=jnp.int32)
  run = jax.jit(functools.partial(prefill_attention, past=past, cut=SMALL))
  state, _ = run(q, k, v, of(qpos), pos=of(every))
  np.testing.assert_allclose(state.o, o, atol=CLOSE[dtype])
  np.testing.assert_allclose(state.lse, lse, atol=CLOSE[dtype])
  sums = jax.jit(functools.partial(column_mass, past=past, cut=SMALL))(
    q, k, of(every), of(qpos), state.m, state.l
  )
  np.testing.assert_allclose(sums, mass, atol=queries * CLOSE[dtype] / 4)


@pytest.mark.slow
def test_windows_may_differ_by_head():
  """Each head's output is that of a call in which all heads have its window."""
  batch, heads, size = 2, 3, 90
  q, k, v = arrays(0, heads, 2, 24, "float32", size, size)
  qpos = jnp.asarray(positions(0, "prompt", batch, size, size)[0], jnp.int32)
  first = jnp.maximum(qpos[:, None] - jnp.array([5, 23, 61])[:, None], 0)
  run = jax.jit(functools.partial(prefill_attention, sinks=2, cut=SMALL))
  state, _ = run(q, k, v, qpos, first)
  for h in range(heads):
    alone, _ = run(q, k, v, qpos, first[:, h])
    np.testing.assert_array_equal(state.o[:, h], alone.o[:, h])
    np.testing.assert_array_equal(state.lse[:, h], alone.lse[:, h])
  assert not np.array_equal(state.o[:, 0], alone.o[:, 0])


def test_a_query_of_nan_gives_no_mass():
  q, k, v = arrays(0, 1, 1, 16, "float32", 40, 40, batch=1)
  qpos = jnp.arange(40, dtype=jnp.int32)[None]
  state = jax.jit(prefill_attention)(q.at[0, 0, 0, 7].set(jnp.nan), k, v, qpos)[0]
  got = jax.jit(column_mass)(q, k, qpos[None], qpos, state.m, state.l)
  want = oracle(q, k, v, np.where(np.arange(40) == 7, -1, np.asarray(qpos)), np.asarray(qpos[None]))
  np.testing.assert_allclose(got, want[2], atol=1e-5)


def test_bad_operands():
  q, k, v = (np.zeros(shape, np.float32) for shape in ((1, 2, 3, 8, 16), *[(1, 2, 9, 16)] * 2))
  qpos = np.zeros((1, 8), np.int32)
  with pytest.raises(ValueError, match=r"v: found shape \(1, 2, 9, 15\), expected \[1, 2, 9, 16\]"):
    check(q, k, v[..., 1:], qpos, 0)
  with pytest.raises(ValueError, match=r"qpos: found shape \(1, 7\), expected \[1, 8\]"):
    check(q, k, v, qpos[:, 1:], 0)
  with pytest.raises(TypeError, match="k: found dtype float64, expected float32"):
    check(q, k.astype(np.float64), v, qpos, 0)
  with pytest.raises(NotImplementedError, match="head size 512, expected at most 256"):
    check(*(np.zeros((*x.shape[:-1], 512), np.float32) for x in (q, k, v)), qpos, 0)
  with pytest.raises(ValueError, match=r"Blocking\.rows: found 24, expected a power of two"):
    Blocking(rows=24)


def stand_in(query, key, value, *, q_seqlen, kv_seqlen, scale, mask_type, qkv_layout, **_):
  """Attention as cuDNN computes it, by XLA; nonsense where it computes nonsense."""
  assert qkv_layout == "BNTH" and mask_type == cudnn.MaskType.PADDING_CAUSAL
  key, value = (jnp.repeat(x, query.shape[1] // key.shape[1], 1) for x in (key, value))
  x = jnp.einsum("bnth,bnsh->bnts", query, key, preferred_element_type=jnp.float32) * scale
  t = jnp.arange(query.shape[2])
  ok = (t < kv_seqlen[:, None])[:, None, None] & (t <= t[:, None])
  x = jnp.where(ok, x, -jnp.inf)
  o = jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(x, -1).astype(value.dtype), value)
  real = (t < q_seqlen[:, None])[:, None]
  return jnp.where(real[..., None], o, 7), jnp.where(real, jax.nn.logsumexp(x, -1), 7)


@pytest.mark.core(3)
@pytest.mark.rest
@pytest.mark.parametrize(
  ("heads", "groups", "head_dim", "dtype"),
  [(2, 4, 128, "bfloat16"), (3, 3, 64, "float16"), (1, 7, 96, "bfloat16"), (2, 1, 40, "float16")],
)
@pytest.mark.parametrize("tokens", [64, 77, 600])
def test_cudnn_against_oracle(heads, groups, head_dim, dtype, tokens, monkeypatch):
  """Ragged rows, one of them idle; NaN in what stands after them. XLA plays cuDNN on a CPU."""
  if jax.default_backend() != "gpu":
    monkeypatch.setattr(cudnn, "dot_product_attention", stand_in)
  q, k, v = arrays(1, heads, groups, head_dim, dtype, tokens, tokens, batch=3)
  valid = np.array([tokens, tokens // 3, 0], np.int32)
  t = np.arange(tokens)
  qpos = np.where(t < valid[:, None], t, -1)
  o, lse, _, _ = oracle(q, k, v, qpos, np.broadcast_to(t, k.shape[:3]))
  behind = jnp.asarray(qpos < 0)[:, None, :, None]
  k, v = (jnp.where(behind, jnp.nan, x).astype(dtype) for x in (k, v))
  q = jnp.where(behind[:, :, None], jnp.nan, q).astype(dtype)
  state, rounded = jax.jit(cudnn.attend_causal)(q, k, v, jnp.asarray(valid))
  np.testing.assert_allclose(state.o, o, atol=CLOSE[dtype])
  np.testing.assert_allclose(state.lse, lse, atol=CLOSE[dtype])
  np.testing.assert_array_equal(np.float32(rounded), np.float32(state.o))


def test_cudnn_takes_the_arguments_that_are_passed():
  """The function is private to jax: it may change with any release."""
  parameters = inspect.signature(cudnn.dot_product_attention).parameters
  assert list(parameters)[:3] == ["query", "key", "value"]
  assert {"q_seqlen", "kv_seqlen", "scale", "mask_type", "qkv_layout", "return_residual"} <= set(
    parameters
  )
  assert "PADDING_CAUSAL" in cudnn.MaskType.__members__
