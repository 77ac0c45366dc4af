"""Keys and values in 8 and 4 bits: what rounding costs SmolLM2."""

from . import cells
from .results import Results

SUMMARY = "cpu/quantised/summary.json"
NAMES = {
  "full": "float32",
  "quantised": "8 bits",
  "quantised:bits=4": "4 bits",
}


def evaluation(results: Results) -> list[str]:
  """Divergence from the full cache, and needles found, of every number of bits."""
  entries = {(x["task"], x["method"]): x for x in results.json(SUMMARY)}
  rows = []
  for method, label in NAMES.items():
    kl, needle = (entries[task, method] for task in ("kl", "needle"))
    also, found = kl["also"]["kl"], needle["score"]
    rows.append(
      [
        label,
        cells.percent(kl["share"]),
        f"{also['mean']:.2g} ({also['low']:.2g}–{also['high']:.2g})",
        cells.percent(kl["score"]["mean"], 1),
        f"{cells.percent(found['mean'])} ({found['low']:.0%}–{found['high']:.0%})",
        str(kl["score"]["n"]),
      ]
    )
  head = ("keys and values", "cache", "KL, nats", "same next token", "needles", "rows")
  return cells.table(head, rows)
