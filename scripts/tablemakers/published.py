"""A real model's full cache beside published figures, and methods on published prompts."""

import dataclasses
from typing import Any

from ..evals import store
from ..evals.standing import FULL, standings
from ..evals.stats import estimate
from . import cells, real
from .results import GPU, Results

FOLDER = f"{GPU}/published"
_REPORT = "Qwen2.5-Coder's report (arXiv 2409.12186)"


@dataclasses.dataclass(frozen=True)
class Figure:
  """What was published.

  Attributes:
    task: whose rows are held against it.
    setting: how it is asked here.
    value: the figure, in percent; with its model where that is another one.
    source: where it stands, and in what its setting differs.
  """

  task: str
  setting: str
  value: str
  source: str


FIGURES = (
  Figure(
    "humaneval",
    "chat, no examples, greedy",
    "70.7",
    f"{_REPORT}, Table 16: its own system message, EvalPlus's inputs",
  ),
  Figure("cruxeval_o", "one worked example, greedy", "37.5", f"{_REPORT}, Table 18: Output-CoT"),
  Figure(
    "gsm8k_chat",
    "chat, no examples, greedy",
    "65.8 (the base model)",
    f"{_REPORT}, Table 12: four examples; none for the instructed model",
  ),
  Figure(
    "lost_in_the_middle_140",
    "chat, five places, greedy",
    "91.8 (MPT-30B-Instruct), 53.0 (LongChat-13B-16K)",
    "EXPERIMENTS.md of nelson-liu/lost-in-the-middle, mean of its five places, 500 rows each",
  ),
)


def table(results: Results) -> list[str]:
  """The full cache's scores with their 95 % intervals, each beside what was published."""
  whole = [row for row in _rows(results) if row["method"] == FULL]
  lines = []
  for figure in FIGURES:
    scores = [row["score"] for row in whole if row["task"] == figure.task]
    if scores:
      found = estimate(scores)
      mean, low, high = (f"{100 * x:.1f}" for x in (found.mean, found.low, found.high))
      here = f"{mean} ({low}–{high})"
      name = f"`{figure.task}`"
      lines.append([name, figure.setting, str(found.n), here, figure.value, figure.source])
  head = ("task", "setting", "n", "here, %", "published, %", "source")
  return cells.table(head, lines) if lines else []


def pairs(results: Results) -> list[str]:
  """Lost in the Middle's key-value retrieval: methods by what they find, full first."""
  rows = [row for row in _rows(results) if row["task"].startswith("lost_in_the_middle_")]
  lines = []
  for found in standings(rows):
    ranked = sorted(found.by.values(), key=lambda one: (one is not found.full, -real.mean(one)))
    for one in ranked:
      (task,) = one.tasks
      score, gap = real.percent(one.tasks[task]), real.points(one.gap) if one.gap else "–"
      keys = task.rsplit("_", 1)[1]
      lines.append([keys, real.called(one.method, one.budget), str(one.tasks[task].n), score, gap])
  head = ("pairs", "method, budget", "n", "right, %", "less full")
  return cells.table(head, lines) if lines else []


def _rows(results: Results) -> list[dict[str, Any]]:
  folder = results.folder / FOLDER
  return store.read(folder) if folder.is_dir() else []
