"""Files that users bring or that are written for them: what is refused and said alike for all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import safetensors

# Of the system, where a folder cannot be written or has no room.
NO_ROOM = {
  getattr(errno, name)
  for name in ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EACCES", "EPERM", "ENOTDIR", "EEXIST")
}
FLOATS = ("F32", "F16", "BF16")  # safetensors' names of what weights may be
_DEEPEST = 64
_END = 1 << 20  # bytes of each end of a large file that tell it from others
_WEIGHT = 0x9E3779B97F4A7C15  # odd: no sum is lost where it is multiplied
_MOST_JSON = 32 << 20  # bytes; the index of 160 shards has 9 MB
# What stands in a clone for a file that its tool has not brought yet, by how the text begins.
_POINTERS = {
  b"version https://git-lfs.github.com/": "git-lfs",
  b"version https://hawser.github.com/": "git-lfs",
  b"# xet version": "git-xet",
  b"/annex/objects/": "git-annex",
}
_BRING = {"git-lfs": "git lfs pull", "git-xet": "git lfs pull", "git-annex": "git annex get"}
_PAGES = (b"<!doctype html", b"<html")  # of a hub's web site, saved under the file's name
_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")  # as the Rust libraries print it


def path_of(name: str, given: Any) -> str:
  """An argument that is a path, or a name in place of one.

  Raises:
    TypeError: it is something else.
    ValueError: it is empty, which would mean the working directory.
  """
  path = os.fspath(given) if isinstance(given, os.PathLike) else given
  if not isinstance(path, str):
    raise TypeError(f"{name}: found {given!r}, expected a path")
  if not path:
    raise ValueError(f"{name}: found an empty text, expected a path")
  return path


def check_begin(path: pathlib.Path) -> None:
  """Raises for a file that is only a pointer to the real one, or a page of a web site.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: as said; the message names the tool that brings the file.
  """
  with path.open("rb") as file:
    begin = file.read(512)
  for text, tool in _POINTERS.items():
    if begin.startswith(text):
      size = re.search(rb"^size (\d+)", begin, re.MULTILINE)
      whole = f" of {int(size[1]):,} bytes" if size and len(size[1]) < 20 else ""
      raise ValueError(
        f"{path}: found a {tool} pointer, a short text in place of the file{whole}, expected the "
        f"file itself: `{_BRING[tool]}` in its folder brings it"
      )
  if begin.lstrip().lower().startswith(_PAGES):
    raise ValueError(f"{path}: found a web page, expected the file itself: download it again")


def read_json(path: pathlib.Path, expected: str) -> dict[str, Any]:
  """The object in a JSON file.

  Args:
    path: the file.
    expected: what it should be, in words, for the error.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is a pointer, no JSON, no object, nested too deeply, too large or no Unicode.
  """
  try:
    check_begin(path)
    size = path.stat().st_size
    if size > _MOST_JSON:
      raise ValueError(f"{path}: found {size:,} bytes, expected at most {_MOST_JSON:,}")
    text = path.read_bytes()
  except (FileNotFoundError, NotADirectoryError) as error:
    raise FileNotFoundError(f"{path}: not found, expected {expected}") from error
  try:
    entries = json.loads(text.decode("utf-8-sig"))
  except RecursionError as error:
    raise ValueError(f"{path}: found values nested without end, expected {expected}") from error
  except ValueError as error:
    raise ValueError(f"{path}: not JSON ({error}), expected an object") from error
  if not isinstance(entries, dict):
    raise ValueError(f"{path}: found a {type(entries).__name__}, expected an object")
  if not _is_flat(entries):
    raise ValueError(f"{path}: found more than {_DEEPEST} nested values, expected {expected}")
  if surrogate := _surrogate(text, entries):
    raise ValueError(f"{path}: found a lone surrogate {surrogate}, expected Unicode text")
  return entries


def _surrogate(text: bytes, entries: dict[str, Any]) -> str | None:
  """Half of a character, as JSON can spell it (`\\ud83d`) and no file can hold it."""
  if not re.search(rb"\\ud[89a-f]", text, re.IGNORECASE):
    return None
  try:
    json.dumps(entries, ensure_ascii=False).encode()
  except UnicodeEncodeError as error:
    return f"\\u{ord(error.object[error.start]):04x}"
  return None


def _is_flat(value: Any) -> bool:
  """True if at most `_DEEPEST` values lie in each other: more can trip whoever walks them."""
  level = [value]
  for _ in range(_DEEPEST):
    inner = (x.values() if isinstance(x, dict) else x for x in level)
    level = [x for values in inner for x in values if isinstance(x, dict | list)]
    if not level:
      return True
  return False


@contextlib.contextmanager
def safetensors_opened(path: pathlib.Path) -> Iterator[Any]:
  """A safetensors file, whose tensors are read within the block.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is a pointer, or damaged, which may come out when a tensor is read.
  """
  check_begin(path)
  try:
    with safetensors.safe_open(path, framework="numpy") as file:
      yield file
  except safetensors.SafetensorError as error:
    raise ValueError(f"{path}: damaged ({error}), expected a safetensors file") from error


@contextlib.contextmanager
def written(path: pathlib.Path) -> Iterator[None]:
  """Names the file and the cause where it cannot be written, whatever library writes it.

  Raises:
    OSError: with the system's `errno`, where it is known.
  """
  try:
    yield
  except Exception as error:  # Rust libraries raise kinds of their own, or plain Exception
    said = _SYSTEM_ERROR.search(str(error))
    number = int(said[1]) if said else getattr(error, "errno", None)
    if number is None:
      raise
    cause = os.strerror(number)
    raise numbered(
      number, f"{path}: cannot be written ({cause}), expected a folder with room for it"
    ) from error


@contextlib.contextmanager
def whole(path: pathlib.Path, expected: str) -> Iterator[None]:
  """Says of whatever a damaged file or folder makes its readers raise that it is damaged.

  Raises:
    ValueError: in one line, which says what was `expected`.
  """
  try:
    yield
  except MemoryError:
    raise
  except Exception as error:  # libraries raise kinds of their own
    said = (str(error).strip().splitlines() or [""])[0]
    found = f"{type(error).__name__}: {said[:500]}".rstrip(": ")
    raise ValueError(f"{path}: found {found}, expected {expected}") from error


def numbered(number: int | None, message: str) -> OSError:
  """An error of the system that says the message alone."""
  error = OSError(message)
  error.errno = number
  return error


def total(path: pathlib.Path) -> int:
  """A sum over the bytes of a file, or of a folder's files, which damage changes."""
  held, piece = 0, np.empty(_END // 8, np.uint64)
  for part in sorted(x for x in path.rglob("*") if x.is_file()) if path.is_dir() else [path]:
    with part.open("rb") as file:
      while size := file.readinto(piece.data):
        piece.view(np.uint8)[size : -(-size // 8) * 8] = 0
        words = int(piece[: -(-size // 8)].sum())
        held = (held * _WEIGHT + words + size) % 2**64
  return held


def check_total(path: pathlib.Path, wanted: Any) -> None:
  """Raises ValueError where `total` is another one."""
  if total(path) != wanted:
    raise ValueError(
      f"{path}: found other bytes than were written, expected those: convert the model again"
    )


def digest(path: pathlib.Path) -> str:
  """A digest of a model's files; of large ones their sizes, ends and times of change."""
  held = hashlib.sha256()
  if path.is_dir():
    parts = [part for part in path.iterdir() if part.suffix in (".json", ".jinja", ".safetensors")]
    parts += path.glob("additional_chat_templates/*.jinja")
  else:  # a GGUF file may have several parts
    whole = re.escape(path.name)
    pattern = re.compile(re.sub(r"\\-\d{5}(?=\\-of\\-\d{5})", r"-\\d{5}", whole))
    parts = [part for part in path.parent.iterdir() if pattern.fullmatch(part.name)]
  for part in sorted(parts):
    there = part.stat()
    held.update(f"{part.name} {there.st_size} ".encode())
    with part.open("rb") as file:
      held.update(file.read(_END))
      if there.st_size > _END:
        held.update(str(there.st_mtime_ns).encode())
        file.seek(-_END, os.SEEK_END)
        held.update(file.read())
  return held.hexdigest()[:12]
