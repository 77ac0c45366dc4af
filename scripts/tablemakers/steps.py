"""Whole decode steps of full-size shapes, beside their bounds and beside transformers."""

from . import cells
from .results import Case, Results

BANDWIDTH = 4.45e12  # bytes a second that a streaming read reaches
DIGITS = "{:.3f}"  # as the remarks have them: rounded once
SHAPES = ((1, 4096), (8, 4096), (1, 32768), (8, 32768), (1, 131072))
MODELS = {"Llama-3.1-8B": "e2e", "Qwen3-1.7B": "e2e_qwen3"}
# Each in a run of its own: what kvjax took there stands beside it.
PEERS = {"Llama-3.1-8B": "e2e_transformers", "Qwen3-1.7B": "e2e_qwen3"}


def steps(results: Results, model: str) -> list[Case]:
  bench = results.bench(MODELS[model])
  return [bench.case(f"{model} B{batch} T{tokens}") for batch, tokens in SHAPES]


def over_products(case: Case) -> cells.Pair:
  """A step over XLA's matrix products and the bytes of keys and values."""
  (value,) = case.numbers(r"([\d.]+) × \(XLA's products \+ KV bytes")
  return value, case.time("products (XLA)")


def table(results: Results) -> list[str]:
  rows = []
  for model in MODELS:
    for (batch, tokens), case in zip(SHAPES, steps(results, model), strict=True):
      (over_ours,) = case.numbers(r"([\d.]+) × \(our products \+ KV bytes")
      took = case.time("kvjax")
      rows.append(
        [
          f"{model}, B{batch} T{tokens >> 10}K",
          cells.ours(took),
          cells.ratio(*over_products(case), DIGITS),
          cells.ratio(over_ours, case.time("products"), DIGITS),
          DIGITS.format(took.us * 1e-6 * BANDWIDTH / case.bytes),
        ]
      )
  head = ("", "kvjax, a token", "over XLA's products + KV", "over ours + KV", "over all bytes")
  return cells.table(head, rows)


def beside_transformers(results: Results) -> list[str]:
  """At T4K, and at whatever other length transformers was run."""
  rows = []
  for model, suite in PEERS.items():
    bench = results.bench(suite)
    for batch, tokens in SHAPES:
      name = f"{model} B{batch} T{tokens}"
      if tokens > 4096 and not (bench.has(name) and bench.case(name).has("transformers")):
        continue
      mine, theirs = (bench.case(name).time(each) for each in ("kvjax", "transformers"))
      over = cells.ratio(theirs.us / mine.us, theirs)
      label = f"{model}, B{batch} T{tokens >> 10}K"
      rows.append([label, cells.ours(mine), cells.time(theirs), over])
  return cells.table(("", "kvjax, a token", "transformers", "times as long"), rows)


def in_short(results: Results) -> str:
  """The line of the README."""
  cases = steps(results, "Llama-3.1-8B")
  first, long = cases[0].time("kvjax"), cases[3].time("kvjax")
  return (
    f"{cells.time(first)} at B1 T4K, {cells.time(long)} at B8 T32K: "
    f"{cells.span(map(over_products, cases), unit=' ×')} XLA's products and the bytes of K and "
    f"V; transformers with a compiled static cache takes {_peer(results, 1)} at B1 T4K, "
    f"{_peer(results, 8)} at B8"
  )


def _peer(results: Results, batch: int) -> str:
  """What transformers takes at T4K, and over what kvjax took beside it."""
  model = "Llama-3.1-8B"
  case = results.bench(PEERS[model]).case(f"{model} B{batch} T4096")
  theirs = case.time("transformers")
  times = f", {theirs.us / case.time('kvjax').us:.1f} × ours" if cells.steady(theirs) else ""
  return cells.time(theirs) + times
