"""Scores without costs: published figures, quality per byte, and SmolLM2's evaluation."""

from collections.abc import Sequence
from typing import Any

from kvjax.programs.evals import walks
from kvjax.programs.evals.standing import FULL, Standing
from scripts.tools.tablemakers import cells, real
from scripts.tools.tablemakers.records import Number, Part
from scripts.tools.tablemakers.results import GPU, Results
from scripts.tools.tablemakers.scored import View, called, of_task, summary, views

# ---- a real model's full cache beside published figures, and methods on published prompts

FOLDER = f"{GPU}/published"
_REPORT = "Qwen2.5-Coder's report (arXiv 2409.12186)"
# By task: how it is asked here; the published figure in percent, with its model where that is
# another one; where it stands, and in what its setting differs.
PUBLISHED = {
  "humaneval": (
    "chat, no examples, greedy",
    "70.7",
    f"{_REPORT}, Table 16: its own system message, EvalPlus's inputs",
  ),
  "cruxeval_o": ("one worked example, greedy", "37.5", f"{_REPORT}, Table 18: Output-CoT"),
  "gsm8k_chat": (
    "chat, no examples, greedy",
    "65.8 (the base model)",
    f"{_REPORT}, Table 12: four examples; none for the instructed model",
  ),
  "lost_in_the_middle_140": (
    "chat, five places, greedy",
    "91.8 (MPT-30B-Instruct), 53.0 (LongChat-13B-16K)",
    "EXPERIMENTS.md of nelson-liu/lost-in-the-middle, mean of its five places, 500 rows each",
  ),
}


def published(results: Results) -> Part:
  """The full cache's scores with their 95 % intervals, each beside what was published."""
  lines = [
    [f"`{task}`", *about, view.n(view.whole.full, task), view.score(view.whole.full, task, ".1f")]
    for task, about in PUBLISHED.items()
    for view in of_task(results, FOLDER, task)
  ]
  head = ("task", "setting", "published, %", "source", "n", "here, %")
  return cells.table(head, lines, labels=4)


def pairs(results: Results) -> Part:
  """Lost in the Middle's key-value retrieval: methods by what they find, full first."""
  lines = []
  for task in dict.fromkeys(row["task"] for row in results.rows(FOLDER)):
    if task.startswith("lost_in_the_middle_"):
      lines += [line for view in of_task(results, FOLDER, task) for line in _pairs(view, task)]
  return cells.table(("pairs", "method, budget", "n", "right, %", "less full"), lines, labels=2)


def _pairs(view: View, task: str) -> list[Sequence[Any]]:
  def row(one: Standing) -> list[Any]:
    name = task.removeprefix("lost_in_the_middle_")
    return [name, called(one), view.n(one, task), view.mean(one), view.gap(one)]

  full, *others = view.whole.by.values()
  return [row(full), *view.ranked(others, row)]


# ---- quality per byte: what cuts, what rounds, and both, beside each other

TASKS = ("needle", "niah_multikey_1", "niah_multivalue")
LENGTH = 8192
# Shares of the full cache's bytes, each with what is nearest to it.
SHARES = {
  "a half": (0.4, 0.6),
  "a quarter": (0.2, 0.4),
  "an eighth": (0.1, 0.2),
  "a sixteenth": (0.0, 0.1),
}
BEST = 3  # of each share, the best by score; others of it are in the summary


def per_byte(results: Results) -> Part:
  """Of each share of the bytes, the methods that find most; the full cache first."""
  (view,) = views(results, real.FOLDER, _counts)
  sizes = real.cache_bytes(filter(_counts, results.rows(real.FOLDER)))
  shares = {who: size / sizes[FULL, None] for who, size in sizes.items()}

  def row(one: Standing) -> list[Any]:
    share = Number(shares[one.method, one.budget], *view.records(one, *TASKS))
    found = (view.score(one, task) for task in TASKS)
    return [called(one), share, *found, view.mean(one), view.gap(one), view.kl(one)]

  full, *others = view.whole.by.values()
  lines = [["all", *row(full)]]
  for label, (low, high) in SHARES.items():
    inside = (one for one in others if low <= shares[one.method, one.budget] < high)
    lines += [[label, *found] for found in view.ranked(inside, row)[:BEST]]
  head = ["", "method, budget", ("cache", "{:.0%}"), *(f"`{task}`" for task in TASKS)]
  return cells.table([*head, "mean", "less full", "KL, nats"], lines, labels=2)


def _counts(row: dict[str, Any]) -> bool:
  """True of the rows that are compared."""
  asked = row["task"] in (*TASKS, "kl") and not row["method"].startswith(real.WITHDRAWN)
  return asked and (row["length"], row["mode"]) == (LENGTH, "aware")


# ---- SmolLM2: one needle, divergence, RULER

SUMMARY, SETTINGS = (f"{GPU}/evaluation/{name}.json" for name in ("summary", "settings"))
# In these the full cache reaches half at 1K and 2K.
RULER = (
  *("niah_single_1", "niah_single_2", "niah_single_3"),
  *("niah_multikey_1", "niah_multivalue", "niah_multiquery"),
)


def smollm2(results: Results) -> Part:
  """A needle and divergence at 2K, and percent, the mean of RULER's tasks, by length.

  Methods whose walks cannot end early at a length have no figure there, nor those that were not
  asked.
  """
  settings = results.json(SETTINGS)
  held = summary(results, SUMMARY, settings["model"], settings["device"])

  def mean(tasks: Sequence[str], length: int, who: tuple[str, int | None]) -> Number | None:
    found = [held.get((task, length, *who)) for task in tasks]
    if None in found or walks.too_short(*who, length, settings):
      return None
    return 100 * sum(cell["score"]["mean"] for cell in found) / len(found)

  rows = []
  for who in dict.fromkeys(cell[2:] for cell in held if not cell[2].startswith("ltri")):
    kl = None if walks.too_short(*who, 2048, settings) else held.get(("kl", 2048, *who))
    row = [mean(("needle",), 2048, who), kl and kl["also"]["kl"]["mean"]]
    row += [mean(RULER, length, who) for length in (1024, 2048, 4096)]
    rows.append([str(who[1] or "–"), f"`{who[0]}`", *row])
  rows.sort(key=lambda row: (row[0] != "–", row[0], -(row[2] or 0)))
  head = ("budget", "method", ("needle", "{:.0f}"), ("KL, nats", "{:.4f}"))
  ruler = [(f"RULER at {n}K", "{:.1f}") for n in (1, 2, 4)]
  return cells.table((*head, *ruler), rows, labels=2)
