"""PRR: attention to a predicted selection beside the true one, and whole steps with it."""

from ..bench_files import BANDWIDTH
from . import cells
from .results import Case, Results, Timing

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
  serial = case.time("serial")
  return serial.us / case.time("prr").us, serial


def bound(case: Case) -> cells.Pair:
  """What the parts allow where the update is hidden, as in a step, and what is divided by."""
  first = case.time("select").us + case.time("attend").us
  bytes_us = case.bytes / BANDWIDTH * 1e6
  longest = max(case.time("select"), case.time("speculate"), key=lambda timing: timing.us)
  parts = longest.then(case.time("repair")).later(max(0.0, bytes_us - longest.us))
  return first / parts.us, parts


def apart(case: Case) -> Timing:
  return case.time("speculate").then(case.time("score"))


def over_peers(case: Case) -> cells.Pair:
  """Scores, `lax.top_k` and FlashInfer's attention one by one, over PRR."""
  first, *others = (case.time(name) for name in PEERS)
  theirs = first.then(*others)
  return theirs.us / case.time("prr").us, theirs


def table(results: Results) -> list[str]:
  rows = [
    [
      label,
      cells.ours(case.time("prr")),
      cells.time(case.time("serial")),
      cells.ratio(*gain(case)),
      cells.ratio(*bound(case)),
      cells.time(apart(case)),
      cells.time(case.time("speculate beside score")),
    ]
    for label, case in every(results).items()
  ]
  head = ("", "PRR", "select first", "gain", "bound", "apart", "side by side")
  return cells.table(head, rows)


def parts(results: Results) -> list[str]:
  first, long = (shape(results, "8B", 1, length) for length in ("16K", "128K"))
  repair = results.bench("prr").case("repair 8B B1 T128K 1024x16")
  launch = repair.time("a launch")
  none, *some = (repair.time(f"{n} missed").us for n in (0, 4, 8, 16))
  more = ", ".join(f"{taken - none:.1f}" for taken in some)
  serial = first.time("serial")
  stages = ", ".join(
    f"{cells.ratio(serial.us / first.time(name).us, serial)} ({stage})"
    for stage, name in (("S1", "prr, S1"), ("S2", "prr, S2"), ("S3", "prr"))
  )
  beside = [over_peers(case) for case in every(results).values() if case.has(PEERS[-1])]
  return cells.sentence(
    f"The bound is {cells.span(map(bound, every(results).values()))}. Attention to 1,024 tokens "
    f"takes {cells.time(long.time('attend'))} at B1 T128K, the repair "
    f"{cells.time(long.time('repair'))}: two empty launches, {cells.time(launch)} each, were aimed "
    f"at, a miss. 4, 8 and 16 missed pages of 64 cost {more} µs more than none. The stages at B1 "
    f"T16K gain {stages}. Against scores, `lax.top_k` and FlashInfer's block-sparse attention PRR "
    f"gains {cells.span(beside, '{:.1f}', ' ×')}."
  )


def steps(results: Results) -> list[str]:
  rows = []
  for length in LENGTHS:
    case = results.bench("e2e_sparse").case(f"PRR Llama-3.1-8B B1 T{length}")
    serial, named = case.time("serial"), ("by profile", "ρ = 1.25")
    gains = [cells.ratio(serial.us / case.time(name).us, serial, "{:.3f}") for name in named]
    (hit,) = case.remark(r"^ρ = 1.25 hit (\d+)% of what was chosen")
    rows.append([f"T{length}", cells.ours(serial), *gains, f"{hit} %"])
  head = ("", "select first", "speed by the profile", "speed at ρ = 1.25", "hit at ρ = 1.25")
  return cells.table(head, rows)


def calibration(results: Results) -> list[str]:
  rows = []
  for length in ("16K", "128K"):
    case = results.bench("prr").case(f"calibration 8B B1 T{length} 1024x16")
    times = [cells.time(case.time(name)) for name in ("searched", "followed")]
    rows.append([f"T{length}", *times])
  return cells.table(("", "a layer's calibration", "without the search"), rows)


def in_short(results: Results) -> str:
  """The line of the results in short."""
  case, cases = shape(results, "8B", 1, "64K"), every(results).values()
  beside = cells.span([over_peers(case) for case in cases if case.has(PEERS[-1])], "{:.1f}", " ×")
  return (
    "attention beside scoring in one launch: "
    f"{cells.time(case.time('speculate beside score'))} for {cells.time(apart(case))} one after "
    f"the other at T64K; {beside} over scores, `lax.top_k` and FlashInfer, "
    f"{cells.span(map(gain, cases), unit=' ×')} over our own selection first, at 97 % hit: "
    "off unless a profile at measured hit rates shows a gain of 3 %"
  )
