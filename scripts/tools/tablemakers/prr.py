"""PRR: attention to a predicted selection beside the true one, whole steps, and foresight."""

from collections.abc import Iterable

from kvjax.programs.evals import costs
from scripts.tools.tablemakers import cells, real
from scripts.tools.tablemakers.cells import faster, median, own
from scripts.tools.tablemakers.records import Figure, Part
from scripts.tools.tablemakers.results import GPU, Case, Results, Study, Timing

MODELS = {"8B": "Llama-3.1-8B's heads", "GLM-4-9B-like": "GLM-4-9B's heads (2 × 16)"}
LENGTHS = ("16K", "32K", "64K", "128K", "256K", "512K")
PEERS = ("score", "top_k, lax", "FlashInfer block-sparse")


def _shape(results: Results, model: str, batch: int, length: str) -> Case:
  return results.bench("prr").case(f"{model} B{batch} T{length} 1024x16")


def _every(results: Results) -> dict[str, Case]:
  return {
    f"{label}, B{batch} T{length}": _shape(results, model, batch, length)
    for model, label in MODELS.items()
    for batch in (1, 4)
    for length in LENGTHS
  }


def _hidden(case: Case) -> cells.Pair:
  """Selecting first over the parts that are left where scoring hides behind attention.

  No bound: a launch of both is shorter than the longer of the two where neither fills the GPU.
  """
  first = case.time("select").us + case.time("attend").us
  longest = max(case.time("select"), case.time("speculate"), key=lambda timing: timing.us)
  bytes_us = case.bytes / cells.rate(longest) * 1e6
  parts = longest.then(case.time("repair")).later(max(0.0, bytes_us - longest.us))
  return first / parts.us, parts


def _apart(case: Case) -> Timing:
  return case.time("speculate").then(case.time("score"))


def _over_peers(cases: Iterable[Case]) -> Figure:
  """Scores, `lax.top_k` and FlashInfer's attention one by one, over PRR."""
  pairs = []
  for case in cases:
    if case.has(PEERS[-1]):
      first, *others = map(case.time, PEERS)
      pairs.append(cells.gain(case.time("prr"), first.then(*others)))
  return cells.span(pairs, "{:.1f}", " ×")


def layer(results: Results) -> Part:
  return cells.cases(
    _every(results),
    ("PRR", own("prr")),
    ("select first", median("serial")),
    ("gain", faster("prr", "serial")),
    ("if parts hid", lambda case: cells.ratio(*_hidden(case))),
    ("apart", lambda case: cells.time(_apart(case))),
    ("side by side", median("speculate beside score")),
  )


def steps(results: Results) -> Part:
  bench = results.bench("e2e_sparse")
  return cells.cases(
    {f"T{length}": bench.case(f"PRR Llama-3.1-8B B1 T{length}") for length in LENGTHS},
    ("select first", own("serial")),
    ("speed by the profile", faster("by profile", "serial", "{:.3f}")),
    ("speed at ρ = 1.25", faster("ρ = 1.25", "serial", "{:.3f}")),
    ("hit at ρ = 1.25", cells.said(r"^ρ = 1.25 hit (\d+)% of what was chosen", "{:.0f} %")),
  )


def real_steps(results: Results) -> Part:
  """PRR's step beside Quest's after real text, with the tokens that each attends to."""
  found = real.held(results)
  timed = {(c.method, c.length, c.batch): c for c in costs.read(results.folder / real.FOLDER)}
  rows = []
  for length, batch in sorted({key[1:] for key in timed if key[0] == "prr"}):
    both = [timed[name, length, batch] for name in ("quest", "prr")]
    theirs, mine = map(found.time, both)
    seen = [cells.number(c.attended or 0, "{:,.0f}", found.time(c)) for c in both]
    speed = cells.ratio(*cells.gain(mine, theirs))
    rows.append([f"B{batch} T{length >> 10}K", cells.time(theirs), cells.ours(mine), speed, *seen])
  head = ("", "Quest", "PRR", "PRR's speed over Quest's", "tokens that Quest attends to")
  return cells.table((*head, "that PRR attends to"), rows)


def calibration(results: Results) -> Part:
  return cells.cases(
    {f"T{length}": _calibration(results, length) for length in ("16K", "128K")},
    ("a layer's calibration", median("searched")),
    ("without the search", median("followed")),
  )


def _calibration(results: Results, length: str) -> Case:
  return results.bench("prr").case(f"calibration 8B B1 T{length} 1024x16")


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


def _hits(results: Results) -> Study:
  """PRR's hit rates, on the texts that α, β, γ were searched on, a step later."""
  about = results.json(HITS)
  setting = f"{about['model']}; {about['texts']}; {about['n']}"
  fitted = f"α, β, γ: on {about['calibrated on']}"
  texts = len(about["texts"].split("(")[0].split(","))
  return results.study(HITS, card=about["device"], n=texts, setting=setting, fitted=fitted)


def _hit(study: Study, base: str, name: str) -> Figure:
  """Share of the tiles chosen by score that were foreseen; weighted by the score in brackets."""
  keys = ("hit_rate", "weighted_hit_rate")
  return cells.join(
    "{} ({})", *(cells.percent(study.number("bases", base, name, key)) for key in keys)
  )


def _again(study: Study) -> list[Figure]:
  return [cells.percent(study.number("bases", x, "last step's", "reuse")) for x in BASES]


def foresight(results: Results) -> Part:
  study = _hits(results)
  rows = [["of a step's tiles, listed by the last one (its newest tile too)", *_again(study)]]
  for name, label in PREDICTORS.items():
    rows.append([label, *(_hit(study, base, name) for base in BASES)])
  head = "63 of 504 pages of 16 (Quest), 16 of 252 blocks of 32 (InfLLM-v2)"
  return cells.table((head, "Quest", "InfLLM-v2"), rows)


# ---- figures in sentences


def figures(results: Results) -> dict[str, str]:
  every, study = _every(results).values(), _hits(results)
  first, middle, long = (_shape(results, "8B", 1, length) for length in ("16K", "64K", "128K"))
  glm = [_shape(results, "GLM-4-9B-like", 1, length) for length in ("16K", "512K")]
  repair = results.bench("prr").case("repair 8B B1 T128K 1024x16")
  missed = [repair.time(f"{n} missed").us for n in (0, 4, 8, 16)]
  gains = [cells.gain(case.time("prr"), case.time("serial")) for case in every]
  whole = results.bench("e2e_sparse").cases(r"^PRR Llama-3\.1-8B B1 T")
  rho = (cells.gain(case.time("ρ = 1.25"), case.time("serial")) for case in whole)
  found = {
    "hidden": cells.span(map(_hidden, every)),
    "attend": median("attend")(long),
    "repair": median("repair")(long),
    "launch": median("a launch")(repair),
    "missed": cells.listed(cells.number(us - missed[0], "{:.1f} µs") for us in missed[1:]),
    "stage-1": faster("prr, S1", "serial")(first),
    "stage-2": faster("prr, S2", "serial")(first),
    "stage-3": faster("prr", "serial")(first),
    "over-peers": _over_peers(every),
    "gain": cells.span(gains),
    "gain-times": cells.span(gains, unit=" ×"),
    "whole": cells.span(rho, "{:.3f}", " ×"),
    "beside": median("speculate beside score")(middle),
    "apart": cells.time(_apart(middle)),
    "hit": cells.said(r"(\d+)% hit", "{:.0f} %")(middle),
    "select-16K": median("select")(glm[0]),
    "select-512K": median("select")(glm[1]),
    "searched": median("searched")(_calibration(results, "16K")),
    "followed": median("followed")(_calibration(results, "16K")),
  }
  for label, base, again in zip(("quest", "infllm"), BASES, _again(study), strict=True):
    found |= {
      f"{label}-again": again,
      f"{label}-hit": _hit(study, base, "holt, ρ = 1"),
      f"{label}-slack": _hit(study, base, "holt, ρ = 1.5"),
    }
  return found
