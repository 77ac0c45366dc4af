"""Evaluations of SmolLM2: one needle, divergence, RULER."""

import dataclasses

from kvjax.programs.evals import walks
from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.records import Figure, Number, Part
from scripts.tools.tablemakers.results import GPU, Results, Study

SUMMARY = f"{GPU}/evaluation/summary.json"
BUDGETS = (128, 256, 512)
METHODS = (
  *("topk_oracle", "cis", "hshare", "prr", "quest", "infllm_v2", "double_sparsity"),
  *("cpe", "cpe:kv=previous", "psaw", "etf", "etf:kv=previous", "infllm", "tova", "r_kv"),
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
RULER = ("prr", "cpe", "streaming_llm", "longflow")

SETTINGS = f"{GPU}/evaluation/settings.json"


@dataclasses.dataclass(frozen=True)
class Summary:
  """Cells of compression that has seen the question, and where each stands in the file."""

  study: Study
  places: dict[tuple[str, int, str, int | None], int]

  def number(self, task: str, length: int, method: str, budget: int | None, *keys: str) -> Number:
    """A figure of one cell.

    Raises:
      ValueError: there is no such cell.
    """
    if (named := (task, length, method, budget)) not in self.places:
      raise ValueError(f"{SUMMARY}: found no cell of task, length, method and budget {named}")
    at = self.places[named]
    n, setting = self.study.get(at, "score", "n"), f"{method}, {budget}, {task} at {length}"
    return self.study.number(at, *keys, n=n, setting=setting)


def summary(results: Results) -> Summary:
  held, settings = results.json(SUMMARY), results.json(SETTINGS)
  study = results.study(SUMMARY, card=settings["device"], n=1, setting=settings["model"])
  names = ("task", "length", "method", "budget")
  places = {tuple(x[name] for name in names): i for i, x in enumerate(held) if x["mode"] == "aware"}
  return Summary(study, places)


def _score(held: Summary, method: str, budget: int | None) -> Figure:
  score = held.number("needle", 2048, method, budget, "score", "mean")
  return cells.worked_out(100 * score, "{:.0f}", score)


def _kl(held: Summary, method: str, budget: int | None) -> Figure:
  kl = held.number("kl", 2048, method, budget, "also", "kl", "mean")
  return cells.number(kl, "{:.0f}" if kl == 0 else "{:.3f}" if kl >= 0.001 else "{:.4f}")


def needle(results: Results) -> Part:
  """Methods that do not run at the least budget have no figure there."""
  held = summary(results)
  rows = []
  for method in METHODS:
    least = BUDGETS if ("needle", 2048, method, BUDGETS[0]) in held.places else BUDGETS[1:]
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


def walked(results: Results) -> Part:
  """Where ART's walks are too short."""
  short = [f"T{n >> 10}K" for n in LENGTHS if ART not in _able(results, n)]
  return cells.sentence(
    f"`{ART}` has no figures at {' and '.join(short)}: no walk can end early there, and it reads "
    "what the full cache reads (`scripts/results/cpu/art_visits` has what it visits)."
  )


def mean(held: Summary, length: int, method: str, budget: int | None) -> Figure:
  """Percent, the mean of RULER's tasks."""
  scores = [held.number(task, length, method, budget, "score", "mean") for task in TASKS]
  return cells.worked_out(100 * sum(scores) / len(scores), "{:.1f}", *scores)


def ruler(results: Results) -> Part:
  held = summary(results)
  named: list[tuple[str, str, int | None]] = [(f"`{name}`", name, None) for name in UNBOUNDED]
  named += [(f"`{name}`, {budget}", name, budget) for name in RULER for budget in (512, 256)]
  rows = []
  for label, method, budget in named:
    able = [budget is not None or method in _able(results, length) for length in LENGTHS]
    scores = [
      mean(held, length, method, budget) if ok else "–"
      for ok, length in zip(able, LENGTHS, strict=True)
    ]
    rows.append([label, *scores])
  return cells.table(("method, budget", "1K", "2K", "4K"), rows)
