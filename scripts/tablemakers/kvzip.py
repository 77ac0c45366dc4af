"""KVzip by how a budget is divided, in kvpress and kvjax."""

from typing import Any

from ..evals import kept, store
from . import beside, cells
from .results import Results

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
    means = kept.summary(rows, ("method", "budget"))
    by_cell = {(x["method"], x["budget"]): x for x in means}
    models.append((store.settings_of(folder), rows, by_cell))
  return models


def _layers(row: dict[str, Any]) -> dict[str, float]:
  return {"least": min(row["kept_by_layer"]), "most": max(row["kept_by_layer"])}


def about(results: Results) -> list[str]:
  """What the table is of, and in how far the libraries agree."""
  texts = []
  for own, rows, means in found(results):
    both, who = [row for row in rows if "answer" in row], "kvpress alone"
    if both:
      apart = max(row["scores_apart"] for row in both)
      same = sum(row["answer"] == row["answer_of_kvpress"] for row in both)
      fewer = beside._share(min(row["of_fewer"] for row in both))
      who = (
        f"scores at most {apart:.0e} apart, {fewer} or more of a smaller selection in the larger "
        f"one, {same} of {len(both)} answers the same text"
      )
    n = next(iter(means.values()))["n"]
    texts.append(f"{own['model']}, {own['length']:,} tokens, n = {n}, {who}")
  return cells.sentence(f"{'; '.join(texts)}.")


def divided(results: Results) -> list[str]:
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
  return cells.table(head, rows)


def _of(each: dict[str, Any]) -> list[str]:
  low, high = (100 * each[name] for name in ("least", "most"))
  span = f"{low:.0f} %" if round(low) == round(high) else f"{low:.0f} to {high:.0f} %"
  scores = [each[name] for name in ("score", "score_of_kvpress") if name in each]
  said = list(dict.fromkeys(beside._percent(score) for score in scores))
  return [span, cells.percent(each["needle_kept_by_kvpress"]), " / ".join(said)]
