"""Result files, read by the names of their cases and contenders: what is missing is named."""

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from .. import bench_files

FOLDER = pathlib.Path(__file__).parents[1] / "results"
GPU = "nvidia-h200"


@dataclasses.dataclass(frozen=True)
class Timing:
  """Microseconds of a contender: the median, and the quartiles around it."""

  name: str
  us: float
  low: float
  high: float

  def then(self, *others: "Timing") -> "Timing":
    """This one and others, one after the other."""
    parts = (self, *others)
    name = " + ".join(part.name for part in parts)
    return Timing(name, *(sum(getattr(p, x) for p in parts) for x in ("us", "low", "high")))

  def scaled(self, factor: float) -> "Timing":
    """So many of it."""
    return Timing(self.name, self.us * factor, self.low * factor, self.high * factor)

  def later(self, us: float) -> "Timing":
    """It, and a time that is known exactly."""
    return Timing(self.name, self.us + us, self.low + us, self.high + us)


class Case:
  """One case of a file of `scripts.bench`."""

  def __init__(self, path: pathlib.Path, data: dict[str, Any]):
    self.path, self._data = path, data
    self.name: str = data["case"]
    self.bytes: int = data["bytes"]
    self.shapes: str = data["shapes"]
    self.repetitions: int = data["repetitions"]

  def has(self, name: str) -> bool:
    """Whether a contender has a time: peers may not be installed, or not take the shape."""
    return any(row["name"] == name and "us" in row for row in self._data["results"])

  def time(self, name: str) -> Timing:
    """A contender's time.

    Raises:
      ValueError: it is not there, or has no time, as its output was wrong.
    """
    row = self._row(name)
    if "us" not in row:
      raise ValueError(f"{self.path}, {self.name}: found no time of {name!r}: its output was wrong")
    return Timing(name, row["us"], *row["us_quartiles"])

  def error(self, name: str) -> float:
    """A contender's relative error."""
    return self._row(name)["error"]

  def remark(self, pattern: str) -> tuple[str, ...]:
    """The groups of the first remark that has the pattern."""
    for line in self._data["remarks"]:
      if match := re.search(pattern, line):
        return match.groups()
    raise ValueError(f"{self.path}, {self.name}: found no remark like {pattern!r}")

  def numbers(self, pattern: str) -> list[float]:
    """The same, as numbers."""
    return [float(group.replace(",", "")) for group in self.remark(pattern)]

  def _row(self, name: str) -> dict[str, Any]:
    rows = {row["name"]: row for row in self._data["results"]}
    if name not in rows:
      raise ValueError(
        f"{self.path}, {self.name}: found no contender {name!r}, expected it among {list(rows)}"
      )
    return rows[name]


class Bench:
  """A file of `scripts.bench`, its cases by their names."""

  def __init__(self, path: pathlib.Path):
    self.path = path
    self.facts = bench_files.read(path)
    self._cases = {case["case"]: case for case in self.facts.pop("cases")}

  def has(self, name: str) -> bool:
    return name in self._cases

  def case(self, name: str) -> Case:
    if name not in self._cases:
      raise ValueError(
        f"{self.path}: found no case {name!r}, expected it among {list(self._cases)}"
      )
    return Case(self.path, self._cases[name])

  def cases(self, pattern: str) -> list[Case]:
    """All whose names have the pattern, in the file's order; at least one."""
    found = [self.case(name) for name in self._cases if re.search(pattern, name)]
    if not found:
      raise ValueError(
        f"{self.path}: found no case like {pattern!r}, expected some among {list(self._cases)}"
      )
    return found


class Results:
  """A folder like scripts/results; each file is read once."""

  def __init__(self, folder: pathlib.Path = FOLDER):
    self.folder = folder
    self._bench = functools.cache(Bench)

  def bench(self, suite: str, device: str = GPU) -> Bench:
    return self._bench(self.folder / device / f"bench_{suite}.json")

  def benches(self, device: str) -> list[Bench]:
    """All files of a device."""
    return [self._bench(path) for path in bench_files.inside(self.folder / device)]

  def json(self, path: str, *keys: str) -> Any:
    """A JSON file, or what lies in it under keys."""
    value = json.loads((self.folder / path).read_text("utf-8"))
    for i, key in enumerate(keys):
      if key not in value:
        raise ValueError(f"{path}, {' / '.join(keys[:i])}: found no {key!r} among {list(value)}")
      value = value[key]
    return value

  def columns(self, path: str) -> list[list[str]]:
    """The rows of a table that `console.table` wrote, without its head."""
    lines = (self.folder / path).read_text("utf-8").splitlines()
    return [re.split(r" {2,}", line.strip()) for line in lines[2:]]


# Makes one part of a document: its lines, without the markers.
Maker = Callable[[Results], Sequence[str]]
