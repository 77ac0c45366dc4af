"""kvpress and kvjax on the same prompts: what both keep and find."""

from collections.abc import Callable
from fractions import Fraction

import pandas as pd

from kvjax.programs.evals import kept, store
from scripts.tools.tablemakers import Part, Results, cells
from scripts.tools.tablemakers.cells import Column, figure, say
from scripts.tools.tablemakers.scores import percent

FOLDER, KVZIP = "cpu/kvpress", "cpu/kvzip"
NEEDLE = ("needle_kept", "needle_kept_by_kvpress")
LIMITS = "limits.json"
MODES = {"aware": "before the cut", "agnostic": "after it"}
OURS = {"head": "to every head alike", "layer": "in each layer", "all": "among all layers"}
DIVIDED = OURS | {"one": "alike, and one layer whole"}
DIVIDED |= {"without": "among all layers, but that one alike"}


def found(results: Results, folder: str) -> pd.DataFrame:
  """The means of each model's cells; FileNotFoundError if there are none."""
  means = []
  for path in sorted((results.folder / folder).glob(f"*/{store.SETTINGS}")):
    model, rows = store.settings_of(path.parent)["model"], store.read(path.parent)
    for row in rows:
      layers = row.get("kept_by_layer", [0])
      row |= {"least": 100 * min(layers), "most": 100 * max(layers)}
    means += [{"model": model, **x} for x in kept.summary(rows, store.KEY[1:5])]
  if not means:
    raise FileNotFoundError(f"{results.folder / folder}: found no results of models")
  return pd.DataFrame(means)


def both(form: str | Callable[..., str], *names: str) -> Column:
  """Figures of both sides, or one where they read alike."""
  return lambda row: " / ".join(filter(None, dict.fromkeys(say(form, row[x]) for x in names)))


def share(x: float) -> str:
  """A share that is 100 % only where nothing differs."""
  return f"{min(100 * x, 99.99):.2f} %" if 0.99 < x < 1 else f"{100 * x:.0f} %"


def _part(budget: int, length: int) -> str:
  part = Fraction(budget, length).limit_denominator(64)
  return "all" if part == 1 else str(part)


KEPT = ("kept", figure(_part, "budget", "length"))
ASKED = ("question", figure(MODES.__getitem__, "mode"))
WAY = ("divided", figure(DIVIDED.__getitem__, "method"))
MEGABYTES = both(lambda x: f"{x / 1e6:.2f}", "bytes", "bytes_of_kvpress")


def kvpress(results: Results) -> Part:
  return cells.table(
    found(results, FOLDER),
    ["model", ("method", figure(cells.method, "method")), KEPT, ASKED],
    "n",
    ("tokens a head", both("{:.0f}", "kept", "kept_by_kvpress")),
    ("equal", figure(share, "equal")),
    ("of fewer", figure(share, "of_fewer")),
    ("heads alike", figure(share, "identical")),
    ("needle's tokens kept", both("{:.0%}", *NEEDLE)),
    ("found by kvjax", figure(percent, "score")),
    ("by kvpress", figure(percent, "score_of_kvpress")),
    ("same answer", figure("{:.0f} of {}", "same_answers", "n")),
    ("of it cached", figure("{:.0%}".format, "answer_kept")),
    ("logits apart", figure("{:.0e}", "logits_apart")),
    ("MB", lambda row: row["bytes"] and MEGABYTES(row)),
  ).fillna("")


def kvzip(results: Results) -> Part:
  return cells.table(
    found(results, KVZIP),
    ["model", ("kept", figure("1/{}", "budget")), WAY],
    ("a layer keeps", figure(lambda *ends: f"{cells.span(ends, '{:.0f}')} %", "least", "most")),
    ("needle's tokens kept", figure("{:.0%}".format, NEEDLE[1])),
    ("found", both(percent, "score", "score_of_kvpress")),
    ("of fewer", figure(share, "of_fewer")),
    ("same answer", figure("{:.0f} of {}", "same_answers", "n")),
    "n",
  ).fillna("")
