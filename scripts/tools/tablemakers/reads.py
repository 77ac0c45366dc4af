"""Times of methods that read a part, of codes, shared slots and LongFlow."""

import re

import pandas as pd

from scripts.tools.tablemakers import GPU, READ, Part, Results
from scripts.tools.tablemakers.cells import Cases, faster, longer, own, said, say

scores = Cases("select", "^(Quest|InfLLM-v2) .* B1").table(
  ("kvjax", own()),
  ("over the summaries' bytes at a read's bandwidth", longer(READ)),
  "XLA",
)
sparse = Cases("sparse").table(
  ("kvjax", own()),
  ("over FlashInfer's paged decode", longer("FlashInfer paged")),
  ("times as fast as its block-sparse", faster("FlashInfer block-sparse")),
)
# Whole steps beside the full cache's or those of copies, and what bytes allow.
BESIDE = "Full|copies"
steps = Cases(pattern="^(?!PRR|DuoAttention|Tab).*Llama").table(
  ("a step", own()),
  ("full cache, or copies", BESIDE),
  ("times as fast", faster(BESIDE)),
  said("of what bytes allow", "{:.3f}", BESIDE),
  said("bytes allow"),
)


def launches(results: Results) -> Part:
  rows = {}
  for layer, found in results.json(f"{GPU}/launches.json")["layers"].items():
    parts = ", ".join(f"{name.partition('__')[0]} {us:.1f}" for name, us in found)
    rows[layer] = {"all": f"**{sum(us for _, us in found):.1f} µs**", "launches, µs": parts}
  return pd.DataFrame.from_dict(rows, "index").rename_axis("a layer's step")


cpe = Cases("cpe", "keys$").table(
  said("tokens a head", "{:.0f}"),
  ("CPE", own()),
  ("dense", "dense decode"),
  ("times as fast", faster("dense decode")),
  said("limit by bytes"),
  said("of the limit by bytes", to="dense decode"),
  *(("torch flash SDPA", "torch flash"), ("times as fast as flash", faster("torch flash"))),
)
# Tabs. IV and V of PrHS.
PEERS = "CPE-8", "CIS-16", "CIS-8", "HShare-0", "HShare-1", "Double Sparsity", "Quest", "H2O"
peers = Cases("cpe", "keys$").table(("CPE-16", own()), *PEERS, ("dense", "dense decode"))
peer_steps = Cases("e2e_sparse", "^Tab").table(
  *(("CPE-16", own()), *PEERS, ("full cache", "Full"), ("torch", "torch, CUDA graph")),
  ("times as fast as torch", faster("torch, CUDA graph")),
  *(("as the full cache", faster("Full")), said("bytes allow")),
)
# Attention to a list alone, by how its tokens lie.
cpe_alone = Cases("cpe", "the list alone$").table(
  ("apart", own("apart")),
  ("in runs of 8", "runs of 8"),
  "in a row",
  ("dense decode over as many", "dense decode"),
  ("apart, of a read's bandwidth", faster(READ, "apart")),
)
BASE = "dense decode|sparse decode"
codes = Cases("quantised", r"^(listed )?int\d B").table(
  ("codes", own()),
  ("bfloat16", BASE),
  ("times as fast", faster(BASE)),
  ("share of read", faster("read")),
)
# Decode over heads of 0.4 to 1.6 of the mean, and over equal ones; steps of Ada-KV.
per_head = Cases("per_head").table(
  ("heads of 0.4 to 1.6", own("shared|kvjax")),
  ("equal heads", "equal heads|SnapKV"),
  ("times as fast", faster("equal heads|SnapKV", "shared|kvjax")),
  ("where those share slots too", faster("equal heads, shared", "shared")),
)
longflow = Cases("longflow", "^step").table(
  ("LongFlow", own()),
  "dense decode",
  ("over dense", longer("dense decode")),
  ("share of read", faster("read")),
  "H2O in XLA",
)


def answers(results: Results) -> Part:
  ours, rows = results.bench("longflow")["Qwen3-1.7B 512 in 16000 out"], {}
  for who in ("LongFlow", "R-KV", "VATP", "H2O", "Full"):
    rows[who] = {
      "batch": int(ours[f"{who}, batch"]),
      "tokens a second": say("**{:,.0f}**", ours[f"{who}, tokens a second"]),
      "of its byte limit": say("{:.2f}", ours[f"{who}, of its byte limit"]),
      "cache of a row": say("{:,.0f} MiB", ours[f"{who}, MiB of a row"]),
    }
  for peer in results.cases("longflow", "transformers$"):
    how = re.sub(r"^batch \d+, |; µs are of a step$", "", peer["shapes"])
    rate = say("{:,.0f}", peer["tokens a second"])
    rows[f"transformers, {how}"] = {"batch": int(peer["batch"]), "tokens a second": rate}
  return pd.DataFrame.from_dict(rows, "index").rename_axis("")
