"""`generate` and a loop of one's own, as a user calls them, over a loop on the device."""

from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.records import Part
from scripts.tools.tablemakers.results import Results

WAYS = ("generate", "generate, streamed", "own loop", "generate, chunk=1", "short answer")
MARKS = [(batch, tokens) for tokens in (4096, 32768) for batch in (1, 8)]


def table(results: Results) -> Part:
  rows = []
  for batch, tokens in MARKS:
    case = results.bench("generate").case(f"Llama-3.1-8B B{batch} T{tokens}")
    loop = case.time("loop")
    ratios = [cells.ratio(*cells.over(case.time(way), loop), "{:.3f}") for way in WAYS]
    rows.append([f"B{batch} T{tokens >> 10}K", cells.ours(loop), *ratios])
  heads = ("`generate`", "streamed", "own loop", "`chunk=1`", "an answer of 8 tokens")
  return cells.table(("", "loop on the device, a token", *heads), rows)
