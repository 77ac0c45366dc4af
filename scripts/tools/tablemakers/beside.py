"""kvpress and kvjax on the same prompts: what both keep and find."""

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from kvjax.programs.evals import kept, store
from scripts.tools.tablemakers import Figure, Part, Record, Results, Row, cells, scored

FOLDER, KVZIP = "cpu/kvpress", "cpu/kvzip"
LIMITS = "limits.json"
MODES = {"aware": "before the cut", "agnostic": "after it"}
OURS = {"head": "to every head alike", "layer": "in each layer", "all": "among all layers"}
DIVIDED = {
  **OURS,
  "one": "alike, and one layer whole",
  "without": "among all layers, but that one alike",
}

NEEDLE, SCORES = ("needle_kept", "needle_kept_by_kvpress"), ("score", "score_of_kvpress")

Show = Callable[[Row], str]  # empty where a library took no part


@functools.cache
def found(results: Results, folder: str) -> list[tuple[Row, list[Row], list[Row]]]:
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


def _layers(row: Row) -> dict[str, float]:
  by_layer = row.get("kept_by_layer")
  return {"least": min(by_layer), "most": max(by_layer)} if by_layer else {}


def _table(results: Results, folder: str, labels: int, columns: Sequence[tuple[str, Show]]) -> Part:
  """A row a cell of each model, whose first columns are names."""
  rows = []
  for each in (each for _, _, means in found(results, folder) for each in means):
    shown = [show(each) for _, show in columns]
    cited = (text and Figure(text, (each["record"],)) for text in shown[labels:])
    rows.append([each["model"], *shown[:labels], *cited])
  return cells.table(("model", *(head for head, _ in columns)), rows, labels=1 + labels)


def of(form: Callable[..., str], *names: str) -> Show:
  """Some figures of a cell."""
  return lambda x: form(*map(x.get, names)) if all(name in x for name in names) else ""


def both(ours: str, theirs: str, form: Callable[[Any], str]) -> Show:
  """Two figures, or one where they read alike or there is one."""
  return lambda x: " / ".join(dict.fromkeys(form(x[name]) for name in (ours, theirs) if name in x))


def share(x: float) -> str:
  """A share that is 100 % only where nothing differs."""
  if x == 1:
    return "100 %"
  return f"{min(100 * x, 99.99):.2f} %" if x > 0.99 else f"{100 * x:.0f} %"


def _part(budget: int, length: int) -> str:
  part = Fraction(budget, length).limit_denominator(64)
  return "all" if part == 1 else str(part)


def _megabytes(*sizes: float) -> str:
  return " / ".join(dict.fromkeys(f"{x / 1e6:.2f}" for x in sizes))


def _span(least: float, most: float) -> str:
  return f"{cells.span((100 * least, 100 * most), '{:.0f}')} %"


N = ("n", of(str, "n"))
SAME = ("same answer", of("{} of {}".format, "same_answers", "n"))


def kvpress(results: Results) -> Part:
  """Tokens kept and scores of both at equal budgets; kvpress in other settings."""
  columns = [
    ("method", of(cells.method, "method")),
    ("kept", of(_part, "budget", "length")),
    ("question", of(MODES.__getitem__, "mode")),
    N,
    ("tokens a head", both("kept", "kept_by_kvpress", "{:.0f}".format)),
    ("equal", of(share, "equal")),
    ("of fewer", of(share, "of_fewer")),
    ("heads alike", of(share, "identical")),
    ("needle's tokens kept", both(*NEEDLE, lambda x: f"{100 * x:.0f} %")),
    ("found by kvjax", of(scored.percent, "score")),
    ("by kvpress", of(scored.percent, SCORES[1])),
    SAME,
    ("of it cached", of("{:.0%}".format, "answer_kept")),
    ("logits apart", of("{:.0e}".format, "logits_apart")),
    ("MB", of(_megabytes, "bytes", "bytes_of_kvpress")),
  ]
  return _table(results, FOLDER, 3, columns)


def kvzip(results: Results) -> Part:
  """KVzip by how a budget is divided: needles that kvpress and kvjax find."""
  columns = [
    ("kept", of("1/{}".format, "budget")),
    ("divided", of(DIVIDED.__getitem__, "method")),
    ("a layer keeps", of(_span, "least", "most")),
    ("needle's tokens kept", of("{:.0%}".format, NEEDLE[1])),
    ("found", both(*SCORES, scored.percent)),
    ("of fewer", of(share, "of_fewer")),
    SAME,
    N,
  ]
  return _table(results, KVZIP, 2, columns)
