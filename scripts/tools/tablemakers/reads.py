"""Times of methods that read a part of the cache, of codes, shared slots and LongFlow."""

import re

from scripts.tools.tablemakers import GPU, Part, Results, cells
from scripts.tools.tablemakers.cells import Cases, faster, longer, own, say

# ---- methods that read a part of the cache

scores = Cases("select", "^(Quest|InfLLM-v2) .* B1").table(
  ("kvjax", own()),
  ("over the summaries' bytes at a read's bandwidth", cells.over_bytes("{:.2f}")),
  "XLA",
)
sparse = Cases("sparse").table(
  ("kvjax", own()),
  ("over FlashInfer's paged decode", longer("FlashInfer paged")),
  ("times as fast as its block-sparse", faster("FlashInfer block-sparse")),
)
# Whole steps beside the full cache's or those of copies, and what bytes allow.
BESIDE = "Full|copies"
steps = Cases(pattern="^(?!PRR|DuoAttention).*Llama").table(
  ("a step", own()),
  ("full cache, or copies", BESIDE),
  ("times as fast", faster(BESIDE)),
  cells.said("of what bytes allow", "{:.3f}", BESIDE),
  cells.said("bytes allow"),
)


def launches(results: Results) -> Part:
  """The launches of a layer's step: their sum, and each in order."""
  study, rows = results.study(f"{GPU}/launches.json"), []
  for layer, found in study["layers"].items():
    parts = [say(f"{name.partition('__')[0]} {{:.1f}}", us) for name, us in found]
    rows.append([layer, sum(us for _, us in found), cells.listed(parts)])
  return cells.table(("a layer's step", ("all", "**{:.1f} µs**"), "launches, µs"), rows)


# ---- CPE's step without groups, where retrievals are shared

cpe = Cases("cpe", "keys$").table(
  cells.said("tokens a head", "{:.0f}"),
  ("CPE", own()),
  ("dense", "dense decode"),
  ("times as fast", faster("dense decode")),
  cells.said("of the limit by bytes", reference="dense decode"),
  ("torch flash SDPA", "torch flash"),
  ("times as fast as flash", faster("torch flash")),
)
# Attention to a list alone, by how its tokens lie, beside dense decode over as many.
cpe_alone = Cases("cpe", "the list alone$").table(
  ("apart", own("apart")),
  ("in runs of 8", "runs of 8"),
  "in a row",
  ("dense decode over as many", "dense decode"),
  ("apart, of a read's bandwidth", cells.bandwidth("apart")),
)


# ---- codes, heads that share slots, branches that share a context

BASE = "dense decode|sparse decode"
# Decode over codes, whole and listed, beside the same over bfloat16.
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


# ---- LongFlow: a layer's step, and whole answers

longflow = Cases("longflow", "^step").table(
  ("LongFlow", own()),
  "dense decode",
  ("over dense", longer("dense decode")),
  ("share of read", faster("read")),
  "H2O in XLA",
)


def answers(results: Results) -> Part:
  """Long answers at the batch that fills the memory."""
  ours, rows = results.bench("longflow")["Qwen3-1.7B 512 in 16000 out"].figures, []
  for name in ("LongFlow", "Full"):
    names = ("batch", "tokens a second", "of its byte limit", "MiB of a row")
    batch, rate, *rest = (ours[f"{name}, {each}"] for each in names)
    rows.append([name, batch, say("**{:,.0f}**", rate), *rest])
  for peer in results.cases("longflow", "transformers$"):
    how = re.sub(r"^batch \d+, |; µs are of a step$", "", peer.shapes)
    rate = say("{:,.0f}", peer.figures["tokens a second"])
    rows.append([f"transformers, {how}", peer.figures["batch"], rate, None, None])
  head = ["", ("batch", "{:.0f}"), "tokens a second", ("of its byte limit", "{:.2f}")]
  return cells.table([*head, ("cache of a row", "{:,.0f} MiB")], rows)
