"""Prompt attention on Hopper: what programs walk, its lowering, and on such a card its results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ETF, PSAW, Env, Full
from kvjax.kernels.prefill import dense, hopper
from kvjax.ops import prefill
from kvjax.testing.layer import Layer, Stream
from tests.kernels.decode_oracle import same_bits
from tests.kernels.prefill_oracle import CLOSE, arrays, oracle

TOKENS = 500
OLD = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11)
on_hopper = pytest.mark.skipif(
  getattr(jax.devices()[0], "compute_capability", "") != "9.0", reason="no Hopper card"
)


def positions(case):
  """Positions of two rows' queries, the second of which has fewer."""
  t = np.arange(TOKENS if case == "prompt" else 300)
  if case == "prompt":
    return np.where(t < np.array([[TOKENS], [130]]), t, -1)
  if case == "chunk":  # after different numbers of cached tokens
    return np.where(t < np.array([[300], [77]]), t + np.array([[200], [5]]), -1)
  if case == "nothing":
    return np.where(t < np.array([[300], [0]]), t, -1)
  return np.where(t < 5, t, t + 195) * np.array([[1], [0]]) + np.array([[0], [3]])  # apart


def windows(qpos, case):
  """The first slot of each query's window, and sinks; None: all is seen."""
  if case == "none":
    return None, 0
  first = qpos // 3 if case == "narrowing" else qpos - 21
  return np.maximum(first, 0).astype(np.int32), 300 if case == "many sinks" else 4


CASES = pytest.mark.parametrize("case", ["prompt", "chunk", "apart", "nothing"])
WINDOWS = pytest.mark.parametrize("window", ["none", "narrowing", "sliding", "many sinks"])


@CASES
@WINDOWS
@pytest.mark.parametrize("tile", [64, 128])
def test_walks_have_every_slot_that_is_seen_and_say_what_is_masked(case, window, tile):
  qpos = positions(case).astype(np.int32)
  first, sinks = windows(qpos, window)
  more = -qpos.shape[1] % (hopper.ROWS * hopper.BLOCKS)
  qpos = np.pad(qpos, ((0, 0), (0, more)), constant_values=-1)
  begin = np.zeros_like(qpos)
  if first is not None:
    begin = np.pad(np.maximum(first, sinks), ((0, 0), (0, more)))
  walks = np.asarray(hopper._walks(jnp.asarray(qpos), jnp.asarray(begin), sinks, tile))
  slot = np.arange(1024)
  rows = qpos.reshape(*walks.shape[:2], -1, 1)
  starts = begin.reshape(rows.shape)
  for b, p in np.ndindex(walks.shape[:2]):
    masked, steps, tile_at = hopper._order(*walks[b, p], windows=first is not None)
    tiles = [int(tile_at(step)) for step in range(steps)]
    assert len(set(tiles)) == steps  # no slot counts twice
    t, start = rows[b, p], starts[b, p]
    seen = (slot <= t) & ((slot < sinks) | (slot >= start))
    assert not seen[:, ~np.isin(slot // tile, tiles)].any()
    assert seen[np.ix_(t[:, 0] >= 0, np.isin(slot // tile, tiles[masked:]))].all()
    if not (t >= 0).any():
      assert steps == 0


@pytest.mark.skipif(OLD, reason="the names of the lowering were others before jax 0.11")
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("head_dim", hopper.HEAD_DIMS)
def test_lowering(head_dim, window):
  """On a machine without a GPU; odd numbers of queries and slots, several rows and heads."""
  of = jax.ShapeDtypeStruct
  ints = [of((2, 999), jnp.int32)] * (1 + window)
  kv = of((2, 2, 1501, head_dim), jnp.bfloat16)
  operands = of((2, 2, 3, 999, head_dim), jnp.bfloat16), kv, kv, *ints
  here = jax.sharding.AbstractDevice("NVIDIA H200", None, "gpu")
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=here)
  with jax.sharding.use_abstract_mesh(mesh):
    run = jax.jit(functools.partial(hopper.prefill_attention, sinks=4))
    lowered = run.trace(*operands).lower(lowering_platforms=("cuda",))
  assert "wgmma" in lowered.as_text()


def test_only_hopper_takes_it(monkeypatch):
  q = jnp.zeros((1, 1, 1, hopper.LEAST, 128))
  monkeypatch.setattr(hopper, "_lowers", lambda: True)
  assert hopper.takes(q, jnp.bfloat16)
  assert not hopper.takes(q, jnp.float32)
  assert not hopper.takes(q[..., :80], jnp.bfloat16)
  assert not hopper.takes(q[..., 1:, :], jnp.bfloat16)
  monkeypatch.undo()
  if jax.default_backend() == "cpu":
    assert not hopper.takes(q, jnp.bfloat16)


def test_ptxas_that_breaks_masks_is_left_alone():
  cuda = 12060, 12080, 12090, 12091, 13000
  assert [*map(hopper._assembles, cuda)] == [True, False, False, True, True]


@pytest.mark.core(1)
@pytest.mark.parametrize(
  "method", [Full(), PSAW(sinks=2), ETF(sinks=2), PSAW(ETF(sinks=2), sinks=2)], ids=repr
)
def test_methods_hand_over_what_their_queries_see(method, monkeypatch):
  """A ragged prompt, and a further chunk where there can be one; another kernel plays this one."""

  def attend(q, k, v, qpos, first=None, *, sinks=0):  # its arguments, and no others
    called.append(sinks)
    return dense.prefill_attention(q, k, v, qpos, first, sinks=sinks)

  stream, outputs, called = Stream.random(2, tokens=150), [], []
  for impl in ("reference", "cudnn"):  # of the second a CPU has no compiled program
    if impl == "cudnn":
      monkeypatch.setattr(prefill, "_prompt_implementation", lambda *_: ("hopper", attend))
    layer = Layer(method, stream, capacity=256, layer=3, env=Env(4, impl=impl))
    outputs.append([layer.prefill([100, 37])])
    if isinstance(method, Full):
      outputs[-1].append(layer.prefill([40, 20], start=[100, 37], past=100, total=[140, 57]))
  assert called
  for first, second in zip(*outputs, strict=True):
    for b, valid in enumerate((100, 37) if first.shape[3] == 100 else (40, 20)):
      np.testing.assert_allclose(first[b, ..., :valid, :], second[b, ..., :valid, :], atol=1e-5)


@on_hopper
@CASES
@WINDOWS
@pytest.mark.parametrize(
  ("heads", "groups", "head_dim", "dtype"),
  [(2, 3, 128, "bfloat16"), (1, 2, 64, "float16"), (1, 2, 256, "bfloat16")],
)
def test_against_oracle(heads, groups, head_dim, dtype, case, window):
  qpos = positions(case)
  slots = TOKENS + 3
  q, k, v = arrays(1, heads, groups, head_dim, dtype, qpos.shape[1], slots)
  first, sinks = windows(qpos, window)
  every = np.broadcast_to(np.arange(slots), (2, heads, slots))
  o, lse, _, _ = oracle(q, k, v, qpos, every, first, sinks)
  behind = jnp.asarray(every > qpos.max(1)[:, None, None])[..., None]
  k, v = (jnp.where(behind, jnp.nan, x).astype(dtype) for x in (k, v))
  q = jnp.where(jnp.asarray(qpos < 0)[:, None, None, :, None], jnp.nan, q).astype(dtype)
  of = functools.partial(jnp.asarray, dtype=jnp.int32)
  run = jax.jit(functools.partial(hopper.prefill_attention, sinks=sinks))
  operands = q, k, v, of(qpos), None if first is None else of(first)
  state, rounded = run(*operands)
  same_bits((state, rounded), run(*operands))
  np.testing.assert_allclose(state.o, o, atol=CLOSE[dtype])
  np.testing.assert_allclose(state.lse, lse, atol=CLOSE[dtype])
  np.testing.assert_array_equal(np.float32(rounded), np.float32(state.o))
