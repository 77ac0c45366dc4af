"""Result files, read by the names of their cases and contenders: what is missing is named."""

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from kvjax.programs import bench_files
from kvjax.programs.evals import store
from scripts.tools.tablemakers.records import NOTHING, Figure, Number, Part, Record
from scripts.tools.tablemakers.timings import Timing

FOLDER = pathlib.Path(__file__).parents[2] / "results"
GPU = "nvidia-h200"
H100 = "nvidia-h100-80gb-hbm3"
T = TypeVar("T")


class Named(dict[str, T]):
  """Parts of a file by their names; what is missing is named."""

  def __init__(self, where: str, found: dict[str, T]):
    super().__init__(found)
    self.where = where

  def __missing__(self, name: str) -> T:
    raise ValueError(f"{self.where}: found no {name!r}, expected it among {list(self)}")


@dataclasses.dataclass(frozen=True)
class Study:
  """A JSON file, or what lies in it at a place; numbers and texts in it know where they stand.

  Attributes:
    held: what is there, as it was parsed.
    file: below scripts/results.
    card, n, setting, fitted: as of a `Record`.
    place: the keys that lead there.
  """

  held: Any
  file: str
  card: str
  n: int
  setting: str
  fitted: str = NOTHING
  place: tuple[str | int, ...] = ()

  @property
  def record(self) -> Record:
    return Record(self.file, self.place, self.card, self.n, self.setting, self.fitted)

  def __getitem__(self, key: str | int) -> Any:
    """The value under a key.

    Raises:
      ValueError: there is nothing.
    """
    try:
      inner = dataclasses.replace(self, held=self.held[key], place=(*self.place, key))
    except (KeyError, IndexError):
      there = list(self.held) if isinstance(self.held, dict) else f"{len(self.held)} entries"
      where = f"{self.file}, {' / '.join(map(str, self.place))} ({self.setting})"
      raise ValueError(f"{where}: found no {key!r} among {there}") from None
    if isinstance(inner.held, str):
      return Figure(inner.held, (inner.record,))
    if isinstance(inner.held, int | float) and not isinstance(inner.held, bool):
      return Number(inner.held, inner.record)
    return inner if isinstance(inner.held, dict | list) else inner.held

  def __iter__(self) -> Iterator[Any]:
    """The names of a dictionary, or the values of a list."""
    return (x if isinstance(self.held, dict) else self[x] for x, _ in self._pairs())

  def __contains__(self, key: str) -> bool:
    """True where there is a value under a key."""
    return self.held.get(key) is not None

  def items(self) -> list[tuple[Any, Any]]:
    return [(key, self[key]) for key, _ in self._pairs()]

  def _pairs(self) -> list[tuple[Any, Any]]:
    return list(self.held.items() if isinstance(self.held, dict) else enumerate(self.held))

  def each(self, *keys: str) -> list[Any]:
    """The values under keys; None where there is none."""
    return [None if self.held.get(key) is None else self[key] for key in keys]

  def of(self, setting: str, n: int) -> "Study":
    """The same with a setting and a number of samples of its own."""
    return dataclasses.replace(self, setting=setting, n=n)


class Case:
  """One case of a file of `kvjax.programs.bench`: data are random, cuts are those of `tune`."""

  def __init__(self, held: Study):
    self.name, self.shapes, self.bytes = (held.held[key] for key in ("case", "shapes", "bytes"))
    self.held = held.of(f"{self.name}: {self.shapes}", held.held["repetitions"])
    where = f"{held.file}, {self.name}"
    self.rows = Named(where, {str(row["name"]): row for row in self.held["results"]})

  def has(self, name: str) -> bool:
    """True where a contender has a time: peers may not be installed, or not take the shape."""
    return name in self.rows and "us" in self.rows[name]

  def time(self, name: str) -> Timing:
    """A contender's time.

    Raises:
      ValueError: it is not there, or has no time, as its output was wrong.
    """
    row = self.rows[name]
    return Timing(name, row["us"], *row.held["us_quartiles"])

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
    for text in (*self.held["remarks"], self.held["shapes"]):
      if match := re.search(pattern, text):
        return tuple(Figure(group, text.records) for group in match.groups())
    return None


class Bench(Named[Case]):
  """The cases of a file of `kvjax.programs.bench` by their names."""

  def __init__(self, path: pathlib.Path, folder: pathlib.Path):
    held = bench_files.read(path)
    file, fitted = path.relative_to(folder).as_posix(), held.get("fitted", NOTHING)
    cases = Study(held, file, held["device"], 1, "cases", fitted)["cases"]
    super().__init__(str(path), {case.name: case for case in map(Case, cases)})


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

  def study(self, path: str, setting: str, **about: Any) -> Study:
    """A JSON file, with what its figures stand for where it does not say so itself."""
    held = self.json(path)
    own = held.get("about", held) if isinstance(held, dict) else {}
    card = "CPU" if own.get("device", "cpu") == "cpu" else own["device"]
    return Study(held, path, **{"card": card, "n": 1, "setting": setting, **about})


# Makes one part of a document: its lines, without the markers, and their figures.
Maker = Callable[[Results], Part]
