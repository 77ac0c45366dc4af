"""A folder of results that a killed run leaves whole: settings, and one line per sample.

Lines are appended and synced to disk as they come; a line that was cut off is dropped when the
folder is opened again. What decides the numbers (model, seed, device, …) is written first, and a
run with other settings is refused. Folders of equal settings can be put together; to report on
them, those of several versions of kvjax and batches too, and the settings then name each.

Settings have fingerprints of weights and tokenizer, rows those of their prompts, data and own
methods (`origin`): what comes from something else under the same name is refused. Folders of before
there were any are read and reported on, and not added to.

`gzip rows.jsonl` packs a folder for keeping: what is packed is read with what comes after it.
"""

import fcntl
import gzip
import json
import operator
import os
import pathlib
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvjax.models.io import files
from kvjax.models.nn.config import ModelConfig
from kvjax.programs import common

SETTINGS = "settings.json"
ROWS = "rows.jsonl"
PACKED = f"{ROWS}.gz"
TRACES = "traces.json"
KEY = ("task", "length", "mode", "method", "budget", "index")
KINDS = dict(zip(KEY, (str, int, str, str, int | None, int), strict=True))
sample = operator.itemgetter("task", "length", "mode", "index")  # of a row: what is asked
FREE = ("kvjax", "batch")  # settings in which folders that are reported on together may differ
PRINTS = ("weights", "tokenizer")  # settings that older folders lack
UNSAID = "not recorded"
# What rows of one sample share, and what rows of one key do; older ones lack some.
SHARED, OWN = ("prompt", "data"), ("settings", "code")


def key(row: dict[str, Any]) -> tuple[Any, ...]:
  """Key of a row: no two of a folder share it."""
  return tuple(row[name] for name in KEY)


class Store:
  """The results of one folder, open for one process at a time.

  Args:
    folder: made if it is not there.
    settings: must equal those that the folder has, if it has rows.

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
      self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}
      self._samples: dict[tuple[Any, ...], dict[str, Any]] = {}
      self._note(folder, read(folder, repair=True))
    except BaseException:
      self._file.close()
      raise

  def _check(self, settings: dict[str, Any]) -> None:
    self.settings = settings
    if not begun(self.folder):
      self._write_settings()  # in place of those of a run that came to no row
    elif (self.folder / SETTINGS).is_file():
      self._compare(self.folder)
    else:
      raise ValueError(f"{self.folder}: found {ROWS} without {SETTINGS}, expected both or none")

  def _write_settings(self) -> None:
    path = self.folder / SETTINGS
    try:
      with common.written_aside(path) as aside:
        aside.write_text(json.dumps(self.settings, indent=2) + "\n", "utf-8")
    except OSError as error:
      raise OSError(f"{path}: settings cannot be written: {error.strerror}") from error

  def _compare(self, folder: pathlib.Path, *, to_report: bool = False) -> None:
    before = settings_of(folder)
    for name in {**before, **self.settings}:
      one, other = before.get(name), self.settings.get(name)
      if _same(name, one, other) or (to_report and (name in FREE or may_be_same(name, one, other))):
        continue
      if name in PRINTS and one is None:
        raise ValueError(
          f"{folder}: found results that do not say of which {name} they are (an older version "
          "left them), expected some that do, or another --out; --only-report reads them"
        )
      raise ValueError(
        f"{folder}: found results with {name} = {one!r}, and now it is "
        f"{other!r}: expected the same, or another --out"
      )

  def _note(self, folder: pathlib.Path, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of a folder's rows that are not there yet, which are now.

    Raises:
      ValueError: a row comes from something else than those that are there.
    """
    new = {}
    for row in rows:
      asked = self._samples.setdefault(sample(row), row)
      known = self.rows.get(key(row)) or new.setdefault(key(row), row)
      for name, other in (*((n, asked) for n in SHARED), *((n, known) for n in OWN)):
        one, before = row.get(name), other.get(name)
        if one != before and None not in (one, before):
          where = "{task} at {length} tokens, {mode}, {method}, row {index}".format_map(row)
          raise ValueError(
            f"{folder}: {where}: found {name} = {one!r}, but stored results have "
            f"{before!r}, expected the same, or another --out"
          )
    self.rows |= new
    return list(new.values())

  def add(self, folder: pathlib.Path, *, to_report: bool = False) -> int:
    """Adds the rows of another folder that this one lacks, and says how many these are.

    The other folder may be open elsewhere: a line that is being written is left out.

    Args:
      folder: the other folder.
      to_report: whether its settings may differ in those that are FREE; they then name both.

    Raises:
      FileNotFoundError: there are no results.
      ValueError: its settings differ, its rows come from something else, or a line is damaged.
    """
    self._compare(folder, to_report=to_report)
    own = [self.settings] if self.rows else []
    new = self._note(folder, read(folder))
    if to_report and new:
      told = [*own, settings_of(folder)]
      names = [*FREE, *(name for name in PRINTS if any(name in each for each in told))]
      named = {name: every(name, *told) for name in names}
      if self.settings != (both := self.settings | named):  # before the rows: none is there unnamed
        self.settings = both
        self._write_settings()
    self.append(new)
    return len(new)

  def append(self, rows: Iterable[dict[str, Any]]) -> None:
    """Adds rows, all of them or, if the machine dies meanwhile, the first few."""
    rows = list(rows)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    try:
      self._file.write(lines.encode("utf-8", "replace"))
      self._file.flush()
      os.fsync(self._file.fileno())
    except OSError as error:
      why = f"{self.folder / ROWS}: rows cannot be written: {error.strerror}"
      raise OSError(f"{why}: the same command goes on where there is room") from error
    self.rows |= {key(row): row for row in rows}

  def close(self) -> None:
    self._file.close()


class Told:
  """Keys of the rows that another process keeps, as a `Store` whose rows are not known."""

  def __init__(self, keys: Iterable[Sequence[Any]]):
    self.rows: dict[tuple[Any, ...], Any] = dict.fromkeys(map(tuple, keys))

  def append(self, rows: Iterable[dict[str, Any]]) -> None:
    self.rows |= {key(row): None for row in rows}

  def close(self) -> None:
    pass


def begun(folder: pathlib.Path) -> bool:
  """True if a folder has rows, so that its settings hold; those of a run without any do not."""
  path = folder / ROWS
  return (folder / PACKED).is_file() or (path.is_file() and path.stat().st_size > 0)


def settings_of(folder: pathlib.Path) -> dict[str, Any]:
  """Settings that the numbers of a folder depend on.

  Raises:
    FileNotFoundError: there are no results.
    ValueError: the file is damaged.
  """
  return files.read_json(folder / SETTINGS, "results of kvjax evaluate")


def traces(folder: pathlib.Path) -> list[dict[str, Any]]:
  """Reports that methods made while they decoded, as `evaluate --trace` left them in a folder.

  Raises:
    ValueError: the file is damaged.
  """
  path = folder / TRACES
  try:
    found = json.loads(path.read_bytes()) if path.is_file() else []
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path}: damaged ({error}), expected traces of results") from error
  if not isinstance(found, list):
    raise ValueError(f"{path}: found {type(found).__name__}, expected traces of results")
  return found


def _same(name: str, one: Any, other: Any) -> bool:
  """True if settings say the same; a model that an older version wrote lacks newer flags."""
  if name == "config" and one and other and one != other:
    return ModelConfig.from_json(one) == ModelConfig.from_json(other)
  return one == other


def may_be_same(name: str, one: Any, other: Any) -> bool:
  """True if fingerprints do not contradict each other, since one or both are not recorded."""
  said = {part for each in (one, other) if each is not None for part in str(each).split(", ")}
  return name in PRINTS and len(said - {UNSAID}) <= 1


def every(name: str, *settings: dict[str, Any]) -> Any:
  """Values of settings under a name: the one value, or each once, in order: "0.1.0, 0.2.0"."""
  told = [each.get(name, UNSAID) for each in settings]
  said = {part: value for value in told for part in str(value).split(", ")}
  if len(said) == 1:
    return said.popitem()[1]
  return ", ".join(sorted(said, key=lambda v: ([int(n) for n in re.findall(r"\d+", v)], v)))


def read(folder: pathlib.Path, *, repair: bool = False) -> list[dict[str, Any]]:
  """The rows of a folder, packed ones first.

  A last line that was cut off is left out (`repair`: and removed).

  Raises:
    FileNotFoundError: there are no results.
    ValueError: a line before the last is damaged, or a row is there twice.
  """
  path, packed = folder / ROWS, folder / PACKED
  if not path.is_file() and not packed.is_file():
    raise FileNotFoundError(f"{path}: not found, expected results of kvjax evaluate")
  rows: dict[tuple[Any, ...], dict[str, Any]] = {}
  for file in filter(pathlib.Path.is_file, (packed, path)):
    made = lines(file, KINDS, "a row of results", repair=repair and file == path)
    for number, row in enumerate(made, 1):
      if rows.setdefault(key(row), row) != row:
        raise ValueError(f"{file}: line {number}: found another result of a row that is there")
  return list(rows.values())


def lines(
  path: pathlib.Path, kinds: Mapping[str, Any], what: str, *, repair: bool = False
) -> list[dict[str, Any]]:
  """The objects of a file of JSON lines; a last one that was cut off is left out.

  Args:
    kinds: types of what each of them has, by name.
    what: each of them is, as errors call it.
    repair: whether a half line is removed.

  Raises:
    ValueError: a line is damaged.
  """
  data = _unpacked(path) if path.suffix == ".gz" else path.read_bytes()
  whole = _whole(data)
  if repair and whole != data:
    _mend(path, whole, len(data))
  made = []
  for number, line in enumerate(whole.split(b"\n")[:-1], 1):
    try:
      row = json.loads(line)
    except (ValueError, RecursionError) as error:
      raise ValueError(f"{path}: line {number}: found {error}, expected {what}") from error
    held = row if isinstance(row, dict) else {}
    if wrong := [n for n, kind in kinds.items() if n not in held or not isinstance(held[n], kind)]:
      found = ", ".join(f"{name} = {held.get(name)!r}" for name in wrong)
      raise ValueError(f"{path}: line {number}: found {found}, expected {what}")
    made.append(row)
  return made


def _whole(data: bytes) -> bytes:
  """Lines that are whole, with their ends: the last one, if it was cut off just before its end."""
  end = data.rfind(b"\n") + 1
  try:
    return data + b"\n" if isinstance(json.loads(data[end:]), dict) else data[:end]
  except (ValueError, RecursionError):
    return data[:end]


def _mend(path: pathlib.Path, whole: bytes, size: int) -> None:
  """Cuts off a half line, or ends a whole one."""
  if len(whole) < size:
    os.truncate(path, len(whole))
  else:
    with open(path, "ab") as file:
      file.write(b"\n")


def _unpacked(path: pathlib.Path) -> bytes:
  try:
    return gzip.decompress(path.read_bytes())
  except (gzip.BadGzipFile, EOFError, zlib.error) as error:
    raise ValueError(f"{path}: damaged ({error}), expected packed rows of results") from error
