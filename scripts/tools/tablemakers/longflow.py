"""LongFlow: a layer's step, and long answers at the batch that fills the memory."""

import re

from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.records import Figure, Part
from scripts.tools.tablemakers.results import Results

ANSWER, PEER = "Qwen3-1.7B 512 in 16000 out", "Qwen3-1.7B transformers"
RATE = r": batch (\d+), ([\d,]+) tokens a second, ([\d.]+) of its byte limit"


def steps(results: Results) -> Part:
  rows = []
  for batch in (128, 16):
    case = results.bench("longflow").case(f"step B{batch} S3200 8x4")
    ours, dense, read = (case.time(name) for name in ("kvjax", "dense decode", "read"))
    rows.append(
      [
        f"B{batch}, 3,200 slots",
        cells.ours(ours),
        cells.time(dense),
        cells.ratio(*cells.over(ours, dense)),
        cells.ratio(*cells.gain(ours, read)),
        cells.time(case.time("H2O in XLA")),
      ]
    )
  head = ("", "LongFlow", "dense decode", "over dense", "share of read", "H2O in XLA")
  return cells.table(head, rows)


def answers(results: Results) -> Part:
  case = results.bench("longflow").case(ANSWER)
  held = case.numbers(r"Cache of a row ([\d.]+) MiB against ([\d.]+)")
  rows = []
  for name, label, size in zip(
    ("LongFlow", "Full"), ("LongFlow, budget 3,200", "Full"), held, strict=True
  ):
    batch, rate, share = case.remark("^" + name + RATE)
    cut = cells.number(cells.read(share))
    rows.append([label, batch, cells.join("**{}**", rate), cut, cells.number(size, "{:,.0f} MiB")])
  for peer in results.bench("longflow").cases(f"^{PEER}"):
    batch, rate = peer.remark(r"batch (\d+), ([\d,]+) tokens a second over the answer")
    how = re.sub(r"^batch \d+, |; µs are of a step$", "", peer.shapes)
    rows.append([f"transformers, {how}", batch, rate, "–", "–"])
  head = ("", "batch", "tokens a second", "of its byte limit", "cache of a row")
  return cells.table(head, rows)


def in_short(results: Results) -> Figure:
  """The line of the results in short."""
  bench = results.bench("longflow")
  rates = [bench.case(ANSWER).remark("^" + name + RATE)[1] for name in ("LongFlow", "Full")]
  held = [bench.case(f"step B{batch} S3200 8x4") for batch in (128, 16)]
  over = [cells.ratio(*cells.over(c.time("kvjax"), c.time("dense decode"))) for c in held]
  return cells.join(
    "answers of `16,000` tokens at {} tokens a second, where the full cache, at the batch that "
    "still fits, has {}; a layer's step over `3,200` slots takes {} × dense decode alone at B128, "
    "{} × at B16",
    *rates,
    *over,
  )
