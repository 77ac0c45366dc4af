"""Figures of evaluations: scores, differences and costs of methods, each with its rows."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from kvjax.programs.evals import store
from kvjax.programs.evals.costs import Cost
from kvjax.programs.evals.standing import Standing, Standings
from kvjax.programs.evals.stats import Estimate
from scripts.tools.tablemakers import cells, records
from scripts.tools.tablemakers.records import NOTHING, Figure, Number, Record
from scripts.tools.tablemakers.results import Results, Timing

# What is fitted to data, where rows do not say it themselves.
FITTED = {
  "prr": "α, β, γ: on each prompt's own last tokens",
  "double_sparsity": "channels: on each prompt itself",
}


@dataclasses.dataclass(frozen=True)
class Held:
  """Rows of one folder, below scripts/results.

  Attributes:
    folder: it.
    rows: the name of its file of rows.
    device: where they ran.
  """

  folder: str
  rows: str
  device: str

  @classmethod
  def of(cls, results: Results, folder: str) -> "Held":
    """Those of a folder that has its settings; packed ones where it has them."""
    path = results.folder / folder
    packed = store.PACKED if (path / store.PACKED).is_file() else store.ROWS
    return cls(folder, packed, store.settings_of(path)["device"])

  def records(self, whole: Standings, one: Standing, *tasks: str) -> records.Records:
    """Of a method's figures in some tasks."""
    return tuple(self._record(whole, one, task) for task in tasks)

  def _record(self, whole: Standings, one: Standing, task: str) -> Record:
    place = (("task", task), ("length", whole.length), ("mode", whole.mode))
    place += (("method", one.method), ("budget", one.budget))
    prompts = one.prompts[task]
    fitted = one.fitted or FITTED.get(one.method.split(":")[0], NOTHING)
    setting = f"{one.settings}, {whole.length} tokens, {whole.mode}"
    file = f"{self.folder}/{self.rows}"
    return Record(file, place, self.device, len(prompts), setting, fitted, prompts)

  def score(self, whole: Standings, one: Standing, task: str) -> str:
    """Percent in a task, with its interval; a dash where it was not asked."""
    if task not in one.tasks:
      return "–"
    return Figure(percent(one.tasks[task]), self.records(whole, one, task))

  def mean(self, whole: Standings, one: Standing) -> str:
    """Percent, the mean of the tasks that are compared."""
    if one.score is None:
      return "–"
    return Figure(percent(one.score), self.records(whole, one, *whole.tasks))

  def value(self, whole: Standings, one: Standing) -> Number:
    """The same as a number to rank by."""
    assert one.score
    return Number(one.score.mean, *self.records(whole, one, *whole.tasks))

  def ranked(
    self, whole: Standings, ones: Iterable[Standing], row: Callable[[Standing], Sequence[str]]
  ) -> list[Sequence[str]]:
    """A row of each by their means, the largest first."""
    return cells.ranked((self.value(whole, one), row(one)) for one in ones)

  def gap(self, whole: Standings, one: Standing) -> str:
    """Points less than the full cache's on the same prompts; a dash for itself."""
    if one.gap is None or one is whole.full:
      return "–"
    full = self.records(whole, whole.full, *whole.tasks)
    return Figure(points(one.gap), (*self.records(whole, one, *whole.tasks), *full))

  def results(self, whole: Standings, one: Standing) -> list[str]:
    """Its mean, what that is less than the full cache's, and the divergence."""
    return [self.mean(whole, one), self.gap(whole, one), self.divergence(whole, one)]

  def prompts(self, whole: Standings, one: Standing, *tasks: str) -> Figure:
    """Of each task, the least to the most."""
    counts = sorted({len(one.prompts[task]) for task in tasks if task in one.prompts})
    text = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    there = [task for task in tasks if task in one.prompts]
    return Figure(text, self.records(whole, one, *there))

  def divergence(self, whole: Standings, one: Standing) -> str:
    """KL from the full cache in nats."""
    if one.kl is None:
      return "–"
    return Figure(nats(one.kl), self.records(whole, one, "kl"))


def by_budget(whole: Standings) -> list[list[Standing]]:
  """Methods that have a score, by their budgets from the least on."""
  ones = [one for one in whole.by.values() if one.budget and one.score]
  budgets = sorted({one.budget for one in ones if one.budget})
  return [[one for one in ones if one.budget == budget] for budget in budgets]


def called(method: str, budget: int | None) -> str:
  return f"`{method}`" if budget is None else f"`{method}`, {budget:,}"


def interval(mean: float, low: float, high: float, form: str, unit: float = 1) -> str:
  """A mean with its interval."""
  mean, low, high = unit * mean, unit * low, unit * high
  return f"{mean:z{form}} ({low:z{form}}–{high:z{form}})"  # z: zero has no sign


def percent(found: Estimate, form: str = ".0f") -> str:
  return interval(found.mean, found.low, found.high, form, 100)


def points(gap: Estimate) -> str:
  """A difference in points of percent."""
  mean, low, high = (cells.signed(100 * x, 0) for x in (gap.mean, gap.low, gap.high))
  return f"{mean} ({low} to {high})"


def nats(kl: Estimate) -> str:
  return "0" if kl.high == 0 else interval(kl.mean, kl.low, kl.high, ".2g")


# ---- costs


def timed(cost: Cost, folder: str, device: str) -> Timing:
  """A step of a method, with its line of speed.jsonl."""
  names = ("method", "budget", "length", "batch")
  place = tuple((name, getattr(cost, name)) for name in names)
  setting = f"{cost.settings}, {cost.length} tokens, batch {cost.batch}"
  fitted = FITTED.get(cost.method.split(":")[0], NOTHING)
  record = Record(f"{folder}/speed.jsonl", place, device, cost.times, setting, fitted)
  return Timing(f"`{cost.method}`", Number(cost.us, record), cost.low, cost.high)
