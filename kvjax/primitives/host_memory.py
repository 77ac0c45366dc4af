"""The host's memory: what is left of it for this process, and arrays of JAX that lie in it."""

import os
import pathlib
from collections.abc import Iterator

import jax
import numpy as np

GROUPS = pathlib.Path("/sys/fs/cgroup")
PROCESS = pathlib.Path("/proc")
# Of version 2 of Linux's control groups, and of version 1: what is used, at most, and for files.
_FILES = (
  ("memory.current", "memory.max", "inactive_file"),
  ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file"),
)


def available() -> int:
  """Bytes that can be taken before the system, or a control group that this runs in, has none."""
  return min([_of_system(), *_of_groups()])


def resident() -> int:
  """Bytes that this process holds; 0 where that is not known."""
  return _entry(PROCESS / "self/status", "VmRSS:") * 1024


def view(x: jax.Array) -> np.ndarray:
  """NumPy's view of an array in the host's memory, which can be donated once the view is gone.

  From jax 0.11 on an array keeps the view that it gave, and what has one is not donated: a program
  copies it, or refuses. Here an alias gives the view.
  """
  parts = [shard.data for shard in x.addressable_shards]
  return np.asarray(jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts))


def _of_system() -> int:
  if free := _entry(PROCESS / "meminfo", "MemAvailable:"):
    return free * 1024
  return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # not Linux: all that there is


def _of_groups() -> Iterator[int]:
  """Bytes that each control group leaves; files that it caches make room."""
  try:
    named = (PROCESS / "self/cgroup").read_text().splitlines()
  except OSError:
    named = []
  own = {line.rpartition(":")[2].strip("/") for line in named}
  for folder in {root / path for root in (GROUPS, GROUPS / "memory") for path in (*own, "")}:
    for used, most, files in _FILES:
      try:
        limit, taken = (int((folder / name).read_text()) for name in (most, used))
      except (OSError, ValueError):  # no such group, or one without a limit
        continue
      yield max(0, limit - taken + _entry(folder / "memory.stat", files))


def _entry(path: pathlib.Path, name: str) -> int:
  """The number after a name in a file of lines; 0 if there is none."""
  try:
    lines = (line.split() for line in path.read_text().splitlines())
    return next((int(words[1]) for words in lines if words[:1] == [name]), 0)
  except OSError:
    return 0
