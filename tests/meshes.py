"""Meshes of the machine that the tests run on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import multihost_utils

import kvjax
from kvjax import Env
from kvjax.models.nn.config import ModelConfig
from kvjax.models.nn.parallel import shard
from kvjax.models.nn.transformer import Transformer


def mesh_of(heads=1, slots=1):
  """A mesh of heads × slots devices; skips where there are fewer."""
  if heads * slots > jax.device_count():
    pytest.skip(f"needs {heads * slots} devices, found {jax.device_count()}")
  return kvjax.make_mesh(heads, slots)


def whole(tree):
  """Every array as NumPy's, those that lie on several processes, too."""
  local = lambda x: x.is_fully_addressable or x.is_fully_replicated  # noqa: E731
  gather = functools.partial(multihost_utils.process_allgather, tiled=True)
  return jax.tree.map(lambda x: np.asarray(x if local(x) else gather(x)), tree)


CONFIG = ModelConfig(
  vocab=64, dim=48, layers=3, heads=16, kv_heads=8, head_dim=16, ffn=64, max_context=512
)


GPU = jax.default_backend() == "gpu"


IMPL = "auto" if GPU else "reference"


@functools.cache
def model(heads=0, slots=1):
  """The decoder on one device (0), or spread over heads × slots of them."""
  if heads:
    return shard(model(), mesh_of(heads, slots))
  graph, shapes = nnx.split(
    nnx.eval_shape(lambda: Transformer(CONFIG, dtype=jnp.float32, impl=IMPL, rngs=nnx.Rngs(0)))
  )
  rng = np.random.default_rng(0)

  def draw(path, x):
    name = jax.tree_util.keystr(path)
    if "norm" in name:
      return jnp.ones(x.shape, x.dtype)
    scale = 2.5 * x.shape[0] ** -0.5 if "wqkv" in name else CONFIG.dim**-0.5
    return jnp.asarray(rng.normal(size=x.shape) * (1 if "embed" in name else scale), x.dtype)

  built = nnx.merge(graph, jax.tree_util.tree_map_with_path(draw, shapes))
  built.env = Env(CONFIG.layers, CONFIG.rope, IMPL, tile=4)
  return built
