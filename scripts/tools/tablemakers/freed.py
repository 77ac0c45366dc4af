"""Heads that share slots, and branches that share a context: steps beside what holds more."""

from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.records import Part
from scripts.tools.tablemakers.results import Case, Results

# What a case of `per_head` is of, and what stands beside it, by the first word of its name.
PAIRS = {"shared": ("shared", "equal heads"), "AdaKV": ("kvjax", "SnapKV")}
ALIKE = "shared", "equal heads, shared"


def by_head(results: Results) -> Part:
  """Decode over heads of 0.4 to 1.6 of the mean, and over equal ones; steps of Ada-KV."""
  rows = []
  for case in results.bench("per_head").cases(""):
    kind, name = case.name.split()[0], case.name.removeprefix("shared ")
    alike = _beside(case, *ALIKE)[2] if kind == "shared" else "–"
    rows.append([name, *_beside(case, *PAIRS[kind]), alike])
  head = "", "heads of 0.4 to 1.6", "equal heads", "times as fast", "where those share slots too"
  return cells.table(head, rows)


def branches(results: Results) -> Part:
  """Whole steps of n branches of a context, and of n copies."""
  rows = []
  for case in results.bench("forked").cases(""):
    (limit,) = case.numbers(r"of what the bytes allow \(([\d.]+) ×\)")
    name = case.name.removeprefix("forked ").replace(" n", ", n = ")
    rows.append([name, *_beside(case, "kvjax", "copies"), cells.number(limit)])
  return cells.table(("", "branches", "copies", "times as fast", "bytes allow"), rows)


def _beside(case: Case, ours: str, other: str) -> list[str]:
  """Both times, and their ratio."""
  mine, theirs = case.time(ours), case.time(other)
  return [cells.ours(mine), cells.time(theirs), cells.ratio(*cells.gain(mine, theirs))]
