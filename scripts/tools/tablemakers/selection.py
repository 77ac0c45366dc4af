"""Methods that read a part of the cache: selection, attention over it, whole steps."""

import statistics

from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.records import Figure, Part
from scripts.tools.tablemakers.results import Case, Results
from scripts.tools.tablemakers.steps import BANDWIDTH

SELECTORS = {"Quest page 16": "Quest, pages of 16", "InfLLM-v2 block 64": "InfLLM-v2, blocks of 64"}
BLOCKS, BUDGETS = (16, 64, 128, 256), (1024, 2048, 4096, 8192)
PAGED, BLOCK_SPARSE = "FlashInfer paged", "FlashInfer block-sparse"
METHODS = {
  "Quest": "Quest, 4,096 tokens",
  "InfLLM-v2": "InfLLM-v2, 64 blocks of 64",
  "CPE": "CPE, 512 tokens, τ = −1: always shared",
}


def scores(results: Results) -> Part:
  rows = []
  for name, label in SELECTORS.items():
    for length in ("128K", "512K"):
      case = results.bench("select").case(f"{name} B1 T{length}")
      took = case.time("kvjax")
      over = took.us * 1e-6 * BANDWIDTH / case.bytes
      rows.append(
        [
          f"{label}, B1 T{length}",
          cells.ours(took),
          cells.worked_out(over, "{:.2f}", took),
          cells.time(case.time("XLA")),
        ]
      )
  return cells.table(("", "kvjax", "over the summaries' bytes at 4.45 TB/s", "XLA"), rows)


def attention(results: Results) -> Part:
  rows = []
  for block in BLOCKS:
    cases = [results.bench("sparse").case(f"block {block} budget {n}") for n in BUDGETS]
    rows.append([f"blocks of {block}", *(cells.ours(case.time("kvjax")) for case in cases)])
    rows.append(["over FlashInfer's paged decode", *(cells.ratio(*_over(c, PAGED)) for c in cases)])
  return cells.table(("", *(f"{n:,} tokens" for n in BUDGETS)), rows)


def against_flashinfer(results: Results) -> Part:
  cases = results.bench("sparse").cases(r"^block \d+ budget \d+$")
  words = {PAGED: "paged decode with every KV head a request", BLOCK_SPARSE: "block-sparse wrapper"}
  parts = []
  for peer, said in words.items():
    pairs = [_over(case, peer) for case in cases]
    held = [value for value, reference in pairs if cells.steady(reference)]
    mean = cells.worked_out(statistics.geometric_mean(held), "{:.2f}", *held) if held else "–"
    parts.append(cells.join(f"{{}} of its {said} ({{}})", mean, cells.span(pairs)))
  return cells.sentence(
    "Beside FlashInfer, geometric mean of all cases: {}.", cells.listed(parts, " and ")
  )


def _over(case: Case, peer: str) -> cells.Pair:
  return cells.over(case.time("kvjax"), case.time(peer))


def step(results: Results, method: str, batch: int) -> Case:
  return results.bench("e2e_sparse").case(f"{method} Llama-3.1-8B B{batch} T128K")


def over_full(case: Case) -> cells.Pair:
  return cells.gain(case.time("kvjax"), case.time("Full"))


def of_bytes(case: Case) -> cells.Pair:
  """The share of the gain over the full cache that the bytes allow."""
  (share,) = case.numbers(r"([\d.]+) of what the bytes allow")
  return share, case.time("Full")


def whole_steps(results: Results) -> Part:
  rows = []
  for batch in (1, 4):
    for method, label in METHODS.items():
      case = step(results, method, batch)
      rows.append(
        [
          f"B{batch}, {label}",
          cells.ours(case.time("kvjax")),
          cells.time(case.time("Full")),
          cells.ratio(*over_full(case)),
          cells.ratio(*of_bytes(case), "{:.3f}"),
        ]
      )
  return cells.table(("", "a token", "Full", "over Full", "of what bytes allow"), rows)


def in_short(results: Results) -> Figure:
  """The line of the results in short."""
  read = ("Quest", "InfLLM-v2")  # CPE's random keys never share by themselves
  cases = {batch: [step(results, method, batch) for method in read] for batch in (1, 4)}
  gains = [
    cells.join(f"{{}} at B{batch}", cells.span(map(over_full, held), "{:.1f}", " ×"))
    for batch, held in cases.items()
  ]
  shares = [of_bytes(case) for held in cases.values() for case in held]
  # What is left out of these is left out, and named, above.
  allowed = cells.span([pair for pair in shares if cells.steady(pair[1])], "{:.3f}")
  return cells.join("over the full cache {}: {} of what bytes allow", cells.listed(gains), allowed)
