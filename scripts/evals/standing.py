"""How methods stand over several tasks: mean scores, and what they lose to the full cache."""

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from .stats import Estimate, estimate, mean_of

FULL = "full"
Who = tuple[str, int | None]  # a method and its budget


def aware_first(mode: str) -> tuple[bool, str]:
  """A key to sort modes by."""
  return mode != "aware", mode


@dataclasses.dataclass(frozen=True)
class Standing:
  """A method with one budget.

  Attributes:
    tasks: score by task, of all tasks that it has done.
    kl: divergence from the full cache in nats, where it was measured.
    score: mean of the tasks that are compared; None where one of them is not done.
    gap: score less the full cache's on the same rows; None where score is.
  """

  method: str
  budget: int | None
  tasks: dict[str, Estimate]
  kl: Estimate | None
  score: Estimate | None
  gap: Estimate | None


@dataclasses.dataclass(frozen=True)
class Standings:
  """All methods at one length, in one mode.

  Attributes:
    mode, length: of the rows.
    tasks: those whose mean is compared.
    weak: tasks that are left out, since the full cache does not solve them.
    counts: rows of a method on one of the tasks, the least and the most.
    by: every method with each budget, the full cache first.
  """

  mode: str
  length: int
  tasks: tuple[str, ...]
  weak: tuple[str, ...]
  counts: tuple[int, int]
  by: dict[Who, Standing]

  @property
  def full(self) -> Standing:
    return self.by[FULL, None]

  @property
  def n(self) -> str:
    """Rows a task, in words."""
    few, many = self.counts
    return f"n = {few}" if few == many else f"n = {few} to {many}"

  @property
  def missing(self) -> list[Standing]:
    """Methods that have not done every task."""
    return [one for one in self.by.values() if one.score is None]


def standings(rows: Iterable[dict[str, Any]], least: float = 0.0) -> list[Standings]:
  """By length and mode, "aware" first; lengths and modes without the full cache are left out.

  The tasks that are compared are those that most methods have done, of the ones in which the full
  cache scores at least `least`.
  """
  cells: dict[tuple[int, str], dict[Who, dict[str, dict[int, dict[str, Any]]]]] = {}
  for row in rows:
    place = cells.setdefault((row["length"], row["mode"]), {})
    mine = place.setdefault((row["method"], row["budget"]), {})
    mine.setdefault(row["task"], {})[row["index"]] = row
  ordered = sorted(cells, key=lambda named: (named[0], aware_first(named[1])))
  made = (_standings(*named, cells[named], least) for named in ordered)
  return [one for one in made if one is not None]


Cells = dict[str, dict[int, dict[str, Any]]]  # rows by task and index


def _standings(length: int, mode: str, place: dict[Who, Cells], least: float) -> Standings | None:
  if (FULL, None) not in place:
    return None
  answered = {
    who: {task: _scores(by_index) for task, by_index in cells.items() if not _followed(by_index)}
    for who, cells in place.items()
  }
  whole = answered[FULL, None]
  weak = tuple(task for task, found in whole.items() if statistics.fmean(found.values()) < least)
  solved = [task for task in whole if task not in weak]
  tasks = _common(solved, answered)
  if not tasks:
    return None
  compared = [found for found in answered.values() if found.keys() >= set(tasks)]
  counts = [len(found[task]) for found in compared for task in tasks]
  order = sorted(place, key=lambda who: who[0] != FULL)
  by = {who: _standing(who, place[who], answered[who], whole, tasks) for who in order}
  return Standings(mode, length, tasks, weak, (min(counts), max(counts)), by)


def _followed(by_index: dict[int, dict[str, Any]]) -> bool:
  """Whether a task follows a given text, and has no answers."""
  return "kl" in next(iter(by_index.values()))["also"]


def _scores(by_index: dict[int, dict[str, Any]]) -> dict[int, float]:
  return {index: row["score"] for index, row in by_index.items()}


def _common(solved: Sequence[str], answered: dict[Who, dict[str, Any]]) -> tuple[str, ...]:
  """The set of tasks that most methods have done, the larger one of two."""
  done = collections.Counter(
    frozenset(found) & frozenset(solved) for who, found in answered.items() if who != (FULL, None)
  )
  del done[frozenset()]
  most = max(done, key=lambda tasks: (done[tasks], len(tasks)), default=frozenset(solved))
  return tuple(task for task in solved if task in most)


def _standing(
  who: Who,
  cells: Cells,
  answered: dict[str, dict[int, float]],
  whole: dict[str, dict[int, float]],
  tasks: tuple[str, ...],
) -> Standing:
  estimates = {task: estimate(list(found.values())) for task, found in answered.items()}
  score = gap = None
  if all(answered.get(task, {}).keys() & whole[task].keys() for task in tasks):
    score = mean_of([estimates[task] for task in tasks])
    gap = mean_of([_gap(answered[task], whole[task]) for task in tasks])
  followed = next((found for found in cells.values() if _followed(found)), None)
  kl = None
  if followed:
    kl = estimate([row["also"]["kl"] for row in followed.values()], shares=False)
  return Standing(*who, estimates, kl, score, gap)


def _gap(mine: dict[int, float], whole: dict[int, float]) -> Estimate:
  """The mean of the differences between rows of the same prompt."""
  both = sorted(mine.keys() & whole.keys())
  return estimate([mine[i] - whole[i] for i in both], shares=False)
