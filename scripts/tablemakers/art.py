"""ART: walks that never stop, walks that do, whole steps, and what a stop costs."""

import re

from . import cells
from .results import GPU, Case, Results

ENDLESS = {
  "p=inf B32 T8K 8x4": ("B32 T8K", "dense decode"),
  "p=inf B8 T32K 8x4": ("B8 T32K", "dense decode"),
  "p=inf B8 T32K 8x4 unit 16": ("B8, 8K tokens in pages of 16", "sparse decode"),
  "p=inf B8 T32K 8x4 unit 128": ("B8, 8K tokens in blocks of 128", "sparse decode"),
}
STOPPING = {
  "decay B32 T32K 8x4": "B32 T32K",
  "decay B8 T128K 8x4": "B8 T128K",
  "decay B1 T128K 8x4": "B1 T128K",
  "recorded": "SmolLM2, B32 T8K",
}
MODEL, SHAPES = "Llama-3.1-8B", ("B8 T32K", "B8 T8K", "B8 T4K", "B1 T32K", "B1 T8K", "B1 T4K")
FORCED = ("ART 1e-5", "ART 1e-2", "ART paper")
BASES = {
  "Full": "Full",
  "StreamingLLM 0.2": "StreamingLLM, a fifth",
  "SnapKV 0.2": "SnapKV, a fifth",
  "PyramidKV 0.2": "PyramidKV, a fifth",
  "StreamingLLM 0.8": "StreamingLLM, four fifths",
  "SnapKV 0.8": "SnapKV, four fifths",
}
SHARED, CUT = "art_shared_walk.txt", "(8, 16384, 16384)"
STUDY = "art_study/tile128_8192_{}.json"
RUNS = {
  "art_study/tile128_8192_newest.json": "8,192 tokens, tiles of 128, 3 layers",
  "art_study/tile32_2048_newest.json": "2,048 tokens, tiles of 32, 8 layers",
}
TAUS = {"1e-05": "1e-5", "0.01": "0.01"}
LENGTHS = (1024, 2048, 4096, 6144, 8192)
ORDERS = {"newest": "newest tile first", "sinks": "`sinks=4`: first tile first"}


def paired(case: Case, peer: str) -> tuple[float, float, float]:
  """By how many percent a walk without an end is slower, with its 95 % interval."""
  found = case.numbers(f"^{peer} \\+ ([+-][\\d.]+)% \\[([+-][\\d.]+)%, ([+-][\\d.]+)%\\]")
  middle, low, high = found
  return middle, low, high


def endless(results: Results) -> list[str]:
  rows = []
  for name, (label, peer) in ENDLESS.items():
    case = results.bench("art").case(name)
    middle, low, high = map(cells.signed, paired(case, peer))
    more = f"{middle} % [{low}, {high}]"
    took = cells.ours(case.time("ART, p = inf"))
    rows.append(
      [label, took, f"{peer}, {cells.time(case.time(peer))}", cells.guarded(more, case.time(peer))]
    )
  return cells.table(("", "ART, no stops", "without ART", "ART is slower by"), rows)


def walked(case: Case) -> tuple[float, float, float]:
  """Splits of a head, and the shares of the tiles that are visited and loaded."""
  splits, visited, loaded = case.numbers(
    r"^(\d+) splits a head; ([\d.]+) of the tiles visited, ([\d.]+) loaded"
  )
  return splits, visited, loaded


def stopping(results: Results) -> list[str]:
  rows = []
  for name, label in STOPPING.items():
    case = results.bench("art").case(name)
    splits, visited, loaded = walked(case)
    alone, bound = case.numbers(r"tiles at ([\d.]+) µs\).*\+ 5 µs = ([\d.]+)")
    (share,) = case.numbers(r"^([\d.]+) of dense decode's bandwidth")
    dense = case.time("dense decode")
    rows.append(
      [
        label,
        f"{splits:.0f}",
        cells.percent(visited),
        cells.percent(loaded),
        cells.ours(case.time("ART")),
        f"{bound:.1f} µs",
        cells.time(dense),
        f"{alone:.2f} µs",
        cells.ratio(share, dense, "{:.3f}"),
      ]
    )
  head = ("", "splits", "visited", "loaded", "time", "bound", "dense", "a tile of a lone walk")
  return cells.table((*head, "of dense decode's bandwidth"), rows)


def shared(results: Results) -> list[str]:
  """Walks that many programs read, at the share that runs, beside dense decode of the same run.

  The file has no quartiles: nothing is divided.
  """
  text = (results.folder / GPU / SHARED).read_text("utf-8")
  case, time = r"(B\d+ T\w+ \w+)", r" +([\d.]+) µs"
  line = re.compile(rf"^(\(.*\)) {case} (dense decode|share 4 p=\w+){time}", re.MULTILINE)
  alone = dict(re.findall(rf"^one program {case} p=5{time}", text, re.MULTILINE))
  found: dict[str, dict[str, float]] = {}
  for cut, shape, what, us in line.findall(text):
    of_shape = found.setdefault(shape, {})
    if cut == CUT or what not in of_shape:
      of_shape[what] = float(us)
  rows = []
  for shape, times in found.items():
    dense, stops = times["dense decode"], times["share 4 p=5"]
    endless = times.get("share 4 p=inf")
    rows.append(
      [
        shape.replace("x", "×"),
        f"**{stops:.1f} µs**",
        "–" if endless is None else f"{endless:.1f} µs",
        f"{dense:.1f} µs",
        f"{alone[shape]} µs" if shape in alone else "–",
      ]
    )
  head = ("", "ART", "without an end", "dense decode", "one program a walk")
  return cells.table(head, rows)


def steps(results: Results) -> list[str]:
  """Every base and shape that was run."""
  bench, rows = results.bench("art_e2e"), []
  for shape in SHAPES:
    there = {case.name for case in bench.cases(f"{MODEL} {shape}$")}
    for base, label in BASES.items():
      if (name := f"{base} {MODEL} {shape}") in there:
        rows.append([f"{shape}, {label}", *_gains(bench.case(name), base)])
  head = ("", "base", "ART, τ = 1e-5", "ART, τ = 0.01", "ART, paper's share")
  return cells.table(head, rows)


def _gains(case: Case, base: str) -> list[str]:
  """TPOT over the full cache's, of what the bytes allow; nothing for what was not run."""
  full, row = case.time("Full"), ["1"] if base == "Full" else []
  for name in FORCED if base == "Full" else (base, *FORCED):
    if not case.has(name):
      row.append("")
      continue
    # The last figures of the line are those over the full cache.
    (allowed,) = case.numbers(rf"^{name}: .*bytes allow ([\d.]+)[^;]* over Full")
    row.append(cells.ratio(full.us / case.time(name).us, full, f"{{:.2f}} of {allowed:.2f}"))
  return row


def forced(results: Results) -> list[str]:
  case = results.bench("art_e2e").case(f"Full {MODEL} B8 T32K")
  found = [
    case.remark(rf"{name} in (\d+)% of the heads after (\d+)% of a walk's tiles") for name in FORCED
  ]
  said = (f"{heads} % of the heads after {after} %" for heads, after in found)
  alone = [
    cells.percent(results.json(STUDY.format("newest"), "splits", f"tau {tau}, 1 splits")["stopped"])
    for tau in ("1e-05", "0.01")
  ]
  return cells.sentence(
    "Heads that stop, and the share of a walk's tiles after which they do, at τ = 1e-5, at "
    f"τ = 0.01 and as the paper's times say: {', '.join(said)}. The first two are those of "
    "SmolLM2's groups of three query heads, which go on until all three are stable; by themselves "
    f"{alone[0]} and {alone[1]} of its query heads stop, earlier."
  )


def stops(results: Results) -> list[str]:
  """What stops read and miss, of query heads by themselves and of a KV head's together."""
  rows = []
  for order, label in ORDERS.items():
    for tau, words in TAUS.items():
      for count in (1, 2, 4, 8):
        row = [label, words, str(count)]
        for kind in ("splits", "groups"):
          cost = results.json(STUDY.format(order), kind, f"tau {tau}, {count} splits")
          row += [cells.percent(cost[key], 1) for key in ("visited", "stopped")]
          row.append(f"{cost['error']:.1e}")
        rows.append(row)
  head = ("order", "τ", "splits", "read, a query head", "stop", "mean error")
  return cells.table((*head, "read, a group", "stop", "mean error"), rows)


def lengths(results: Results) -> list[str]:
  """Shares visited by length: one walk, of a query head and of a group."""
  rows = []
  for order, label in ORDERS.items():
    for tau, words in TAUS.items():
      found = results.json(STUDY.format(order), "lengths", tau)
      for kind in ("query head", "group"):
        row = [cells.percent(found[f"{n} tokens"][kind]) for n in LENGTHS]
        rows.append([f"{label}, τ = {words}, a {kind}", *row])
  return cells.table(("", *(f"{n:,} tokens" for n in LENGTHS)), rows)


def probe(results: Results) -> list[str]:
  """How often the probe agrees where it can err, and what φ adds."""
  rows = []
  for run, which in RUNS.items():
    for tau, words in TAUS.items():
      found = results.json(run, "agreement", tau, "all")
      free = results.json(run, "without_direction", tau)
      rows.append(
        [
          which,
          words,
          f"{found['walks']:,}",
          f"{found['ended']:,}",
          cells.percent(found["agree_of_ended"]),
          cells.percent(found["agree"]),
          f"{free['same_stop']:,}",
        ]
      )
  last = f"{LENGTHS[-1]} tokens"
  longest = [results.json(STUDY.format("newest"), "agreement", tau, last) for tau in TAUS]
  agreed = [cells.percent(found["agree"]) for found in longest]
  head = ("newest tile first", "τ", "walks", "either ends", "of these alike", "of all alike")
  return [
    *cells.table((*head, "walks that end alike without φ"), rows),
    "",
    *cells.sentence(
      f"Of the {longest[0]['walks']} walks that see all {LENGTHS[-1]:,} tokens both end alike in "
      f"{agreed[0]} at τ = 1e-5 and in {agreed[1]} at τ = 0.01."
    ),
  ]


def theorems(results: Results) -> list[str]:
  """Where the bounds apply."""
  bounds = [results.json(STUDY.format(order), "bounds", tau) for order in ORDERS for tau in TAUS]
  holds, wrong = (
    [found[key] for found in bounds] for key in ("decays", "violations_where_it_decays")
  )
  assumed = max(found["assumption"] for found in bounds)
  return cells.sentence(
    f"Assumption 1 of the theorems held at {cells.percent(assumed)} of the stops, Lemma 1 at "
    f"{cells.percent(min(holds))} to {cells.percent(max(holds))}, where the bound was broken "
    f"{sum(wrong)} times."
  )


def cost(results: Results) -> str:
  """What whole steps pay where walks are long enough to look, and too short to spare much."""
  case = results.bench("art_e2e").case("SnapKV 0.8 Llama-3.1-8B B1 T32K")
  base, ours = case.time("SnapKV 0.8"), case.time("ART 1e-5")
  more = cells.guarded(f"{ours.us - base.us:.0f} µs ({100 * (ours.us / base.us - 1):.1f} %)", base)
  return f"{more} of a step over SnapKV's four fifths of B1 T32K in 33 walks a head"


def costs(results: Results) -> list[str]:
  return cells.sentence(f"{cost(results)}.")


def in_short(results: Results) -> str:
  """The line of the results in short."""
  bench = results.bench("art")
  dense = [(bench.case(name), peer) for name, (_, peer) in ENDLESS.items() if "dense" in peer]
  more = [(paired(case, peer)[0], case.time(peer)) for case, peer in dense]
  case = bench.case("decay B32 T32K 8x4")
  slower = cells.span(more, "{:+.2f}", " %").replace("-", "−")
  return (
    f"where nothing stops, {slower} over dense decode, and {cost(results)}; "
    f"{cells.time(case.time('ART'))} for {cells.time(case.time('dense decode'))} where "
    f"{cells.percent(walked(case)[1])} of B32 T32K is visited"
  )
