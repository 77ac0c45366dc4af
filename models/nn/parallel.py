"""The decoder over several devices: which weight is split over what, and how a model gets there.

    mesh = kvjax.make_mesh(heads=4)
    model = shard(model, mesh)                     # or convert.load(folder, mesh=mesh)
    caches = model.init_caches(method, batch=8, capacity=32768)

From there on everything is as on one device: `prefill`, `generate`, own decode loops. A decode step
has two all-reduces a layer of [B, D] in the model's dtype, after attention and after the MLP, one
for the embedding's rows, and gathers the logits of all parts of the vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from kvjax.runtime import sharding

if TYPE_CHECKING:
  from kvjax.models.nn.config import ModelConfig
  from kvjax.models.nn.transformer import Transformer

# Logical axes of every weight, by name; norms, routers and biases on the residual stream are whole.
AXES: dict[str, tuple[str | None, ...]] = {
  "embedding": ("vocab", "dim"),
  "head": ("vocab", "dim"),
  "wqkv": ("dim", "kv_heads", "queries", "head_dim"),
  "bqkv": ("kv_heads", "queries", "head_dim"),
  "wo": ("kv_heads", "groups", "head_dim", "dim"),
  "gate_up": ("dim", None, "ffn"),
  "down": ("ffn", "dim"),
  "sinks": ("kv_heads", "groups"),
}
# Of experts each device holds a part of every one.
EXPERTS: dict[str, tuple[str | None, ...]] = {
  "gate_up": ("experts", "dim", None, "ffn"),
  "gate_up_bias": ("experts", None, "ffn"),
  "down": ("experts", "ffn", "dim"),
}


def shard(model: Transformer, mesh: Mesh) -> Transformer:
  """The model with its weights spread over a mesh; the one that was passed stays as it is.

  For a model that fits on one device; `convert.load(folder, mesh=...)` restores a checkpoint into
  this layout without ever holding it whole.

  Args:
    model: a decoder on one device.
    mesh: of `kvjax.make_mesh`.

  Raises:
    ValueError: the mesh has other axes, or key/value heads or the MLP's width are no multiple of
      the parts that they are split into.
  """
  return placed(model, mesh, jax.device_put)


def placed(model: Transformer, mesh: Mesh, put: Any) -> Transformer:
  """The model on a mesh, each leaf as `put(leaf, sharding)` gives it: `model` may be abstract."""
  leaves, tree = jax.tree.flatten(model)
  moved = map(put, leaves, shardings(model, model.config, mesh))
  return on_mesh(jax.tree.unflatten(tree, moved), mesh)


def on_mesh(model: Transformer, mesh: Mesh) -> Transformer:
  """The model itself, told that its weights lie on this mesh."""
  model.mesh, model.env = mesh, sharding.on_mesh(model.env, mesh)
  return model


def shardings(state: Any, config: ModelConfig, mesh: Mesh) -> list[NamedSharding]:
  """Shardings of the leaves of a model, or of its state; raises as `shard` does."""
  sharding.check_mesh(mesh)
  check_sizes(config, mesh)
  sharding.check_windows(config.windows, mesh)
  return [NamedSharding(mesh, spec) for spec in weight_specs(state, config, mesh)]


def check_sizes(config: ModelConfig, mesh: Mesh | AbstractMesh) -> None:
  """Raises ValueError where heads or the MLP cannot be split evenly."""
  for name, size in (("kv_heads", config.kv_heads), ("ffn", config.ffn)):
    parts = sharding.shards(mesh, name)
    if size % parts:
      raise ValueError(
        f"mesh: found {parts} devices to split {name} = {size} over, expected a divisor of it"
      )


def weight_specs(state: Any, config: ModelConfig, mesh: Mesh | AbstractMesh) -> list[PartitionSpec]:
  """Specs of the leaves of a model, or of its state; a vocabulary that does not split is whole."""
  whole = config.vocab % sharding.shards(mesh, "vocab") != 0
  known = {**AXES, **EXPERTS} if config.experts else AXES

  def spec(path: Any) -> PartitionSpec:
    names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    axes = next((known[name] for name in reversed(names) if name in known), ())
    return sharding.spec_of([None if axis == "vocab" and whole else axis for axis in axes])

  return [spec(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
