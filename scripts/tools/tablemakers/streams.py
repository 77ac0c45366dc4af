"""Streams: a million tokens through a model of which a window is on the device."""

from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.records import Figure, Part
from scripts.tools.tablemakers.results import Case, Results

RETRIEVING = 14  # of 32 layers: those with a retrieval head divide their blocks
MARKS = ("100K", "1024K")
MAPS = 32  # that a case of `spans` divides
PROBED = "chunk at 100K"


def whole(results: Results) -> Case:
  return results.bench("offload").case("whole stream")


def rates(case: Case) -> Figure:
  """Tokens a second from the first mark on, the least to the most."""
  (listed,) = case.remark(r"^tokens a second to each mark: ([\d, ]+)$")
  later = [int(rate.replace(",", "")) for rate in listed.split(", ")[1:]]
  return Figure(f"{min(later):,} to {max(later):,}", listed.records)


def in_use(case: Case) -> Figure:
  low, high = case.remark(r"device memory in use ([\d.]+) to ([\d.]+) GiB")
  return cells.join("{} GiB", low) if low == high else cells.join("{} to {} GiB", low, high)


def table(results: Results) -> Part:
  case = whole(results)
  host, vectors, copies = case.remark(
    r"host memory ([\d.]+) GiB; .* has ([\d.]+) GiB of vectors, ([\d.]+) GiB of copies"
  )
  rows = [
    ["tokens a second, from 100K tokens on", rates(case)],
    ["device memory in use after every call", in_use(case)],
    ["of which index vectors, copied blocks", cells.join("{} GiB, {} GiB", vectors, copies)],
    ["host memory", cells.join("{} GiB", host)],
    *([f"a token at {mark}", cells.time(case.time(f"token at {mark}"))] for mark in MARKS),
  ]
  return cells.table(("1,048,576 tokens", ""), rows)


def vectors(results: Results) -> Figure:
  """Index vectors on the device at 800K tokens."""
  stream = results.bench("offload").case("stream")
  return cells.join("{} GiB", *stream.remark(r"allocated for 819,200 tokens: ([\d.]+) GiB of vec"))


def parts(results: Results) -> Part:
  bench = results.bench("offload")
  link, stream = bench.case("link"), bench.case("stream")
  ways = {
    "fetch": "read out of the store",
    "append": "written to it",
    "device_put": "by `device_put`",
  }
  rows = [[f"16 blocks of 512 KiB, {words}", _rate(link, name)] for name, words in ways.items()]
  divide = bench.case("spans").time("divide").scaled(1 / MAPS)
  chunk = whole(results).time("chunk to 200K")
  share = RETRIEVING * divide.us / chunk.us
  rows += [
    ["a map of 128 × 128 divided into spans, one layer", cells.time(divide)],
    [
      f"one map a layer, of a chunk's time, in the {RETRIEVING} layers that divide",
      cells.worked_out(100 * share, "{:.1f} %", divide, chunk),
    ],
    ["index vectors on the device at 800K tokens", vectors(results)],
    ["four layers beside the reference, logits apart", cells.percent(stream.error(PROBED), 1)],
  ]
  return cells.table(("", ""), rows)


def _rate(case: Case, name: str) -> Figure:
  timing = case.time(name)
  rate = cells.worked_out(case.bytes / timing.us / 1e3, "{:.0f} GB/s", timing)
  return cells.join("{}, {}", rate, cells.time(timing))


def prefetch(results: Results) -> Part:
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
          cells.ratio(*cells.over(ahead, chunk), "{:.3f}"),
          cells.time(case.time(f"token at {mark}")),
        ]
      )
  return cells.table(("four layers", "a chunk", "prefetch", "over without", "a token"), rows)


def in_short(results: Results) -> Figure:
  """The line of the results in short."""
  case = whole(results)
  return cells.join(
    "`1,048,576` random tokens through the layers of an 8B model at {} a second, {} on the device "
    "after every call",
    rates(case),
    in_use(case),
  )
