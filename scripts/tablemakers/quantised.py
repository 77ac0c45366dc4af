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


def kernels(results: Results) -> list[str]:
  """Decode over codes, whole and listed, beside the same over bfloat16."""
  rows = []
  for case in results.bench("quantised").cases(r"^(listed )?int\d B"):
    base = "sparse decode" if case.name.startswith("listed") else "dense decode"
    ours, other, read = (case.time(name) for name in ("kvjax", base, "read"))
    rows.append(
      [
        case.name.replace("int", "").replace(" B", " bits, B", 1),
        cells.ours(ours),
        cells.time(other),
        cells.ratio(other.us / ours.us, other),
        cells.ratio(read.us / ours.us, read),
      ]
    )
  return cells.table(("", "codes", "bfloat16", "times as fast", "share of read"), rows)


def steps(results: Results) -> list[str]:
  """Whole steps under codes, beside the full cache."""
  rows = []
  for case in results.bench("quantised").cases("Llama"):
    ours, full = case.time("kvjax"), case.time("Full")
    (limit,) = case.numbers(r"of what the bytes allow \(([\d.]+) ×")
    name = case.name.replace("int", "").replace(" ", " bits, ", 1)
    faster = cells.ratio(full.us / ours.us, full)
    rows.append([name, cells.ours(ours), cells.time(full), faster, f"{limit:.2f}"])
  return cells.table(("", "codes", "full cache", "times as fast", "bytes allow"), rows)


def in_short(results: Results) -> str:
  """The kernel at B8 T32K, and a whole step."""
  bench = results.bench("quantised")
  parts = []
  for bits in (8, 4):
    case = bench.case(f"int{bits} B8 T32K 8x4")
    ours, dense = case.time("kvjax"), case.time("dense decode")
    faster = cells.ratio(dense.us / ours.us, dense)
    parts.append(f"decode over {bits} bits {faster} × bfloat16's at B8 T32K")
  step = bench.case("int8 Llama-3.1-8B B8 T32K")
  ours, full = step.time("kvjax"), step.time("Full")
  parts.append(f"the 8B step over 8 bits {cells.ratio(full.us / ours.us, full)} ×")
  return "; ".join(parts)
