"""Makers of the tables of README and the results, from the result files.

A document says where: `<!-- MODULE.NAME ARGUMENT: begin -->` and its `end` hold what `NAME` of a
module here makes of the files, and of an argument if it takes one. Files are read into records, in
which what is missing is named; a table declares how its columns are made of a record (`cells`).
Quartiles wider than 5 % of a median stand after it, and in place of a ratio that divides by it.
"""

import dataclasses
import functools
import importlib.util
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pandas as pd

from kvjax.kernels.common.devices import device
from kvjax.programs import bench_files

FOLDER = pathlib.Path(__file__).parents[2] / "results"
GPU = "nvidia-h200"
H100 = "nvidia-h100-80gb-hbm3"
READ = "its bytes"  # of a case's times that of its bytes in a streaming read

Part = pd.DataFrame | list[str]  # a table, whose index are its labels, or lines


class Record(dict[str, Any]):
  """Figures and texts of a file by their names."""

  def __init__(self, where: str, found: dict[str, Any]):
    super().__init__(found)
    self.where = where

  def __missing__(self, name: str) -> Any:
    raise ValueError(f"{self.where}: found no {name!r}, expected it among {list(self)}")


@dataclasses.dataclass(frozen=True)
class Timing:
  """Microseconds of a contender on a card: the median and the quartiles."""

  name: str
  us: float
  low: float
  high: float
  card: str

  @property
  def steady(self) -> bool:
    """True where others may be divided by it."""
    return bench_files.steady(self.low, self.us, self.high)

  @property
  def spread(self) -> str:
    """The quartiles with their unit."""
    unit, (_, low, high) = self._written()
    return f"{low} to {high} {unit}"

  def __add__(self, other: "Timing") -> "Timing":
    """This one and another, one after the other."""
    name, low, high = f"{self.name} + {other.name}", self.low + other.low, self.high + other.high
    return Timing(name.strip(" +"), self.us + other.us, low, high, self.card)

  def __mul__(self, factor: float) -> "Timing":
    ends = self.us * factor, self.low * factor, self.high * factor
    return Timing(self.name, *ends, self.card)

  def __format__(self, mark: str) -> str:
    """The median with its unit and a mark such as `**`, and quartiles that are wide."""
    unit, (us, low, high) = self._written()
    return f"{mark}{us} {unit}{mark}" + ("" if self.steady else f" ({low} to {high})")

  def _written(self) -> tuple[str, list[str]]:
    unit, form, scale = "µs", "{:.1f}", 1.0
    if self.us >= 1e3:
      unit, form, scale = "ms", "{:.2f}" if self.us < 1e5 else "{:,.0f}", 1e3
    return unit, [form.format(us / scale) for us in (self.us, self.low, self.high)]


@dataclasses.dataclass(frozen=True)
class Ratio:
  """A ratio with its text, and the time that was divided by, if that was steady."""

  value: Any
  text: str
  reference: Timing

  def __str__(self) -> str:
    took = self.reference
    return self.text if took.steady else f"– ({took.name}: {took.spread})"


def over(mine: Timing, reference: Timing, form: str = "{:.2f}", power: int = 1) -> Ratio:
  """One time over another, which is divided by; ValueError if they are of unlike cards.

  A power of −1 turns it round: how often as fast as the reference it is.
  """
  if mine.card != reference.card:
    raise ValueError(f"cards: found {mine.card!r} and {reference.card!r}, expected one card")
  value = (mine.us / reference.us) ** power
  return Ratio(value, form.format(value), reference)


class Results:
  """A folder like scripts/results."""

  def __init__(self, folder: pathlib.Path = FOLDER):
    self.folder = folder

  def json(self, name: str | pathlib.Path) -> Any:
    """Content of a JSON file, whose objects are records; ValueError names a damaged one."""
    path = self.folder / name
    try:
      return json.loads(path.read_text("utf-8"), object_hook=functools.partial(Record, str(path)))
    except json.JSONDecodeError as error:
      raise ValueError(f"{path}: found no JSON ({error})") from None

  def bench(self, suite: str, card: str = GPU) -> Record:
    """Cases of a file of `kvjax bench`: contenders' times, and figures, by their names.

    Contenders without a time are left out: peers may not take a shape.
    """
    path = f"{card}/bench_{suite}.json"
    held, found = self.json(path), Record(path, {})
    for case in held["cases"]:
      least = 1e6 * case["bytes"] / device(held["device"]).read
      timed = {READ: Timing("", least, least, least, held["device"])}
      for row in case["results"]:
        if row.get("us") is not None:
          time = row["name"], row["us"], *row["us_quartiles"]
          timed[row["name"]] = Timing(*time, held["device"])
      record = {**case, **case.get("figures", {}), **timed}
      found[case["case"]] = Record(f"{path}, {case['case']}", record)
    return found

  def cases(self, suite: str, pattern: str = "", card: str = GPU) -> list[Record]:
    """Those of a file whose names have the pattern, by their names; at least one."""
    bench = self.bench(suite, card)
    # Numbers in a name count as numbers.
    ordered = sorted(bench, key=lambda name: re.sub(r"\d+", lambda n: n[0].zfill(9), name))
    found = [bench[name] for name in ordered if re.search(pattern, name)]
    if not found:
      raise ValueError(f"{bench.where}: found no case like {pattern!r} among {list(bench)}")
    return found


def maker(name: str) -> Callable[[Results], Part]:
  """Maker of the part between some markers; ValueError if there is none."""
  named, _, argument = name.partition(" ")
  module, _, function = named.partition(".")
  where = importlib.util.find_spec(f"{__name__}.{module}")
  made = where and getattr(importlib.import_module(where.name), function, None)
  if not made:
    raise ValueError("found no maker of this name")
  return lambda results: made(results, argument) if argument else made(results)
