"""ART's stops on a real model's activations: what they read and miss, group by group, and theory.

All give nothing while there are no studies.
"""

from collections.abc import Sequence

from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.art import ORDERS, TAUS, stopped, study
from scripts.tools.tablemakers.records import Figure, Part
from scripts.tools.tablemakers.results import Results, Study

LENGTHS = (8192, 16384, 32768)
STUDY = "art_study/qwen1.5b/tile128_{}_{{}}.json"
WHOSE = {"": "a query head", "group_": "a group"}


def studies(results: Results) -> dict[str, Study]:
  """The studies that there are, by the tokens of their text and their order."""
  return {
    f"{n:,} tokens, {label}": study(results, STUDY.format(n).format(order))
    for n in LENGTHS
    if (results.folder / STUDY.format(n).format("newest")).is_file()
    for order, label in ORDERS.items()
  }


def stops(results: Results) -> Part:
  """What one walk reads and misses, of query heads by themselves and of six together."""
  rows = [
    [label, words, *stopped(held, f"tau {tau}, 1 splits")]
    for label, held in studies(results).items()
    for tau, words in TAUS.items()
  ]
  head = ("order", "τ", "read, a query head", "stop", "mean error", "read, a group", "stop")
  return cells.table((*head, "mean error"), rows, labels=2) if rows else Part()


def groups(results: Results) -> Part:
  """What the groups of each layer read at τ = 0.01, from the least to the most of its KV heads."""
  columns = studies(results)
  layers = sorted({int(n) for held in columns.values() for n in held.get("heads", "0.01")})
  rows = [[str(n), *(_between(held, str(n)) for held in columns.values())] for n in layers]
  return cells.table(("layer", *columns), rows) if rows else Part()


def _between(held: Study, layer: str) -> str:
  keys = ("heads", "0.01", layer)
  if layer not in held.get(*keys[:-1]):
    return "–"
  heads = range(len(held.get(*keys, "group")))
  shares = [held.number(*keys, "group", head, 0) for head in heads]
  low, high = (cells.percent(end(shares)) for end in (min, max))
  return low if low == high else cells.listed((low, high), " – ")


def theory(results: Results) -> Part:
  """How probe and oracle agree, and where the theorems' bounds apply."""
  rows = [
    [label, words, whose, *_theory(held, tau, prefix)]
    for label, held in studies(results).items()
    for tau, words in TAUS.items()
    for prefix, whose in WHOSE.items()
  ]
  head = ("order", "τ", "whose", "walks", "probe or oracle ends", "of these alike")
  head += ("of all alike", "probe too early", "stops", "Lemma 1 holds", "bound broken there")
  return cells.table((*head, "broken elsewhere"), rows, labels=3) if rows else Part()


def _theory(held: Study, tau: str, prefix: str) -> Sequence[str]:
  agreed, bounds = (f"{prefix}agreement", tau, "all"), (f"{prefix}bounds", tau)
  return [
    *(_figure(held, *agreed, key) for key in ("walks", "ended")),
    *(_figure(held, *agreed, key, share=True) for key in ("agree_of_ended", "agree", "early")),
    _figure(held, *bounds, "stops"),
    _figure(held, *bounds, "decays", share=True),
    *(_figure(held, *bounds, f"violations_{where}") for where in ("where_it_decays", "elsewhere")),
  ]


def _figure(held: Study, *keys: str, share: bool = False) -> Figure:
  """A count or a share; a dash where there is none."""
  if held.get(*keys[:-1]).get(keys[-1]) is None:
    return Figure("–", ())
  value = held.number(*keys)
  return cells.percent(value, 1) if share else cells.number(value, "{:,.0f}")
