"""Files and folders that are whole or not there: written aside, then renamed."""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import os
import pathlib
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator

from kvjax.models.io import files

_END = ".aside"
_OLD = 24 * 3600  # seconds after which an aside of another machine is given up
_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


@contextlib.contextmanager
def aside(dest: str | os.PathLike[str], *, replace: bool = False) -> Iterator[pathlib.Path]:
  """A path to write a file or a folder to; it becomes `dest` at the end, or goes after an error.

  A file's bytes are on the disk before it gets its name. Every call has a path of its own, whatever
  threads, processes or machines write to one `dest`: the last one to end gives it its content. What
  killed writers have left there is swept up.

  Args:
    dest: what is made; folders that lead to it are made too.
    replace: whether a file of that name is replaced.

  Raises:
    FileExistsError: `dest` is there at the end, and is not to be replaced.
    OSError: it cannot be written, or a folder is to be replaced.
  """
  dest = pathlib.Path(dest).absolute()
  if replace and dest.is_dir():
    raise IsADirectoryError(f"{dest}: found a folder, expected a file to write")
  prefix = f".{dest.name[:40]}."  # a name has at most 255 bytes
  with files.written(dest):
    dest.parent.mkdir(parents=True, exist_ok=True)
    _sweep(dest.parent, prefix)
    work, lock = _claimed(dest.parent, prefix)
  try:
    path = work / dest.name
    yield path
    if path.is_file():
      with path.open("rb") as file:
        os.fsync(file.fileno())
    if replace:
      path.replace(dest)
    else:
      _rename(path, dest)
  finally:
    shutil.rmtree(work, ignore_errors=True)
    _release(lock)


@contextlib.contextmanager
def alone(folder: pathlib.Path) -> Iterator[None]:
  """Waits until no other writer is at work in a folder, as far as its file system has locks."""
  lock = _lock(folder, wait=True)
  try:
    yield
  finally:
    _release(lock)


def _rename(path: pathlib.Path, dest: pathlib.Path) -> None:
  """Renames to what is not there."""
  try:
    if path.is_file():
      os.link(path, dest)  # a rename would replace a file
    else:
      path.rename(dest)
  except OSError as error:
    if dest.exists():  # another process was faster
      raise FileExistsError(f"{dest}: exists already, expected a path to be made") from error
    if not path.is_file():
      raise
    path.rename(dest)  # a file system without links


@functools.cache
def _system() -> str:
  """Names the running kernel: all that shares its locks, containers too."""
  try:
    name = _BOOT.read_text("ascii")
  except OSError:
    name = platform.node()
  return hashlib.sha256(name.encode()).hexdigest()[:8]


def _claimed(parent: pathlib.Path, prefix: str) -> tuple[pathlib.Path, int | None]:
  """A fresh folder, and the lock that says that its writer lives."""
  while True:
    made = tempfile.mkdtemp(prefix=f"{prefix}{_system()}-", suffix=_END, dir=parent)
    work = pathlib.Path(made)
    lock = _lock(work, wait=True)  # a sweep of another writer may have it
    if work.exists():
      return work, lock
    _release(lock)  # swept up before it was locked


def _sweep(parent: pathlib.Path, prefix: str) -> None:
  """Removes what writers that are dead have left.

  A lock tells those of this system. Others' locks may not be seen, as on some network drives: what
  is theirs is left alone for a day.
  """
  for old in parent.glob(f"{glob.escape(prefix)}*{_END}"):
    with contextlib.suppress(OSError):
      here = old.name.startswith(f"{prefix}{_system()}-")
      if not here and time.time() - old.stat().st_mtime < _OLD:
        continue
      lock = _lock(old)
      if lock is not None:
        shutil.rmtree(old, ignore_errors=True)
        _release(lock)


def _lock(folder: pathlib.Path, *, wait: bool = False) -> int | None:
  """A lock on a folder; None: it is gone, the file system has no locks, or another has it."""
  try:
    import fcntl

    lock = os.open(folder, os.O_RDONLY)
  except (ImportError, OSError):
    return None
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
  except OSError:
    os.close(lock)
    return None
  return lock


def _release(lock: int | None) -> None:
  if lock is not None:
    os.close(lock)
