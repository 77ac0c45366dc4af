"""Times of methods that read a part of the cache, of codes, of shared slots, and of LongFlow."""

import re
import statistics
from collections.abc import Mapping

from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.cells import Pair, faster, longer, median, own, said
from scripts.tools.tablemakers.records import Part
from scripts.tools.tablemakers.results import GPU, Case, Results

# ---- methods that read a part of the cache

SELECTORS = {"Quest page 16": "Quest, pages of 16", "InfLLM-v2 block 64": "InfLLM-v2, blocks of 64"}
BLOCKS, BUDGETS = (16, 64, 128, 256), (1024, 2048, 4096, 8192)
PAGED, BLOCK_SPARSE = "FlashInfer paged", "FlashInfer block-sparse"
METHODS = {
  "Quest": "Quest, 4,096 tokens",
  "InfLLM-v2": "InfLLM-v2, 64 blocks of 64",
  "CPE": "CPE, 512 tokens, τ = −1: always shared",
}


def scores(results: Results) -> Part:
  bench = results.bench("select")
  held = {
    f"{label}, B1 T{length}": bench.case(f"{name} B1 T{length}")
    for name, label in SELECTORS.items()
    for length in ("128K", "512K")
  }
  return cells.cases(
    held,
    ("kvjax", own()),
    ("over the summaries' bytes at a read's bandwidth", _over_bytes),
    ("XLA", median("XLA")),
  )


def _over_bytes(case: Case) -> str:
  took = case.time("kvjax")
  return cells.number(took.us * 1e-6 * cells.rate(took) / case.bytes)


def sparse(results: Results) -> Part:
  rows = []
  for block in BLOCKS:
    cases = [results.bench("sparse").case(f"block {block} budget {n}") for n in BUDGETS]
    rows.append([f"blocks of {block}", *map(own(), cases)])
    rows.append(["over FlashInfer's paged decode", *map(longer("kvjax", PAGED), cases)])
  return cells.table(("", *(f"{n:,} tokens" for n in BUDGETS)), rows)


def _beside_flashinfer(results: Results, label: str, peer: str) -> dict[str, str]:
  """The geometric mean of all cases, and their span."""
  cases = results.bench("sparse").cases(r"^block \d+ budget \d+$")
  pairs = [cells.over(case.time("kvjax"), case.time(peer)) for case in cases]
  held = [value for value, reference in pairs if cells.steady(reference)]
  mean = cells.number(statistics.geometric_mean(held), "{:.2f}", *held)
  return {label: mean, f"{label}-span": cells.span(pairs)}


def _step(results: Results, method: str, batch: int) -> Case:
  return results.bench("e2e_sparse").case(f"{method} Llama-3.1-8B B{batch} T128K")


def _over_full(case: Case) -> Pair:
  return cells.gain(case.time("kvjax"), case.time("Full"))


def _allowed(case: Case) -> Pair:
  """The share of the gain over the full cache that the bytes allow."""
  return case.number(r"([\d.]+) of what the bytes allow"), case.time("Full")


def sparse_steps(results: Results) -> Part:
  held = {
    f"B{batch}, {label}": _step(results, method, batch)
    for batch in (1, 4)
    for method, label in METHODS.items()
  }
  return cells.cases(
    held,
    ("a token", own()),
    ("Full", median("Full")),
    ("over Full", faster("kvjax", "Full")),
    ("of what bytes allow", lambda case: cells.ratio(*_allowed(case), "{:.3f}")),
  )


def launches(results: Results) -> Part:
  """The parts of a layer's step: the sum of its launches, and each of them in order."""
  path, rows = f"{GPU}/launches.json", []
  device = results.json(path, "about", "device")
  study = results.study(path, card=device, n=1, setting="cold caches, no CUDA graph")
  for layer, found in study.get("layers").items():
    times = [study.number("layers", layer, i, 1, setting=layer) for i in range(len(found))]
    names = [name.partition("__")[0] for name, _ in found]
    parts = (cells.number(us, f"{name} {{:.1f}}") for name, us in zip(names, times, strict=True))
    rows.append([layer, cells.number(sum(times), "**{:.1f} µs**"), cells.listed(parts)])
  return cells.table(("a layer's step", "all", "launches, µs"), rows)


# ---- CPE's step without groups, where retrievals are shared

CPE = tuple((batch, tokens) for batch in (8, 16) for tokens in (1024, 2048, 4096))
VISITED = r"([\d.]+) tokens a head at a budget"


def _cpe(results: Results, batch: int, tokens: int, which: str) -> Case:
  return results.bench("cpe").case(f"B{batch} T{tokens} 32x1 1/8, {which}")


def cpe(results: Results) -> Part:
  held = {
    f"B{batch} T{tokens >> 10}K, {keys} keys": _cpe(results, batch, tokens, f"{keys} keys")
    for batch, tokens in CPE
    for keys in ("random", "clustered")
  }
  return cells.cases(
    held,
    ("tokens a head", said(VISITED, "{:.0f}")),
    ("CPE", own()),
    ("dense", median("dense decode")),
    ("times as fast", faster("kvjax", "dense decode")),
    ("of the limit by bytes", _of_limit),
    ("torch flash SDPA", median("torch flash")),
    ("times as fast", faster("kvjax", "torch flash")),
  )


def _of_limit(case: Case) -> str:
  return cells.ratio(case.number(r"([\d.]+) of the limit by bytes"), case.time("dense decode"))


def cpe_alone(results: Results) -> Part:
  """Attention to a step's list alone, by how its tokens lie, beside dense decode over as many."""
  held = {f"B{b} T{t >> 10}K": _cpe(results, b, t, "the list alone") for b, t in CPE}
  return cells.cases(
    held,
    ("apart", own("apart")),
    ("in runs of 8", median("runs of 8")),
    ("in a row", median("in a row")),
    ("dense decode over as many", median("dense decode")),
    ("apart, of a read's bandwidth", _bandwidth),
  )


def _bandwidth(case: Case) -> str:
  took = case.time("apart")
  return cells.number(case.bytes / cells.rate(took) / (took.us * 1e-6))


# ---- codes, heads that share slots, branches that share a context

LIMIT = r"of what the bytes allow \(([\d.]+) ×"


def codes(results: Results) -> Part:
  """Decode over codes, whole and listed, beside the same over bfloat16."""
  held = {
    case.name.replace("int", "").replace(" B", " bits, B", 1): case
    for case in results.bench("quantised").cases(r"^(listed )?int\d B")
  }
  return cells.cases(
    held,
    ("codes", own()),
    ("bfloat16", lambda case: median(_base(case))(case)),
    ("times as fast", lambda case: faster("kvjax", _base(case))(case)),
    ("share of read", faster("kvjax", "read")),
  )


def _base(case: Case) -> str:
  return "sparse decode" if case.name.startswith("listed") else "dense decode"


def code_steps(results: Results) -> Part:
  """Whole steps under codes, beside the full cache."""
  held = {
    case.name.replace("int", "").replace(" ", " bits, ", 1): case
    for case in results.bench("quantised").cases("Llama")
  }
  return _limited(held, ("codes", "kvjax"), ("full cache", "Full"))


def _limited(held: Mapping[str, Case], ours: tuple[str, str], other: tuple[str, str]) -> Part:
  """Times beside what holds more, and what the bytes allow."""
  return cells.cases(
    held,
    (ours[0], own(ours[1])),
    (other[0], median(other[1])),
    ("times as fast", faster(ours[1], other[1])),
    ("bytes allow", said(LIMIT)),
  )


def forked(results: Results) -> Part:
  """Whole steps of n branches of a context, and of n copies."""
  held = {
    case.name.removeprefix("forked ").replace(" n", ", n = "): case
    for case in results.bench("forked").cases("")
  }
  return _limited(held, ("branches", "kvjax"), ("copies", "copies"))


def per_head(results: Results) -> Part:
  """Decode over heads of 0.4 to 1.6 of the mean, and over equal ones; steps of Ada-KV."""
  shared = lambda case: case.has("shared")  # noqa: E731
  pair = lambda case: ("shared", "equal heads") if shared(case) else ("kvjax", "SnapKV")  # noqa: E731
  alike = faster("shared", "equal heads, shared")
  return cells.cases(
    {case.name.removeprefix("shared "): case for case in results.bench("per_head").cases("")},
    ("heads of 0.4 to 1.6", lambda case: own(pair(case)[0])(case)),
    ("equal heads", lambda case: median(pair(case)[1])(case)),
    ("times as fast", lambda case: faster(*pair(case))(case)),
    ("where those share slots too", lambda case: alike(case) if shared(case) else "–"),
  )


# ---- LongFlow

ANSWER, PEER = "Qwen3-1.7B 512 in 16000 out", "Qwen3-1.7B transformers"
RATE = r": batch (\d+), ([\d,]+) tokens a second, ([\d.]+) of its byte limit"
HELD = r"Cache of a row ([\d.]+) MiB against ([\d.]+)"


def _longflow_step(results: Results, batch: int) -> Case:
  return results.bench("longflow").case(f"step B{batch} S3200 8x4")


def longflow(results: Results) -> Part:
  """A layer's step."""
  return cells.cases(
    {f"B{batch}, 3,200 slots": _longflow_step(results, batch) for batch in (128, 16)},
    ("LongFlow", own()),
    ("dense decode", median("dense decode")),
    ("over dense", longer("kvjax", "dense decode")),
    ("share of read", faster("kvjax", "read")),
    ("H2O in XLA", median("H2O in XLA")),
  )


def answers(results: Results) -> Part:
  """Long answers at the batch that fills the memory."""
  bench, rows = results.bench("longflow"), []
  case = bench.case(ANSWER)
  for name, size in zip(("LongFlow", "Full"), case.numbers(HELD), strict=True):
    batch, rate, share = case.remark("^" + name + RATE)
    label = "LongFlow, budget 3,200" if name == "LongFlow" else name
    cut = cells.number(cells.read(share))
    rows.append([label, batch, cells.join("**{}**", rate), cut, cells.number(size, "{:,.0f} MiB")])
  for peer in bench.cases(f"^{PEER}"):
    batch, rate = peer.remark(r"batch (\d+), ([\d,]+) tokens a second over the answer")
    how = re.sub(r"^batch \d+, |; µs are of a step$", "", peer.shapes)
    rows.append([f"transformers, {how}", batch, rate, "–", "–"])
  head = ("", "batch", "tokens a second", "of its byte limit", "cache of a row")
  return cells.table(head, rows)


# ---- figures in sentences


def figures(results: Results) -> dict[str, str]:
  read = {n: [_step(results, name, n) for name in ("Quest", "InfLLM-v2")] for n in (1, 4)}
  allowed = [_allowed(case) for held in read.values() for case in held]
  codes, flow = results.bench("quantised"), results.bench("longflow").case(ANSWER)
  rates = [flow.remark(f"^{name}{RATE}")[1] for name in ("LongFlow", "Full")]
  more = cells.read(rates[0]) / cells.read(rates[1])
  sizes = flow.numbers(HELD)
  step = _longflow_step(results, 128)
  dense = faster("kvjax", "dense decode")
  found = {
    **_beside_flashinfer(results, "paged", PAGED),
    **_beside_flashinfer(results, "block-sparse", BLOCK_SPARSE),
    "b1": cells.span(map(_over_full, read[1]), "{:.1f}", " ×"),
    "b4": cells.span(map(_over_full, read[4]), "{:.1f}", " ×"),
    # What is left out of these is left out, and named, above.
    "allowed": cells.span((x for x in allowed if cells.steady(x[1])), "{:.3f}"),
    "cpe-b1": faster("kvjax", "Full")(_step(results, "CPE", 1)),
    "cpe-b4": faster("kvjax", "Full")(_step(results, "CPE", 4)),
    "int8": dense(codes.case("int8 B8 T32K 8x4")),
    "int4": dense(codes.case("int4 B8 T32K 8x4")),
    "int8-step": faster("kvjax", "Full")(codes.case("int8 Llama-3.1-8B B8 T32K")),
    "longflow-rate": rates[0],
    "full-rate": rates[1],
    "longflow-more": cells.number(more, "{:.1f}"),
    "longflow-b128": longer("kvjax", "dense decode")(step),
    "longflow-b16": longer("kvjax", "dense decode")(_longflow_step(results, 16)),
    "longflow-step": cells.time(step.time("kvjax")),
    "h2o-step": cells.time(step.time("H2O in XLA")),
    "over-h2o": faster("kvjax", "H2O in XLA")(step),
    "longflow-smaller": cells.number(100 * (1 - sizes[0] / sizes[1]), "{:.0f} %"),
    "longflow-size": cells.number(sizes[0], "{:,.0f} MiB"),
    "full-size": cells.number(sizes[1], "{:,.0f} MiB"),
  }
  for tokens in (2048, 4096):
    case = _cpe(results, 16, tokens, "clustered keys")
    found |= {
      f"cpe-dense-{tokens}": cells.time(case.time("dense decode")),
      f"cpe-{tokens}": cells.time(case.time("kvjax")),
      f"cpe-gain-{tokens}": dense(case),
      f"cpe-flash-{tokens}": faster("kvjax", "torch flash")(case),
    }
  for keys in ("clustered", "random"):
    found[f"cpe-{keys}"] = said(VISITED, "{:.0f}")(_cpe(results, 8, 4096, f"{keys} keys"))
  for budget in (1024, 8192):
    held = results.bench("sparse").cases(rf"^block \d+ budget {budget}$")
    pairs = (cells.gain(case.time("kvjax"), case.time(BLOCK_SPARSE)) for case in held)
    found[f"sparse-{budget}"] = cells.span(pairs)
  return found
