"""Scores without costs: published figures, quality per byte, and SmolLM2's evaluation."""

import functools
from typing import Any

from kvjax.programs.evals import walks
from kvjax.programs.evals.standing import FULL, Standing, Standings, Who, standings
from scripts.tools.tablemakers import cells, real, scored
from scripts.tools.tablemakers.records import Figure, Number, Part
from scripts.tools.tablemakers.results import GPU, Results, Study

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
  rows, lines = results.rows(FOLDER), []
  for task, about in PUBLISHED.items():
    for whole in standings(row for row in rows if row["task"] == task):
      held = scored.Held.of(results, FOLDER)
      here = Figure(
        scored.percent(whole.full.tasks[task], ".1f"), held.records(whole, whole.full, task)
      )
      lines.append([f"`{task}`", *about, held.prompts(whole, whole.full, task), here])
  head = ("task", "setting", "published, %", "source", "n", "here, %")
  return cells.table(head, lines, labels=4)


def pairs(results: Results) -> Part:
  """Lost in the Middle's key-value retrieval: methods by what they find, full first."""
  rows = [r for r in results.rows(FOLDER) if r["task"].startswith("lost_in_the_middle_")]
  lines = []
  for task in dict.fromkeys(row["task"] for row in rows):
    for whole in standings(row for row in rows if row["task"] == task):
      held = scored.Held.of(results, FOLDER)
      row = functools.partial(_pair, held, whole, task)
      others = (one for one in whole.by.values() if one is not whole.full)
      lines += [row(whole.full), *held.ranked(whole, others, row)]
  return cells.table(("pairs", "method, budget", "n", "right, %", "less full"), lines, labels=2)


def _pair(held: scored.Held, whole: Standings, task: str, one: Standing) -> list[str]:
  row = [scored.called(one.method, one.budget), held.prompts(whole, one, task)]
  return [task.rsplit("_", 1)[1], *row, held.mean(whole, one), held.gap(whole, one)]


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
  held = scored.Held.of(results, real.FOLDER)
  rows = [row for row in results.rows(real.FOLDER) if _counts(row)]
  whole, shares = standings(rows)[0], _shares(rows)
  line = functools.partial(_line, held, whole, shares)
  lines = [["all", *line(whole.full)]]
  for label, (low, high) in SHARES.items():
    inside = [
      one
      for who, one in whole.by.items()
      if one.score and one is not whole.full and low <= shares[who] < high
    ]
    lines += [[label, *row] for row in held.ranked(whole, inside, line)[:BEST]]
  head = ("", "method, budget", "cache", *(f"`{task}`" for task in TASKS), "mean", "less full")
  return cells.table((*head, "KL, nats"), lines, labels=2)


def _counts(row: dict[str, Any]) -> bool:
  asked = row["task"] in (*TASKS, "kl") and not row["method"].startswith(real.WITHDRAWN)
  return asked and (row["length"], row["mode"]) == (LENGTH, "aware")


def _shares(rows: list[dict[str, Any]]) -> dict[Who, float]:
  """Bytes of a row's cache, measured, as a share of the full one's."""
  sums: dict[Who, list[int]] = {}
  for row in rows:
    sums.setdefault((row["method"], row["budget"]), []).append(row["cache_bytes"])
  means = {who: sum(found) / len(found) for who, found in sums.items()}
  return {who: size / means[FULL, None] for who, size in means.items()}


def _line(
  held: scored.Held, whole: Standings, shares: dict[Who, float], one: Standing
) -> list[str]:
  share = shares[one.method, one.budget]
  kept = cells.percent(Number(share, *held.records(whole, one, *TASKS)))
  row = [scored.called(one.method, one.budget), kept]
  return [*row, *(held.score(whole, one, task) for task in TASKS), *held.results(whole, one)]


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
Cell = tuple[str, int, str, int | None]  # task, length, method, budget


@functools.cache
def _summary(results: Results) -> tuple[Study, dict[Cell, int]]:
  """Cells of compression that has seen the question, and where each stands in the file."""
  held, settings = results.json(SUMMARY), results.json(SETTINGS)
  study = results.study(SUMMARY, card=settings["device"], n=1, setting=settings["model"])
  names = ("task", "length", "method", "budget")
  places = {tuple(x[name] for name in names): i for i, x in enumerate(held) if x["mode"] == "aware"}
  return study, places


def _number(results: Results, cell: Cell, *keys: str) -> Number:
  """A figure of one cell; no such cell is a `KeyError`."""
  study, places = _summary(results)
  task, length, method, budget = cell
  n, setting = study.get(places[cell], "score", "n"), f"{method}, {budget}, {task} at {length}"
  return study.number(places[cell], *keys, n=n, setting=setting)


def _score(results: Results, method: str, budget: int | None) -> Figure:
  score = _number(results, ("needle", 2048, method, budget), "score", "mean")
  return cells.number(100 * score, "{:.0f}")


def _kl(results: Results, method: str, budget: int | None) -> Figure:
  kl = _number(results, ("kl", 2048, method, budget), "also", "kl", "mean")
  return cells.number(kl, "{:.0f}" if kl == 0 else "{:.3f}" if kl >= 0.001 else "{:.4f}")


def needle(results: Results) -> Part:
  """Methods that do not run at the least budget have no figure there."""
  rows = []
  for method in METHODS:
    there = [("needle", 2048, method, n) in _summary(results)[1] for n in BUDGETS]
    row = [f"`{method}`"]
    for form in (_score, _kl):
      budgets = zip(BUDGETS, there, strict=True)
      row += [form(results, method, n) if ok else "–" for n, ok in budgets]
    rows.append(row)
  for method in _able(results, 2048):
    score, kl = _score(results, method, None), _kl(results, method, None)
    rows.append([f"`{method}`, which has no budget", "", "", score, "", "", kl])
  head = ("method", "needle 128", "256", "512", "KL 128", "256", "512")
  return cells.table(head, rows)


def _able(results: Results, length: int) -> list[str]:
  """Methods without a budget, but for those whose walks cannot end early at this length."""
  settings = results.json(SETTINGS)
  return [name for name in UNBOUNDED if not walks.too_short(name, None, length, settings)]


def ruler(results: Results) -> Part:
  """Percent, the mean of RULER's tasks."""
  named: list[tuple[str, str, int | None]] = [(f"`{name}`", name, None) for name in UNBOUNDED]
  named += [(f"`{name}`, {budget}", name, budget) for name in RULER for budget in (512, 256)]
  rows = []
  for label, method, budget in named:
    row: list[str] = [label]
    for length in LENGTHS:
      if budget is None and method not in _able(results, length):
        row.append("–")
        continue
      of = ((task, length, method, budget) for task in RULER_TASKS)
      found = [_number(results, cell, "score", "mean") for cell in of]
      row.append(cells.number(100 * sum(found) / len(found), "{:.1f}"))
    rows.append(row)
  return cells.table(("method, budget", *LENGTHS.values()), rows)


def figures(results: Results) -> dict[str, str]:
  """Contexts in which ART's walks are too short."""
  short = (f"T{words}" for n, words in LENGTHS.items() if ART not in _able(results, n))
  return {"short": " and ".join(short)}
