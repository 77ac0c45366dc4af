"""PRR: attention to a predicted selection beside the true one, steps, and foresight."""

from scripts.tools.tablemakers import GPU, H100, Case, Part, Results, cells, real
from scripts.tools.tablemakers.cells import Cases, faster, figure, own, say
from scripts.tools.tablemakers.timings import Ratio, gain

PEERS = "score + top_k, lax + FlashInfer block-sparse"  # one by one


def _hidden(case: Case) -> Ratio:
  """Selecting first over what is left where scoring hides behind attention.

  No bound: a launch of both is shorter than the longer of the two where neither fills the GPU.
  """
  first = case.time("select").us + case.time("attend").us
  longest = max(case.time("select"), case.time("speculate"), key=lambda timing: timing.us)
  parts = longest + case.time("repair") + max(0.0, case.bytes / longest.rate - longest.us)
  return Ratio(first / parts.us, parts)


layer = Cases("prr", "^(8B|GLM-4-9B-like) ").table(
  ("PRR", own("prr")),
  ("select first", "serial"),
  ("gain", faster("serial", "prr")),
  ("if parts hid", lambda case: say("{:.2f}", _hidden(case))),
  ("apart", "speculate + score"),
  ("side by side", "speculate beside score"),
  "select",
  "attend",
  "repair",
  ("gain of S1", faster("serial", "prr, S1")),
  ("of S2", faster("serial", "prr, S2")),
  ("over peers", faster(PEERS, "prr", "{:.1f}")),
)
steps = Cases("e2e_sparse", "^PRR ").table(
  ("select first", own("serial")),
  ("speed by the profile", faster("serial", "by profile", "{:.3f}")),
  ("speed at ρ = 1.25", faster("serial", "ρ = 1.25", "{:.3f}")),
  ("hit at ρ = 1.25", figure("hit, %", "{:.0f} %")),
)
calibration = Cases("prr", "^calibration").table(
  ("a layer's calibration", "searched"),
  ("without the search", "followed"),
)


def blocks(results: Results) -> Part:
  """Attention over a list, times as fast as FlashInfer's block-sparse, as in Tab. 3."""
  rows: dict[int, dict[str, str]] = {}
  for case in results.cases("sparse", card=H100):
    _, unit, _, budget = case.name.split()
    row = rows.setdefault(int(budget), {"tokens": f"{int(budget):,}"})
    row[f"blocks of {unit}"] = faster("FlashInfer block-sparse")(case)
  return cells.framed(rows[budget] for budget in sorted(rows))


def real_steps(results: Results) -> Part:
  """PRR's step beside Quest's after real text, with the tokens of each."""
  found = real.held(results)
  timed = {(cost.method, cost.length, cost.batch): cost for cost in found.costs}
  rows = []
  for length, batch in sorted({key[1:] for key in timed if key[0] == "prr"}):
    both = [timed[name, length, batch] for name in ("quest", "prr")]
    theirs, mine = map(found.time, both)
    row = [f"B{batch} T{length >> 10}K", theirs, say("{:**}", mine), gain(mine, theirs)]
    rows.append([*row, *(found.shown(cost, cost)["attended"] for cost in both)])
  head = ["", "Quest", "PRR", ("PRR's speed over Quest's", "{:.2f}")]
  return cells.table((*head, "tokens that Quest attends to", "that PRR attends to"), rows)


# ---- foresight

HITS = {"": f"{GPU}/prr_hits.json", "smollm2": "cpu/prr_hits.json"}  # by model
BASES = {
  "": {
    "Quest, 63 of 504 pages of 16": "Quest, 63 + 1 of pages of 16",
    "InfLLM-v2, 16 of 252 blocks of 32": "InfLLM-v2, 16 + 1 + 4 of blocks of 32",
  },
  "smollm2": {
    "Quest, 24 of 240 pages of 8": "Quest, 24 + 1 of pages of 8",
    "InfLLM-v2, 16 of 120 blocks of 16": "InfLLM-v2, 16 + 1 + 4 of blocks of 16",
  },
}
FORECASTS = ("last step's", "ema, ρ = 1", "holt, ρ = 1")
FORECASTS += tuple(f"{kind}, ρ = {ratio}" for ratio in (1.25, 1.5) for kind in ("last", "holt"))


def foresight(results: Results, model: str = "") -> Part:
  """Share of the tiles that score chooses that were foreseen; weighted by it in brackets.

  On the texts that α, β, γ were searched on, a step later.
  """
  file, names = HITS[model], BASES[model]
  study = results.study(file)["bases"]
  bases = [study[name] for name in names.values()]
  again = (say("{:.0%}", base["last step's"]["reuse"]) for base in bases)
  rows = [["of a step's tiles, listed by the last one (its newest tile too)", *again]]
  for name in (x for x in FORECASTS if x in bases[0]):
    found = (map(base[name].get, ("hit_rate", "weighted_hit_rate")) for base in bases)
    rows.append([name, *(say("{:.0%} ({:.0%})", *pair) for pair in found)])
  return cells.table(("", *names), rows)
