"""kvpress and kvjax on the same prompts: what both keep and find, and KVzip by its division."""

import functools
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from kvjax.programs.evals import kept, store
from scripts.tools.tablemakers import Figure, Part, Record, Results, cells, scored

FOLDER, KVZIP = "cpu/kvpress", "cpu/kvzip"
LIMITS = "limits.json"
MODES = {"aware": "before the cut", "agnostic": "after it"}
OURS = {"head": "to every head alike", "layer": "in each layer", "all": "among all layers"}
DIVIDED = {
  **OURS,
  "one": "alike, and one layer whole",
  "without": "among all layers, but that one alike",
}

SHARES = {"equal": "equal", "of fewer": "of_fewer", "heads alike": "identical"}
NEEDLE, SCORES = ("needle_kept", "needle_kept_by_kvpress"), ("score", "score_of_kvpress")

Mean = dict[str, Any]  # of a cell: its figures, its settings, and under "record" where it stands
Show = Callable[[Mean], str]
Labels = Mapping[str, Show]
Columns = Sequence[tuple[str, str, Show]]  # head, what it needs of a cell, how it shows it


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
      each["record"] = Record(file, place, "CPU", each["n"])
    models.append((own, rows, means))
  return models


def _layers(row: dict[str, Any]) -> dict[str, float]:
  by_layer = row.get("kept_by_layer")
  return {"least": min(by_layer), "most": max(by_layer)} if by_layer else {}


def _table(results: Results, folder: str, labels: Labels, columns: Columns) -> Part:
  """A row a cell of each model; nothing where the library that a column is about was not asked."""
  rows = []
  for each in (each for _, _, means in found(results, folder) for each in means):
    row = [each["model"], *(show(each) for show in labels.values())]
    for _, name, show in columns:
      row.append(Figure(show(each), (each["record"],)) if name in each else "")
    rows.append(row)
  head = ("model", *labels, *(head for head, *_ in columns))
  return cells.table(head, rows, labels=1 + len(labels))


def both(ours: str, theirs: str, form: Callable[[Any], str]) -> Show:
  """Two figures, or one where they read alike or there is one."""
  return lambda each: " / ".join(
    dict.fromkeys(form(each[name]) for name in (ours, theirs) if name in each)
  )


def share(x: float) -> str:
  """A share that is 100 % only where nothing differs."""
  if x == 1:
    return "100 %"
  return f"{min(100 * x, 99.99):.2f} %" if x > 0.99 else f"{100 * x:.0f} %"


def _part(each: Mean) -> str:
  part = Fraction(each["budget"], each["length"]).limit_denominator(64)
  return "all" if part == 1 else str(part)


def kvpress(results: Results) -> Part:
  """Tokens kept and scores of both at equal budgets, and scores of kvpress in other settings."""
  return _table(
    results,
    FOLDER,
    {
      "method": lambda each: cells.method(each["method"]),
      "kept": _part,
      "question": lambda each: MODES[each["mode"]],
    },
    [
      ("n", "n", lambda each: str(each["n"])),
      ("tokens a head", "kept", both("kept", "kept_by_kvpress", "{:.0f}".format)),
      *((head, name, lambda x, name=name: share(x[name])) for head, name in SHARES.items()),
      ("needle's tokens kept", NEEDLE[1], both(*NEEDLE, lambda x: f"{100 * x:.0f} %")),
      ("found by kvjax", "score", lambda each: scored.percent(each["score"])),
      ("by kvpress", SCORES[1], lambda each: scored.percent(each[SCORES[1]])),
      ("same answer", "same_answers", lambda each: f"{each['same_answers']} of {each['n']}"),
      ("of it cached", "answer_kept", lambda each: f"{each['answer_kept']:.0%}"),
      ("logits apart", "logits_apart", lambda each: f"{each['logits_apart']:.0e}"),
      ("MB", "bytes", both("bytes", "bytes_of_kvpress", lambda x: f"{x / 1e6:.2f}")),
    ],
  )


# ---- KVzip by how a budget is divided


def _layer(each: Mean) -> str:
  return f"{cells.span((100 * each['least'], 100 * each['most']), '{:.0f}')} %"


def kvzip(results: Results) -> Part:
  """Needles found by kvpress, and by kvjax where both were asked."""
  return _table(
    results,
    KVZIP,
    {"kept": lambda each: f"1/{each['budget']}", "divided": lambda each: DIVIDED[each["method"]]},
    [
      ("a layer keeps", "least", _layer),
      ("needle's tokens kept", NEEDLE[1], lambda each: f"{each[NEEDLE[1]]:.0%}"),
      ("found", SCORES[1], both(*SCORES, scored.percent)),
      ("of fewer", "of_fewer", lambda each: share(each["of_fewer"])),
      ("same answer", "same_answers", lambda each: f"{each['same_answers']} of {each['n']}"),
      ("n", "n", lambda each: str(each["n"])),
    ],
  )
