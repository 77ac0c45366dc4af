"""ART's stops on a real model's activations: what they read and miss, group by group, and theory.

All give nothing while there are no studies.
"""

from . import cells
from .art import ORDERS, TAUS
from .results import Results

LENGTHS = (8192, 16384, 32768)
STUDY = "art_study/qwen1.5b/tile128_{}_{{}}.json"
WHOSE = {"": "a query head", "group_": "a group"}


def _studies(results: Results) -> dict[str, str]:
  """The studies that there are, by the tokens of their text."""
  paths = {f"{n:,}": STUDY.format(n) for n in LENGTHS}
  return {n: p for n, p in paths.items() if (results.folder / p.format("newest")).is_file()}


def stops(results: Results) -> list[str]:
  """What one walk reads and misses, of query heads by themselves and of six together."""
  rows = []
  for n, path in _studies(results).items():
    for order, label in ORDERS.items():
      for tau, words in TAUS.items():
        row = [f"{n} tokens, {label}", words]
        for kind in ("splits", "groups"):
          cost = results.json(path.format(order), kind, f"tau {tau}, 1 splits")
          row += [cells.percent(cost[key], 1) for key in ("visited", "stopped")]
          row.append(f"{cost['error']:.1e}")
        rows.append(row)
  head = ("order", "τ", "read, a query head", "stop", "mean error", "read, a group", "stop")
  return cells.table((*head, "mean error"), rows) if rows else []


def groups(results: Results) -> list[str]:
  """What the groups of each layer read at τ = 0.01, from the least to the most of its KV heads."""
  columns = {
    f"{n} tokens, {label}": results.json(path.format(order), "heads", "0.01")
    for n, path in _studies(results).items()
    for order, label in ORDERS.items()
  }
  layers = sorted({int(layer) for found in columns.values() for layer in found})
  rows = [[str(n), *(_between(found.get(str(n))) for found in columns.values())] for n in layers]
  return cells.table(("layer", *columns), rows) if rows else []


def _between(shares: dict[str, list[list[float]]] | None) -> str:
  if shares is None:
    return "–"
  low, high = (cells.percent(f(share for (share,) in shares["group"])) for f in (min, max))
  return low if low == high else f"{low} – {high}"


def theory(results: Results) -> list[str]:
  """How probe and oracle agree, and where the theorems' bounds apply."""
  rows = []
  for n, path in _studies(results).items():
    for order, label in ORDERS.items():
      for tau, words in TAUS.items():
        for prefix, whose in WHOSE.items():
          agreed = results.json(path.format(order), f"{prefix}agreement", tau, "all")
          row = [f"{n} tokens, {label}", words, whose, f"{agreed['walks']:,}"]
          row += [f"{agreed['ended']:,}", _percent(agreed["agree_of_ended"])]
          row.append(cells.percent(agreed["early"], 1))
          found = results.json(path.format(order), f"{prefix}bounds", tau)
          keys = ("violations_where_it_decays", "violations_elsewhere")
          row.append(f"{found['stops']:,}")
          row.append(_percent(found.get("decays")))
          row += [f"{found[key]:,}" if key in found else "–" for key in keys]
          rows.append(row)
  head = (
    "order",
    "τ",
    "whose",
    "walks",
    "probe or oracle ends",
    "of these alike",
    "probe too early",
  )
  head += ("stops", "Lemma 1 holds", "bound broken there", "broken elsewhere")
  return cells.table(head, rows) if rows else []


def _percent(share: float | None) -> str:
  return "–" if share is None else cells.percent(share, 1)
