"""Keys and values in 8, 4 and 2 bits: what rounding costs SmolLM2."""

from . import cells
from .results import Results

SUMMARY = "cpu/quantised/summary.json"
NAMES = {
  "full": "float32",
  "quantised": "8 bits",
  "quantised:bits=4": "4 bits",
  "quantised:bits=4,group=32": "4 bits, 32 channels a scale",
  "kivi:bits=4,residual=32": "KIVI, 4 bits, R = 32",
  "kivi:bits=4": "KIVI, 4 bits, R = 128",
  "quantised:bits=2": "2 bits",
  "quantised:bits=2,group=32": "2 bits, 32 channels a scale",
  "kivi:residual=32": "KIVI, 2 bits, R = 32",
  "kivi": "KIVI, 2 bits, R = 128",
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
