"""Several devices give what one gives: every method, split over 1, 2, 4 and 8 of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import METHODS, Env, sharding
from models.config import ModelConfig
from models.generate import join, split
from models.parallel import shard
from models.transformer import Transformer
from tests.tiny import CLOSE

CONFIG = ModelConfig(
  vocab=64, dim=48, layers=4, heads=16, kv_heads=8, head_dim=16, ffn=64, max_context=512
)
BUDGET, CAPACITY, STEPS = 12, 64, 3
LENGTHS = np.array([23, 14], np.int32)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab, (2, 40), np.int32)

every = pytest.mark.parametrize("name", METHODS)


@functools.cache
def model(heads=0, slots=1):
  """The decoder on one device (0), or spread over heads × slots of them."""
  if heads:
    return shard(model(), kvjax.make_mesh(heads, slots))
  from flax import nnx

  graph, shapes = nnx.split(
    nnx.eval_shape(
      lambda: Transformer(CONFIG, dtype=jnp.float32, impl="reference", rngs=nnx.Rngs(0))
    )
  )
  rng = np.random.default_rng(0)

  def draw(path, x):
    name = jax.tree_util.keystr(path)
    if "norm" in name:
      return jnp.ones(x.shape, x.dtype)
    scale = 2.5 * x.shape[0] ** -0.5 if "wqkv" in name else CONFIG.dim**-0.5
    return jnp.asarray(rng.normal(size=x.shape) * (1 if "embed" in name else scale), x.dtype)

  built = nnx.merge(graph, jax.tree_util.tree_map_with_path(draw, shapes))
  built.env = Env(CONFIG.layers, CONFIG.rope, "reference", tile=4)
  return built


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(graph, method, leaves, caches, tokens, lengths):
  """A prompt and STEPS tokens; logits [B, STEPS + 1, V]."""
  decoder = join(graph, leaves)
  first, caches = decoder.prefill(tokens[:, : LENGTHS.max()], lengths, caches, method)

  def step(caches, i):
    token = jnp.take_along_axis(tokens, lengths[:, None] + i, 1)[:, 0]
    return decoder.decode(token, caches, method)[::-1]

  caches, rest = jax.lax.scan(step, caches, jnp.arange(STEPS))
  return jnp.concatenate([first[None], rest]).swapaxes(0, 1), caches


@functools.cache
def logits(method, heads=0, slots=1):
  decoder = model(heads, slots)
  caches = decoder.init_caches(method, 2, CAPACITY)
  return np.asarray(run(*split(decoder)[:1], method, split(decoder)[1], caches, TOKENS, LENGTHS)[0])


@every
@pytest.mark.parametrize("heads", (1, 2, 4, 8))
def test_tensor_parallel_equals_one_device(name, heads):
  method = METHODS[name].example(BUDGET)
  np.testing.assert_allclose(logits(method, heads), logits(method), atol=CLOSE)


SPREAD = [name for name in METHODS if METHODS[name].example(BUDGET).spreads]


@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.parametrize(("heads", "slots"), [(1, 2), (1, 4), (1, 8), (2, 4)])
def test_context_parallel_equals_one_device(name, heads, slots):
  method = METHODS[name].example(BUDGET)
  np.testing.assert_allclose(logits(method, heads, slots), logits(method), atol=CLOSE)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in SPREAD])
def test_what_cannot_be_spread_says_so(name):
  with pytest.raises(NotImplementedError, match=r"slots split over devices for .* heads only"):
    model(1, 2).init_caches(METHODS[name].example(BUDGET), 2, CAPACITY)
