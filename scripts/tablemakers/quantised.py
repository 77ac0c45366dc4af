"""Keys and values in 8, 4 and 2 bits: what rounding costs two models."""

from typing import Any

from . import cells
from .results import Results

SUMMARY = "cpu/quantised/summary.json"
# Of Qwen2.5-Coder-1.5B-Instruct, and the same before keys were rounded less their mean.
LARGER, WITHOUT_MEAN = (f"cpu/quantised_1.5b/{name}.json" for name in ("summary", "without_mean"))
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
    found = needle["score"]
    rows.append(
      [
        label,
        cells.percent(kl["share"]),
        _divergence(kl),
        cells.percent(kl["score"]["mean"], 1),
        f"{cells.percent(found['mean'])} ({found['low']:.0%}–{found['high']:.0%})",
        str(kl["score"]["n"]),
      ]
    )
  head = ("keys and values", "cache", "KL, nats", "same next token", "needles", "rows")
  return cells.table(head, rows)


def larger(results: Results) -> list[str]:
  """Divergence of the 1.5B, with keys rounded less their mean and as they are."""
  found, before = (
    {x["method"]: x for x in results.json(name) if x["task"] == "kl"}
    for name in (LARGER, WITHOUT_MEAN)
  )
  rows = []
  for method, label in NAMES.items():
    if method in found:
      kl, old = found[method], before.get(method)
      rows.append(
        [
          label,
          cells.percent(kl["share"]),
          _divergence(kl),
          cells.percent(kl["score"]["mean"], 1),
          "–" if old is None else _divergence(old),
          "–" if old is None else cells.percent(old["score"]["mean"], 1),
          str(kl["score"]["n"]),
        ]
      )
  head = ("keys and values", "cache", "KL, nats", "same next token")
  return cells.table((*head, "KL without the mean", "same next token", "rows"), rows)


def _divergence(entry: dict[str, Any]) -> str:
  """The KL to the full cache, with its interval."""
  found = entry["also"]["kl"]
  return f"{found['mean']:.2g} ({found['low']:.2g}–{found['high']:.2g})"
