"""Meshes of the machine that the tests run on."""

import functools

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

import kvjax
from kvjax.models.nn.config import ModelConfig
from kvjax.models.nn.parallel import shard
from kvjax.testing import tiny


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
  return shard(model(), mesh_of(heads, slots)) if heads else tiny.drawn(CONFIG, IMPL)
