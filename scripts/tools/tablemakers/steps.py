"""Whole decode steps of full-size shapes, beside their bounds and beside PyTorch."""

from kvjax.programs.bench_files import BANDWIDTH
from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.records import Part
from scripts.tools.tablemakers.results import Case, Results

DIGITS = "{:.3f}"  # as the remarks have them: rounded once
SHAPES = ((1, 4096), (8, 4096), (1, 32768), (8, 32768), (1, 131072))
MODELS = {"Llama-3.1-8B": "e2e", "Qwen3-1.7B": "e2e_qwen3"}
PEERS = ("torch, CUDA graph", "transformers")


def steps(results: Results, model: str) -> list[Case]:
  bench = results.bench(MODELS[model])
  return [bench.case(f"{model} B{batch} T{tokens}") for batch, tokens in SHAPES]


def over_products(case: Case) -> cells.Pair:
  """A step over XLA's matrix products and the bytes of keys and values."""
  (value,) = case.numbers(r"([\d.]+) × \(XLA's products \+ KV bytes")
  return value, case.time("products (XLA)")


def table(results: Results) -> Part:
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
          cells.worked_out(took.us * 1e-6 * BANDWIDTH / case.bytes, DIGITS, took),
        ]
      )
  head = ("", "kvjax, a token", "over XLA's products + KV", "over ours + KV", "over all bytes")
  return cells.table(head, rows)


def beside_peers(results: Results) -> Part:
  """Where any was run."""
  rows = []
  for model in MODELS:
    for (batch, tokens), case in zip(SHAPES, steps(results, model), strict=True):
      if any(map(case.has, PEERS)):
        each = [part for peer in PEERS for part in _peer(case, peer)]
        rows.append([f"{model}, B{batch} T{tokens >> 10}K", cells.ours(case.time("kvjax")), *each])
  head = ("PyTorch, compiled, CUDA graph", "over ours", "transformers", "over ours")
  return cells.table(("", "kvjax, a token", *head), rows)


def _peer(case: Case, peer: str) -> tuple[str, str]:
  """What a peer takes, and over what kvjax took beside it."""
  if not case.has(peer):
    return "–", "–"
  theirs = case.time(peer)
  return cells.time(theirs), cells.ratio(*cells.gain(case.time("kvjax"), theirs))


def in_short(results: Results) -> str:
  """The line of the results in short."""
  cases = steps(results, "Llama-3.1-8B")
  first, long = cases[0].time("kvjax"), cases[3].time("kvjax")
  peers = [_peer(case, "torch, CUDA graph") for case in cases[:2]]
  return cells.join(
    "{} at B1 T4K, {} at B8 T32K: {} XLA's products and the bytes of K and V; a plain PyTorch "
    "step, compiled and in a CUDA graph, takes {} × as long at B1 T4K, {} × at B8",
    cells.time(first),
    cells.time(long),
    cells.span(map(over_products, cases), unit=" ×"),
    peers[0][1],
    peers[1][1],
  )
