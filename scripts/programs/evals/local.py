"""Data sets that lie on this machine: where they are looked for, and what is said if they are not.

Nothing is downloaded. The folder is $KVJAX_DATA, or `data` in the cache folder. Packages of
benchmarks are looked for alike.
"""

import functools
import gzip
import importlib
import json
import os
import pathlib
import zlib
from collections.abc import Sequence
from typing import Any

from kvjax.models.io.fetch import cache_dir
from kvjax.programs.evals.task import NoMoreRows, rng


def folder() -> pathlib.Path:
  """Folder of data sets: $KVJAX_DATA, or data in $KVJAX_CACHE (~/.cache/kvjax)."""
  named = os.environ.get("KVJAX_DATA")
  return pathlib.Path(named).expanduser().absolute() if named else cache_dir() / "data"


def there(name: str) -> bool:
  """True if a file (or folder) is there."""
  return (folder() / name).exists()


def path(name: str, what: str, source: str) -> pathlib.Path:
  """The path of a file that has to be there, by its name below `folder()`.

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


def package(module: str, name: str = "", what: str = "a metric") -> Any:
  """A module of an optional package.

  Raises:
    ModuleNotFoundError: it is not installed; the message says how to get it.
  """
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
      f"the package {name or module} ({what}) is not installed: pip install 'kvjax[benchmarks]'"
    ) from error


def read(file: pathlib.Path) -> Any:
  """A .json file's value, or a .jsonl or .jsonl.gz file's list of values; read once.

  Raises:
    ValueError: the file is damaged.
  """
  return _read(file, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _read(file: pathlib.Path, _: int) -> Any:
  data = file.read_bytes()
  try:
    text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8-sig")
  except UnicodeDecodeError as error:
    raise ValueError(f"{file}: not UTF-8: {error}") from error
  except (OSError, EOFError, zlib.error) as error:
    raise ValueError(f"{file}: not a whole gzip file: {error}") from error
  if file.suffix == ".json":
    return _value(text, str(file))
  out = []
  for number, line in enumerate(text.split("\n"), 1):
    if line.strip():
      out.append(_value(line, f"{file}: line {number}"))
  if not out:
    raise ValueError(f"{file}: found no lines, expected one JSON object per line")
  return out


def _value(text: str, what: str) -> Any:
  """A JSON value, whose texts are Unicode."""
  try:
    value = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{what}: not JSON: {error}") from error
  try:
    json.dumps(value, ensure_ascii=False).encode()
  except UnicodeEncodeError as error:
    code = f"\\u{ord(error.object[error.start]):04x}"
    raise ValueError(f"{what}: found a lone surrogate {code}, expected Unicode text") from error
  return value


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
