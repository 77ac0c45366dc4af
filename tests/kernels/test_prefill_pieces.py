"""Prompt attention in pieces against our kernel's oracle; cuDNN is played by XLA on a CPU."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ETF, PSAW, Env, Full, Prompt, StreamingLLM
from kvjax.families import sight
from kvjax.kernels.prefill import cudnn, pieces
from kvjax.kernels.prefill.dense import prefill_attention
from kvjax.kernels.prefill.pieces import Block, attend_in_pieces, plan
from kvjax.ops import prefill
from kvjax.testing.layer import Layer, Stream
from tests.kernels.prefill_oracle import CLOSE, arrays, oracle

ON_GPU = jax.default_backend() == "gpu"
DTYPE = "bfloat16" if ON_GPU else "float32"


def stand_in(
  query, key, value, *, q_seqlen, kv_seqlen, scale, mask_type, qkv_layout, return_residual
):
  """What cuDNN computes, by XLA; nonsense where it computes nonsense."""
  assert qkv_layout == "BNTH" and return_residual
  shared = query.shape[1] // key.shape[1]
  key, value = (jnp.repeat(x, shared, 1) for x in (key, value))
  x = jnp.einsum("bnth,bnsh->bnts", query, key) * scale
  t, s = (jnp.arange(n) for n in x.shape[2:])
  ok = (s < kv_seqlen[:, None])[:, None, None]
  if mask_type == cudnn.MaskType.PADDING_CAUSAL:
    ok &= s <= t[:, None]
  x = jnp.where(ok, x, -jnp.inf)
  o = jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(x, -1), value)
  real = (t < q_seqlen[:, None])[:, None]
  return jnp.where(real[..., None], o, 7), jnp.where(real, jax.nn.logsumexp(x, -1), 7)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  monkeypatch.setattr(pieces, "MIN_BLOCK", 16)
  if not ON_GPU:
    monkeypatch.setattr(cudnn, "dot_product_attention", stand_in)


def case(name):
  """Positions of two rows' queries, slots, `apart`, and slots before the neighbours'."""
  if name == "prompt":
    t = np.arange(200)
    return np.where(t < np.array([[200], [70]]), t, -1), 200, 0, 0
  if name == "chunk":
    t = np.arange(80)
    qpos = np.array([[120], [31]]) + t
    return np.where(t < np.array([[80], [33]]), qpos, -1), 200, 0, 120
  # The first five and the second half of what each row has.
  total, t = np.array([[200], [110]]), np.arange(105)
  index = np.where(t < 5, t, total // 2 + t - 5)
  return np.where(index < total, index, -1), 200, 5, 100


@pytest.mark.core(1)
@pytest.mark.parametrize("hidden", [0, 0.3])
@pytest.mark.parametrize("name", ["prompt", "chunk", "apart"])
def test_against_oracle(name, hidden):
  qpos, slots, apart, before = case(name)
  q, k, v = arrays(1, 2, 3, 64, DTYPE, qpos.shape[1], slots)
  first, sinks = (np.floor(hidden * qpos).astype(np.int32), 3) if hidden else (None, 0)
  begins = np.floor(hidden * np.arange(200)) if hidden else None
  blocks = plan(qpos.shape[1], apart, before, begins, sinks)
  assert sum(b.end - b.begin for b in blocks) > qpos.shape[1] // 2
  every = np.broadcast_to(np.arange(slots), (2, 2, slots))
  o, lse, _, _ = oracle(q, k, v, qpos, every, first, sinks)
  behind = jnp.asarray(every > qpos.max(1)[:, None, None])[..., None]
  k, v = (jnp.where(behind, jnp.nan, x).astype(DTYPE) for x in (k, v))
  of = functools.partial(jnp.asarray, dtype=jnp.int32)
  run = jax.jit(functools.partial(attend_in_pieces, sinks=sinks, blocks=blocks))
  state, out = run(q, k, v, of(qpos), None if first is None else of(first))
  np.testing.assert_allclose(state.o, o, atol=CLOSE[DTYPE])
  np.testing.assert_allclose(state.lse, lse, atol=CLOSE[DTYPE])
  np.testing.assert_array_equal(np.float32(out), np.float32(state.o.astype(out.dtype)))


@pytest.mark.slow
def test_rows_that_do_not_fit_the_plan_are_our_kernels():
  """A window that hides more of one row than the host was told."""
  qpos = np.broadcast_to(np.arange(64, dtype=np.int32), (2, 64))
  q, k, v = arrays(1, 1, 2, 64, DTYPE, 64, 64, batch=2)
  first = np.maximum(qpos - np.array([[9], [40]], np.int32), 0)
  blocks = (Block(32, 64, 32),)
  spans = jax.jit(functools.partial(pieces._span, *blocks, sinks=2))(k, qpos, first)
  assert spans.queries.tolist() == [0, 32] and spans.low.tolist() == [0, 23]
  run = jax.jit(functools.partial(attend_in_pieces, sinks=2, blocks=blocks))
  state, _ = run(q, k, v, qpos, first)
  run = jax.jit(functools.partial(prefill_attention, sinks=2))
  want, _ = run(q, k, v, qpos, first)
  np.testing.assert_array_equal(np.asarray(state.o)[0], np.asarray(want.o)[0])
  np.testing.assert_allclose(state.o, want.o, atol=CLOSE[DTYPE])
  np.testing.assert_allclose(state.lse, want.lse, atol=CLOSE[DTYPE])


def test_a_rectangle_begins_no_later_than_its_block():
  k, start = jnp.zeros((1, 1, 32, 8)), jnp.array([4])
  fits = [pieces._fits(Block(0, 8, 4), k, start, start + n) for n in (-1, 0, 1)]
  assert fits == [True, True, False]


def test_plan():
  assert plan(15, 0, 0) == ()  # too few
  assert plan(100, 0, 0) == (Block(0, 100, 0),)
  assert plan(100, 4, 50) == (Block(4, 100, 50),)
  first = np.arange(1024) // 2  # hides half: the first block sees less than its own slots
  assert plan(1024, 0, 0, first) == tuple(
    Block(b, b + 128, min(b, b - (b + 127) // 2 + 15 & -16)) for b in range(128, 1024, 128)
  )
  assert plan(1024, 0, 0, np.arange(1024) - 20) == ()  # slides


@pytest.mark.core(1)
@pytest.mark.parametrize(
  "method", [Full(), PSAW(sinks=2), ETF(sinks=2), PSAW(ETF(sinks=2), sinks=2)], ids=repr
)
def test_methods_agree_with_the_reference(method, monkeypatch):
  """A ragged prompt, and a further chunk where there can be one, of the top layer, in float32."""
  monkeypatch.setattr(prefill, "_beyond_cudnn", lambda at, staged: "")
  monkeypatch.setattr(cudnn, "dot_product_attention", stand_in)  # the real one takes 16 bits
  stream = Stream.random(2, tokens=150)
  outputs = []
  for impl in ("cudnn", "reference"):
    env = Env(4, impl=impl)
    layer = Layer(method, stream, capacity=256, layer=3, env=env)
    outputs.append([layer.prefill([100, 37])])
    if isinstance(method, Full):
      outputs[-1].append(layer.prefill([40, 20], start=[100, 37], past=100, total=[140, 57]))
  for first, second in zip(*outputs, strict=True):
    for b, valid in enumerate((100, 37) if first.shape[3] == 100 else (40, 20)):
      np.testing.assert_allclose(first[b, ..., :valid, :], second[b, ..., :valid, :], atol=1e-5)


def test_windows_that_slide_are_left_to_the_kernel():
  layer = Layer(StreamingLLM(budget=12, sinks=2, rope="original"), Stream.random(0))
  at, staged = layer.at, {"k": jnp.zeros((1, 1, 40, 16), jnp.bfloat16)}
  qpos = jnp.arange(40, dtype=jnp.int32)[None]
  prompt = Prompt(jnp.array([40]), jnp.array([40]), None, 40, 0)
  q = jnp.zeros((1, 1, 1, 40, 16))
  blocks, words = prefill._pieces(at, staged, q, sight.of(at, qpos, prompt))
  assert blocks == () and "too few queries" in words


def test_cudnn_takes_the_arguments_that_are_passed():
  """The function is private to jax: it may change with any release."""
  from jax._src.cudnn.fused_attention_stablehlo import dot_product_attention

  parameters = inspect.signature(dot_product_attention).parameters
  assert list(parameters)[:3] == ["query", "key", "value"]
  assert set(inspect.signature(stand_in).parameters) <= set(parameters)
  assert {"PADDING", "PADDING_CAUSAL"} <= set(cudnn.MaskType.__members__)
