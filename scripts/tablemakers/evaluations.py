"""Evaluations of SmolLM2: one needle, divergence, RULER."""

from collections.abc import Sequence
from typing import Any

from ..evals import walks
from . import cells
from .results import GPU, Results

SUMMARY = f"{GPU}/evaluation/summary.json"
BUDGETS = (128, 256, 512)
METHODS = (
  *("topk_oracle", "cis", "hshare", "prr", "quest", "infllm_v2", "double_sparsity"),
  *("cpe", "cpe:kv=previous", "psaw", "etf", "etf:kv=previous", "infllm", "ltri", "tova", "r_kv"),
  *("streaming_llm", "lm_infinite", "h2o", "vatp", "longflow", "snapkv", "pyramidkv", "random"),
)
ART = "art:splits=fill"  # as many walks as fill the GPU
UNBOUNDED = ("full", ART)
# In these the full cache reaches half at 1K and 2K.
TASKS = (
  *("niah_single_1", "niah_single_2", "niah_single_3"),
  *("niah_multikey_1", "niah_multivalue", "niah_multiquery"),
)
LENGTHS = (1024, 2048, 4096)
RULER = ("prr", "cpe", "streaming_llm", "ltri", "longflow")

SETTINGS = f"{GPU}/evaluation/settings.json"

Cells = dict[tuple[str, int, str, int | None], dict[str, Any]]


def cells_of(results: Results) -> Cells:
  """The summary's cells, of compression that has seen the question."""
  return {
    (cell["task"], cell["length"], cell["method"], cell["budget"]): cell
    for cell in results.json(SUMMARY)
    if cell["mode"] == "aware"
  }


def _cell(held: Cells, task: str, length: int, method: str, budget: int | None) -> dict[str, Any]:
  if (named := (task, length, method, budget)) not in held:
    raise ValueError(f"{SUMMARY}: found no cell of task, length, method and budget {named}")
  return held[named]


def _score(held: Cells, method: str, budget: int | None) -> str:
  return f"{100 * _cell(held, 'needle', 2048, method, budget)['score']['mean']:.0f}"


def _kl(held: Cells, method: str, budget: int | None) -> str:
  kl = _cell(held, "kl", 2048, method, budget)["also"]["kl"]["mean"]
  return "0" if kl == 0 else f"{kl:.3f}" if kl >= 0.001 else f"{kl:.4f}"


def needle(results: Results) -> list[str]:
  """Methods that do not run at the least budget have no figure there."""
  held = cells_of(results)
  rows = []
  for method in METHODS:
    least = BUDGETS if ("needle", 2048, method, BUDGETS[0]) in held else BUDGETS[1:]
    missing = ["–"] * (len(BUDGETS) - len(least))
    scores, kls = ([form(held, method, n) for n in least] for form in (_score, _kl))
    rows.append([f"`{method}`", *missing, *scores, *missing, *kls])
  for method in _able(results, 2048):
    score, kl = _score(held, method, None), _kl(held, method, None)
    rows.append([f"`{method}`, which has no budget", "", "", score, "", "", kl])
  head = ("method", "needle 128", "256", "512", "KL 128", "256", "512")
  return cells.table(head, rows)


def _able(results: Results, length: int) -> list[str]:
  """Methods without a budget, but for those whose walks cannot end early at this length."""
  settings = results.json(SETTINGS)
  return [name for name in UNBOUNDED if not walks.too_short(name, None, length, settings)]


def walked(results: Results) -> list[str]:
  """Where ART's walks are too short."""
  short = [f"{n:,}" for n in LENGTHS if ART not in _able(results, n)]
  return cells.sentence(
    f"`{ART}` has no figures at {' and '.join(short)} tokens: no walk can end early there, and it "
    "reads what the full cache reads (`scripts/results/cpu/art_visits` has what it visits)."
  )


def mean(held: Cells, tasks: Sequence[str], length: int, method: str, budget: int | None) -> str:
  """Percent, the mean of some tasks."""
  scores = [_cell(held, task, length, method, budget)["score"]["mean"] for task in tasks]
  return f"{100 * sum(scores) / len(scores):.1f}"


def ruler(results: Results) -> list[str]:
  held = cells_of(results)
  named: list[tuple[str, str, int | None]] = [(f"`{name}`", name, None) for name in UNBOUNDED]
  named += [(f"`{name}`, {budget}", name, budget) for name in RULER for budget in (512, 256)]
  rows = []
  for label, method, budget in named:
    able = [budget is not None or method in _able(results, length) for length in LENGTHS]
    scores = [
      mean(held, TASKS, length, method, budget) if ok else "–"
      for ok, length in zip(able, LENGTHS, strict=True)
    ]
    rows.append([label, *scores])
  return cells.table(("method, budget", "1K", "2K", "4K"), rows)
