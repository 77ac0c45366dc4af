"""Result files, read by the names of their cases and contenders: what is missing is named."""

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

from kvjax.programs import bench_files
from kvjax.programs.evals import store
from scripts.tools.tablemakers import records
from scripts.tools.tablemakers.records import (
  NOTHING,
  Figure,
  Number,
  Part,
  Record,
  Records,
)

FOLDER = pathlib.Path(__file__).parents[2] / "results"
GPU = "nvidia-h200"


@dataclasses.dataclass(frozen=True)
class Timing:
  """Microseconds of a contender: the median, which has its source, and the quartiles around it."""

  name: str
  us: float
  low: float
  high: float

  @property
  def records(self) -> Records:
    return records.of(self.us)

  def then(self, *others: "Timing") -> "Timing":
    """This one and others, one after the other."""
    parts = (self, *others)
    ends = (sum(getattr(part, x) for part in parts) for x in ("us", "low", "high"))
    return Timing(" + ".join(part.name for part in parts), *ends)

  def scaled(self, factor: float) -> "Timing":
    """So many of it."""
    return Timing(self.name, self.us * factor, self.low * factor, self.high * factor)

  def later(self, us: float) -> "Timing":
    """It, and a time that is known exactly."""
    return Timing(self.name, self.us + us, self.low + us, self.high + us)


@dataclasses.dataclass(frozen=True)
class Study:
  """A JSON file whose figures all stand for as many samples of one setting.

  Attributes:
    file: below scripts/results.
    held: what is in it.
    card, n, setting, fitted: as of a `Record`.
  """

  file: str
  held: Any
  card: str
  n: int
  setting: str
  fitted: str

  def get(self, *keys: str | int) -> Any:
    """The value under keys.

    Raises:
      ValueError: there is nothing.
    """
    value = self.held
    for i, key in enumerate(keys):
      try:
        value = value[key]
      except (KeyError, IndexError, TypeError):
        there = list(value) if isinstance(value, dict) else f"{len(value)} entries"
        where = f"{self.file}, {' / '.join(map(str, keys[:i]))}"
        raise ValueError(f"{where}: found no {key!r} among {there}") from None
    return value

  def has(self, *keys: str) -> bool:
    """True where there is a value under the last of the keys."""
    return self.get(*keys[:-1]).get(keys[-1]) is not None

  def number(self, *keys: str | int, n: int | None = None, setting: str | None = None) -> Number:
    """The number under keys; `n` and `setting` where it has its own."""
    return Number(self.get(*keys), self.record(*keys, n=n, setting=setting))

  def record(self, *keys: str | int, n: int | None = None, setting: str | None = None) -> Record:
    """Of what is under keys."""
    setting = f"{self.setting}; {setting}" if setting else self.setting
    return Record(self.file, keys, self.card, n or self.n, setting, self.fitted)


class Case:
  """One case of a file of `kvjax.programs.bench`.

  Args:
    file: data are random, cuts are those that `tune` found.
    at: its place there.
  """

  def __init__(self, file: Study, at: int):
    self._at, self._data = at, file.held["cases"][at]
    self.name: str = self._data["case"]
    self.bytes: int = self._data["bytes"]
    self.shapes: str = self._data["shapes"]
    setting, n = f"{self.name}: {self.shapes}", self._data["repetitions"]
    self._file = dataclasses.replace(file, n=n, setting=setting)
    self._rows = {row["name"]: i for i, row in enumerate(self._data["results"])}

  def has(self, name: str) -> bool:
    """True where a contender has a time: peers may not be installed, or not take the shape."""
    return name in self._rows and "us" in self._data["results"][self._rows[name]]

  def time(self, name: str) -> Timing:
    """A contender's time.

    Raises:
      ValueError: it is not there, or has no time, as its output was wrong.
    """
    us = self._of(name, "us")
    return Timing(name, us, *self._data["results"][self._rows[name]]["us_quartiles"])

  def error(self, name: str) -> Number:
    """A contender's relative error."""
    return self._of(name, "error")

  def _of(self, name: str, key: str) -> Number:
    where = f"{self._file.file}, {self.name}: found no"
    if name not in self._rows:
      raise ValueError(f"{where} contender {name!r}, expected it among {list(self._rows)}")
    at = self._rows[name]
    if key not in self._data["results"][at]:
      raise ValueError(f"{where} {key} of {name!r}: its output was wrong")
    return self._file.number("cases", self._at, "results", at, key)

  def remark(self, pattern: str) -> tuple[Figure, ...]:
    """The groups of the first remark that has the pattern, with their source; shapes come last."""
    texts = {("remarks", number): line for number, line in enumerate(self._data["remarks"])}
    for place, text in {**texts, ("shapes",): self.shapes}.items():
      if match := re.search(pattern, text):
        record = self._file.record("cases", self._at, *place)
        return tuple(Figure(group, (record,)) for group in match.groups())
    raise ValueError(f"{self._file.file}, {self.name}: found no remark like {pattern!r}")

  def numbers(self, pattern: str) -> list[Number]:
    """The same, as numbers."""
    return [Number(float(x.replace(",", "")), *x.records) for x in self.remark(pattern)]

  def number(self, pattern: str) -> Number:
    """The first of them."""
    return self.numbers(pattern)[0]

  def repeated(self) -> Number:
    """The number of times that it was timed."""
    return self._file.number("cases", self._at, "repetitions")


class Bench:
  """A file of `kvjax.programs.bench`, its cases by their names."""

  def __init__(self, path: pathlib.Path, folder: pathlib.Path = FOLDER):
    self.path, self.held = path, bench_files.read(path)
    fitted, file = self.held.get("fitted", NOTHING), path.relative_to(folder).as_posix()
    study = Study(file, self.held, self.held["device"], 1, "", fitted)
    self._cases = {x["case"]: Case(study, i) for i, x in enumerate(self.held["cases"])}

  def has(self, name: str) -> bool:
    return name in self._cases

  def case(self, name: str) -> Case:
    if name not in self._cases:
      raise ValueError(
        f"{self.path}: found no case {name!r}, expected it among {list(self._cases)}"
      )
    return self._cases[name]

  def cases(self, pattern: str) -> list[Case]:
    """All whose names have the pattern, in the file's order; at least one."""
    found = [case for name, case in self._cases.items() if re.search(pattern, name)]
    if not found:
      raise ValueError(
        f"{self.path}: found no case like {pattern!r}, expected some among {list(self._cases)}"
      )
    return found


class Results:
  """A folder like scripts/results; each file is read once."""

  def __init__(self, folder: pathlib.Path = FOLDER):
    self.folder = folder
    self._bench = functools.cache(lambda path: Bench(path, folder))

  def bench(self, suite: str, card: str = GPU) -> Bench:
    return self._bench(self.folder / card / f"bench_{suite}.json")

  def rows(self, folder: str) -> list[dict[str, Any]]:
    """The rows of an evaluation; none where it is not there."""
    return self._rows(folder) if (self.folder / folder).is_dir() else []

  @functools.cache  # noqa: B019 (a handful live as long as the program)
  def _rows(self, folder: str) -> list[dict[str, Any]]:
    return store.read(self.folder / folder)

  def benches(self) -> list[Bench]:
    """All of them."""
    return [self._bench(path) for path in bench_files.inside(self.folder / GPU)]

  def json(self, path: str, *keys: str) -> Any:
    """A JSON file, or what lies in it under keys: names and counts; figures come from `study`."""
    value = json.loads((self.folder / path).read_text("utf-8"))
    for i, key in enumerate(keys):
      if key not in value:
        raise ValueError(f"{path}, {' / '.join(keys[:i])}: found no {key!r} among {list(value)}")
      value = value[key]
    return value

  def study(self, path: str, *, card: str, n: int, setting: str, fitted: str = NOTHING) -> Study:
    """A JSON file with what its figures stand for."""
    return Study(path, self.json(path), card, n, setting, fitted)

  def lines(
    self, path: str, pattern: str, *, card: str, n: int, setting: str, fitted: str = NOTHING
  ) -> list[tuple[Figure, ...]]:
    """The groups of every line of a text that has the pattern, each with its source.

    Raises:
      ValueError: none has.
    """
    found = []
    for number, line in enumerate((self.folder / path).read_text("utf-8").splitlines()):
      if match := re.search(pattern, line):
        where = (Record(path, ("line", number), card, n, setting, fitted),)
        found.append(tuple(Figure(group or "", where) for group in match.groups()))
    if not found:
      raise ValueError(f"{path}: found no line like {pattern!r}")
    return found


# Makes one part of a document: its lines, without the markers, and their figures.
Maker = Callable[[Results], Part]
