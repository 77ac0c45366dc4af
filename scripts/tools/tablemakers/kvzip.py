"""KVzip by how a budget is divided, in kvpress and kvjax."""

from typing import Any

from kvjax.programs.evals import kept, store
from kvjax.programs.evals.standing import Standing, Standings, standings
from scripts.tools.tablemakers import beside, cells, scored
from scripts.tools.tablemakers.records import NOTHING, Figure, Part, Record
from scripts.tools.tablemakers.results import GPU, Results

FOLDER = "cpu/kvzip"
OURS = {"head": "to every head alike", "layer": "in each layer", "all": "among all layers"}
DIVIDED = {
  **OURS,
  "one": "alike, and one layer whole",
  "without": "among all layers, but that one alike",
}

Found = dict[tuple[str, int], dict[str, Any]]


def found(results: Results) -> list[tuple[dict[str, Any], list[dict[str, Any]], Found]]:
  """Of each model the settings, rows, and means by how a budget is divided and which part is kept.

  Raises:
    FileNotFoundError: there are no results.
  """
  folders = sorted(path.parent for path in (results.folder / FOLDER).glob(f"*/{store.SETTINGS}"))
  if not folders:
    raise FileNotFoundError(f"{results.folder / FOLDER}: found no results of beside_kvzip")
  models = []
  for folder in folders:
    rows = [{**row, **_layers(row)} for row in store.read(folder)]
    own, file = store.settings_of(folder), folder.relative_to(results.folder) / store.ROWS
    means = [
      {**each, "record": _record(own, file.as_posix(), each)}
      for each in kept.summary(rows, ("method", "budget"))
    ]
    models.append((own, rows, {(x["method"], x["budget"]): x for x in means}))
  return models


def _record(own: dict[str, Any], file: str, each: dict[str, Any]) -> Record:
  place = tuple((name, each[name]) for name in ("method", "budget"))
  setting = f"{own['model']}, {own['length']} tokens, {DIVIDED[each['method']]}"
  return Record(file, place, "CPU", each["n"], setting, NOTHING)


def _layers(row: dict[str, Any]) -> dict[str, float]:
  return {"least": min(row["kept_by_layer"]), "most": max(row["kept_by_layer"])}


def about(results: Results) -> Part:
  """What the table is of, and in how far the libraries agree."""
  texts = []
  for own, rows, means in found(results):
    every = [each["record"] for each in means.values()]
    both, who = [row for row in rows if "answer" in row], "kvpress alone"
    if both:
      apart = max(row["scores_apart"] for row in both)
      same = sum(row["answer"] == row["answer_of_kvpress"] for row in both)
      fewer = beside.share(min(row["of_fewer"] for row in both))
      who = Figure(
        f"scores at most {apart:.0e} apart, {fewer} or more of a smaller selection in the larger "
        f"one, {same} of {len(both)} answers the same text",
        every,
      )
    n = Figure(str(next(iter(means.values()))["n"]), every)
    texts.append(cells.join(f"{own['model']}, `{own['length']:,}` tokens, n = {{}}, {{}}", n, who))
  return cells.sentence("{}.", cells.listed(texts, "; "))


def divided(results: Results) -> Part:
  """Needles found by kvpress, and by kvjax where both were asked."""
  models = found(results)
  parts = sorted({part for _, _, means in models for _, part in means}, reverse=True)
  rows = []
  for part in parts:
    for how, text in DIVIDED.items():
      row = [f"1/{part}", text]
      for _, _, means in models:
        each = means.get((how, part))
        row += ["", "", ""] if each is None else _of(each)
      rows.append(row)
  head = ["kept", "divided"]
  for own, _, _ in models:
    head += [f"{own['model']}: a layer keeps", "needle's tokens kept", "found"]
  return cells.table(head, rows, labels=2)


def _of(each: dict[str, Any]) -> list[str]:
  low, high = (100 * each[name] for name in ("least", "most"))
  span = f"{low:.0f} %" if round(low) == round(high) else f"{low:.0f} to {high:.0f} %"
  scores = [each[name] for name in ("score", "score_of_kvpress") if name in each]
  found = " / ".join(dict.fromkeys(map(scored.percent, scores)))
  kept = f"{each['needle_kept_by_kvpress']:.0%}"
  return [beside.said(each, text) for text in (span, kept, found)]


LONGER = f"{GPU}/kvzip_8K"


def longer(results: Results) -> Part:
  """Needles found at the longer context, by how each budget is divided; the run was stopped."""
  if not (rows := results.rows(LONGER)):
    return Part()
  held = scored.Held(LONGER, store.PACKED, store.settings_of(results.folder / LONGER)["device"])
  (whole,) = standings(rows)
  lines = [["all", "–", *_longer(held, whole, whole.full)]]
  for budget in sorted({one.budget for one in whole.by.values() if one.budget}):
    ones = [one for one in whole.by.values() if one.budget == budget]
    named = [[f"{budget:,}", DIVISIONS[one.method], *_longer(held, whole, one)] for one in ones]
    lines += cells.ranked(zip((held.value(whole, one) for one in ones), named, strict=True))
  return cells.table(("kept", "divided", "n", "found, %"), lines, labels=2)


DIVISIONS = {
  "kvzip": OURS["head"],
  "adakv:safeguard=0+kvzip": OURS["layer"],
  "adakv:safeguard=0+kvzip:over_layers=True": OURS["all"],
}


def _longer(held: scored.Held, whole: Standings, one: Standing) -> list[str]:
  return [held.prompts(whole, one, "needle"), held.mean(whole, one)]
