"""kvpress and kvjax on the same prompts: what both keep and find, and KVzip by its division."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from kvjax.programs.evals import kept, store
from kvjax.programs.evals.standing import Standing
from scripts.tools.tablemakers import cells, scored
from scripts.tools.tablemakers.cells import say
from scripts.tools.tablemakers.records import Figure, Part, Record
from scripts.tools.tablemakers.results import GPU, Results
from scripts.tools.tablemakers.timings import ends

FOLDER, KVZIP, LONGER = "cpu/kvpress", "cpu/kvzip", f"{GPU}/kvzip_8K"
LIMITS = "limits.json"
MODES = {"aware": "before the cut", "agnostic": "after it"}
OURS = {"head": "to every head alike", "layer": "in each layer", "all": "among all layers"}
DIVIDED = {
  **OURS,
  "one": "alike, and one layer whole",
  "without": "among all layers, but that one alike",
}

Mean = dict[str, Any]  # of a cell: its figures, its settings, and under "record" where it stands


@functools.cache
def found(results: Results, folder: str) -> list[tuple[dict[str, Any], list[dict], list[Mean]]]:
  """Of each model its settings, its rows, and each cell's means.

  Raises:
    FileNotFoundError: there are no results.
  """
  inside = sorted(path.parent for path in (results.folder / folder).glob(f"*/{store.SETTINGS}"))
  if not inside:
    raise FileNotFoundError(f"{results.folder / folder}: found no results of models")
  by = ("length", "mode", "method", "budget") if folder == FOLDER else ("method", "budget")
  models = []
  for path in inside:
    own = store.settings_of(path)
    rows = [{**row, "model": own["model"], **_layers(row)} for row in store.read(path)]
    file = (path.relative_to(results.folder) / store.ROWS).as_posix()
    means = kept.summary(rows, ("model", *by))
    for each in means:
      place = tuple((name, each[name]) for name in by)
      settings, method = own.get("methods", DIVIDED), each["method"]
      said = settings.get(f"{method}, {each['budget']}") or settings.get(method, method)
      setting = f"{own['model']}, {own['length']} tokens, {said}"
      each["record"] = Record(file, place, "CPU", each["n"], setting)
    models.append((own, rows, means))
  return models


def _layers(row: dict[str, Any]) -> dict[str, float]:
  by_layer = row.get("kept_by_layer")
  return {"least": min(by_layer), "most": max(by_layer)} if by_layer else {}


def said(each: Mean, text: str) -> Figure:
  """A text with figures of a cell."""
  return Figure(text, (each["record"],))


def _models(results: Results, folder: str, agreed: Callable[[list[dict], list[Mean]], str]) -> str:
  """The samples of a table, and in how far the libraries agree."""
  texts = []
  for own, rows, means in found(results, folder):
    n = Figure(ends((each["n"] for each in means), "{}"), (each["record"] for each in means))
    who = agreed(rows, means)
    texts.append(say(f"{own['model']}, `{own['length']:,}` tokens, n = {{}}, {{}}", n, who))
  return cells.listed(texts, "; ")


def _logits(rows: list[dict], means: list[Mean]) -> str:
  apart = [each for each in means if "logits_apart" in each]
  if not apart:
    return "kvpress alone"
  far = max(apart, key=lambda each: each["logits_apart"])
  return said(far, f"logits of the full caches at most {far['logits_apart']:.0e} apart")


def pairs(results: Results) -> Part:
  """Methods that both libraries have, at equal budgets; the question is read before the cut."""
  rows = []
  for each in (each for _, _, means in found(results, FOLDER) for each in means):
    if "equal" in each:
      row = [*_named(each), _both(each, "kept", "kept_by_kvpress", "{:.0f}")]
      texts = [share(each[name]) for name in ("equal", "of_fewer", "identical")]
      row += [said(each, text) for text in texts]
      row.append(_both(each, "needle_kept", "needle_kept_by_kvpress", "{:.0f} %", 0.01))
      row += [said(each, scored.percent(each[name])) for name in ("score", "score_of_kvpress")]
      row.append(said(each, f"{each['same_answers']} of {each['n']}"))
      row.append(said(each, f"{each['answer_kept']:.0%}") if "answer_kept" in each else "–")
      rows.append([*row, _both(each, "bytes", "bytes_of_kvpress", "{:.2f}", 1e6)])
  head = ("model", "method", "kept", "tokens a head", "equal", "of fewer", "heads alike")
  head += ("needle's tokens kept", "found by kvjax", "by kvpress", "same answer", "of it cached")
  return cells.table((*head, "MB"), rows, labels=3)


def presses(results: Results) -> Part:
  """Scores of kvpress under its own protocol and other settings, and two yardsticks.

  A press that stands there for several methods of kvjax has one row.
  """
  asked: dict[tuple[str, ...], dict[str, Mean]] = {}
  for own, _, means in found(results, FOLDER):
    presses = own["presses"]
    for each in means:
      first = next(name for name in presses if presses[name] == presses[each["method"]])
      if first == each["method"] or each["method"] == "knorm":  # all at ratio 0 is "full"
        cell = (*_named(each)[1:], MODES[each["mode"]])
        asked.setdefault(cell, {})[own["model"]] = each
  models = [own["model"] for own, _, _ in found(results, FOLDER)]
  rows = [[*cell, *_by_model(models, by_model, _press, 2)] for cell, by_model in asked.items()]
  head = ["press", "kept", "question"]
  for model in models:
    head += [f"{model}: needle's tokens kept", "found"]
  return cells.table(head, rows, labels=3)


def _by_model(
  models: Iterable[str],
  means: Mapping[str, Mean],
  show: Callable[[Mean], list[str]],
  width: int,
) -> list[str]:
  """Each model's columns, which are empty where it was not asked."""
  return [x for name in models for x in (show(means[name]) if name in means else [""] * width)]


def _press(each: Mean) -> list[str]:
  texts = f"{each['needle_kept_by_kvpress']:.0%}", scored.percent(each["score_of_kvpress"])
  return [said(each, text) for text in texts]


def _named(each: Mean) -> list[str]:
  method, comma, rest = each["method"].partition(",")
  share = Fraction(each["budget"], each["length"]).limit_denominator(64)
  return [each["model"], f"`{method}`{comma}{rest}", "all" if share == 1 else str(share)]


def _both(each: Mean, ours: str, theirs: str, form: str, unit: float = 1) -> Figure:
  """Two figures, or one where they read alike."""
  texts = (form.format(each[name] / unit) for name in (ours, theirs))
  return said(each, " / ".join(dict.fromkeys(texts)))


def share(x: float) -> str:
  """A share that is 100 % only where nothing differs."""
  if x == 1:
    return "100 %"
  return f"{min(100 * x, 99.99):.2f} %" if x > 0.99 else f"{100 * x:.0f} %"


# ---- KVzip by how a budget is divided


def _answers(rows: list[dict], means: list[Mean]) -> str:
  both = [row for row in rows if "answer" in row]
  if not both:
    return "kvpress alone"
  apart, fewer = max(x["scores_apart"] for x in both), share(min(x["of_fewer"] for x in both))
  same = sum(row["answer"] == row["answer_of_kvpress"] for row in both)
  text = (
    f"scores at most {apart:.0e} apart, {fewer} or more of a smaller selection in the larger "
    f"one, {same} of {len(both)} answers the same text"
  )
  return Figure(text, (each["record"] for each in means))


def kvzip(results: Results) -> Part:
  """Needles found by kvpress, and by kvjax where both were asked."""
  models = found(results, KVZIP)
  by = {own["model"]: {(x["budget"], x["method"]): x for x in means} for own, _, means in models}
  rows = []
  for part in sorted({part for held in by.values() for part, _ in held}, reverse=True):
    for how, text in DIVIDED.items():
      there = {model: held[part, how] for model, held in by.items() if (part, how) in held}
      rows.append([f"1/{part}", text, *_by_model(by, there, _division, 3)])
  head = ["kept", "divided"]
  for model in by:
    head += [f"{model}: a layer keeps", "needle's tokens kept", "found"]
  return cells.table(head, rows, labels=2)


def _division(each: Mean) -> list[str]:
  low, high = (100 * each[name] for name in ("least", "most"))
  scores = [each[name] for name in ("score", "score_of_kvpress") if name in each]
  right = " / ".join(dict.fromkeys(map(scored.percent, scores)))
  kept = f"{each['needle_kept_by_kvpress']:.0%}"
  return [said(each, text) for text in (f"{ends((low, high), '{:.0f}')} %", kept, right)]


DIVISIONS = {
  "full": "–",
  "kvzip": OURS["head"],
  "adakv:safeguard=0+kvzip": OURS["layer"],
  "adakv:safeguard=0+kvzip:over_layers=True": OURS["all"],
}


def kvzip_longer(results: Results) -> Part:
  """Needles found at the longer context, by how each budget is divided; the run was stopped."""
  (view,) = scored.views(results, LONGER)

  def row(one: Standing) -> Sequence[Any]:
    kept = f"{one.budget:,}" if one.budget else "all"
    return [kept, DIVISIONS[one.method], view.n(one, "needle"), view.mean(one)]

  return cells.table(("kept", "divided", "n", "found, %"), view.by_budget(row), labels=2)


# ---- figures in sentences

BY_HEAD = "expected_attention, ε = 0.01, by head"


def figures(results: Results) -> dict[str, str]:
  """Of the last model that both ran: bytes, padded rows, versions.

  Raises:
    ValueError: kvpress does what the table of capabilities says that it does not.
  """
  models = found(results, FOLDER)
  own, _, means = next((model for model in models if not model[0]["alone"]), models[0])
  path, versions = f"{FOLDER}/{own['model']}/{LIMITS}", models[0][0]["versions"]
  study = results.study(path, "a random model, a row of 200 behind 56 pads")
  if not study["uneven"]:
    raise ValueError(f"{FOLDER}: found a question behind uneven layers answered, expected an error")

  def mb(name: str, side: str) -> Figure:
    each = next(each for each in means if each["method"] == name and side in each)
    return said(each, f"{each[side] / 1e6:.1f} MB")

  zipped = {}
  if (results.folder / KVZIP).is_dir():
    zipped["kvzip-models"] = _models(results, KVZIP, _answers)
  return {name: f"`{version}`" for name, version in versions.items()} | {
    **zipped,
    "models": _models(results, FOLDER, _logits),
    "full-bytes": mb("full", "bytes"),
    "snapkv-bytes": mb("snapkv", "bytes"),
    "full-bytes-of-kvpress": mb("full", "bytes_of_kvpress"),
    "snapkv-bytes-of-kvpress": mb("snapkv", "bytes_of_kvpress"),
    "by-head-bytes": mb(BY_HEAD, "bytes_of_kvpress"),
    "padded-keydiff": say("{:.0%}", study["padded"]["KeyDiffPress"]),
    "padded-tova": say("{:.0%}", study["padded"]["TOVAPress"]),
    "presses": say("{:.0f}", study["presses"]),
    "compared": said(means[0], versions["kvpress"]),
  }
