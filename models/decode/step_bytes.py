"""Bytes that a decode step of a model moves: its weights, and what its method reads of caches."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.analysis.traffic import LayerTraffic, step_traffic
from kvjax.families.method import Method
from kvjax.models.nn.config import ModelConfig
from kvjax.models.nn.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class StepBytes:
  """Bytes that one decode step of a model moves, all rows together.

  Attributes:
    weights: bytes of weights, each read once; of an embedding that no head shares only single rows
      are read, and of experts those that the rows may choose, three times: a GPU gathers
      them (`kvjax.models.nn.experts`).
    layers: what each layer moves of its cache, at most.
  """

  weights: int
  layers: tuple[LayerTraffic, ...]

  @property
  def device(self) -> int:
    """Bytes in the device's memory, at most."""
    return self.weights + round(sum(layer.device for layer in self.layers))

  @property
  def spared(self) -> int:
    """Bytes of `device` that shared retrievals spare where all that can share do."""
    return round(sum(layer.spared for layer in self.layers))

  @property
  def host(self) -> int:
    """Bytes over the link to the host's memory, at most."""
    return round(sum(layer.host for layer in self.layers))

  @property
  def bound(self) -> bool:
    """True if it may be less, depending on the data."""
    return any(layer.bound for layer in self.layers)


def step_bytes(
  config: ModelConfig, method: Method, batch: int, tokens: int, dtype: Any = jnp.bfloat16
) -> StepBytes:
  """Bytes that a decode step moves, in a context of `tokens` tokens; nothing is allocated.

  Args:
    config: the model's sizes.
    method: the KV-cache method.
    batch: rows.
    tokens: length of the context, those that the step attends to.
    dtype: of weights, keys and values.

  Raises:
    TypeError: `method` is no method.
    ValueError: a size is below 1.
  """
  held, unread = weight_bytes(config, dtype)
  chosen = min(config.experts, batch * config.experts_per_token)
  of_expert = expert_bytes(config, dtype)
  moved = (3 * chosen - config.experts) * of_expert
  return StepBytes(
    held - unread + moved, step_traffic(config.cache_spec(batch, tokens, dtype), method)
  )


def expert_bytes(config: ModelConfig, dtype: Any) -> int:
  """Bytes of one expert's matrices in all layers; 0 without experts."""
  size = 3 * config.dim * config.ffn if config.experts else 0
  return config.layers * size * jnp.dtype(dtype).itemsize


@functools.cache
def weight_bytes(config: ModelConfig, dtype: Any) -> tuple[int, int]:
  """Bytes of a model's weights, and of those that no decode step reads."""
  one, two = (_held(config, dtype, layers) for layers in (1, 2))  # all layers are of one size
  held = one + (config.layers - 1) * (two - one)
  unread = 0 if config.tie_embeddings else config.vocab * config.dim * jnp.dtype(dtype).itemsize
  return held, unread


def _held(config: ModelConfig, dtype: Any, layers: int) -> int:
  """Bytes of the weights of a model with so many layers."""
  windows = config.windows and config.windows[:1] * layers
  config = dataclasses.replace(config, layers=layers, windows=windows)
  made = nnx.eval_shape(lambda: Transformer(config, dtype=dtype, rngs=nnx.Rngs(0)))
  leaves = jax.tree.leaves(made)
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
