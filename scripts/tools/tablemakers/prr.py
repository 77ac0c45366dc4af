"""PRR: attention to a predicted selection beside the true one, and whole steps with it."""

from kvjax.programs.bench_files import BANDWIDTH
from kvjax.programs.evals import costs
from scripts.tools.tablemakers import cells, real, records
from scripts.tools.tablemakers.records import Figure, Number, Part
from scripts.tools.tablemakers.results import Case, Results, Timing

MODELS = {"8B": "Llama-3.1-8B's heads", "GLM-4-9B-like": "GLM-4-9B's heads (2 × 16)"}
LENGTHS = ("16K", "32K", "64K", "128K", "256K", "512K")
PEERS = ("score", "top_k, lax", "FlashInfer block-sparse")


def shape(results: Results, model: str, batch: int, length: str) -> Case:
  return results.bench("prr").case(f"{model} B{batch} T{length} 1024x16")


def every(results: Results) -> dict[str, Case]:
  return {
    f"{label}, B{batch} T{length}": shape(results, model, batch, length)
    for model, label in MODELS.items()
    for batch in (1, 4)
    for length in LENGTHS
  }


def gain(case: Case) -> cells.Pair:
  """The time of selecting first over PRR's."""
  return cells.gain(case.time("prr"), case.time("serial"))


def hidden(case: Case) -> cells.Pair:
  """Selecting first over the parts that are left where scoring hides behind attention.

  No bound: a launch of both is shorter than the longer of the two where neither fills the GPU.
  """
  first = case.time("select").us + case.time("attend").us
  bytes_us = case.bytes / BANDWIDTH * 1e6
  longest = max(case.time("select"), case.time("speculate"), key=lambda timing: timing.us)
  parts = longest.then(case.time("repair")).later(max(0.0, bytes_us - longest.us))
  return Number(first / parts.us, *records.of(parts, case.time("attend"))), parts


def apart(case: Case) -> Timing:
  return case.time("speculate").then(case.time("score"))


def over_peers(case: Case) -> cells.Pair:
  """Scores, `lax.top_k` and FlashInfer's attention one by one, over PRR."""
  first, *others = (case.time(name) for name in PEERS)
  return cells.gain(case.time("prr"), first.then(*others))


def table(results: Results) -> Part:
  rows = [
    [
      label,
      cells.ours(case.time("prr")),
      cells.time(case.time("serial")),
      cells.ratio(*gain(case)),
      cells.ratio(*hidden(case)),
      cells.time(apart(case)),
      cells.time(case.time("speculate beside score")),
    ]
    for label, case in every(results).items()
  ]
  head = ("", "PRR", "select first", "gain", "if parts hid", "apart", "side by side")
  return cells.table(head, rows)


def parts(results: Results) -> Part:
  first, long = (shape(results, "8B", 1, length) for length in ("16K", "128K"))
  repair = results.bench("prr").case("repair 8B B1 T128K 1024x16")
  launch = repair.time("a launch")
  none, *some = (repair.time(f"{n} missed") for n in (0, 4, 8, 16))
  more = cells.listed(
    cells.worked_out(taken.us - none.us, "{:.1f} µs", taken, none) for taken in some
  )
  serial = first.time("serial")
  stages = cells.listed(
    cells.join("{} ({})", cells.ratio(*cells.gain(first.time(name), serial)), stage)
    for stage, name in (("S1", "prr, S1"), ("S2", "prr, S2"), ("S3", "prr"))
  )
  beside = [over_peers(case) for case in every(results).values() if case.has(PEERS[-1])]
  return cells.sentence(
    "Select first and attend, over the longer of selecting and speculating, or their bytes, and "
    "the repair: {}. Attention to the budget takes {} at B1 T128K, the repair {}; two empty "
    "launches, {} each, were aimed at. More missed pages of `64` (`4`, `8`, `16`) cost {} over "
    "none. The stages at B1 T16K gain {}. Against scores, `lax.top_k` and FlashInfer's "
    "block-sparse attention PRR gains {}.",
    cells.span(map(hidden, every(results).values())),
    cells.time(long.time("attend")),
    cells.time(long.time("repair")),
    cells.time(launch),
    more,
    stages,
    cells.span(beside, "{:.1f}", " ×"),
  )


def steps(results: Results) -> Part:
  rows = []
  for length in LENGTHS:
    case = results.bench("e2e_sparse").case(f"PRR Llama-3.1-8B B1 T{length}")
    serial, named = case.time("serial"), ("by profile", "ρ = 1.25")
    gains = [cells.ratio(*cells.gain(case.time(name), serial), "{:.3f}") for name in named]
    (hit,) = case.remark(r"^ρ = 1.25 hit (\d+)% of what was chosen")
    rows.append([f"T{length}", cells.ours(serial), *gains, cells.join("{} %", hit)])
  head = ("", "select first", "speed by the profile", "speed at ρ = 1.25", "hit at ρ = 1.25")
  return cells.table(head, rows)


def real_steps(results: Results) -> Part:
  """PRR's step beside Quest's after real text, with the tokens that each attends to."""
  found = real.held(results)
  if found is None:
    return Part()
  timed = {(c.method, c.length, c.batch): c for c in costs.read(results.folder / real.FOLDER)}
  rows = []
  for length, batch in sorted({key[1:] for key in timed if key[0] == "prr"}):
    ours, base = (timed[name, length, batch] for name in ("prr", "quest"))
    mine, theirs = found.time(ours), found.time(base)
    seen = [
      cells.worked_out(cost.attended or 0, "{:,.0f}", time)
      for cost, time in ((base, theirs), (ours, mine))
    ]
    speed = cells.ratio(*cells.gain(mine, theirs))
    rows.append([f"B{batch} T{length >> 10}K", cells.time(theirs), cells.ours(mine), speed, *seen])
  head = ("", "Quest", "PRR", "PRR's speed over Quest's", "tokens that Quest attends to")
  return cells.table((*head, "that PRR attends to"), rows)


def calibration(results: Results) -> Part:
  rows = []
  for length in ("16K", "128K"):
    case = results.bench("prr").case(f"calibration 8B B1 T{length} 1024x16")
    times = [cells.time(case.time(name)) for name in ("searched", "followed")]
    rows.append([f"T{length}", *times])
  return cells.table(("", "a layer's calibration", "without the search"), rows)


def in_short(results: Results) -> Figure:
  """The line of the results in short."""
  case, cases = shape(results, "8B", 1, "64K"), every(results).values()
  beside = cells.span([over_peers(case) for case in cases if case.has(PEERS[-1])], "{:.1f}", " ×")
  hit = case.shaped(r"(\d+)% hit")[0]
  return cells.join(
    "attention beside scoring in one launch: {} for {} one after the other at T64K; {} over "
    "scores, `lax.top_k` and FlashInfer, {} over our own selection first, at {} hit: off unless a "
    "profile at measured hit rates shows a gain",
    cells.time(case.time("speculate beside score")),
    cells.time(apart(case)),
    beside,
    cells.span(map(gain, cases), unit=" ×"),
    cells.join("{} %", hit),
  )
