"""PRR: attention to a predicted selection beside the true one, whole steps, and foresight."""

from scripts.tools.tablemakers import cells, real
from scripts.tools.tablemakers.cells import faster, median, own, said, say
from scripts.tools.tablemakers.records import Figure, Part
from scripts.tools.tablemakers.results import GPU, Case, Results, Study
from scripts.tools.tablemakers.timings import Ratio, Timing, gain, span

LENGTHS = ("16K", "32K", "64K", "128K", "256K", "512K")
EVERY = {
  f"{label}, B{batch} T{length}": f"{model} B{batch} T{length} 1024x16"
  for model, label in (
    ("8B", "Llama-3.1-8B's heads"),
    ("GLM-4-9B-like", "GLM-4-9B's heads (2 × 16)"),
  )
  for batch in (1, 4)
  for length in LENGTHS
}
PEERS = ("score", "top_k, lax", "FlashInfer block-sparse")


def _hidden(case: Case) -> Ratio:
  """Selecting first over the parts that are left where scoring hides behind attention.

  No bound: a launch of both is shorter than the longer of the two where neither fills the GPU.
  """
  first = case.time("select").us + case.time("attend").us
  longest = max(case.time("select"), case.time("speculate"), key=lambda timing: timing.us)
  parts = longest + case.time("repair") + max(0.0, case.bytes / longest.rate - longest.us)
  return Ratio(first / parts.us, parts)


def _apart(case: Case) -> Timing:
  return case.time("speculate") + case.time("score")


def _over_peers(case: Case) -> Ratio:
  """Scores, `lax.top_k` and FlashInfer's attention one by one, over PRR."""
  first, second, third = map(case.time, PEERS)
  return gain(case.time("prr"), first + second + third)


layer = cells.cases(
  "prr",
  EVERY,
  ("PRR", own("prr")),
  ("select first", median("serial")),
  ("gain", faster("prr", "serial")),
  ("if parts hid", lambda case: say("{:.2f}", _hidden(case))),
  ("apart", lambda case: say("{}", _apart(case))),
  ("side by side", median("speculate beside score")),
)
steps = cells.cases(
  "e2e_sparse",
  {f"T{length}": f"PRR Llama-3.1-8B B1 T{length}" for length in LENGTHS},
  ("select first", own("serial")),
  ("speed by the profile", faster("by profile", "serial", "{:.3f}")),
  ("speed at ρ = 1.25", faster("ρ = 1.25", "serial", "{:.3f}")),
  ("hit at ρ = 1.25", said(r"^ρ = 1.25 hit (\d+)% of what was chosen", "{:.0f} %")),
)
calibration = cells.cases(
  "prr",
  {f"T{length}": f"calibration 8B B1 T{length} 1024x16" for length in ("16K", "128K")},
  ("a layer's calibration", median("searched")),
  ("without the search", median("followed")),
)


def real_steps(results: Results) -> Part:
  """PRR's step beside Quest's after real text, with the tokens that each attends to."""
  found = real.held(results)
  timed = {(cost.method, cost.length, cost.batch): cost for cost in found.costs}
  rows = []
  for length, batch in sorted({key[1:] for key in timed if key[0] == "prr"}):
    both = [timed[name, length, batch] for name in ("quest", "prr")]
    theirs, mine = map(found.time, both)
    seen = (found.number(cost, cost.attended) for cost in both)
    row = [f"B{batch} T{length >> 10}K", theirs, say("{:**}", mine), gain(mine, theirs), *seen]
    rows.append(row)
  head = ["", "Quest", "PRR", ("PRR's speed over Quest's", "{:.2f}")]
  head += [("tokens that Quest attends to", "{:,.0f}"), ("that PRR attends to", "{:,.0f}")]
  return cells.table(head, rows)


# ---- foresight

HITS = f"{GPU}/prr_hits.json"
BASES = ("Quest, 63 + 1 of pages of 16", "InfLLM-v2, 16 + 1 + 4 of blocks of 32")
PREDICTORS = {
  "last step's": "the last step's tiles",
  "ema, ρ = 1": "EMA, ρ = 1",
  "holt, ρ = 1": "Holt, ρ = 1",
  "holt, ρ = 1.25": "Holt, ρ = 1.25",
  "holt, ρ = 1.5": "Holt, ρ = 1.5",
}


def _hits(results: Results) -> list[Study]:
  """PRR's hit rates, on the texts that α, β, γ were searched on, a step later."""
  about = results.json(HITS)
  setting = f"{about['model']}; {about['texts']}; {about['n']}"
  fitted = f"α, β, γ: on {about['calibrated on']}"
  texts = len(about["texts"].split("(")[0].split(","))
  bases = results.study(HITS, setting, n=texts, fitted=fitted)["bases"]
  return [bases[base] for base in BASES]


def _hit(base: Study, name: str) -> Figure:
  """Share of the tiles chosen by score that were foreseen; weighted by the score in brackets."""
  return say("{:.0%} ({:.0%})", *base[name].each("hit_rate", "weighted_hit_rate"))


def _again(base: Study) -> Figure:
  return say("{:.0%}", base["last step's"]["reuse"])


def foresight(results: Results) -> Part:
  bases = _hits(results)
  rows = [["of a step's tiles, listed by the last one (its newest tile too)", *map(_again, bases)]]
  for name, label in PREDICTORS.items():
    rows.append([label, *(_hit(base, name) for base in bases)])
  head = "63 of 504 pages of 16 (Quest), 16 of 252 blocks of 32 (InfLLM-v2)"
  return cells.table((head, "Quest", "InfLLM-v2"), rows)


# ---- figures in sentences


def figures(results: Results) -> dict[str, str]:
  bench = results.bench("prr")
  every = [bench[name] for name in EVERY.values()]
  first, middle, long = (bench[f"8B B1 T{length} 1024x16"] for length in ("16K", "64K", "128K"))
  repair, fits = bench["repair 8B B1 T128K 1024x16"], bench["calibration 8B B1 T16K 1024x16"]
  missed = [repair.time(f"{n} missed").us for n in (0, 4, 8, 16)]
  gains = [gain(case.time("prr"), case.time("serial")) for case in every]
  whole = results.cases("e2e_sparse", r"^PRR Llama-3\.1-8B B1 T")
  rho = (gain(case.time("ρ = 1.25"), case.time("serial")) for case in whole)
  peers = (_over_peers(case) for case in every if case.has(PEERS[-1]))
  found = {
    "hidden": span(map(_hidden, every)),
    "attend": median("attend")(long),
    "repair": median("repair")(long),
    "launch": median("a launch")(repair),
    "missed": cells.listed((us - missed[0] for us in missed[1:]), form="{:.1f} µs"),
    "stage-1": faster("prr, S1", "serial")(first),
    "stage-2": faster("prr, S2", "serial")(first),
    "stage-3": faster("prr", "serial")(first),
    "over-peers": span(peers, "{:.1f}", " ×"),
    "gain": span(gains),
    "gain-times": span(gains, unit=" ×"),
    "whole": span(rho, "{:.3f}", " ×"),
    "beside": median("speculate beside score")(middle),
    "apart": say("{}", _apart(middle)),
    "hit": said(r"(\d+)% hit", "{:.0f} %")(middle),
    "searched": median("searched")(fits),
    "followed": median("followed")(fits),
  }
  for length in ("16K", "512K"):
    found[f"select-{length}"] = median("select")(bench[f"GLM-4-9B-like B1 T{length} 1024x16"])
  for label, base in zip(("quest", "infllm"), _hits(results), strict=True):
    found |= {
      f"{label}-again": _again(base),
      f"{label}-hit": _hit(base, "holt, ρ = 1"),
      f"{label}-slack": _hit(base, "holt, ρ = 1.5"),
    }
  return found
