"""Which cases of a sweep the core runs: few that have every value, and every pair, between them."""

import itertools

import pytest


def covering(cases: list[tuple], most: int | None = None) -> list[int]:
  """Indices of cases that have between them every value of two axes, every pair of more.

  Greedy: the case that adds most, the first of equals. With `most`, no more than so many.
  """

  def parts(case):
    at = list(enumerate(case))
    return {*at, *(itertools.combinations(at, 2) if len(at) > 2 else ())}

  left, chosen = set().union(*map(parts, cases)), []
  while left and len(chosen) != most:
    best = max(range(len(cases)), key=lambda i: len(left & parts(cases[i])))
    chosen.append(best)
    left -= parts(cases[best])
  return sorted(chosen)


def axes(item) -> tuple:
  """A case's value on each axis: what one `parametrize` of several gives is one axis."""
  names = [mark.args[0] for mark in item.iter_markers("parametrize")]
  names = [x.replace(" ", "").split(",") if isinstance(x, str) else list(x) for x in names]
  if len(names) == 1:
    names = [[name] for name in names[0]]
  return tuple(repr([item.callspec.params[name] for name in group]) for group in names)


def mark_rest(items) -> None:
  """Marks as slow what `@pytest.mark.core(n)` leaves out of a test's cases; n: at most so many."""
  swept: dict = {}
  for item in items:
    if item.get_closest_marker("core") and not item.get_closest_marker("slow"):
      swept.setdefault(item.nodeid.partition("[")[0], []).append(item)
  for cases in swept.values():
    most = cases[0].get_closest_marker("core").args
    kept = covering([axes(item) for item in cases], *most)
    for i, item in enumerate(cases):
      if i not in kept:
        item.add_marker(pytest.mark.slow)
