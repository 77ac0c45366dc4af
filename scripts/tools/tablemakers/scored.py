"""Figures of evaluations: scores and differences of methods, with their rows."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from kvjax.programs.evals import store
from kvjax.programs.evals.costs import Cost, Point
from kvjax.programs.evals.standing import Standing, Standings, standings
from kvjax.programs.evals.stats import Estimate
from scripts.tools.tablemakers import Figure, Named, Number, Record, Results, Row, cells, records
from scripts.tools.tablemakers.results import sourced

Cell = tuple[str, int, str, int | None]  # task, length, method, budget


@dataclasses.dataclass(frozen=True)
class View:
  """Methods at one length and mode; their figures lead to the rows of a folder.

  Attributes:
    whole: the standings.
    file: of the rows, below scripts/results.
    device: where they ran.
  """

  whole: Standings
  file: str
  device: str

  def records(self, one: Standing, *tasks: str) -> records.Records:
    """Of a method's figures in some tasks."""
    place = (("length", self.whole.length), ("mode", self.whole.mode))
    place += (("method", one.method), ("budget", one.budget))
    asked = ((task, one.prompts[task]) for task in tasks)
    return tuple(
      Record(self.file, (("task", task), *place), self.device, len(prompts), prompts)
      for task, prompts in asked
    )

  def score(self, one: Standing, task: str, form: str = ".0f") -> str | None:
    """Percent in a task, with its interval; None where it was not asked."""
    if task not in one.tasks:
      return None
    return Figure(percent(one.tasks[task], form), self.records(one, task))

  def mean(self, one: Standing) -> str | None:
    """Percent, the mean of the tasks that are compared."""
    return one.score and Figure(percent(one.score), self.records(one, *self.whole.tasks))

  def gap(self, one: Standing) -> str | None:
    """Points less than the full cache's on the same prompts; None for itself."""
    if one.gap is None or one is self.whole.full:
      return None
    both = (self.records(who, *self.whole.tasks) for who in (one, self.whole.full))
    mean, low, high = (f"{100 * x:+.0f}" for x in (one.gap.mean, one.gap.low, one.gap.high))
    return Figure(f"{mean} ({low} to {high})".replace("-", "−"), sum(both, ()))

  def kl(self, one: Standing) -> str | None:
    """Divergence from the full cache in nats."""
    if one.kl is None:
      return None
    return Figure("0" if one.kl.high == 0 else interval(one.kl, ".2g"), self.records(one, "kl"))

  def n(self, one: Standing, *tasks: str) -> Figure:
    """Prompts of each task, the least to the most."""
    there = [task for task in tasks if task in one.prompts]
    counts = (len(one.prompts[task]) for task in there)
    return Figure(cells.span(counts, "{}"), self.records(one, *there))

  def shown(self, one: Standing, tasks: Sequence[str]) -> Row:
    """Scores in tasks, their mean, its gap to the full cache's, and divergence."""
    found = {"method, budget": called(one)}
    found["n"] = self.n(one, *(tasks if one.score else one.tasks))
    for task in tasks:
      weak = ", not in the mean" if task in self.whole.weak else ""
      found[f"`{task}`{weak}"] = self.score(one, task)
    return found | {"mean": self.mean(one), "less full": self.gap(one), "KL, nats": self.kl(one)}

  def ranked(self, ones: Iterable[Standing], row: Callable[[Standing], Row]) -> list[Row]:
    """A row of each that has a mean, the largest first."""
    tasks = self.whole.tasks
    return cells.ranked(
      (Number(one.score.mean, *self.records(one, *tasks)), row(one)) for one in ones if one.score
    )


def views(
  results: Results, folder: str, wanted: Callable[[Row], bool], least: float = 0.0
) -> list[View]:
  """By length and mode, those of the rows that are wanted."""
  if not (found := standings(filter(wanted, results.rows(folder)), least)):
    return []
  path = results.folder / folder
  packed = store.PACKED if (path / store.PACKED).is_file() else store.ROWS
  device = store.settings_of(path)["device"]
  return [View(whole, f"{folder}/{packed}", device) for whole in found]


def summary(results: Results, path: str, card: str = "CPU") -> dict[Cell, Named]:
  """Cells of a file of means, of compression that has seen the question."""
  found: dict[Cell, Named] = {}
  for i, held in enumerate(results.json(path)):
    if held["mode"] == "aware":
      whole = Record(path, ("all",), card, held["score"]["n"])
      cell = (held["task"], held["length"], held["method"], held["budget"])
      found[cell] = sourced(held, whole, i)
  return found


def called(one: Standing | Cost | Point) -> str:
  """A method with its budget."""
  return f"`{one.method}`" if one.budget is None else f"`{one.method}`, {one.budget:,}"


def interval(found: Estimate, form: str, unit: float = 1) -> str:
  """A mean with its interval; zero has no sign."""
  mean, low, high = (f"{unit * x:z{form}}" for x in (found.mean, found.low, found.high))
  return f"{mean} ({low}–{high})"


def percent(found: Estimate, form: str = ".0f") -> str:
  return interval(found, form, 100)
