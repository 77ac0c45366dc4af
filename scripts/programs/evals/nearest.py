"""Scores of the rows that an evaluation kept, by method, length and budget."""

import collections
import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from kvjax.programs.evals import store
from kvjax.programs.evals.standing import answered


@dataclasses.dataclass(frozen=True)
class Kept:
  """Rows of one method at one length with one budget.

  Attributes:
    length, budget: tokens; None: the method has no budget.
    values: their scores, of those that the full cache has if it has some.
    full: its mean over these; None where it has none.
  """

  length: int
  budget: int | None
  values: tuple[float, ...]
  full: float | None

  @property
  def share(self) -> float:
    """Its budget as a share of its length; 1 without one."""
    return (self.budget or self.length) / self.length

  @property
  def of_full(self) -> float | None:
    """The mean score over the full cache's; None where that is none."""
    return sum(self.values) / len(self.values) / self.full if self.full else None


class Rows:
  """The answers of an evaluation's folder; texts that were only followed are left out.

  Args:
    folder: of `kvjax.programs.evaluate`.
    tasks: whose rows; none: all.

  Attributes:
    model: whose rows, by name.
    cells: rows by length, method and budget.

  Raises:
    FileNotFoundError: there are no results.
    ValueError: they are damaged, or hold no answers, or none of a task.
  """

  def __init__(self, folder: pathlib.Path, tasks: Sequence[str] = ()):
    self.model: str = store.settings_of(folder)["model"]
    rows = [x for x in store.read(folder) if answered(x["also"]) and x["mode"] == "aware"]
    held = {row["task"] for row in rows}
    if missing := sorted(set(tasks) - held):
      raise ValueError(
        f"--tasks: found {', '.join(missing)}, expected some of: {', '.join(sorted(held))}"
      )
    rows = [row for row in rows if not tasks or row["task"] in tasks]
    if not rows:
      raise ValueError(f"{folder}: found no answers in the mode aware, expected some")
    self._full = {store.sample(row): row["score"] for row in rows if row["method"] == "full"}
    self.cells: dict[tuple[int, str, int | None], list[dict[str, Any]]]
    self.cells = collections.defaultdict(list)
    for row in rows:
      self.cells[row["length"], row["method"], row["budget"]].append(row)

  def lengths(self, length: int, most: int = 2) -> list[int]:
    """The lengths that have rows, nearest first by their logarithms; of two the longer."""
    held = sorted({at for at, _, _ in self.cells}, reverse=True)
    return sorted(held, key=lambda at: abs(math.log(at / length)))[:most]

  def nearest(self, method: str, at: int, share: float) -> Kept | None:
    """The rows of a method at one length whose budget is nearest to a share of it.

    Shares are compared by their logarithms. None: the method has no rows there.
    """
    mine = [budget for length, name, budget in self.cells if (length, name) == (at, method)]
    if not mine:
      return None
    budget = min(mine, key=lambda x: abs(math.log((x or at) / at / share)))
    rows = self.cells[at, method, budget]
    both = [row for row in rows if store.sample(row) in self._full]
    full = sum(self._full[store.sample(row)] for row in both) / len(both) if both else None
    return Kept(at, budget, tuple(row["score"] for row in both or rows), full)
