"""ART: walks that never stop, walks that do, whole steps, and studies of stops."""

import functools
import itertools
import re

import pandas as pd

from scripts.tools.tablemakers import Part, Record, Results, cells, over
from scripts.tools.tablemakers.cells import Cases, faster, figure, longer, own, said

DENSE = "dense decode"
DECODE = f"{DENSE}|sparse decode"
SLOWER = "{:+.2f}% [{:+.2f}, {:+.2f}]"  # with its 95 % interval

# Walks without an end, beside decode and the same walk when it does not look.
endless = Cases("art", "^p=inf").table(
  ("ART, no stops", own("ART, p = inf")),
  ("dense or sparse decode", DECODE),
  ("slower by", figure(SLOWER, "over decode, %", to=DECODE)),
  ("slower than ART that does not look by", figure(SLOWER, "over not looking, %", to=DECODE)),
)
# Walks that end: their splits, and the shares of the tiles visited and loaded.
stopping = Cases("art", r"^decay \S+ \S+ 8x4$|^recorded$").table(
  said("splits", "{:.0f}"),
  said("visited", "{:.0%}"),
  said("loaded", "{:.0%}"),
  ("time", own("ART")),
  ("expected", figure("{:.1f} µs", "expected, µs")),
  ("dense", DENSE),
  ("a tile of a lone walk", figure("{:.2f} µs", "a tile of a lone walk, µs")),
  said("of dense decode's bandwidth", "{:.3f}", DENSE),
)
# Lengths that are known: of all tiles, of 0.6 of them, and of each head its own.
known = Cases("art", "^known").table(
  ("ART, known lengths", own("ART, known")),
  ("of the bytes", figure("{:.2f}", "of the bytes")),
  DENSE,
  ("over dense", longer(DENSE, "ART, known")),
  ("over dense of as much", longer(f"{DENSE} of as much", "ART, known")),
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


def _allowed(case: Record, name: str = "") -> str | None:
  """A token's rate over the full cache's, of what bytes allow."""
  who = name or case["case"].partition(" Llama")[0]
  if who == "Full" or who not in case:
    return None if who == "Full" else ""
  return f"{over(case[who], case['Full'], power=-1)} of {case[f'{who}, bytes allow']:.2f}"


steps = Cases("art_e2e", "^(?!known)").table(
  ("base", _allowed),
  ("ART, τ = 1e-5", functools.partial(_allowed, name="ART 1e-5")),
  ("ART, τ = 0.01", functools.partial(_allowed, name="ART 1e-2")),
  ("ART, paper's share", functools.partial(_allowed, name="ART paper")),
)

# Of studies of a speech's activations.
TAUS = {"1e-05": "1e-5", "0.01": "0.01"}
BOUNDS = ("assumption", "decays", "violations_where_it_decays", "violations_elsewhere")
COUNT, SHARE, ERROR = "{:,.0f}", "{:.1%}", "{:.1e}"


def _studies(results: Results, names: str) -> dict[str, Record]:
  """The studies whose files begin so, by tokens, tiles and order."""
  found = {}
  for path in (results.folder / "art_study").glob(f"{names}*.json"):
    held, (tile, tokens) = results.json(path), map(int, re.findall(r"\d+", path.stem))
    found[-tile, tokens, f"{tokens:,} tokens, tiles of {tile}, {held['order']}"] = held
  return {key[-1]: found[key] for key in sorted(found)}


def stops(results: Results, names: str) -> Part:
  made, labels = [], ["order", "τ", "splits"]
  for kind, who in (("splits", "a query head"), ("groups", "a group")):
    rows = [
      {"order": order, "τ": TAUS[tau], "splits": splits, **held[kind][name]}
      for order, held in _studies(results, names).items()
      for name in held["splits"]
      for tau, splits in [re.findall(r"[\de.-]+", name)[:2]]
    ]
    shares = (f"read, {who}", figure(SHARE, "visited")), ("stop", figure(SHARE, "stopped"))
    made.append(cells.table(rows, labels, *shares, ("mean error", figure(ERROR, "error"))))
  return pd.concat(made, axis=1)


def orders(results: Results, names: str) -> Part:
  rows = [
    {"rule": rule, "text": held["about"]["text"].split()[-1], **row}
    for path in sorted((results.folder / "art_study").glob(f"{names}*.json"))
    for held in [results.json(path)]
    for rule, row in held["rules"].items()
  ]
  return cells.table(
    rows,
    [("walks", "rule"), "text"],
    ("τ", figure(ERROR, "tau")),
    said("read", SHARE),
    ("mean error", figure(ERROR, "error")),
    ("99 % below", figure(ERROR, "error_p99")),
    ("go on", lambda row: cells.say(SHARE, row["longer"] if "margin" in row["rule"] else None)),
  )


def groups(results: Results, names: str) -> Part:
  by_layer = {
    order: {
      int(layer): cells.span((share for (share,) in heads["group"]), "{:.0%}", " – ")
      for layer, heads in held["heads"]["0.01"].items()
    }
    for order, held in _studies(results, names).items()
  }
  return pd.DataFrame(by_layer).sort_index().rename_axis("layer")


def theory(results: Results, names: str) -> Part:
  rows = []
  for order, held in _studies(results, names).items():
    for (tau, words), group in itertools.product(TAUS.items(), ("", "group_")):
      if f"{group}agreement" in held:
        row = dict.fromkeys(BOUNDS)  # without stops there are none
        row |= {"order": order, "τ": words, "whose": "a group" if group else "a query head"}
        row |= {} if group else {"same": held["without_direction"][tau]["same_stop"]}
        rows.append(row | held[f"{group}agreement"][tau]["all"] | held[f"{group}bounds"][tau])
  return cells.table(
    pd.DataFrame(rows),
    ["order", "τ", "whose"],
    said("walks", COUNT),
    ("probe or oracle ends", figure(COUNT, "ended")),
    ("of these alike", figure(SHARE, "agree_of_ended")),
    ("of all alike", figure(SHARE, "agree")),
    ("probe too early", figure(SHARE, "early")),
    ("walks that end alike without φ", figure(COUNT, "same")),
    said("stops", COUNT),
    ("Assumption 1 holds", figure(SHARE, BOUNDS[0])),
    ("Lemma 1 holds", figure(SHARE, BOUNDS[1])),
    ("bound broken there", figure(COUNT, BOUNDS[2])),
    ("broken elsewhere", figure(COUNT, BOUNDS[3])),
  )


def lengths(results: Results, names: str) -> Part:
  shares = {
    (order, words): pd.DataFrame(held["lengths"][tau]).rename("a {}".format)
    for order, held in _studies(results, names).items()
    for tau, words in TAUS.items()
  }
  rows = pd.concat(shares, names=["order", "τ", "whose"]).reset_index()
  lengths = (1024, 2048, 4096, 6144, 8192)
  columns = ((f"{n:,} tokens", figure("{:.0%}", f"{n} tokens")) for n in lengths)
  return cells.table(rows, ["order", "τ", "whose"], *columns)
