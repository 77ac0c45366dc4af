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
from kvjax.primitives import host_memory

EXPECTED = "a whole folder that Orbax wrote"
HEADER, ARRAYS = pathlib.Path("header", "metadata"), "arrays"  # of a version
_CHUNK = 64 << 20  # bytes that are written, and read, as one
_PIECE = 1 << 20  # entries of a host's array that are summed at a time


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


class _AsItIs(np.ndarray):
  """An array that Orbax takes as it is. It copies others before it writes them."""

  def __deepcopy__(self, _: Any) -> _AsItIs:
    return self


class Saving:
  """A folder that is being written while the program goes on; in each of its processes."""

  def __init__(
    self, path: pathlib.Path, header: dict[str, Any], arrays: dict[str, Any], *, lent: bool = False
  ):
    """Begins; when it returns the arrays are copied.

    Args:
      path: the folder. A new version in it replaces the one before once it is whole.
      header: what JSON can say of the arrays; their sums are added.
      arrays: by name, on whatever devices.
      lent: those of the host are not copied, and stay as they are until `wait` returns.

    Raises:
      OSError: it cannot be written.
    """
    import orbax.checkpoint as ocp

    header = {**header, "sums": sums(arrays)}

    def kept(x: Any) -> Any:
      """A host's array would be written as it is then, not as it is now."""
      if not _on_host(x):
        return x
      return (_of_numpy(x) if lent else _of_numpy(x).copy()).view(_AsItIs)

    arrays = {name: kept(x) for name, x in arrays.items()}
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
  """A number for each array that tells it from damaged ones: Σ xᵢ·wᵢ modulo 2³².

  Of the entries as unsigned integers, each with a weight of its own: the same for an array on a
  host, on a device or in shards.
  """
  made = {name: _host_sum(x) if _on_host(x) else _sum(x) for name, x in arrays.items()}
  return {name: int(x) for name, x in made.items()}


_WEIGHT = 0x9E3779B1  # odd: wᵢ = i·_WEIGHT + 1 differ for all i below 2³²


def _host_sum(x: Any) -> int:
  entries, total = _of_numpy(x).reshape(-1), 0
  entries = entries.view(f"u{entries.itemsize}")
  for start in range(0, entries.size, _PIECE):
    part = entries[start : start + _PIECE].astype(np.uint32)
    place = np.arange(len(part), dtype=np.uint32) + np.uint32(start % 2**32)
    total += int((part * (place * np.uint32(_WEIGHT) + np.uint32(1))).sum(dtype=np.uint32))
  return total % 2**32


@flat.own
@jax.jit
def _sum(x: Array) -> Array:
  x = x.astype(jnp.uint8) if x.dtype == bool else x
  entries = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
  place = jnp.uint32(0)  # in the whole array, whatever shard it is in
  for axis, size in enumerate(x.shape):
    place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
  return (entries * (place * jnp.uint32(_WEIGHT) + 1)).sum(dtype=jnp.uint32)


def _of_numpy(x: Any) -> np.ndarray:
  """A host's array, or its view: an array of JAX may be donated afterwards."""
  return x if isinstance(x, np.ndarray) else host_memory.view(x)


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
