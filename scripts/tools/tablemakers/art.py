"""ART: walks that never stop, walks that do, whole steps, and studies of stops."""

from typing import Any

from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.cells import median, own, said, say
from scripts.tools.tablemakers.records import Figure, Part
from scripts.tools.tablemakers.results import GPU, Case, Results, Study
from scripts.tools.tablemakers.timings import Ratio, gain

ENDLESS = {
  "p=inf B32 T8K 8x4": ("B32 T8K", "dense decode"),
  "p=inf B8 T32K 8x4": ("B8 T32K", "dense decode"),
  "p=inf B8 T32K 8x4 unit 16": ("B8, 8K tokens in pages of 16", "sparse decode"),
  "p=inf B8 T32K 8x4 unit 128": ("B8, 8K tokens in blocks of 128", "sparse decode"),
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
VISITED = said(r"^\d+ splits a head; ([\d.]+) of the tiles visited", "{:.0%}")


def paired(case: Case, peer: str) -> Figure:
  """By how many percent a walk without an end is slower, with its 95 % interval."""
  percent = r"([+-][\d.]+)%"
  found = case.numbers(rf"^{peer} \+ {percent} \[{percent}, {percent}\]")
  return say("{:+.2f} % [{:+.2f}, {:+.2f}]", *found)


def endless(results: Results) -> Part:
  """Beside dense or sparse decode, and beside the same walk when it does not look."""
  rows = []
  for name, (label, peer) in ENDLESS.items():
    case = results.bench("art")[name]
    beside = case.time(peer)
    slower = (Ratio(paired(case, x), beside) for x in (peer, BLIND))
    rows.append([label, own("ART, p = inf")(case), say(f"{peer}, {{}}", beside), *slower])
  head = ("", "ART, no stops", "without ART", "slower by", "slower than ART that does not look by")
  return cells.table(head, rows)


# Walks that end: their splits, and the shares of the tiles that are visited and loaded.
stopping = cells.cases(
  "art",
  {
    "B32 T32K": "decay B32 T32K 8x4",
    "B8 T128K": "decay B8 T128K 8x4",
    "B1 T128K": "decay B1 T128K 8x4",
    "SmolLM2, B32 T8K": "recorded",
  },
  ("splits", said(r"^(\d+) splits a head", "{:.0f}")),
  ("visited", VISITED),
  ("loaded", said(r"of the tiles visited, ([\d.]+) loaded", "{:.0%}")),
  ("time", own("ART")),
  ("expected", said(r"\+ 5 µs = ([\d.]+)", "{:.1f} µs")),
  ("dense", median("dense decode")),
  ("a tile of a lone walk", said(r"tiles at ([\d.]+) µs\)", "{:.2f} µs")),
  (
    "of dense decode's bandwidth",
    said(r"^([\d.]+) of dense decode's bandwidth", "{:.3f}", "dense decode"),
  ),
)


def shared(results: Results) -> Part:
  """Walks that many programs read, at the share that runs, beside dense decode of the same run.

  The file has no quartiles: nothing is divided but a walk without an end, which costs most.
  """
  about = "NVIDIA H200", "share 4, tiles of 128, synthetic stops"
  path, time = f"{GPU}/art_shared_walk.txt", r" +([\d.]+) µs"
  line = r"^(\(.*\)|one program) (B\d+ T\w+ \w+) (dense decode|share 4 p=\w+|p=5)" + time
  found: dict[str, dict[str, Figure]] = {}
  for cut, shape, what, us in results.lines(path, line, *about):
    of_shape = found.setdefault(shape, {})
    if cut == "(8, 16384, 16384)" or what not in of_shape:
      of_shape[what] = us
  rows = []
  for shape, times in found.items():
    dense, unended = times["dense decode"], times.get("share 4 p=inf")
    more = unended and say("+{:.0f} %", 100 * (unended.number / dense.number - 1))
    alone = times.get("p=5")
    art, *others = (us and say("{} µs", us) for us in (times["share 4 p=5"], unended, dense, alone))
    rows.append([shape.replace("x", "×"), say("**{}**", art), *others[:2], more, others[2]])
  head = ("", "ART", "without an end", "dense decode", "without an end over dense")
  return cells.table((*head, "one program a walk"), rows)


def steps(results: Results) -> Part:
  """Every base and shape that was run."""
  bench, rows = results.bench("art_e2e"), []
  for shape in SHAPES:
    for base, label in BASES.items():
      if (name := f"{base} Llama-3.1-8B {shape}") in bench:
        rows.append([f"{shape}, {label}", *gains(bench[name], base)])
  head = ("", "base", "ART, τ = 1e-5", "ART, τ = 0.01", "ART, paper's share")
  return cells.table(head, rows)


def gains(case: Case, base: str) -> list[str]:
  """TPOT over the full cache's, of what the bytes allow; nothing for what was not run."""
  row = ["–"] if base == "Full" else []
  for name in FORCED if base == "Full" else (base, *FORCED):
    if case.has(name):
      # The last figures of the line are those over the full cache.
      allowed = case.numbers(rf"^{name}: .*bytes allow ([\d.]+)[^;]* over Full")
      row.append(say("{:.2f} of {:.2f}", gain(case.time(name), case.time("Full")), *allowed))
    else:
      row.append("")
  return row


# ---- studies of one speech's activations

TAUS = {"1e-05": "1e-5", "0.01": "0.01"}
LENGTHS = (1024, 2048, 4096, 6144, 8192)
ORDERS = {"newest": "newest tile first", "sinks": "`sinks=4`: first tile first"}
COUNT, SHARE = "{:,.0f}", "{:.1%}"
STOPS = [
  *(("read, a query head", SHARE), ("stop", SHARE), ("mean error", "{:.1e}")),
  *(("read, a group", SHARE), ("stop", SHARE), ("mean error", "{:.1e}")),
]


def study(results: Results, path: str) -> Study:
  held = results.json(f"art_study/{path}")
  about = held["about"]
  setting = f"{about['model']}, {about['text']}, tiles of {held['tile']}, {held['order']}"
  return results.study(f"art_study/{path}", setting, n=held["walks"])


def real(results: Results) -> dict[str, Study]:
  """The studies of the real model that there are, by the tokens of their text and their order."""
  return {
    f"{n:,} tokens, {label}": study(results, f"qwen1.5b/tile128_{n}_{order}.json")
    for n in (8192, 16384, 32768)
    if (results.folder / f"art_study/qwen1.5b/tile128_{n}_newest.json").is_file()
    for order, label in ORDERS.items()
  }


def _ours(results: Results) -> dict[str, Study]:
  return {label: study(results, f"tile128_8192_{order}.json") for order, label in ORDERS.items()}


def stopped(held: Study, setting: str) -> list[Any]:
  """Shares read and stopped, and the error, of query heads by themselves and of a group."""
  kinds = (held[kind][setting] for kind in ("splits", "groups"))
  return [value for kind in kinds for value in kind.each("visited", "stopped", "error")]


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
  columns = {label: held["heads"]["0.01"] for label, held in real(results).items()}
  layers = sorted({int(n) for heads in columns.values() for n in heads})
  rows = []
  for n in map(str, layers):
    groups = (heads[n]["group"] if n in heads else None for heads in columns.values())
    shares = (group and cells.ends((x[0] for x in group), "{:.0%}", " – ") for group in groups)
    rows.append([n, *shares])
  return cells.table(("layer", *columns), rows)


def real_theory(results: Results) -> Part:
  """Agreement of probe and oracle, and where the theorems' bounds apply."""
  rows = []
  for label, held in real(results).items():
    for tau, words in TAUS.items():
      for prefix, whose in (("", "a query head"), ("group_", "a group")):
        agreed = held[f"{prefix}agreement"][tau]["all"]
        row = agreed.each("walks", "ended", "agree_of_ended", "agree", "early")
        broken = ("violations_where_it_decays", "violations_elsewhere")
        row += held[f"{prefix}bounds"][tau].each("stops", "decays", *broken)
        rows.append([label, words, whose, *row])
  head = [
    *("order", "τ", "whose", ("walks", COUNT), ("probe or oracle ends", COUNT)),
    *(("of these alike", SHARE), ("of all alike", SHARE), ("probe too early", SHARE)),
    *(("stops", COUNT), ("Lemma 1 holds", SHARE)),
    *(("bound broken there", COUNT), ("broken elsewhere", COUNT)),
  ]
  return cells.table(head, rows, labels=3)


def lengths(results: Results) -> Part:
  """Shares visited by length: one walk, of a query head and of a group."""
  rows = [
    [
      f"{label}, τ = {words}, a {kind}",
      *(held["lengths"][tau][f"{n} tokens"][kind] for n in LENGTHS),
    ]
    for label, held in _ours(results).items()
    for tau, words in TAUS.items()
    for kind in ("query head", "group")
  ]
  return cells.table(("", *((f"{n:,} tokens", "{:.0%}") for n in LENGTHS)), rows)


def probe(results: Results) -> Part:
  """Agreement of the probe where it can err, and what φ adds."""
  rows = []
  for path, which in (
    ("tile128_8192_newest.json", "8,192 tokens, tiles of 128, 3 layers"),
    ("tile32_2048_newest.json", "2,048 tokens, tiles of 32, 8 layers"),
  ):
    held = study(results, path)
    for tau, words in TAUS.items():
      agreed = held["agreement"][tau]["all"].each("walks", "ended", "agree_of_ended", "agree")
      rows.append([which, words, *agreed, held["without_direction"][tau]["same_stop"]])
  head = ["newest tile first", "τ", ("walks", COUNT), ("either ends", COUNT)]
  head += [("of these alike", "{:.0%}"), ("of all alike", "{:.0%}")]
  return cells.table([*head, ("walks that end alike without φ", COUNT)], rows, labels=2)


# ---- figures in sentences


def figures(results: Results) -> dict[str, str]:
  bench, steps = results.bench("art"), results.bench("art_e2e")
  held, last = _ours(results), f"{LENGTHS[-1]} tokens"
  newest = held[ORDERS["newest"]]
  forced = steps["Full Llama-3.1-8B B8 T32K"]
  bounds = [one["bounds"][tau] for one in held.values() for tau in TAUS]
  holds = [bound["decays"] for bound in bounds]
  case = steps["SnapKV 0.8 Llama-3.1-8B B1 T32K"]
  base, ours = case.time("SnapKV 0.8"), case.time("ART 1e-5")
  cost = say("{:.0f} µs ({:.1%})", ours.us - base.us, ours.us / base.us - 1)
  decay = bench["decay B32 T32K 8x4"]
  found = {
    "cost": say("{}", Ratio(cost, base)),
    "last-walks": say("{:.0f}", newest["agreement"]["1e-05"][last]["walks"]),
    "assumed": say("{:.0%}", max(bound["assumption"] for bound in bounds)),
    "holds-least": say("{:.0%}", min(holds)),
    "holds-most": say("{:.0%}", max(holds)),
    "broken": say("{:.0f}", sum(bound["violations_where_it_decays"] for bound in bounds)),
    "blind": cells.listed(paired(bench[name], BLIND) for name in ENDLESS),
    "blind-b8": paired(bench["p=inf B8 T32K 8x4"], BLIND),
    "decay-visited": VISITED(decay),
    "decay": median("ART")(decay),
    "decay-dense": median("dense decode")(decay),
  }
  for i, name in enumerate(FORCED):
    stop, after = forced.remark(rf"{name} in (\d+)% of the heads after (\d+)%")
    found |= {f"forced-{i}": stop, f"forced-after-{i}": after}
  for i, tau in enumerate(TAUS):
    found[f"alone-{i}"] = say("{:.0%}", newest["splits"][f"tau {tau}, 1 splits"]["stopped"])
    found[f"agreed-{i}"] = say("{:.0%}", newest["agreement"][tau][last]["agree"])
  full, fifth = (
    gains(steps[f"{base} Llama-3.1-8B B8 T32K"], base) for base in ("Full", "SnapKV 0.2")
  )
  short, long = (real(results)[f"{n} tokens, newest tile first"] for n in ("8,192", "16,384"))
  walk = stopped(long, "tau 1e-05, 1 splits")
  agreed = short["agreement"]["1e-05"]["all"]
  return found | {
    "full-gain": full[1],
    "full-paper": full[3],
    "fifth": fifth[0],
    "fifth-gain": fifth[1],
    "head-reads": say(SHARE, walk[0]),
    "group-reads": say(SHARE, walk[3]),
    "agree": say(SHARE, agreed["agree"]),
    "agree-of-ended": say(SHARE, agreed["agree_of_ended"]),
  }
