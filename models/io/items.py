"""Items of a checkpoint: the arrays of a layer, or of the embedding.

An item is a safetensors file, or a folder of Orbax's, by its suffix. A file is read piece by piece,
each cast to the dtype of the model as it comes: beside the model's own memory there is a piece,
whatever the model's size.
"""

from __future__ import annotations

import functools
import mmap
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import safetensors.numpy

from kvjax.models.io import files, orbax
from kvjax.models.io.source import Item
from kvjax.models.nn import parallel

KINDS = ("safetensors", "orbax")  # suffixes of items
_PIECE = 1 << 20  # numbers that are read together


def save(path: pathlib.Path, item: Item) -> None:
  """Writes an item; its arrays are named by their place in it, "attention.wqkv" say."""
  arrays = {name: np.ascontiguousarray(x) for name, x in named(item).items()}
  if path.suffix == ".orbax":
    orbax.save(path, arrays, {name: _heads(name) for name in arrays})
    return
  with files.written(path):
    safetensors.numpy.save_file(arrays, path)


def load(path: pathlib.Path, target: Item) -> Item:
  """Reads an item onto devices.

  Args:
    path: what `save` wrote.
    target: a jax.ShapeDtypeStruct for each array. With a sharding each device gets its part of it;
      without, the array is on the first device and, like all arrays of JAX, not committed to it.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is damaged, or its arrays are others.
  """
  wanted, tree = named(target), jax.tree.structure(target)
  if path.suffix == ".orbax":
    read = orbax.load(path, wanted)
    return jax.tree.unflatten(tree, [read[name] for name in wanted])
  if not path.is_file():
    raise FileNotFoundError(f"{path}: not found, expected an item of the checkpoint")
  with files.safetensors_opened(path) as file:
    parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    found = {name: tuple(part.get_shape()) for name, part in parts.items()}
    expected = {name: x.shape for name, x in wanted.items()}
    if found != expected:
      raise ValueError(f"{path}: found arrays {found}, expected {expected}")
    kinds = {name: part.get_dtype() for name, part in parts.items()}
    if not set(kinds.values()) <= set(files.FLOATS):
      raise ValueError(f"{path}: found arrays of {kinds}, expected {', '.join(files.FLOATS)}")
    arrays = [_placed(parts[name], x) for name, x in wanted.items()]
  return jax.tree.unflatten(tree, arrays)


def _heads(name: str) -> tuple[int, ...]:
  """Axes of key/value heads: each is written apart, so that a device reads its own alone."""
  axes = parallel.AXES.get(name.rpartition(".")[2], ())
  return tuple(i for i, axis in enumerate(axes) if axis == "kv_heads")


def named(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
  """The leaves of a tree by path, in their order: {"a": {"b": x}} has "a.b"."""
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf)
  return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def _placed(part: Any, want: jax.ShapeDtypeStruct) -> jax.Array:
  """An array of a file in the wanted dtype, where it is wanted."""
  read = functools.partial(_read, part, want)
  if want.sharding is not None:
    return jax.make_array_from_callback(want.shape, want.sharding, read)
  return jax.device_put(read((slice(None),) * len(want.shape)))


def _read(part: Any, want: jax.ShapeDtypeStruct, index: tuple[slice, ...]) -> np.ndarray:
  """A part of an array, piece by piece in the wanted dtype."""
  (first, *rest) = [range(*at.indices(n)) for at, n in zip(index, want.shape, strict=True)]
  out = _buffer((len(first), *map(len, rest)), want.dtype)
  step = max(1, _PIECE * len(out) // max(1, out.size))
  for i in range(0, len(out), step):
    end = min(i + step, len(out))
    out[i:end] = part[(slice(first[i], first[end - 1] + 1), *index[1:])]
  return out


def _buffer(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """Memory that JAX takes over as a CPU's buffer, without a copy: it is aligned, to a page.

  It comes from the system in small pages. NumPy asks for large ones, which a virtual machine of
  fragmented memory took four times as long to give.
  """
  size = int(np.prod(shape)) * dtype.itemsize
  memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
  return np.frombuffer(memory, dtype).reshape(shape)
