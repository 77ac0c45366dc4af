"""Cost of a decode step of a method: the lines of speed.jsonl, one per method and shape."""

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from kvjax.programs.evals import store
from kvjax.programs.evals.standing import FULL, Standings, aware_first
from kvjax.programs.evals.stats import Estimate

FILE = "speed.jsonl"
KINDS = {"method": str, "budget": int | None, "length": int, "batch": int}
_NUMBERS = ("length", "batch", "us", "cache_bytes", "host_bytes", "read_bytes")


@dataclasses.dataclass(frozen=True)
class Cost:
  """A method with one budget at one shape.

  Attributes:
    method, budget: as in rows of results.
    length, batch: tokens of each row, and rows.
    us, low, high: median and quartiles of a step of the whole batch, in µs.
    cache_bytes, host_bytes: of the whole batch's caches, on the device and in host memory.
    read_bytes: what a step of the whole batch reads: weights, and what of the caches.
    peak_bytes: what a step holds on the device, weights and caches included; None where the
      compiler does not say.
    expected_us: what `advise` expects of a step; None where it was not asked.
    visited: share of the tokens that a layer attended to, mean of layers; None: not measured.
    times: how often a step was timed.
  """

  method: str
  budget: int | None
  length: int
  batch: int
  us: float
  low: float
  high: float
  cache_bytes: float
  host_bytes: float
  read_bytes: float
  peak_bytes: float | None
  expected_us: float | None = None
  visited: float | None = None
  times: int = 1

  @property
  def attended(self) -> int | None:
    """Tokens that a layer attended to, whatever the budget is called."""
    return None if self.visited is None else round(self.visited * self.length)

  @property
  def milliseconds(self) -> float:
    """Of a step, which gives each row a token."""
    return self.us / 1e3

  @property
  def kept(self) -> float:
    """GB of a row's cache on the device."""
    return self.cache_bytes / self.batch / 1e9

  @property
  def read(self) -> float:
    """GB that a step reads."""
    return self.read_bytes / 1e9


def key(line: dict[str, Any]) -> tuple[Any, ...]:
  return tuple(line[name] for name in KINDS)


def measured(folder: pathlib.Path, *, repair: bool = False) -> list[dict[str, Any]]:
  """The lines of a folder; a last one that was cut off is left out (`repair`: and removed).

  Raises:
    ValueError: a line is damaged.
  """
  path = folder / FILE
  return store.lines(path, KINDS, "the cost of a method", repair=repair) if path.is_file() else []


def read(folder: pathlib.Path) -> list[Cost]:
  """The costs in a folder, of several lines for one method and shape the last; none without a file.

  A line without a time, whose method computed something else than the reference, is none.

  Raises:
    ValueError: a line is damaged, or lacks a number.
  """
  found = {}
  for number, line in enumerate(measured(folder), 1):
    if "us" in line:
      found[key(line)] = _cost(line, f"{folder / FILE}: line {number}")
  return list(found.values())


def _cost(held: dict[str, Any], where: str) -> Cost:
  for name in _NUMBERS:
    if not isinstance(value := held.get(name), int | float) or value < 0:
      raise ValueError(f"{where}: found {name} = {value!r}, expected a number")
  quartiles = held.get("us_quartiles")
  if not isinstance(quartiles, list) or len(quartiles) != 2:
    raise ValueError(f"{where}: found us_quartiles = {quartiles!r}, expected two numbers")
  return Cost(
    method=held["method"],
    budget=held["budget"],
    low=quartiles[0],
    high=quartiles[1],
    peak_bytes=held.get("peak_bytes"),
    expected_us=held.get("expected_us"),
    visited=held.get("visited"),
    times=len(held.get("us_all", ())) or 1,
    **{name: held[name] for name in _NUMBERS},
  )


@dataclasses.dataclass(frozen=True)
class Point:
  """Score of a method at one budget, its difference from the full cache, and its cost."""

  method: str
  budget: int | None
  score: Estimate
  gap: Estimate
  cost: Cost


@dataclasses.dataclass(frozen=True)
class Board:
  """The methods at one shape, in one mode, that have both scores and costs; full first."""

  standings: Standings
  batch: int
  points: Sequence[Point]

  @property
  def full(self) -> Point:
    return self.points[0]


def boards(standings: Iterable[Standings], costs: Sequence[Cost]) -> list[Board]:
  """One for each mode, length and batch that the full cache was timed at, in this order."""
  made = []
  for held in standings:
    here = [cost for cost in costs if cost.length == held.length]
    for batch in sorted({cost.batch for cost in here}):
      timed = {(cost.method, cost.budget): cost for cost in here if cost.batch == batch}
      points = [
        Point(one.method, one.budget, one.score, one.gap, timed[one.method, one.budget])
        for one in held.by.values()
        if one.score and one.gap and (one.method, one.budget) in timed
      ]
      if points and points[0].method == FULL:
        made.append(Board(held, batch, points))
  return sorted(made, key=lambda board: aware_first(board.standings.mode))
