"""Heads that share slots, and branches that share a context: steps beside what holds more."""

from . import cells
from .results import Case, Results


def by_head(results: Results) -> list[str]:
  """Decode over heads of 0.4 to 1.6 of the mean, and over equal ones; steps of Ada-KV."""
  cases = results.bench("per_head").cases("")
  pairs = {"shared": "equal heads", "AdaKV": "SnapKV"}
  rows = [_beside(case, *_names(case, pairs)) for case in cases]
  return cells.table(("", "heads of 0.4 to 1.6", "equal heads", "times as fast"), rows)


def _names(case: Case, pairs: dict[str, str]) -> tuple[str, str]:
  """The contender that a case is of, and the other."""
  kind = case.name.split()[0]
  return ("shared" if kind == "shared" else "kvjax"), pairs[kind]


def _beside(case: Case, ours: str, other: str) -> list[str]:
  mine, theirs = case.time(ours), case.time(other)
  ratio = cells.ratio(theirs.us / mine.us, theirs)
  return [case.name.removeprefix("shared "), cells.ours(mine), cells.time(theirs), ratio]


def branches(results: Results) -> list[str]:
  """Whole steps of n branches of a context, and of n copies."""
  rows = []
  for case in results.bench("forked").cases(""):
    limit = case.numbers(r"of what the bytes allow \(([\d.]+) ×\)")[0]
    name = case.name.removeprefix("forked ").replace(" n", ", n = ")
    rows.append([name, *_beside(case, "kvjax", "copies")[1:], f"{limit:.2f}"])
  return cells.table(("", "branches", "copies", "times as fast", "bytes allow"), rows)
