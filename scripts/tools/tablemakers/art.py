"""ART: walks that never stop, walks that do, whole steps, and studies of stops."""

import functools
import re
from typing import Any

from scripts.tools.tablemakers import Case, Named, Part, Results, cells
from scripts.tools.tablemakers.cells import Cases, faster, figure, longer, own, say
from scripts.tools.tablemakers.timings import gain

DENSE = "dense decode"
DECODE = f"{DENSE}|sparse decode"
SLOWER = "{:+.2f} % [{:+.2f}, {:+.2f}]"  # with its 95 % interval

# Walks without an end, beside decode and the same walk when it does not look.
endless = Cases("art", "^p=inf").table(
  ("ART, no stops", own("ART, p = inf")),
  ("dense or sparse decode", DECODE),
  ("slower by", figure("over decode, %", SLOWER, DECODE)),
  ("slower than ART that does not look by", figure("over not looking, %", SLOWER, DECODE)),
)
# Walks that end: their splits, and the shares of the tiles visited and loaded.
stopping = Cases("art", r"^decay \S+ \S+ 8x4$|^recorded$").table(
  cells.said("splits", "{:.0f}"),
  cells.said("visited", "{:.0%}"),
  cells.said("loaded", "{:.0%}"),
  ("time", own("ART")),
  ("expected", figure("expected, µs", "{:.1f} µs")),
  ("dense", DENSE),
  ("a tile of a lone walk", figure("a tile of a lone walk, µs", "{:.2f} µs")),
  cells.said("of dense decode's bandwidth", "{:.3f}", DENSE),
)
# One walk a KV head, read by many programs.
shared = Cases("art", "^lone").table(
  ("ART", own("ART")),
  ("without an end", "ART, p = inf"),
  DENSE,
  ("without an end over dense", longer(DENSE, "ART, p = inf")),
  ("one program a walk", "one program"),
  ("times as fast as that", faster("one program", "ART")),
)


def _allowed(name: str = "") -> cells.Column:
  """A token's rate over the full cache's, of what bytes allow; empty where it was not run."""

  def show(case: Case) -> str:
    who = name or case.name.partition(" Llama")[0]
    if who == "Full" or not case.has(who):
      return "–" if who == "Full" else ""
    allowed = case.figures[f"{who}, bytes allow"]
    return say("{:.2f} of {:.2f}", gain(case.time(who), case.time("Full")), allowed)

  return show


# Every base and shape that was run.
steps = Cases("art_e2e", "^(?!known)").table(
  ("base", _allowed()),
  ("ART, τ = 1e-5", _allowed("ART 1e-5")),
  ("ART, τ = 0.01", _allowed("ART 1e-2")),
  ("ART, paper's share", _allowed("ART paper")),
)


# ---- studies of a speech's activations

TAUS = {"1e-05": "1e-5", "0.01": "0.01"}
LENGTHS = (1024, 2048, 4096, 6144, 8192)
COUNT, SHARE = "{:,.0f}", "{:.1%}"


@functools.cache
def studies(results: Results, names: str) -> dict[str, Named]:
  """The studies whose files begin so, by tokens, tiles and order."""
  found = {}
  for name, held in results.studies(f"art_study/{names}*.json").items():
    tile, tokens = map(int, re.findall(r"\d+", name))
    found[-tile, tokens, f"{tokens:,} tokens, tiles of {tile}, {held['order']}"] = held
  return {key[-1]: found[key] for key in sorted(found)}


def stops(results: Results, names: str) -> Part:
  """Share read and error of stops: of a query head, and of those of a KV head together."""
  rows = []
  for label, held in studies(results, names).items():
    for setting in [name for name in held["splits"] if " splits" in name]:
      tau, count = re.findall(r"[\de.-]+", setting)[:2]
      row = [label, TAUS[tau], count]
      for kind in ("splits", "groups"):
        row += map(held[kind][setting].get, ("visited", "stopped", "error"))
      rows.append(row)
  head: list[Any] = ["order", "τ", "splits"]
  for who in ("a query head", "a group"):
    head += [(f"read, {who}", SHARE), ("stop", SHARE), ("mean error", "{:.1e}")]
  return cells.table(head, rows, labels=3)


def orders(results: Results, names: str) -> Part:
  """Tiles that groups read step after step by test and margin, τ fitted elsewhere."""
  rows = []
  for held in results.studies(f"art_study/{names}*.json").values():
    text = held["about"]["text"].split()[-1]
    for rule, row in held["rules"].items():
      longer = row["longer"] if "margin" in rule else None
      found = map(row.get, ("tau", "read", "error", "error_p99"))
      rows.append([rule, text, *found, longer])
  error = "{:.1e}"
  head: list[Any] = ["walks", "text", ("τ", error), ("read", SHARE), ("mean error", error)]
  return cells.table([*head, ("99 % below", error), ("go on", SHARE)], rows, labels=2)


def groups(results: Results, names: str) -> Part:
  """Share that each layer's groups read at τ = 0.01, the least to the most."""
  rows: dict[int, dict[str, str]] = {}
  for label, held in studies(results, names).items():
    for layer, heads in held["heads"]["0.01"].items():
      shown = cells.ends((x[0] for x in heads["group"]), "{:.0%}", " – ")
      rows.setdefault(int(layer), {"layer": layer})[label] = shown
  return cells.framed(rows[layer] for layer in sorted(rows))


def theory(results: Results, names: str) -> Part:
  """Agreement of probe and oracle, what φ adds, and where bounds apply."""
  rows = []
  for label, held in studies(results, names).items():
    for tau, words in TAUS.items():
      for prefix, whose in (("", "a query head"), ("group_", "a group")):
        if f"{prefix}agreement" in held:
          row = [*map(held[f"{prefix}agreement"][tau]["all"].get, AGREED)]
          row.append(None if prefix else held["without_direction"][tau]["same_stop"])
          row += map(held[f"{prefix}bounds"][tau].get, BOUNDS)
          rows.append([label, words, whose, *row])
  head = ["order", "τ", "whose", *AGREED.values()]
  head += [("walks that end alike without φ", COUNT), *BOUNDS.values()]
  return cells.table(head, rows, labels=3)


AGREED = {
  "walks": ("walks", COUNT),
  "ended": ("probe or oracle ends", COUNT),
  "agree_of_ended": ("of these alike", SHARE),
  "agree": ("of all alike", SHARE),
  "early": ("probe too early", SHARE),
}
BOUNDS = {
  "stops": ("stops", COUNT),
  "assumption": ("Assumption 1 holds", SHARE),
  "decays": ("Lemma 1 holds", SHARE),
  "violations_where_it_decays": ("bound broken there", COUNT),
  "violations_elsewhere": ("broken elsewhere", COUNT),
}


def lengths(results: Results, names: str) -> Part:
  """Shares visited by length: one walk, of a query head and of a group."""
  rows = [
    [label, words, f"a {kind}", *(held["lengths"][tau][f"{n} tokens"][kind] for n in LENGTHS)]
    for label, held in studies(results, names).items()
    for tau, words in TAUS.items()
    for kind in ("query head", "group")
  ]
  head = ("order", "τ", "whose", *((f"{n:,} tokens", "{:.0%}") for n in LENGTHS))
  return cells.table(head, rows, labels=3)
