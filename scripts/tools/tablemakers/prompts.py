"""Prompts: attention of one layer, and of a whole model."""

from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.records import Part
from scripts.tools.tablemakers.results import Case, Results

DENSE, PSAW, BOTH = "dense 32K", "top layer of PSAW 32K", "top layer of ETF + PSAW 32K"
PEERS = {
  "kvjax": "dense: cuDNN, as kvjax calls it",
  "our kernel": "dense: our kernel",
  "torch flash": "dense: torch flash",
  "torch cuDNN": "dense: torch cuDNN",
}
PIECES = {PSAW: "PSAW's top layer", BOTH: "ETF's and PSAW's top layer"}


def layers(results: Results) -> Part:
  bench = results.bench("prefill")
  dense = bench.case(DENSE)
  rows = []
  for name, label in PEERS.items():
    over = "one" if name == "kvjax" else _over(dense, name, "kvjax")
    rows.append([label, cells.ours(dense.time(name)), _rate(dense, name), over, "all"])
  for name, label in PIECES.items():
    case = bench.case(name)
    (seen,) = case.numbers(r"queries see ([\d.]+) of what they see in a dense layer")
    took = cells.ours(case.time("kvjax"))
    rows.append(
      [f"{label}, in pieces", took, "", _over(case, "kvjax", "dense"), cells.number(seen)]
    )
  return cells.table(("", "time", "TFLOP/s", "against dense", "of what its queries see"), rows)


def _rate(case: Case, name: str) -> str:
  return case.remark(f"^{name}: (\\d+) TFLOP/s")[0]


def _over(case: Case, name: str, reference: str) -> str:
  whole = case.time(reference)
  return cells.ratio(*cells.over(case.time(name), whole))


def model(results: Results) -> Part:
  case = results.bench("prefill").case("model 32K")
  full, (saved,) = case.time("Full"), case.numbers(r"saves ([\d.]+) of the operations")
  rows = [["Full", cells.ours(full), _rate(case, "Full"), "", ""]]
  ours = case.time("kvjax")
  fall = 1 - ours.us / full.us
  rows.append(
    [
      "ETF with PSAW",
      cells.ours(ours),
      _rate(case, "kvjax"),
      cells.guarded(cells.worked_out(100 * fall, "{:.1f} %", ours, full), full),
      cells.percent(saved, 1),
    ]
  )
  return cells.table(("32,768 tokens", "time", "TFLOP/s", "less time", "less work"), rows)


def long(results: Results) -> Part:
  """A prompt of 128K tokens in one piece, beside transformers."""
  case = results.bench("prefill").case("model 128K in one piece")
  full, rows = case.time("Full"), []
  for name in ("Full", "SnapKV", "PyramidKV"):
    rate, kept, spare, growth = case.numbers(
      f"^{name}: [\\d.]+ s, (\\d+) TFLOP/s; caches ([\\d.]+) GB, temporary ([\\d.]+) GB, of "
      r"which \+([\d.]+) GB come"
    )
    took = cells.ours(case.time(name))
    rows.append(
      [
        name,
        took,
        cells.number(rate, "{:.0f}"),
        cells.number(kept, "{:.2f} GB"),
        *(cells.number(x, "{:.1f} GB") for x in (spare, growth)),
      ]
    )
  peer = case.time("transformers")
  over = cells.ratio(*cells.over(peer, full))
  rows.append([cells.join("transformers ({} of Full)", over), cells.time(peer), "–", "–", "–", "–"])
  head = ("131,072 tokens", "time", "TFLOP/s", "caches", "temporary", "of it, of 30 of the layers")
  return cells.table(head, rows)
