"""Result files, read by names of cases and contenders; what is missing is named."""

import dataclasses
import functools
import json
import pathlib
import re
from typing import Any, TypeVar

from kvjax.programs import bench_files
from kvjax.programs.evals import store
from scripts.tools.tablemakers.records import Figure, Number, Record
from scripts.tools.tablemakers.timings import Timing

FOLDER = pathlib.Path(__file__).parents[2] / "results"
GPU = "nvidia-h200"
H100 = "nvidia-h100-80gb-hbm3"
T = TypeVar("T")
Row = dict[str, Any]  # of parsed JSON, or of a table


def in_order(name: str) -> list[tuple[int, str]]:
  """Numbers in a name count as numbers."""
  return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


class Named(dict[str, T]):
  """Parts of a file by their names; what is missing is named."""

  def __init__(self, where: str, found: dict[str, T]):
    super().__init__(found)
    self.where = where

  def __missing__(self, name: str) -> T:
    raise ValueError(f"{self.where}: found no {name!r}, expected it among {list(self)}")


def sourced(held: Any, whole: Record, *place: str | int) -> Any:
  """Parsed JSON whose numbers and texts know where they stand.

  Args:
    held: what was parsed.
    whole: the record of the file, whose place is of no account.
    place: where it lies itself, the keys that lead there.
  """
  if isinstance(held, dict):
    found = {key: sourced(value, whole, *place, key) for key, value in held.items()}
    return Named(" / ".join(map(str, (whole.file, *place))), found)
  if isinstance(held, list):
    return [sourced(value, whole, *place, i) for i, value in enumerate(held)]
  if isinstance(held, str):
    return Figure(held, (dataclasses.replace(whole, place=place),))
  if isinstance(held, int | float) and not isinstance(held, bool):
    return Number(held, dataclasses.replace(whole, place=place))
  return held


class Case:
  """One case of a file of `kvjax bench`: data are random, cuts tuned."""

  def __init__(self, held: Named[Any]):
    self.name, self.shapes, self.bytes = str(held["case"]), held["shapes"], float(held["bytes"])
    where = f"{held.where}, {self.name}"
    rows = {str(row["name"]): Named(f"{where}, {row['name']}", row) for row in held["results"]}
    self.rows, self.figures = Named(where, rows), Named(where, held.get("figures", {}))

  def has(self, name: str) -> bool:
    """True where a contender has a time: peers may not take the shape."""
    return name in self.rows and self.rows[name].get("us") is not None

  def time(self, name: str) -> Timing:
    """A contender's time.

    Raises:
      ValueError: it is not there, or has no time, as its output was wrong.
    """
    row = self.rows[name]
    return Timing(name, row["us"], *map(float, row["us_quartiles"]))


class Results:
  """A folder like scripts/results; each file of times or rows is read once."""

  def __init__(self, folder: pathlib.Path = FOLDER):
    self.folder = folder
    self.bench, self.rows = functools.cache(self._bench), functools.cache(self._rows)

  def _bench(self, suite: str, card: str = GPU) -> Named[Case]:
    """The cases of a file of `kvjax bench` by their names."""
    file = f"{card}/bench_{suite}.json"
    held, found = bench_files.read(self.folder / file), {}
    for i, case in enumerate(held["cases"]):
      whole = Record(file, ("all",), held["device"], case["repetitions"])
      found[case["case"]] = Case(sourced(case, whole, "cases", i))
    return Named(str(self.folder / file), found)

  def _rows(self, folder: str) -> list[Row]:
    """The rows of an evaluation; none where it is not there."""
    path = self.folder / folder
    return store.read(path) if path.is_dir() else []

  def cases(self, suite: str, pattern: str = "", card: str = GPU) -> list[Case]:
    """All of a file whose names have the pattern, by their names; at least one."""
    bench = self.bench(suite, card)
    found = [bench[name] for name in sorted(bench, key=in_order) if re.search(pattern, name)]
    if not found:
      raise ValueError(f"{bench.where}: found no case like {pattern!r} among {list(bench)}")
    return found

  def json(self, path: str) -> Any:
    return json.loads((self.folder / path).read_text("utf-8"))

  def study(self, path: str) -> Named[Any]:
    """A JSON file, whose figures stand for its walks or texts, or for one run."""
    held = self.json(path)
    texts = held.get("texts") or held.get("starts") or [path]
    listed = texts.partition("(")[0].split(",") if isinstance(texts, str) else texts
    device = held.get("about", held).get("device", "cpu")
    card = "CPU" if device == "cpu" else device
    return sourced(held, Record(path, ("all",), card, held.get("walks") or len(listed)))

  def studies(self, pattern: str) -> dict[str, Named[Any]]:
    """Those of a folder by their files' names, without the ending."""
    found = sorted(self.folder.glob(pattern))
    return {path.stem: self.study(path.relative_to(self.folder).as_posix()) for path in found}
