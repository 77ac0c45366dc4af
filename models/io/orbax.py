"""Arrays by name in folders that Orbax writes and reads: a process touches what its devices hold.

Orbax is imported with the first call: it takes longer than the library.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.models.io import asides, files
from kvjax.models.nn import flat

EXPECTED = "a whole folder that Orbax wrote"
HEADER, ARRAYS = pathlib.Path("header", "metadata"), "arrays"  # of a version
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


class Saving:
  """A folder that is being written while the program goes on; in each of its processes."""

  def __init__(self, path: pathlib.Path, header: dict[str, Any], arrays: dict[str, Any]):
    """Begins; when it returns the arrays are copied.

    Args:
      path: the folder. A new version in it replaces the one before once it is whole.
      header: what JSON can say of the arrays; their sums are added.
      arrays: by name, on whatever devices.

    Raises:
      OSError: it cannot be written.
    """
    import orbax.checkpoint as ocp

    header = {**header, "sums": sums(arrays)}
    # A host's array would be written as it is then, not as it is now.
    arrays = {name: np.array(x) if _on_host(x) else x for name, x in arrays.items()}
    self._path, self._held = path, contextlib.ExitStack()
    self._error: BaseException | None = None
    with files.written(path), self._held:
      path.mkdir(parents=True, exist_ok=True)
      if jax.process_index() == 0:
        self._held.enter_context(asides.alone(path))
      one = ocp.CheckpointManagerOptions(max_to_keep=1, cleanup_tmp_directories=True)
      self._manager = self._held.enter_context(ocp.CheckpointManager(path.absolute(), options=one))
      version = (self._manager.latest_step() or 0) + 1
      whole = ocp.args.Composite(
        **{HEADER.parent.name: ocp.args.JsonSave(header), ARRAYS: ocp.args.PyTreeSave(arrays)}
      )
      self._manager.save(version, args=whole)
      self._held = self._held.pop_all()
    self._thread = threading.Thread(target=self._finish)
    self._thread.start()

  def _finish(self) -> None:
    """Waits for the writing, in a thread, and lets the next writer begin."""
    try:
      with files.written(self._path), self._held:
        self._manager.wait_until_finished()
    except BaseException as error:
      self._error = error

  def wait(self) -> pathlib.Path:
    """Blocks until the folder is whole, and returns it; raises what went wrong in writing it."""
    self._thread.join()
    if self._error is not None:
      raise self._error
    return self._path


def latest(path: pathlib.Path) -> pathlib.Path:
  """The folder of the newest whole version of what was saved; its `HEADER` and `ARRAYS` are within.

  Raises:
    FileNotFoundError: there is none.
  """
  import orbax.checkpoint as ocp

  steps = ocp.utils.checkpoint_steps(path.absolute()) if path.is_dir() else []
  if not steps:
    raise FileNotFoundError(f"{path}: found nothing saved, expected {EXPECTED}")
  return path / str(max(steps))


def sums(arrays: dict[str, Any]) -> dict[str, int]:
  """The sum of each array's bytes, modulo 2³², which tells that one of them is another."""
  made = {
    name: np.asarray(x).reshape(-1).view(np.uint8).sum(dtype=np.uint32) if _on_host(x) else _sum(x)
    for name, x in arrays.items()
  }
  return {name: int(x) for name, x in made.items()}


@flat.own
@jax.jit
def _sum(x: Array) -> Array:
  x = x.astype(jnp.uint8) if x.dtype == bool else x
  return jax.lax.bitcast_convert_type(x, jnp.uint8).sum(dtype=jnp.uint32)


def _on_host(x: Any) -> bool:
  return isinstance(x, np.ndarray) or x.sharding.memory_kind == "pinned_host"


def described(path: pathlib.Path) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes and dtypes of a folder's arrays, by name; raises as `load`."""
  if not path.is_dir():
    raise FileNotFoundError(f"{path}: not found, expected {EXPECTED}")
  with files.whole(path, EXPECTED):
    found = _handler()[0].metadata(path.absolute()).tree
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in found.items()}


def _handler(limit: int | None = None) -> tuple[Any, Any]:
  """Writer and reader of this process, which waits for no other one; and that it does so.

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
