"""A folder of results that a killed run leaves whole: settings, and one line per sample.

Lines are appended and synced to disk as they come; a line that was cut off is dropped when the
folder is opened again. What decides the numbers (model, seed, device, …) is written first, and a
run with other settings is refused. Folders of equal settings can be put together; to report on
them, those of several versions of kvjax and batches too, and the settings then name each.

`gzip rows.jsonl` packs a folder for keeping: what is packed is read with what comes after it.
"""

import fcntl
import gzip
import json
import os
import pathlib
import re
import zlib
from collections.abc import Iterable
from typing import Any

from kvjax.models.config import ModelConfig

SETTINGS = "settings.json"
ROWS = "rows.jsonl"
PACKED = f"{ROWS}.gz"
KEY = ("task", "length", "mode", "method", "budget", "index")
FREE = ("kvjax", "batch")  # settings in which folders that are reported on together may differ


def key(row: dict[str, Any]) -> tuple[Any, ...]:
  """What names a row: no two of a folder share it."""
  return tuple(row[name] for name in KEY)


class Store:
  """The results of one folder, open for one process at a time.

  Args:
    folder: made if it is not there.
    settings: must equal those that the folder has, if it has any.

  Attributes:
    settings: as given.
    rows: by key, in the order in which they were written.

  Raises:
    ValueError: the settings differ, or a line is damaged.
    OSError: another process has the folder open.
  """

  def __init__(self, folder: pathlib.Path, settings: dict[str, Any]):
    folder.mkdir(parents=True, exist_ok=True)
    self.folder = folder
    self._file = open(folder / ROWS, "ab")  # noqa: SIM115 (closed by `close`)
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      self._file.close()
      raise OSError(f"{folder}: another run is writing there") from error
    try:
      self._check(settings)
      self.rows = {key(row): row for row in read(folder, repair=True)}
    except BaseException:
      self._file.close()
      raise

  def _check(self, settings: dict[str, Any]) -> None:
    self.settings = settings
    path = self.folder / SETTINGS
    if path.is_file():
      self._compare(self.folder)
      return
    if self._file.tell() or (self.folder / PACKED).is_file():
      raise ValueError(f"{self.folder}: found {ROWS} without {SETTINGS}, expected both or none")
    self._write_settings()

  def _write_settings(self) -> None:
    aside = self.folder / f".{SETTINGS}"
    aside.write_text(json.dumps(self.settings, indent=2) + "\n", "utf-8")
    aside.replace(self.folder / SETTINGS)

  def _compare(self, folder: pathlib.Path, *, but: tuple[str, ...] = ()) -> None:
    before = settings_of(folder)
    for name in {**before, **self.settings}:
      if name not in but and not _same(name, before.get(name), self.settings.get(name)):
        raise ValueError(
          f"{folder}: found results with {name} = {before.get(name)!r}, and now it is "
          f"{self.settings.get(name)!r}: expected the same, or another --out"
        )

  def add(self, folder: pathlib.Path, *, to_report: bool = False) -> int:
    """Adds the rows of another folder that this one lacks, and says how many these are.

    The other folder may be open elsewhere: a line that is being written is left out.

    Args:
      folder: the other folder.
      to_report: whether its settings may differ in those that are FREE; they then name both.

    Raises:
      FileNotFoundError: there are no results.
      ValueError: its settings differ, or a line is damaged.
    """
    self._compare(folder, but=FREE if to_report else ())
    new = {key(row): row for row in read(folder) if key(row) not in self.rows}
    if to_report and new:
      own = [self.settings] if self.rows else []
      named = {name: every(name, *own, settings_of(folder)) for name in FREE}
      if self.settings != (both := self.settings | named):  # before the rows: none is there unnamed
        self.settings = both
        self._write_settings()
    self.append(new.values())
    return len(new)

  def append(self, rows: Iterable[dict[str, Any]]) -> None:
    """Adds rows, all of them or, if the machine dies meanwhile, the first few."""
    rows = list(rows)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    self._file.write(lines.encode())
    self._file.flush()
    os.fsync(self._file.fileno())
    self.rows |= {key(row): row for row in rows}

  def close(self) -> None:
    self._file.close()


def settings_of(folder: pathlib.Path) -> dict[str, Any]:
  """What the numbers of a folder depend on.

  Raises:
    FileNotFoundError: there are no results.
  """
  path = folder / SETTINGS
  if not path.is_file():
    raise FileNotFoundError(f"{path}: not found, expected results of python -m scripts.evaluate")
  return json.loads(path.read_text("utf-8"))


def _same(name: str, one: Any, other: Any) -> bool:
  """Whether settings say the same; a model that an older version wrote lacks newer flags."""
  if name == "config" and one and other and one != other:
    return ModelConfig.from_json(one) == ModelConfig.from_json(other)
  return one == other


def every(name: str, *settings: dict[str, Any]) -> Any:
  """What settings say under a name: the one value, or each once, in order: "0.1.0, 0.2.0"."""
  said = {part: each[name] for each in settings for part in str(each[name]).split(", ")}
  if len(said) == 1:
    return said.popitem()[1]
  return ", ".join(sorted(said, key=lambda v: ([int(n) for n in re.findall(r"\d+", v)], v)))


def read(folder: pathlib.Path, *, repair: bool = False) -> list[dict[str, Any]]:
  """The rows of a folder, packed ones first.

  A last line that was cut off is left out (`repair`: and removed).

  Raises:
    FileNotFoundError: there are no results.
    ValueError: a line before the last is damaged.
  """
  path, packed = folder / ROWS, folder / PACKED
  if not path.is_file() and not packed.is_file():
    raise FileNotFoundError(f"{path}: not found, expected results of python -m scripts.evaluate")
  rows = _parsed(packed, _unpacked(packed)) if packed.is_file() else []
  if path.is_file():
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if repair and len(whole) < len(data):
      os.truncate(path, len(whole))
    rows += _parsed(path, whole)
  return rows


def _unpacked(path: pathlib.Path) -> bytes:
  try:
    return gzip.decompress(path.read_bytes())
  except (gzip.BadGzipFile, EOFError, zlib.error) as error:
    raise ValueError(f"{path}: damaged ({error}), expected packed rows of results") from error


def _parsed(path: pathlib.Path, lines: bytes) -> list[dict[str, Any]]:
  return [_parse(path, number, line) for number, line in enumerate(lines.split(b"\n")[:-1], 1)]


def _parse(path: pathlib.Path, number: int, line: bytes) -> dict[str, Any]:
  try:
    return json.loads(line)
  except ValueError as error:
    raise ValueError(f"{path}: line {number}: found {error}, expected a row of results") from error
