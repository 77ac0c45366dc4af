"""PRR: attention to a predicted selection, steps, and foresight."""

import pandas as pd

from scripts.tools.tablemakers import GPU, H100, READ, Part, Record, Results, cells, reads, real
from scripts.tools.tablemakers.cells import Cases, Ratio, faster, figure, over, own, say

PEERS = "score + top_k, lax + FlashInfer block-sparse"  # one by one


def _hidden(case: Record) -> Ratio:
  """Selecting first over what is left where scoring hides behind attention.

  No bound: a launch of both is shorter than the longer of the two where neither fills the GPU.
  """
  longest = max((case[x] for x in ("select", "speculate", READ)), key=lambda timing: timing.us)
  return over(case["select"] + case["attend"], longest + case["repair"])


layer = Cases("prr", "^(8B|GLM-4-9B-like) ").table(
  ("PRR", own("prr")),
  ("select first", "serial"),
  ("gain", faster("serial", "prr")),
  ("if parts hid", _hidden),
  ("apart", "speculate + score"),
  ("side by side", "speculate beside score"),
  *("select", "attend", "repair"),
  ("gain of S1", faster("serial", "prr, S1")),
  ("of S2", faster("serial", "prr, S2")),
  ("over peers", faster(PEERS, "prr", "{:.1f}")),
)
steps = Cases("e2e_sparse", "^PRR ").table(
  ("select first", own("serial")),
  ("speed by the profile", faster("serial", "by profile", "{:.3f}")),
  ("speed at ρ = 1.25", faster("serial", "ρ = 1.25", "{:.3f}")),
  ("hit at ρ = 1.25", figure("{:.0f}%", "hit, %")),
)
calibration = Cases("prr", "^calibration").table(
  ("a layer's calibration", "searched"),
  ("without the search", "followed"),
)


def blocks(results: Results) -> Part:
  gains = reads.sparse(results, H100)["times as fast as its block-sparse"].reset_index(name="gain")
  gains[["unit", "tokens"]] = gains[""].str.extract(r"block (\d+) budget (\d+)").astype(int)
  found = gains.pivot(index="tokens", columns="unit", values="gain")
  return found.rename("{:,}".format).add_prefix("blocks of ")


def real_steps(results: Results) -> Part:
  steps = real.steps(results)
  prr, quest = (steps[steps.method == name] for name in ("prr", "quest"))
  both = prr.merge(quest, on=["length", "batch"], suffixes=("", ", Quest"))
  return cells.table(
    both.sort_values(["length", "batch"]),
    [("", lambda row: f"B{row['batch']} T{row['length'] >> 10}K")],
    ("Quest", "time, Quest"),
    ("PRR", own("time")),
    ("PRR's speed over Quest's", faster("time, Quest", "time")),
    ("tokens that Quest attends to", "tokens, Quest"),
    ("that PRR attends to", "tokens"),
  )


HITS = {"": f"{GPU}/prr_hits.json", "smollm2": "cpu/prr_hits.json"}  # by model
HEADS = {
  "Quest, 63 + 1 of pages of 16": "Quest, 63 of 504 pages of 16",
  "InfLLM-v2, 16 + 1 + 4 of blocks of 32": "InfLLM-v2, 16 of 252 blocks of 32",
  "Quest, 24 + 1 of pages of 8": "Quest, 24 of 240 pages of 8",
  "InfLLM-v2, 16 + 1 + 4 of blocks of 16": "InfLLM-v2, 16 of 120 blocks of 16",
}
REUSED = "of a step's tiles, listed by the last one (its newest tile too)"
FORECASTS = ("last step's", "ema, ρ = 1", "holt, ρ = 1", "last, ρ = 1.25", "holt, ρ = 1.25")
FORECASTS += ("last, ρ = 1.5", "holt, ρ = 1.5")


def foresight(results: Results, model: str = "") -> Part:
  """Shares that were foreseen of the tiles that score chooses, weighted by it in brackets.

  On the texts that α, β, γ were searched on, a step later.
  """
  columns, hits = {}, figure("{:.0%} ({:.0%})", "hit_rate", "weighted_hit_rate")
  for base, study in results.json(HITS[model])["bases"].items():
    if base in HEADS:
      found = {name: hits(study[name]) for name in FORECASTS if name in study}
      columns[HEADS[base]] = {REUSED: say("{:.0%}", study["last step's"]["reuse"]), **found}
  return pd.DataFrame(columns).rename_axis("")
