"""ART: walks that never stop, walks that do, whole steps, and studies of stops."""

from collections.abc import Sequence

from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.cells import median, own, said
from scripts.tools.tablemakers.records import Figure, Part
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
SHAPES = ("B8 T32K", "B8 T8K", "B8 T4K", "B1 T32K", "B1 T8K", "B1 T4K")
FORCED = ("ART 1e-5", "ART 1e-2", "ART paper")
BASES = {
  "Full": "Full",
  "StreamingLLM 0.2": "StreamingLLM, a fifth",
  "SnapKV 0.2": "SnapKV, a fifth",
  "PyramidKV 0.2": "PyramidKV, a fifth",
  "StreamingLLM 0.8": "StreamingLLM, four fifths",
  "SnapKV 0.8": "SnapKV, four fifths",
}
BLIND = "ART, not looking"
WALKS = r"^(\d+) splits a head; ([\d.]+) of the tiles visited, ([\d.]+) loaded"


def paired(case: Case, peer: str) -> Figure:
  """By how many percent a walk without an end is slower, with its 95 % interval."""
  found = case.remark(f"^{peer} \\+ ([+-][\\d.]+)% \\[([+-][\\d.]+)%, ([+-][\\d.]+)%\\]")
  signs = [cells.signed(cells.read(x)) for x in found]
  return Figure("{} % [{}, {}]".format(*signs), found[0].records)


def endless(results: Results) -> Part:
  """Beside dense or sparse decode, and beside the same walk when it does not look."""
  rows = []
  for name, (label, peer) in ENDLESS.items():
    case = results.bench("art").case(name)
    beside = case.time(peer)
    row = [label, own("ART, p = inf")(case), cells.join(f"{peer}, {{}}", cells.time(beside))]
    rows.append([*row, *(cells.guarded(paired(case, x), beside) for x in (peer, BLIND))])
  head = ("", "ART, no stops", "without ART", "slower by", "slower than ART that does not look by")
  return cells.table(head, rows)


def stopping(results: Results) -> Part:
  """Walks that end: their splits, and the shares of the tiles that are visited and loaded."""
  return cells.cases(
    {label: results.bench("art").case(name) for name, label in STOPPING.items()},
    ("splits", lambda case: cells.number(case.numbers(WALKS)[0], "{:.0f}")),
    ("visited", lambda case: cells.percent(case.numbers(WALKS)[1])),
    ("loaded", lambda case: cells.percent(case.numbers(WALKS)[2])),
    ("time", own("ART")),
    ("expected", said(r"\+ 5 µs = ([\d.]+)", "{:.1f} µs")),
    ("dense", median("dense decode")),
    ("a tile of a lone walk", said(r"tiles at ([\d.]+) µs\)", "{:.2f} µs")),
    ("of dense decode's bandwidth", _bandwidth),
  )


def _bandwidth(case: Case) -> str:
  share = case.number(r"^([\d.]+) of dense decode's bandwidth")
  return cells.ratio(share, case.time("dense decode"), "{:.3f}")


def shared(results: Results) -> Part:
  """Walks that many programs read, at the share that runs, beside dense decode of the same run.

  The file has no quartiles: nothing is divided but a walk without an end, which costs most.
  """
  about = {"card": "NVIDIA H200", "n": 1, "setting": "share 4, tiles of 128, synthetic stops"}
  case, time = r"(B\d+ T\w+ \w+)", r" +([\d.]+) µs"
  path = f"{GPU}/art_shared_walk.txt"
  line = rf"^(\(.*\)) {case} (dense decode|share 4 p=\w+){time}"
  found: dict[str, dict[str, Figure]] = {}
  for cut, shape, what, us in results.lines(path, line, **about):
    of_shape = found.setdefault(shape, {})
    if cut == "(8, 16384, 16384)" or what not in of_shape:
      of_shape[what] = us
  alone = dict(results.lines(path, rf"^one program {case} p=5{time}", **about))
  rows = []
  for shape, times in found.items():
    dense, endless = times["dense decode"], times.get("share 4 p=inf")
    more = "–"
    if endless is not None:
      more = cells.number(100 * (cells.read(endless) / cells.read(dense) - 1), "+{:.0f} %")
    row = [times["share 4 p=5"], endless, dense, alone.get(shape)]
    art, *others = ("–" if us is None else cells.join("{} µs", us) for us in row)
    shown = [cells.join("**{}**", art), *others[:2], more, others[2]]
    rows.append([shape.replace("x", "×"), *shown])
  head = ("", "ART", "without an end", "dense decode", "without an end over dense")
  return cells.table((*head, "one program a walk"), rows)


def steps(results: Results) -> Part:
  """Every base and shape that was run."""
  bench, rows = results.bench("art_e2e"), []
  for shape in SHAPES:
    for base, label in BASES.items():
      if bench.has(name := f"{base} Llama-3.1-8B {shape}"):
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
    allowed = case.number(rf"^{name}: .*bytes allow ([\d.]+)[^;]* over Full")
    gain = cells.ratio(*cells.gain(case.time(name), full))
    row.append(cells.join("{} of {}", gain, cells.number(allowed)))
  return row


# ---- studies of one speech's activations

STUDY = "art_study/tile128_8192_{}.json"
RUNS = {
  "art_study/tile128_8192_newest.json": "8,192 tokens, tiles of 128, 3 layers",
  "art_study/tile32_2048_newest.json": "2,048 tokens, tiles of 32, 8 layers",
}
TAUS = {"1e-05": "1e-5", "0.01": "0.01"}
LENGTHS = (1024, 2048, 4096, 6144, 8192)
ORDERS = {"newest": "newest tile first", "sinks": "`sinks=4`: first tile first"}
# Of a real model
REAL = "art_study/qwen1.5b/tile128_{}_{}.json"
REAL_LENGTHS = (8192, 16384, 32768)
WHOSE = {"": "a query head", "group_": "a group"}
STOPS = ("read, a query head", "stop", "mean error", "read, a group", "stop", "mean error")


def study(results: Results, path: str) -> Study:
  held = results.json(path)
  about = held["about"]
  setting = f"{about['model']}, {about['text']}, tiles of {held['tile']}, {held['order']}"
  return results.study(path, card="CPU", n=held["walks"], setting=setting)


def real(results: Results) -> dict[str, Study]:
  """The studies of the real model that there are, by the tokens of their text and their order."""
  return {
    f"{n:,} tokens, {label}": study(results, REAL.format(n, order))
    for n in REAL_LENGTHS
    if (results.folder / REAL.format(n, "newest")).is_file()
    for order, label in ORDERS.items()
  }


def _ours(results: Results) -> dict[str, Study]:
  return {label: study(results, STUDY.format(order)) for order, label in ORDERS.items()}


def stopped(held: Study, setting: str) -> list[str]:
  """Shares read and stopped, and the error, of query heads by themselves and of a group."""
  row = []
  for kind in ("splits", "groups"):
    row += [cells.percent(held.number(kind, setting, key), 1) for key in ("visited", "stopped")]
    row.append(cells.number(held.number(kind, setting, "error"), "{:.1e}"))
  return row


def stops(results: Results) -> Part:
  """Share read and error of stops: query heads by themselves, and those of a KV head together."""
  rows = [
    [label, words, str(count), *stopped(held, f"tau {tau}, {count} splits")]
    for label, held in _ours(results).items()
    for tau, words in TAUS.items()
    for count in (1, 2, 4, 8)
  ]
  return cells.table(("order", "τ", "splits", *STOPS), rows, labels=3)


def real_stops(results: Results) -> Part:
  """The same of one walk on a real model, six query heads together."""
  rows = [
    [label, words, *stopped(held, f"tau {tau}, 1 splits")]
    for label, held in real(results).items()
    for tau, words in TAUS.items()
  ]
  return cells.table(("order", "τ", *STOPS), rows, labels=2)


def real_groups(results: Results) -> Part:
  """Share that each layer's groups read at τ = 0.01, from the least to the most of KV heads."""
  columns = real(results)
  layers = sorted({int(n) for held in columns.values() for n in held.get("heads", "0.01")})
  rows = [[str(n), *(_between(held, str(n)) for held in columns.values())] for n in layers]
  return cells.table(("layer", *columns), rows)


def _between(held: Study, layer: str) -> str:
  if not held.has("heads", "0.01", layer):
    return "–"
  keys = ("heads", "0.01", layer, "group")
  shares = [held.number(*keys, head, 0) for head in range(len(held.get(*keys)))]
  low, high = cells.percent(min(shares)), cells.percent(max(shares))
  return low if low == high else cells.listed((low, high), " – ")


def real_theory(results: Results) -> Part:
  """Agreement of probe and oracle, and where the theorems' bounds apply."""
  rows = [
    [label, words, whose, *_theory(held, tau, prefix)]
    for label, held in real(results).items()
    for tau, words in TAUS.items()
    for prefix, whose in WHOSE.items()
  ]
  head = ("order", "τ", "whose", "walks", "probe or oracle ends", "of these alike")
  head += ("of all alike", "probe too early", "stops", "Lemma 1 holds", "bound broken there")
  return cells.table((*head, "broken elsewhere"), rows, labels=3)


def _theory(held: Study, tau: str, prefix: str) -> Sequence[str]:
  agreed, bounds = (f"{prefix}agreement", tau, "all"), (f"{prefix}bounds", tau)
  return [
    *(_count(held, *agreed, key) for key in ("walks", "ended")),
    *(_share(held, *agreed, key) for key in ("agree_of_ended", "agree", "early")),
    _count(held, *bounds, "stops"),
    _share(held, *bounds, "decays"),
    *(_count(held, *bounds, f"violations_{where}") for where in ("where_it_decays", "elsewhere")),
  ]


def _count(held: Study, *keys: str) -> str:
  """A dash where there is none."""
  return cells.number(held.number(*keys), "{:,.0f}") if held.has(*keys) else "–"


def _share(held: Study, *keys: str) -> str:
  return cells.percent(held.number(*keys), 1) if held.has(*keys) else "–"


def lengths(results: Results) -> Part:
  """Shares visited by length: one walk, of a query head and of a group."""
  rows = []
  for label, held in _ours(results).items():
    for tau, words in TAUS.items():
      for kind in ("query head", "group"):
        found = [held.number("lengths", tau, f"{n} tokens", kind) for n in LENGTHS]
        rows.append([f"{label}, τ = {words}, a {kind}", *map(cells.percent, found)])
  return cells.table(("", *(f"{n:,} tokens" for n in LENGTHS)), rows)


def probe(results: Results) -> Part:
  """Agreement of the probe where it can err, and what φ adds."""
  rows = []
  for run, which in RUNS.items():
    held = study(results, run)
    for tau, words in TAUS.items():
      agreed = ("agreement", tau, "all")
      counts = [cells.number(held.number(*agreed, x), "{:,.0f}") for x in ("walks", "ended")]
      alike = [cells.percent(held.number(*agreed, x)) for x in ("agree_of_ended", "agree")]
      free = cells.number(held.number("without_direction", tau, "same_stop"), "{:,.0f}")
      rows.append([which, words, *counts, *alike, free])
  head = ("newest tile first", "τ", "walks", "either ends", "of these alike", "of all alike")
  return cells.table((*head, "walks that end alike without φ"), rows, labels=2)


# ---- figures in sentences


def figures(results: Results) -> dict[str, str]:
  bench, steps = results.bench("art"), results.bench("art_e2e")
  held, last = _ours(results), f"{LENGTHS[-1]} tokens"
  newest = held[ORDERS["newest"]]
  forced = steps.case("Full Llama-3.1-8B B8 T32K")
  assumed, holds, wrong = (
    [one.number("bounds", tau, key) for one in held.values() for tau in TAUS]
    for key in ("assumption", "decays", "violations_where_it_decays")
  )
  case = steps.case("SnapKV 0.8 Llama-3.1-8B B1 T32K")
  base, ours = case.time("SnapKV 0.8"), case.time("ART 1e-5")
  more = cells.number(ours.us - base.us, "{:.0f} µs")
  share = cells.number(100 * (ours.us / base.us - 1), "{:.1f} %")
  found = {
    "cost": cells.guarded(cells.join("{} ({})", more, share), base),
    "last-walks": cells.number(newest.number("agreement", "1e-05", last, "walks"), "{:.0f}"),
    "assumed": cells.percent(max(assumed)),
    "holds-least": cells.percent(min(holds)),
    "holds-most": cells.percent(max(holds)),
    "broken": cells.number(sum(wrong), "{:.0f}"),
  }
  decay = bench.case("decay B32 T32K 8x4")
  found |= {
    "blind": cells.listed(paired(bench.case(name), BLIND) for name in ENDLESS),
    "blind-b8": paired(bench.case("p=inf B8 T32K 8x4"), BLIND),
    "decay-visited": cells.percent(decay.numbers(WALKS)[1]),
    "decay": median("ART")(decay),
    "decay-dense": median("dense decode")(decay),
  }
  for i, name in enumerate(FORCED):
    stop, after = forced.remark(rf"{name} in (\d+)% of the heads after (\d+)%")
    found |= {f"forced-{i}": stop, f"forced-after-{i}": after}
  for i, tau in enumerate(TAUS):
    found[f"alone-{i}"] = cells.percent(newest.number("splits", f"tau {tau}, 1 splits", "stopped"))
    found[f"agreed-{i}"] = cells.percent(newest.number("agreement", tau, last, "agree"))
  full, fifth = (
    gains(steps.case(f"{base} Llama-3.1-8B B8 T32K"), base) for base in ("Full", "SnapKV 0.2")
  )
  short, long = (real(results)[f"{n} tokens, newest tile first"] for n in ("8,192", "16,384"))
  walk = stopped(long, "tau 1e-05, 1 splits")
  agreement = ("agreement", "1e-05", "all")
  return found | {
    "full-gain": full[1],
    "full-paper": full[3],
    "fifth": fifth[0],
    "fifth-gain": fifth[1],
    "head-reads": walk[0],
    "group-reads": walk[3],
    "agree": cells.percent(short.number(*agreement, "agree"), 1),
    "agree-of-ended": cells.percent(short.number(*agreement, "agree_of_ended"), 1),
  }
