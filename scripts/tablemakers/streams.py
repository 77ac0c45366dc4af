"""Streams: a million tokens through a model of which a window is on the device."""

from . import cells
from .results import Case, Results

RETRIEVING = 14  # of 32 layers: those with a retrieval head divide their blocks
MARKS = ("100K", "1024K")


def whole(results: Results) -> Case:
  return results.bench("offload").case("whole stream")


def rates(case: Case) -> tuple[int, int]:
  """The least and the most tokens a second, from the first mark on."""
  (listed,) = case.remark(r"^tokens a second to each mark: ([\d, ]+)$")
  later = [int(rate.replace(",", "")) for rate in listed.split(", ")[1:]]
  return min(later), max(later)


def in_use(case: Case) -> str:
  low, high = case.remark(r"device memory in use ([\d.]+) to ([\d.]+) GiB")
  return f"{low} GiB" if low == high else f"{low} to {high} GiB"


def table(results: Results) -> list[str]:
  case = whole(results)
  least, most = rates(case)
  host, vectors, copies = case.remark(
    r"host memory ([\d.]+) GiB; .* has ([\d.]+) GiB of vectors, ([\d.]+) GiB of copies"
  )
  rows = [
    ["tokens a second, from 100K tokens on", f"{least:,} to {most:,}"],
    ["device memory in use after every call", in_use(case)],
    ["of which index vectors, copied blocks", f"{vectors} GiB, {copies} GiB"],
    ["host memory", f"{host} GiB"],
    *([f"a token at {mark}", cells.time(case.time(f"token at {mark}"))] for mark in MARKS),
  ]
  return cells.table(("1,048,576 tokens", ""), rows)


def vectors(results: Results) -> str:
  """Index vectors on the device at 800K tokens."""
  stream = results.bench("offload").case("stream")
  return stream.remark(r"allocated for 819,200 tokens: ([\d.]+) GiB of vectors")[0] + " GiB"


def parts(results: Results) -> list[str]:
  bench = results.bench("offload")
  link, stream = bench.case("link"), bench.case("stream")
  ways = {
    "fetch": "read out of the store",
    "append": "written to it",
    "device_put": "by `device_put`",
  }
  rows = [[f"16 blocks of 512 KiB, {words}", _rate(link, name)] for name, words in ways.items()]
  divide = bench.case("spans").time("divide").scaled(1 / 32)
  chunk = whole(results).time("chunk to 200K")
  share = RETRIEVING * divide.us / chunk.us
  error = stream.error("chunk at 100K")
  rows += [
    ["a block divided into spans, one layer", cells.time(divide)],
    [f"of a chunk, in the {RETRIEVING} layers that do it", cells.percent(share, 1)],
    ["index vectors on the device at 800K tokens", vectors(results)],
    ["four layers beside the reference, logits apart", cells.percent(error, 1)],
  ]
  return cells.table(("", ""), rows)


def _rate(case: Case, name: str) -> str:
  timing = case.time(name)
  rate = case.bytes / timing.us / 1e3
  return f"{rate:.0f} GB/s, {cells.time(timing)}"


def prefetch(results: Results) -> list[str]:
  rows = []
  for label, suite in (("", "offload"), ("concurrent regions", "offload_graphs")):
    case = results.bench(suite).case("stream")
    for mark in ("100K", "792K"):
      chunk, ahead = case.time(f"chunk at {mark}"), case.time(f"chunk at {mark}, ahead")
      rows.append(
        [
          f"at {mark}" + bool(label) * f", {label}",
          cells.ours(chunk),
          cells.time(ahead),
          cells.ratio(ahead.us / chunk.us, chunk, "{:.3f}"),
          cells.time(case.time(f"token at {mark}")),
        ]
      )
  return cells.table(("four layers", "a chunk", "prefetch", "over without", "a token"), rows)


def in_short(results: Results) -> str:
  """The line of the results in short."""
  case = whole(results)
  least, most = rates(case)
  return (
    f"1,048,576 tokens through the 32 layers of an 8B model at {least:,} to {most:,} a second, "
    f"{in_use(case)} on the device after every call"
  )
