"""A real model's full cache beside published figures, and methods on published prompts."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from kvjax.programs.evals import store
from kvjax.programs.evals.standing import Standings, standings
from scripts.tools.tablemakers import cells, real, scored
from scripts.tools.tablemakers.records import Figure, Part
from scripts.tools.tablemakers.results import GPU, Results

FOLDER = f"{GPU}/published"
_REPORT = "Qwen2.5-Coder's report (arXiv 2409.12186)"


@dataclasses.dataclass(frozen=True)
class Published:
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
  Published(
    "humaneval",
    "chat, no examples, greedy",
    "70.7",
    f"{_REPORT}, Table 16: its own system message, EvalPlus's inputs",
  ),
  Published("cruxeval_o", "one worked example, greedy", "37.5", f"{_REPORT}, Table 18: Output-CoT"),
  Published(
    "gsm8k_chat",
    "chat, no examples, greedy",
    "65.8 (the base model)",
    f"{_REPORT}, Table 12: four examples; none for the instructed model",
  ),
  Published(
    "lost_in_the_middle_140",
    "chat, five places, greedy",
    "91.8 (MPT-30B-Instruct), 53.0 (LongChat-13B-16K)",
    "EXPERIMENTS.md of nelson-liu/lost-in-the-middle, mean of its five places, 500 rows each",
  ),
)


def table(results: Results) -> Part:
  """The full cache's scores with their 95 % intervals, each beside what was published."""
  lines = []
  for figure in FIGURES:
    for whole in standings(row for row in _rows(results) if row["task"] == figure.task):
      held = _held(results)
      text = scored.tenths(whole.full.tasks[figure.task])
      here = Figure(text, held.records(whole, whole.full, figure.task))
      n = held.prompts(whole, whole.full, figure.task)
      lines.append([f"`{figure.task}`", figure.setting, figure.value, figure.source, n, here])
  head = ("task", "setting", "published, %", "source", "n", "here, %")
  return cells.table(head, lines, labels=4) if lines else Part()


def pairs(results: Results) -> Part:
  """Lost in the Middle's key-value retrieval: methods by what they find, full first."""
  rows = [row for row in _rows(results) if row["task"].startswith("lost_in_the_middle_")]
  lines = []
  for task in dict.fromkeys(row["task"] for row in rows):
    for whole in standings(row for row in rows if row["task"] == task):
      lines += _pairs(_held(results), whole, task)
  head = ("pairs", "method, budget", "n", "right, %", "less full")
  return cells.table(head, lines, labels=2) if lines else Part()


def _pairs(held: scored.Held, whole: Standings, task: str) -> Sequence[Sequence[str]]:
  keys, rows = task.rsplit("_", 1)[1], []
  for one in whole.by.values():
    less = "–" if one is whole.full else held.gap(whole, one)
    row = [keys, real.called(one.method, one.budget), held.prompts(whole, one, task)]
    rows.append((held.value(whole, one), [*row, held.mean(whole, one), less]))
  return [rows[0][1], *cells.ranked(rows[1:])]


def _held(results: Results) -> scored.Held:
  folder = results.folder / FOLDER
  packed = store.PACKED if (folder / store.PACKED).is_file() else store.ROWS
  return scored.Held(FOLDER, packed, store.settings_of(folder)["device"])


def _rows(results: Results) -> list[dict[str, Any]]:
  folder = results.folder / FOLDER
  return results.rows(FOLDER) if folder.is_dir() else []
