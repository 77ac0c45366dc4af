"""Arrays by name in folders that Orbax writes and reads: a process touches what its devices hold.

Orbax is imported with the first call: it takes longer than the library.
"""

from __future__ import annotations

import math
import pathlib
from typing import Any

import jax
import numpy as np

from kvjax.models.io import files

EXPECTED = "a whole folder that Orbax wrote"
_CHUNK = 64 << 20  # bytes that are written, and read, as one


def save(
  path: pathlib.Path, arrays: dict[str, np.ndarray], axes: dict[str, tuple[int, ...]]
) -> None:
  """Writes arrays, by this process alone.

  Args:
    path: the folder to make.
    arrays: by name.
    axes: of each array, those along which every index is a chunk of its own, or more: others are
      cut, the longest first, until a chunk has `_CHUNK` bytes.
  """
  import orbax.checkpoint as ocp

  how = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK, shard_axes=axes[name]) for name in arrays}
  with files.written(path):
    handler, own = _handler()
    with ocp.Checkpointer(handler, multiprocessing_options=own) as writer:
      writer.save(path.absolute(), ocp.args.PyTreeSave(arrays, save_args=how))


def load(path: pathlib.Path, target: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
  """Reads arrays onto devices.

  Args:
    path: the folder.
    target: shape and dtype of each array. With a sharding each device gets its part of it;
      without, the array is on the first device and, like all arrays of JAX, not committed to it.

  Raises:
    FileNotFoundError: there is no such folder.
    ValueError: it is damaged, or its arrays are others.
  """
  import orbax.checkpoint as ocp

  def how(x: jax.ShapeDtypeStruct) -> Any:
    if x.sharding is None:
      return ocp.RestoreArgs(restore_type=np.ndarray, dtype=x.dtype)
    return ocp.ArrayRestoreArgs(dtype=x.dtype, sharding=x.sharding, global_shape=x.shape)

  found = described(path)
  if (shapes := {name: x.shape for name, x in found.items()}) != (
    expected := {name: x.shape for name, x in target.items()}
  ):
    raise ValueError(f"{path}: found arrays {shapes}, expected {expected}")
  wanted = ocp.args.PyTreeRestore(target, restore_args=jax.tree.map(how, target))
  largest = max(math.prod(x.shape) * x.dtype.itemsize for x in target.values())
  with files.whole(path, EXPECTED):
    read = _handler(largest + 1)[0].restore(path.absolute(), args=wanted)
  return jax.tree.map(lambda x: jax.device_put(x) if isinstance(x, np.ndarray) else x, read)


def described(path: pathlib.Path) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes and dtypes of a folder's arrays, by name; raises as `load`."""
  if not path.is_dir():
    raise FileNotFoundError(f"{path}: not found, expected {EXPECTED}")
  with files.whole(path, EXPECTED):
    found = _handler()[0].metadata(path.absolute()).tree
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in found.items()}


def _handler(limit: int | None = None) -> tuple[Any, Any]:
  """What writes and reads for this process, which waits for no other one; and that it does so.

  `limit` are the bytes that are on their way from files to devices at a time.
  """
  import orbax.checkpoint as ocp

  me = jax.process_index()
  own = ocp.options.MultiprocessingOptions(me, {me}, f"kvjax-{me}")
  # Weights are noise to a compressor, which would take most of the time.
  handler = ocp.BasePyTreeCheckpointHandler(
    use_compression=False, restore_concurrent_bytes=limit, multiprocessing_options=own
  )
  return ocp.PyTreeCheckpointHandler(handler_impl=handler, multiprocessing_options=own), own
