"""Scores without costs: published figures, quality per byte, and SmolLM2's evaluation."""

from collections.abc import Sequence
from typing import Any

from kvjax.programs.evals import walks
from kvjax.programs.evals.standing import FULL, Standing
from scripts.tools.tablemakers import cells, real
from scripts.tools.tablemakers.cells import say
from scripts.tools.tablemakers.records import Number, Part
from scripts.tools.tablemakers.results import GPU, Results, Study
from scripts.tools.tablemakers.scored import Cell, View, called, of_task, summary, views

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
BUDGETS = (128, 256, 512)
METHODS = (
  *("topk_oracle", "cis", "hshare", "prr", "quest", "infllm_v2", "double_sparsity"),
  *("cpe", "cpe:kv=previous", "psaw", "etf", "etf:kv=previous", "infllm", "tova", "r_kv"),
  *("streaming_llm", "lm_infinite", "h2o", "vatp", "longflow", "snapkv", "pyramidkv", "random"),
)
ART = "art:splits=fill"  # as many walks as fill the GPU
UNBOUNDED = ("full", ART)
# In these the full cache reaches half at 1K and 2K.
RULER_TASKS = (
  *("niah_single_1", "niah_single_2", "niah_single_3"),
  *("niah_multikey_1", "niah_multivalue", "niah_multiquery"),
)
LENGTHS = {1024: "1K", 2048: "2K", 4096: "4K"}
RULER = ("prr", "cpe", "streaming_llm", "longflow")


def _able(results: Results, length: int) -> list[str]:
  """Methods without a budget, but for those whose walks cannot end early at this length."""
  settings = results.json(SETTINGS)
  return [name for name in UNBOUNDED if not walks.too_short(name, None, length, settings)]


def _summary(results: Results) -> dict[Cell, Study]:
  settings = results.json(SETTINGS)
  return summary(results, SUMMARY, settings["model"], settings["device"])


def needle(results: Results) -> Part:
  """Methods that do not run at the least budget have no figure there."""
  held = _summary(results)

  def score(method: str, budget: int | None) -> str | None:
    cell = held.get(("needle", 2048, method, budget))
    return cell and say("{:.0f}", 100 * cell["score"]["mean"])

  def kl(method: str, budget: int | None) -> str | None:
    if (cell := held.get(("kl", 2048, method, budget))) is None:
      return None
    mean = cell["also"]["kl"]["mean"]
    return say("{:.0f}" if mean == 0 else "{:.3f}" if mean >= 0.001 else "{:.4f}", mean)

  rows = [
    [f"`{name}`", *(form(name, budget) for form in (score, kl) for budget in BUDGETS)]
    for name in METHODS
  ]
  for name in _able(results, 2048):
    found = ["", "", score(name, None), "", "", kl(name, None)]
    rows.append([f"`{name}`, which has no budget", *found])
  head = ("method", "needle 128", "256", "512", "KL 128", "256", "512")
  return cells.table(head, rows)


def ruler(results: Results) -> Part:
  """Percent, the mean of RULER's tasks."""
  held, rows = _summary(results), []
  named: list[tuple[str, int | None]] = [(name, None) for name in UNBOUNDED]
  named += [(name, budget) for name in RULER for budget in (512, 256)]
  for method, budget in named:
    row: list[Any] = [f"`{method}`" if budget is None else f"`{method}`, {budget}"]
    for length in LENGTHS:
      able = budget or method in _able(results, length)
      found = [held[task, length, method, budget] for task in RULER_TASKS if able]
      row.append(100 * sum(x["score"]["mean"] for x in found) / len(found) if found else None)
    rows.append(row)
  return cells.table(("method, budget", *((n, "{:.1f}") for n in LENGTHS.values())), rows)


def figures(results: Results) -> dict[str, str]:
  """Contexts in which ART's walks are too short."""
  short = (f"T{words}" for n, words in LENGTHS.items() if ART not in _able(results, n))
  return {"short": " and ".join(short)}
