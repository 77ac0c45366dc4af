"""Times of methods that read a part of the cache, of codes, of shared slots, and of LongFlow."""

import re
import statistics

from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.cells import faster, longer, median, over_bytes, own, said, say
from scripts.tools.tablemakers.records import Number, Part
from scripts.tools.tablemakers.results import GPU, Case, Results
from scripts.tools.tablemakers.timings import Ratio, gain, over, span

# ---- methods that read a part of the cache

BLOCKS, BUDGETS = (16, 64, 128, 256), (1024, 2048, 4096, 8192)
PAGED, BLOCK_SPARSE = "FlashInfer paged", "FlashInfer block-sparse"
STEP = "{} Llama-3.1-8B B{} T128K"
# The share of the gain over the full cache that the bytes allow.
ALLOWED = r"([\d.]+) of what the bytes allow"

scores = cells.cases(
  "select",
  {
    f"{label}, B1 T{length}": f"{name} B1 T{length}"
    for name, label in (
      ("Quest page 16", "Quest, pages of 16"),
      ("InfLLM-v2 block 64", "InfLLM-v2, blocks of 64"),
    )
    for length in ("128K", "512K")
  },
  ("kvjax", own()),
  ("over the summaries' bytes at a read's bandwidth", over_bytes("{:.2f}")),
  ("XLA", median("XLA")),
)


def sparse(results: Results) -> Part:
  rows = []
  for block in BLOCKS:
    cases = [results.bench("sparse")[f"block {block} budget {n}"] for n in BUDGETS]
    rows.append([f"blocks of {block}", *map(own(), cases)])
    rows.append(["over FlashInfer's paged decode", *map(longer("kvjax", PAGED), cases)])
  return cells.table(("", *(f"{n:,} tokens" for n in BUDGETS)), rows)


sparse_steps = cells.cases(
  "e2e_sparse",
  {
    f"B{batch}, {label}": STEP.format(method, batch)
    for batch in (1, 4)
    for method, label in (
      ("Quest", "Quest, 4,096 tokens"),
      ("InfLLM-v2", "InfLLM-v2, 64 blocks of 64"),
      ("CPE", "CPE, 512 tokens, τ = −1: always shared"),
    )
  },
  ("a token", own()),
  ("Full", median("Full")),
  ("over Full", faster("kvjax", "Full")),
  ("of what bytes allow", said(ALLOWED, "{:.3f}", "Full")),
)


def launches(results: Results) -> Part:
  """The parts of a layer's step: the sum of its launches, and each of them in order."""
  study, rows = results.study(f"{GPU}/launches.json", "cold caches, no CUDA graph"), []
  for layer, found in study["layers"].items():
    parts = [say(f"{name.partition('__')[0]} {{:.1f}}", us) for name, us in found]
    rows.append([layer, sum(us for _, us in found), cells.listed(parts)])
  return cells.table(("a layer's step", ("all", "**{:.1f} µs**"), "launches, µs"), rows)


# ---- CPE's step without groups, where retrievals are shared

CPE = {
  f"B{batch} T{tokens >> 10}K": f"B{batch} T{tokens} 32x1 1/8"
  for batch in (8, 16)
  for tokens in (1024, 2048, 4096)
}
VISITED = said(r"([\d.]+) tokens a head at a budget", "{:.0f}")


def _bandwidth(case: Case) -> str:
  took = case.time("apart")
  return say("{:.2f}", case.bytes / took.rate / took.us)


cpe = cells.cases(
  "cpe",
  {
    f"{label}, {keys} keys": f"{name}, {keys} keys"
    for label, name in CPE.items()
    for keys in ("random", "clustered")
  },
  ("tokens a head", VISITED),
  ("CPE", own()),
  ("dense", median("dense decode")),
  ("times as fast", faster("kvjax", "dense decode")),
  ("of the limit by bytes", said(r"([\d.]+) of the limit by bytes", reference="dense decode")),
  ("torch flash SDPA", median("torch flash")),
  ("times as fast", faster("kvjax", "torch flash")),
)
# Attention to a step's list alone, by how its tokens lie, beside dense decode over as many.
cpe_alone = cells.cases(
  "cpe",
  {label: f"{name}, the list alone" for label, name in CPE.items()},
  ("apart", own("apart")),
  ("in runs of 8", median("runs of 8")),
  ("in a row", median("in a row")),
  ("dense decode over as many", median("dense decode")),
  ("apart, of a read's bandwidth", _bandwidth),
)


# ---- codes, heads that share slots, branches that share a context


def _base(case: Case) -> str:
  return "sparse decode" if case.name.startswith("listed") else "dense decode"


# Decode over codes, whole and listed, beside the same over bfloat16.
codes = cells.cases(
  "quantised",
  r"^(listed )?int\d B",
  ("codes", own()),
  ("bfloat16", median(_base)),
  ("times as fast", faster("kvjax", _base)),
  ("share of read", faster("kvjax", "read")),
  label=lambda name: name.replace("int", "").replace(" B", " bits, B", 1),
)
ALLOW = ("bytes allow", said(r"of what the bytes allow \(([\d.]+) ×"))
# Whole steps under codes, beside the full cache.
code_steps = cells.cases(
  "quantised",
  "Llama",
  ("codes", own()),
  ("full cache", median("Full")),
  ("times as fast", faster("kvjax", "Full")),
  ALLOW,
  label=lambda name: name.replace("int", "").replace(" ", " bits, ", 1),
)
# Whole steps of n branches of a context, and of n copies.
forked = cells.cases(
  "forked",
  "",
  ("branches", own()),
  ("copies", median("copies")),
  ("times as fast", faster("kvjax", "copies")),
  ALLOW,
  label=lambda name: name.removeprefix("forked ").replace(" n", ", n = "),
)


def _apart(case: Case) -> str:
  return "shared" if case.has("shared") else "kvjax"


def _equal(case: Case) -> str:
  return "equal heads" if case.has("shared") else "SnapKV"


# Decode over heads of 0.4 to 1.6 of the mean, and over equal ones; steps of Ada-KV.
per_head = cells.cases(
  "per_head",
  "",
  ("heads of 0.4 to 1.6", own(_apart)),
  ("equal heads", median(_equal)),
  ("times as fast", faster(_apart, _equal)),
  (
    "where those share slots too",
    cells.where("shared", faster("shared", "equal heads, shared")),
  ),
  label=lambda name: name.removeprefix("shared "),
)


# ---- LongFlow

ANSWER, PEER = "Qwen3-1.7B 512 in 16000 out", "Qwen3-1.7B transformers"
RATE = r": batch (\d+), ([\d,]+) tokens a second, ([\d.]+) of its byte limit"
HELD = r"Cache of a row ([\d.]+) MiB against ([\d.]+)"
LAYER = "step B{} S3200 8x4"
# A layer's step.
longflow = cells.cases(
  "longflow",
  {f"B{batch}, 3,200 slots": LAYER.format(batch) for batch in (128, 16)},
  ("LongFlow", own()),
  ("dense decode", median("dense decode")),
  ("over dense", longer("kvjax", "dense decode")),
  ("share of read", faster("kvjax", "read")),
  ("H2O in XLA", median("H2O in XLA")),
)


def answers(results: Results) -> Part:
  """Long answers at the batch that fills the memory."""
  case = results.bench("longflow")[ANSWER]
  rows = []
  for name, size in zip(("LongFlow", "Full"), case.numbers(HELD), strict=True):
    batch, rate, share = case.remark("^" + name + RATE)
    label = "LongFlow, budget 3,200" if name == "LongFlow" else name
    rows.append([label, batch, say("**{}**", rate), share.number, size])
  for peer in results.cases("longflow", f"^{PEER}"):
    batch, rate = peer.remark(r"batch (\d+), ([\d,]+) tokens a second over the answer")
    how = re.sub(r"^batch \d+, |; µs are of a step$", "", peer.shapes)
    rows.append([f"transformers, {how}", batch, rate, None, None])
  head = ["", "batch", "tokens a second", ("of its byte limit", "{:.2f}")]
  return cells.table([*head, ("cache of a row", "{:,.0f} MiB")], rows)


# ---- figures in sentences


def figures(results: Results) -> dict[str, str]:
  steps, codes = results.bench("e2e_sparse"), results.bench("quantised")
  read = {n: [steps[STEP.format(name, n)] for name in ("Quest", "InfLLM-v2")] for n in (1, 4)}
  allowed = [
    Ratio(case.numbers(ALLOWED)[0], case.time("Full")) for held in read.values() for case in held
  ]
  answer = results.bench("longflow")[ANSWER]
  rates = [answer.remark(f"^{name}{RATE}")[1] for name in ("LongFlow", "Full")]
  sizes = answer.numbers(HELD)
  small, large = (results.bench("longflow")[LAYER.format(batch)] for batch in (16, 128))
  over_full, over_dense = faster("kvjax", "Full"), faster("kvjax", "dense decode")
  found = {
    # What is left out of these is left out, and named, above.
    "allowed": span((x for x in allowed if x.reference.steady), "{:.3f}"),
    "int8": over_dense(codes["int8 B8 T32K 8x4"]),
    "int4": over_dense(codes["int4 B8 T32K 8x4"]),
    "int8-step": over_full(codes["int8 Llama-3.1-8B B8 T32K"]),
    "longflow-rate": rates[0],
    "full-rate": rates[1],
    "longflow-more": say("{:.1f}", rates[0].number / rates[1].number),
    "longflow-b128": longer("kvjax", "dense decode")(large),
    "longflow-b16": longer("kvjax", "dense decode")(small),
    "longflow-step": median("kvjax")(large),
    "h2o-step": median("H2O in XLA")(large),
    "over-h2o": faster("kvjax", "H2O in XLA")(large),
    "longflow-smaller": say("{:.0%}", 1 - sizes[0] / sizes[1]),
    "longflow-size": say("{:,.0f} MiB", sizes[0]),
    "full-size": say("{:,.0f} MiB", sizes[1]),
  }
  for batch, held in read.items():
    gains = (gain(case.time("kvjax"), case.time("Full")) for case in held)
    found[f"b{batch}"] = span(gains, "{:.1f}", " ×")
    found[f"cpe-b{batch}"] = over_full(steps[STEP.format("CPE", batch)])
  for tokens in (2048, 4096):
    case = results.bench("cpe")[f"B16 T{tokens} 32x1 1/8, clustered keys"]
    found |= {
      f"cpe-dense-{tokens}": median("dense decode")(case),
      f"cpe-{tokens}": median("kvjax")(case),
      f"cpe-gain-{tokens}": over_dense(case),
      f"cpe-flash-{tokens}": faster("kvjax", "torch flash")(case),
    }
  for keys in ("clustered", "random"):
    found[f"cpe-{keys}"] = VISITED(results.bench("cpe")[f"B8 T4096 32x1 1/8, {keys} keys"])
  return found | _beside_flashinfer(results)


def _beside_flashinfer(results: Results) -> dict[str, str]:
  """The geometric mean of all cases over each way of FlashInfer, and their span."""
  found: dict[str, str] = {}
  for label, peer in (("paged", PAGED), ("block-sparse", BLOCK_SPARSE)):
    cases = results.cases("sparse", r"^block \d+ budget \d+$")
    ratios = [over(case.time("kvjax"), case.time(peer)) for case in cases]
    held = [ratio.value for ratio in ratios if ratio.reference.steady]
    mean = Number(statistics.geometric_mean(held), *cells.records.of(*held))
    found |= {label: say("{:.2f}", mean), f"{label}-span": span(ratios)}
  for budget in (1024, 8192):
    cases = results.cases("sparse", rf"^block \d+ budget {budget}$")
    gains = (gain(case.time("kvjax"), case.time(BLOCK_SPARSE)) for case in cases)
    found[f"sparse-{budget}"] = span(gains)
  return found
