"""Standing of methods over several tasks: mean scores, and what they lose to the full cache."""

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from kvjax.programs.evals.stats import Estimate, estimate, mean_of, paired

FULL = "full"
Who = tuple[str, int | None]  # a method and its budget


def between(counts: Iterable[int]) -> str:
  """The least and the most of some numbers, in words."""
  few, many = min(listed := list(counts)), max(listed)
  return f"n = {few}" if few == many else f"n = {few} to {many}"


def answered(also: Iterable[str]) -> bool:
  """True if a row with such further means is scored by an answer, not by a text that is given."""
  return not {"kl", "bytes"}.intersection(also)


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
    gap: score less the full cache's, paired by prompt; None where score is.
    prompts: by task, those that its figures are of.
  """

  method: str
  budget: int | None
  tasks: dict[str, Estimate]
  kl: Estimate | None
  score: Estimate | None
  gap: Estimate | None
  prompts: dict[str, frozenset[str]]


@dataclasses.dataclass(frozen=True)
class Standings:
  """All methods at one length, in one mode.

  What is compared is compared on the prompts that everybody who has a mean has answered.

  Attributes:
    mode, length: of the rows.
    tasks: those whose mean is compared.
    weak: tasks that are left out, since the full cache does not solve them.
    counts: prompts of a task, the least and the most.
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
    """Prompts a task, in words."""
    return between(self.counts)

  @property
  def missing(self) -> list[Standing]:
    """Methods that are not compared: a task is missing, or most of its prompts."""
    return [one for one in self.by.values() if one.score is None]


def standings(rows: Iterable[dict[str, Any]], least: float = 0.0) -> list[Standings]:
  """By length and mode, "aware" first; lengths and modes without the full cache are left out.

  The tasks that are compared are those that most methods have done, of the ones in which the full
  cache scores at least `least`.

  Raises:
    ValueError: rows of one task and index are of different prompts.
  """
  places: dict[tuple[int, str], dict[Who, Cells]] = {}
  for row in rows:
    place = places.setdefault((row["length"], row["mode"]), {})
    mine = place.setdefault((row["method"], row["budget"]), {})
    mine.setdefault(row["task"], {})[prompt_of(row)] = row
  ordered = sorted(places, key=lambda named: (named[0], aware_first(named[1])))
  made = (_standings(*named, places[named], least) for named in ordered)
  return [one for one in made if one is not None]


Cells = dict[str, dict[str, dict[str, Any]]]  # rows by task and prompt


def prompt_of(row: dict[str, Any]) -> str:
  """The mark of a row's prompt; rows from before prompts were kept have their index."""
  return str(row.get("prompt", row["index"]))


def _standings(length: int, mode: str, place: dict[Who, Cells], least: float) -> Standings | None:
  if (FULL, None) not in place:
    return None
  whole = place[FULL, None]
  scored = [task for task in whole if answered(_also(whole[task]))]
  means = {task: statistics.fmean(r["score"] for r in whole[task].values()) for task in scored}
  weak = tuple(task for task, mean in means.items() if mean < least)
  solved = [task for task in scored if task not in weak]
  tasks = _common(solved, place)
  if not tasks:
    return None
  compared = {
    who: cells
    for who, cells in place.items()
    if all(2 * len(whole[x].keys() & cells.get(x, {})) >= len(whole[x]) for x in tasks)
  }
  shared = {task: _shared(task, compared, whole) for task in whole}
  counts = [len(shared[task]) for task in tasks]
  order = sorted(place, key=lambda who: who[0] != FULL)
  by = {who: _standing(who, place[who], whole, shared, tasks, who in compared) for who in order}
  return Standings(mode, length, tasks, weak, (min(counts), max(counts)), by)


def _also(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
  """Further means of a task's first row, which all of its rows have."""
  return next(iter(found.values()))["also"]


def _shared(task: str, compared: dict[Who, Cells], whole: Cells) -> frozenset[str]:
  """The prompts of a task that all have answered that are compared and have done it."""
  done = [frozenset(cells[task]) for cells in compared.values() if task in cells]
  return frozenset(whole[task]).intersection(*done)


def _common(solved: Sequence[str], place: dict[Who, Cells]) -> tuple[str, ...]:
  """The set of tasks that most methods have done, the larger one of two."""
  done = collections.Counter(
    frozenset(cells) & frozenset(solved) for who, cells in place.items() if who != (FULL, None)
  )
  del done[frozenset()]
  most = max(done, key=lambda tasks: (done[tasks], len(tasks)), default=frozenset(solved))
  return tuple(task for task in solved if task in most)


def _standing(
  who: Who,
  cells: Cells,
  whole: Cells,
  shared: dict[str, frozenset[str]],
  tasks: tuple[str, ...],
  compared: bool,
) -> Standing:
  """Its figures: of shared prompts if it is compared, else of all that it has."""
  prompts = {
    task: shared[task] if compared and task in shared else frozenset(cells[task]) for task in cells
  }
  listed = {task: sorted(prompts[task]) for task in cells if prompts[task]}
  estimates = {
    task: estimate([cells[task][prompt]["score"] for prompt in listed[task]])
    for task in listed
    if answered(_also(cells[task]))
  }
  score = gap = kl = None
  if compared:
    score = mean_of([estimates[task] for task in tasks])
    gap = mean_of(
      [
        paired([mine[x]["score"] - full[x]["score"] for x in sorted(prompts[task])])
        for task, mine, full in ((task, cells[task], whole[task]) for task in tasks)
      ]
    )
  for task in (task for task in listed if "kl" in _also(cells[task])):
    kl = estimate([cells[task][x]["also"]["kl"] for x in listed[task]], shares=False)
  return Standing(*who, estimates, kl, score, gap, prompts)
