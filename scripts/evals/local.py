"""Data sets that lie on this machine: where they are looked for, and what is said if they are not.

Nothing is downloaded. The folder is $KVJAX_DATA, or `data` in the cache folder.
"""

import functools
import gzip
import json
import os
import pathlib
import zlib
from collections.abc import Sequence
from typing import Any

from kvjax.models.fetch import cache_dir

from .task import NoMoreRows, rng


def folder() -> pathlib.Path:
  """Where data sets lie: $KVJAX_DATA, or data in $KVJAX_CACHE (~/.cache/kvjax)."""
  named = os.environ.get("KVJAX_DATA")
  return pathlib.Path(named).expanduser().absolute() if named else cache_dir() / "data"


def there(name: str) -> bool:
  """Whether a file (or folder) is there."""
  return (folder() / name).exists()


def path(name: str, what: str, source: str) -> pathlib.Path:
  """The path of a file that has to be there.

  Args:
    name: path below `folder()`.
    what: what the file is, for the message.
    source: where it comes from.

  Raises:
    FileNotFoundError: it is not there; the message says where to get it and where to put it.
  """
  file = folder() / name
  if not file.exists():
    raise FileNotFoundError(
      f"{what}: not found. Get it from {source} and put it at {file} "
      "(another folder than this: --data, or KVJAX_DATA)"
    )
  return file


def read(file: pathlib.Path) -> Any:
  """A .json file's value, or a .jsonl or .jsonl.gz file's list of values; read once.

  Raises:
    ValueError: the file is damaged.
  """
  return _read(file, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _read(file: pathlib.Path, _: int) -> Any:
  text = _unpacked(file) if file.suffix == ".gz" else file.read_text("utf-8")
  if file.suffix == ".json":
    try:
      return json.loads(text)
    except ValueError as error:
      raise ValueError(f"{file}: not JSON: {error}") from error
  out = []
  for number, line in enumerate(text.split("\n"), 1):
    if line.strip():
      try:
        out.append(json.loads(line))
      except ValueError as error:
        raise ValueError(f"{file}: line {number}: not JSON: {error}") from error
  if not out:
    raise ValueError(f"{file}: found no lines, expected one JSON object per line")
  return out


def _unpacked(file: pathlib.Path) -> str:
  try:
    return gzip.decompress(file.read_bytes()).decode("utf-8")
  except (OSError, EOFError, zlib.error) as error:
    raise ValueError(f"{file}: not a whole gzip file: {error}") from error


def pick(entries: Sequence[Any], task: str, seed: int, index: int) -> Any:
  """Entry `index` of the entries in an order that the seed shuffles.

  Raises:
    NoMoreRows: there are fewer.
  """
  if index >= len(entries):
    raise NoMoreRows(f"{task}: found index {index}, expected less than {len(entries)}")
  order = list(range(len(entries)))
  rng(task, seed, -1).shuffle(order)
  return entries[order[index]]
