"""Of the rows that an evaluation kept, those nearest to a method, a length and a budget."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from kvjax.programs.evals import store
from kvjax.programs.evals.stats import Estimate, estimate

# What decides a method's quality on one context: rows of these are compared with the full cache's.
SHARED = ("task", "length", "mode", "index")


@dataclasses.dataclass(frozen=True)
class Kept:
  """Rows of one method at one length with one budget.

  Attributes:
    model: whose rows, by name.
    length, budget: tokens; None: the method has no budget.
    score: mean over all rows, and its interval.
    full: the full cache's mean over the same rows; None where it has none of them.
  """

  model: str
  length: int
  budget: int | None
  score: Estimate
  full: float | None

  def __str__(self) -> str:
    budget = "" if self.budget is None else f" b{self.budget:,}"
    return f"{self.model} {self.length:,}{budget}"


class Rows:
  """The answers of an evaluation's folder; texts that were only followed are left out.

  Args:
    folder: of `kvjax.programs.evaluate`.
    tasks: whose rows; none: all.

  Raises:
    FileNotFoundError: there are no results.
    ValueError: they are damaged, or hold none of a task.
  """

  def __init__(self, folder: pathlib.Path, tasks: Sequence[str] = ()):
    self.model = store.settings_of(folder)["model"]
    rows = [row for row in store.read(folder) if "positions" not in row and row["mode"] == "aware"]
    held = {row["task"] for row in rows}
    if missing := sorted(set(tasks) - held):
      raise ValueError(
        f"--tasks: found {', '.join(missing)}, expected some of: {', '.join(sorted(held))}"
      )
    self._rows = [row for row in rows if not tasks or row["task"] in tasks]
    self._full = {_shared(row): row["score"] for row in self._rows if row["method"] == "full"}

  def nearest(self, method: str, length: int, budget: int | None) -> Kept | None:
    """The rows of the method nearest in length, then in the share of it that the budget is.

    Both are compared by their logarithms. None: the method has no rows.
    """
    mine = [row for row in self._rows if row["method"] == method]
    if not mine:
      return None
    at = min({row["length"] for row in mine}, key=lambda x: abs(math.log(x / length)))
    mine = [row for row in mine if row["length"] == at]
    found = min((row["budget"] for row in mine), key=lambda x: _distance(x, at, budget, length))
    mine = [row for row in mine if row["budget"] == found]
    both = [self._full[_shared(row)] for row in mine if _shared(row) in self._full]
    full = sum(both) / len(both) if both else None
    return Kept(self.model, at, found, estimate([row["score"] for row in mine]), full)


def _shared(row: dict[str, Any]) -> tuple[Any, ...]:
  return tuple(row[name] for name in SHARED)


def _distance(kept: int | None, at: int, budget: int | None, length: int) -> float:
  """Distance of two budgets as shares of their lengths; none is the whole."""
  return abs(math.log((at if kept is None else kept) / at) - math.log((budget or length) / length))
