"""Dense decode in Mosaic GPU: lowered for Hopper anywhere, and against a float64 oracle.

On a Hopper GPU the oracle meets the compiled kernel, on a CPU Mosaic's interpreter.
"""

import functools
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from kvjax.kernels.common.config import Config
from kvjax.kernels.decode.mosaic import DEFAULT, decode_attention
from kvjax.testing.decode_cases import Shape
from tests.kernels.dense_oracle import make, no_worse, oracle, plain, poison, same_bits


def missing() -> str:
  """Why the kernel cannot run here; empty if it can."""
  if jax.default_backend() != "gpu":
    known = hasattr(mosaic_gpu, "InterpretGPUParams")
    return "" if known else f"Mosaic's interpreter of jax {jax.__version__} lacks operations"
  found = jax.devices()[0].compute_capability
  return "" if found.startswith("9.") else f"wgmma needs compute capability 9.x, found {found}"


runs = pytest.mark.skipif(bool(missing()), reason=missing())


@runs
@pytest.mark.parametrize(
  ("groups", "heads", "head_dim", "slots", "config"),
  [
    (4, 2, 128, 304, DEFAULT),
    (6, 2, 128, 304, Config(tile=64, programs=1, warps=4, stages=3)),
    (8, 1, 128, 520, Config(tile=128, programs=18, warps=4, stages=2)),
    (1, 1, 128, 64, DEFAULT),
    (9, 3, 128, 136, Config(tile=64, programs=36, warps=4, stages=2)),
    (3, 3, 64, 304, DEFAULT),
  ],
)
def test_equals_the_oracle_twice(groups, heads, head_dim, slots, config):
  q, k, v, start, stop, _ = make(groups, heads, head_dim, slots, "bfloat16")
  expected = oracle(q, k, v, start, stop, 0, q)
  usual = plain(q, k, v, start, stop, 0, q)
  k, v = (poison(x, start, stop, 0) for x in (k, v))
  run = jax.jit(functools.partial(decode_attention, config=config))
  state, again = run(q, k, v, start, stop), run(q, k, v, start, stop)
  no_worse((state.o, state.m, state.l), expected, usual)
  same_bits(state, again)


@runs
def test_one_range_of_all_heads_is_clipped_and_a_scale_is_taken():
  q, k, v, start, stop, _ = make(4, 2, 128, 72, "bfloat16")
  inside = decode_attention(2 * q, k, v, 0 * start, 0 * stop + 72)
  beyond = decode_attention(
    q, k, v, 0 * start[:, :1] - 9, 0 * stop[:, :1] + 1000, scale=2 * 128**-0.5
  )
  same_bits(inside, beyond)


@pytest.mark.parametrize("groups", [1, 4, 12])
@pytest.mark.parametrize(
  "config", [DEFAULT, Config(tile=128, programs=264, warps=4, stages=2)], ids=["64", "128"]
)
def test_lowers_for_hopper(groups, config):
  here = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
  run = jax.jit(functools.partial(decode_attention, config=config, interpret=False))
  with use_abstract_mesh(AbstractMesh((), (), abstract_device=here)):
    traced = run.trace(*Shape(2, 8, groups, 8 << 10).abstract())
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert "mosaic_gpu" in text
  assert "wgmma.mma_async" in text and "cp.async.bulk.tensor" in text


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"dtype": "float32"}, "q: found dtype float32, expected bfloat16"),
    ({"head_dim": 96}, "q: found 4 query heads of size 96"),
    ({"groups": 65}, "q: found 65 query heads of size 128 .* expected at most 64 of 64 or 128"),
    ({"slots": 56}, "k: found 2 rows of 56 slots, expected 2 rows of .* at least a tile of 64"),
    ({"slots": 100}, "k: found 2 rows of 100 slots, expected 2 rows of a multiple of 8"),
    ({"config": Config(32, 9, 4, 2)}, "config: found tile 32, stages 2, expected a multiple of 64"),
    ({"config": Config(64, 9, 4, 1)}, "config: found tile 64, stages 1"),
  ],
)
def test_what_it_does_not_take_raises(change, message):
  config = change.pop("config", DEFAULT)
  shape = Shape(**{"batch": 1, "kv_heads": 2, "groups": 4, "slots": 104} | change)
  with pytest.raises(NotImplementedError, match=message):
    decode_attention(*(jnp.zeros(x.shape, x.dtype) for x in shape.abstract()), config=config)


def test_a_gpu_without_wgmma_raises(monkeypatch):
  operands = [jnp.zeros(x.shape, x.dtype) for x in Shape(1, 2, 4, 104).abstract()]
  older = types.SimpleNamespace(device_kind="NVIDIA A100", compute_capability="8.0")
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(jax, "devices", lambda: [older])
  with pytest.raises(NotImplementedError, match=r"found NVIDIA A100 of .* 8\.0, expected one of 9"):
    decode_attention(*operands)
