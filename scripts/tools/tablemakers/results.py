"""Result files, read by the names of their cases and contenders: what is missing is named."""

import functools
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any, TypeVar

from kvjax.programs import bench_files
from kvjax.programs.evals import store
from scripts.tools.tablemakers.records import NOTHING, Figure, Number, Part, Record
from scripts.tools.tablemakers.timings import Timing

FOLDER = pathlib.Path(__file__).parents[2] / "results"
GPU = "nvidia-h200"
H100 = "nvidia-h100-80gb-hbm3"
T = TypeVar("T")
Source = Callable[[tuple[str | int, ...]], Record]


class Named(dict[str, T]):
  """Parts of a file by their names; what is missing is named."""

  def __init__(self, where: str, found: dict[str, T]):
    super().__init__(found)
    self.where = where

  def __missing__(self, name: str) -> T:
    raise ValueError(f"{self.where}: found no {name!r}, expected it among {list(self)}")


def source(file: str, card: str, n: int, setting: str, fitted: str = NOTHING) -> Source:
  """The records of a file by their places."""
  return lambda place: Record(file, place, card, n, setting, fitted)


def sourced(held: Any, record: Source, *place: str | int) -> Any:
  """Parsed JSON whose numbers and texts know where they stand.

  Args:
    held: what was parsed.
    record: of a place, the keys that lead there.
    place: where it lies itself.
  """
  if isinstance(held, dict):
    found = {key: sourced(value, record, *place, key) for key, value in held.items()}
    return Named(" / ".join(map(str, (record(place or ("all",)).file, *place))), found)
  if isinstance(held, list):
    return [sourced(value, record, *place, i) for i, value in enumerate(held)]
  if isinstance(held, str):
    return Figure(held, (record(place),))
  if isinstance(held, int | float) and not isinstance(held, bool):
    return Number(held, record(place))
  return held


class Case:
  """One case of a file of `kvjax.programs.bench`: data are random, cuts are those of `tune`."""

  def __init__(self, held: Named[Any]):
    self.held, self.name, self.shapes = held, str(held["case"]), held["shapes"]
    self.bytes = float(held["bytes"])
    where = f"{held.where}, {self.name}"
    rows = {str(row["name"]): Named(f"{where}, {row['name']}", row) for row in held["results"]}
    self.rows = Named(where, rows)

  def has(self, name: str) -> bool:
    """True where a contender has a time: peers may not be installed, or not take the shape."""
    return name in self.rows and self.rows[name].get("us") is not None

  def time(self, name: str) -> Timing:
    """A contender's time.

    Raises:
      ValueError: it is not there, or has no time, as its output was wrong.
    """
    row = self.rows[name]
    return Timing(name, row["us"], *map(float, row["us_quartiles"]))

  def remark(self, pattern: str) -> tuple[Figure, ...]:
    """The groups of the first remark that has the pattern, with their source; shapes come last.

    Raises:
      ValueError: none has.
    """
    if (found := self._search(pattern)) is None:
      raise ValueError(f"{self.rows.where}: found no remark like {pattern!r}")
    return found

  def numbers(self, pattern: str) -> list[Number]:
    """The same, as numbers."""
    return [figure.number for figure in self.remark(pattern)]

  def maybe(self, pattern: str) -> Number | None:
    """The first of these, if there is such a remark."""
    found = self._search(pattern)
    return found and found[0].number

  def _search(self, pattern: str) -> tuple[Figure, ...] | None:
    for text in (*self.held["remarks"], self.shapes):
      if match := re.search(pattern, text):
        return tuple(Figure(group, text.records) for group in match.groups())
    return None


class Bench(Named[Case]):
  """The cases of a file of `kvjax.programs.bench` by their names."""

  def __init__(self, path: pathlib.Path, folder: pathlib.Path):
    held, file = bench_files.read(path), path.relative_to(folder).as_posix()
    found = {}
    for i, case in enumerate(held["cases"]):
      n, setting = case["repetitions"], f"{case['case']}: {case['shapes']}"
      record = source(file, held["device"], n, setting, held.get("fitted", NOTHING))
      found[case["case"]] = Case(sourced(case, record, "cases", i))
    super().__init__(str(path), found)


class Results:
  """A folder like scripts/results; each file of times or rows is read once."""

  def __init__(self, folder: pathlib.Path = FOLDER):
    self.folder = folder
    self._bench = functools.cache(lambda path: Bench(path, folder))
    self._rows = functools.cache(lambda path: store.read(folder / path))

  def bench(self, suite: str, card: str = GPU) -> Bench:
    return self._bench(self.folder / card / f"bench_{suite}.json")

  def cases(self, suite: str, pattern: str = "", card: str = GPU) -> list[Case]:
    """All of a file whose names have the pattern, in the file's order; at least one."""
    bench = self.bench(suite, card)
    found = [case for name, case in bench.items() if re.search(pattern, name)]
    if not found:
      raise ValueError(f"{bench.where}: found no case like {pattern!r} among {list(bench)}")
    return found

  def rows(self, folder: str) -> list[dict[str, Any]]:
    """The rows of an evaluation; none where it is not there."""
    return self._rows(folder) if (self.folder / folder).is_dir() else []

  def json(self, path: str) -> Any:
    return json.loads((self.folder / path).read_text("utf-8"))

  def study(self, path: str, setting: str, n: int = 1, fitted: str = NOTHING) -> Any:
    """A JSON file, with what its figures stand for where it does not say so itself."""
    held = self.json(path)
    device = held.get("about", held).get("device", "cpu")
    card = "CPU" if device == "cpu" else device
    return sourced(held, source(path, card, n, setting, fitted))


# Makes one part of a document: its lines, without the markers, and their figures.
Maker = Callable[[Results], Part]
