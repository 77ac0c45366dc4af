"""ART: walks that never stop, walks that do, whole steps, and what a stop costs."""

from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.records import Figure, Number, Part
from scripts.tools.tablemakers.results import GPU, Case, Results, Study

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
BLIND = "ART, not looking"
STUDY = "art_study/tile128_8192_{}.json"
RUNS = {
  "art_study/tile128_8192_newest.json": "8,192 tokens, tiles of 128, 3 layers",
  "art_study/tile32_2048_newest.json": "2,048 tokens, tiles of 32, 8 layers",
}
TAUS = {"1e-05": "1e-5", "0.01": "0.01"}
LENGTHS = (1024, 2048, 4096, 6144, 8192)
ORDERS = {"newest": "newest tile first", "sinks": "`sinks=4`: first tile first"}


def paired(case: Case, peer: str) -> Figure:
  """By how many percent a walk without an end is slower, with its 95 % interval."""
  found = case.remark(f"^{peer} \\+ ([+-][\\d.]+)% \\[([+-][\\d.]+)%, ([+-][\\d.]+)%\\]")
  signed = [cells.number(cells.read(x), "{:+.2f}").replace("-", "−") for x in found]
  return Figure("{} % [{}, {}]".format(*signed), found[0].records)


def endless(results: Results) -> Part:
  """Beside dense or sparse decode, and beside the same walk when it does not look."""
  rows = []
  for name, (label, peer) in ENDLESS.items():
    case = results.bench("art").case(name)
    beside = case.time(peer)
    without = cells.join(f"{peer}, {{}}", cells.time(beside))
    row = [label, cells.ours(case.time("ART, p = inf")), without]
    rows.append([*row, *(cells.guarded(paired(case, x), beside) for x in (peer, BLIND))])
  head = ("", "ART, no stops", "without ART", "slower by", "slower than ART that does not look by")
  return cells.table(head, rows)


def walked(case: Case) -> list[Number]:
  """Splits of a head, and the shares of the tiles that are visited and loaded."""
  return case.numbers(r"^(\d+) splits a head; ([\d.]+) of the tiles visited, ([\d.]+) loaded")


def stopping(results: Results) -> Part:
  rows = []
  for name, label in STOPPING.items():
    case = results.bench("art").case(name)
    splits, visited, loaded = walked(case)
    alone, least = case.numbers(r"tiles at ([\d.]+) µs\).*\+ 5 µs = ([\d.]+)")
    (share,) = case.numbers(r"^([\d.]+) of dense decode's bandwidth")
    dense = case.time("dense decode")
    rows.append(
      [
        label,
        cells.number(splits, "{:.0f}"),
        cells.percent(visited),
        cells.percent(loaded),
        cells.ours(case.time("ART")),
        cells.number(least, "{:.1f} µs"),
        cells.time(dense),
        cells.number(alone, "{:.2f} µs"),
        cells.ratio(share, dense, "{:.3f}"),
      ]
    )
  head = ("", "splits", "visited", "loaded", "time", "expected", "dense", "a tile of a lone walk")
  return cells.table((*head, "of dense decode's bandwidth"), rows)


def shared(results: Results) -> Part:
  """Walks that many programs read, at the share that runs, beside dense decode of the same run.

  The file has no quartiles: nothing is divided but a walk without an end, which costs most.
  """
  about = {"card": "NVIDIA H200", "n": 1, "setting": "share 4, tiles of 128, synthetic stops"}
  case, time = r"(B\d+ T\w+ \w+)", r" +([\d.]+) µs"
  path = f"{GPU}/{SHARED}"
  line = rf"^(\(.*\)) {case} (dense decode|share 4 p=\w+){time}"
  found: dict[str, dict[str, Figure]] = {}
  for cut, shape, what, us in results.lines(path, line, **about):
    of_shape = found.setdefault(shape, {})
    if cut == CUT or what not in of_shape:
      of_shape[what] = us
  alone = dict(results.lines(path, rf"^one program {case} p=5{time}", **about))
  rows = []
  for shape, times in found.items():
    dense, endless = times["dense decode"], times.get("share 4 p=inf")
    more = "–"
    if endless is not None:
      cost = 100 * (float(endless) / float(dense) - 1)
      more = cells.worked_out(cost, "+{:.0f} %", endless, dense)
    row = [times["share 4 p=5"], endless, dense, alone.get(shape)]
    shown = ["–" if us is None else cells.join("{} µs", us) for us in row]
    rows.append(
      [shape.replace("x", "×"), cells.join("**{}**", shown[0]), *shown[1:3], more, shown[3]]
    )
  head = ("", "ART", "without an end", "dense decode", "without an end over dense")
  return cells.table((*head, "one program a walk"), rows)


def steps(results: Results) -> Part:
  """Every base and shape that was run."""
  bench, rows = results.bench("art_e2e"), []
  for shape in SHAPES:
    there = {case.name for case in bench.cases(f"{MODEL} {shape}$")}
    for base, label in BASES.items():
      if (name := f"{base} {MODEL} {shape}") in there:
        rows.append([f"{shape}, {label}", *gains(bench.case(name), base)])
  head = ("", "base", "ART, τ = 1e-5", "ART, τ = 0.01", "ART, paper's share")
  return cells.table(head, rows)


def gains(case: Case, base: str) -> list[str]:
  """TPOT over the full cache's, of what the bytes allow; nothing for what was not run."""
  full, row = case.time("Full"), ["–"] if base == "Full" else []
  for name in FORCED if base == "Full" else (base, *FORCED):
    if not case.has(name):
      row.append("")
      continue
    # The last figures of the line are those over the full cache.
    (allowed,) = case.numbers(rf"^{name}: .*bytes allow ([\d.]+)[^;]* over Full")
    gain = cells.ratio(*cells.gain(case.time(name), full))
    row.append(cells.join("{} of {}", gain, cells.number(allowed)))
  return row


def forced(results: Results) -> Part:
  case = results.bench("art_e2e").case(f"Full {MODEL} B8 T32K")
  found = [
    cells.join(
      "{} % of the heads after {} %", *case.remark(rf"{name} in (\d+)% of the heads after (\d+)%")
    )
    for name in FORCED
  ]
  held = study(results, STUDY.format("newest"))
  alone = [cells.percent(held.number("splits", f"tau {tau}, 1 splits", "stopped")) for tau in TAUS]
  return cells.sentence(
    "Heads that stop, and the share of a walk's tiles after which they do, at τ = `1e-5`, at τ = "
    "`0.01` and as the paper's times say: {}. The first two are those of SmolLM2's groups of query "
    'heads in one walk, forced here onto `splits="fill"`; by themselves {} and {} of its query '
    "heads stop, earlier, and in as many walks as run here nearly none would.",
    cells.listed(found),
    *alone,
  )


# ---- studies


def study(results: Results, path: str) -> Study:
  """A study of one speech's activations, on a CPU."""
  held = results.json(path)
  about = held["about"]
  setting = f"{about['model']}, {about['text']}, tiles of {held['tile']}, {held['order']}"
  return results.study(path, card="CPU", n=held["walks"], setting=setting)


def stopped(held: Study, setting: str) -> list[str]:
  """Shares read and stopped, and the error, of query heads by themselves and of a group."""
  row = []
  for kind in ("splits", "groups"):
    keys = (kind, setting)
    row += [cells.percent(held.number(*keys, key), 1) for key in ("visited", "stopped")]
    row.append(cells.number(held.number(*keys, "error"), "{:.1e}"))
  return row


def stops(results: Results) -> Part:
  """What stops read and miss, of query heads by themselves and of a KV head's together."""
  rows = []
  for order, label in ORDERS.items():
    held = study(results, STUDY.format(order))
    for tau, words in TAUS.items():
      for count in (1, 2, 4, 8):
        rows.append([label, words, str(count), *stopped(held, f"tau {tau}, {count} splits")])
  head = ("order", "τ", "splits", "read, a query head", "stop", "mean error")
  return cells.table((*head, "read, a group", "stop", "mean error"), rows, labels=3)


def lengths(results: Results) -> Part:
  """Shares visited by length: one walk, of a query head and of a group."""
  rows = []
  for order, label in ORDERS.items():
    held = study(results, STUDY.format(order))
    for tau, words in TAUS.items():
      for kind in ("query head", "group"):
        found = [held.number("lengths", tau, f"{n} tokens", kind) for n in LENGTHS]
        rows.append([f"{label}, τ = {words}, a {kind}", *map(cells.percent, found)])
  return cells.table(("", *(f"{n:,} tokens" for n in LENGTHS)), rows)


def probe(results: Results) -> Part:
  """How often the probe agrees where it can err, and what φ adds."""
  rows = []
  for run, which in RUNS.items():
    held = study(results, run)
    for tau, words in TAUS.items():
      walks, ended, of_ended, agree = (
        held.number("agreement", tau, "all", key)
        for key in ("walks", "ended", "agree_of_ended", "agree")
      )
      counts = [cells.number(x, "{:,.0f}") for x in (walks, ended)]
      free = cells.number(held.number("without_direction", tau, "same_stop"), "{:,.0f}")
      rows.append([which, words, *counts, cells.percent(of_ended), cells.percent(agree), free])
  held, last = study(results, STUDY.format("newest")), f"{LENGTHS[-1]} tokens"
  agreed = [cells.percent(held.number("agreement", tau, last, "agree")) for tau in TAUS]
  walks = cells.number(held.number("agreement", "1e-05", last, "walks"), "{:.0f}")
  head = ("newest tile first", "τ", "walks", "either ends", "of these alike", "of all alike")
  return cells.table((*head, "walks that end alike without φ"), rows, labels=2).then(
    cells.sentence(
      f"Of the {{}} walks that see all T{LENGTHS[-1] >> 10}K both end alike in {{}} at τ = `1e-5` "
      "and in {} at τ = `0.01`.",
      walks,
      *agreed,
    )
  )


def theorems(results: Results) -> Part:
  """Where the bounds apply."""
  helds = [(study(results, STUDY.format(order)), tau) for order in ORDERS for tau in TAUS]
  assumed, holds, wrong = (
    [held.number("bounds", tau, key) for held, tau in helds]
    for key in ("assumption", "decays", "violations_where_it_decays")
  )
  return cells.sentence(
    "Assumption 1 of the theorems held at {} of the stops, Lemma 1 at {} to {}, where the bound "
    "was broken {} times.",
    cells.percent(max(assumed)),
    cells.percent(min(holds)),
    cells.percent(max(holds)),
    cells.worked_out(sum(wrong), "{:.0f}", *wrong),
  )


def cost(results: Results) -> Figure:
  """What whole steps pay where walks are long enough to look, and too short to spare much."""
  case = results.bench("art_e2e").case("SnapKV 0.8 Llama-3.1-8B B1 T32K")
  base, ours = case.time("SnapKV 0.8"), case.time("ART 1e-5")
  more = cells.worked_out(ours.us - base.us, "{:.0f} µs", ours, base)
  share = cells.worked_out(100 * (ours.us / base.us - 1), "{:.1f} %", ours, base)
  both = cells.guarded(cells.join("{} ({})", more, share), base)
  return cells.join("{} of a step over SnapKV's four fifths of B1 T32K in `33` walks a head", both)


def costs(results: Results) -> Part:
  return cells.sentence("{}.", cost(results))


def in_short(results: Results) -> Figure:
  """The line of the results in short."""
  bench = results.bench("art")
  blind = cells.listed(paired(bench.case(name), BLIND) for name in ENDLESS)
  case = bench.case("decay B32 T32K 8x4")
  return cells.join(
    "looking at every tile where nothing stops costs {} over the same walk that does not look, {}; "
    "where synthetic keys whose mass decays let walks end after {} of B32 T32K, {} for {}",
    blind,
    cost(results),
    cells.percent(walked(case)[1]),
    cells.time(case.time("ART")),
    cells.time(case.time("dense decode")),
  )
