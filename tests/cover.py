"""Which cases of a sweep run when: few that have every value, and every pair, between them."""

import itertools

import numpy as np
import pytest

# Methods that differ from another one in their scores alone, or their window.
KIN = {
  *("random", "lm_infinite", "vatp", "pyramidkv", "expected_attention", "knorm", "keydiff"),
  "kvzip",  # without scores a window
  *("lagkv", "chunkkv", "criticalkv"),
  *("topk_oracle", "double_sparsity", "infllm_v2"),  # select as quest does
  "ltri",  # streams as infllm does
}


def covering(cases: list[tuple], most: int | None = None) -> list[int]:
  """Indices of cases that have between them every value of two axes, every pair of more.

  Greedy: the case that adds most, the first of equals. With `most`, no more than so many.
  """
  parts = [[*enumerate(x), *(_pairs(x) if len(x) > 2 else ())] for x in cases]
  numbers: dict = {}
  table = np.array([[numbers.setdefault(x, len(numbers)) for x in part] for part in parts])
  return sorted(_most_first(table, len(numbers), most))


def pairwise(*levels) -> list[tuple]:
  """Few combinations of levels that have between them every pair of two of these."""
  sizes = [len(level) for level in levels]
  cases = np.indices(sizes).reshape(len(sizes), -1).T
  first, columns = 0, []
  for i, j in itertools.combinations(range(len(sizes)), 2):  # a number for every pair of levels
    columns.append(first + cases[:, i] * sizes[j] + cases[:, j])
    first += sizes[i] * sizes[j]
  chosen = _most_first(np.stack(columns, 1), first)
  return [tuple(level[k] for level, k in zip(levels, cases[i], strict=True)) for i in chosen]


def _pairs(case: tuple):
  return itertools.combinations(enumerate(case), 2)


def _most_first(table: np.ndarray, count: int, most: int | None = None) -> list[int]:
  """Rows that have between them every number below `count`, each the one that adds most."""
  left, chosen = np.ones(count, bool), []
  while left.any() and len(chosen) != most:
    best = int(left[table].sum(1).argmax())
    chosen.append(best)
    left[table[best]] = False
  return chosen


def axes(item) -> tuple:
  """A case's value on each axis: what one `parametrize` of several gives is one axis."""
  names = [mark.args[0] for mark in item.iter_markers("parametrize")]
  names = [x.replace(" ", "").split(",") if isinstance(x, str) else list(x) for x in names]
  if len(names) == 1:
    names = [[name] for name in names[0]]
  return tuple(repr([item.callspec.params[name] for name in group]) for group in names)


def mark_rest(items) -> None:
  """Marks as slow what `core(n)` leaves out of a test's cases, and as sweep what `rest(n)` leaves
  out of these; n: at most so many are kept. Of `kin` those of KIN are of sweeps.
  """
  _leave_out(items, "core", unless=("slow", "sweep"), mark="slow")
  slow = [item for item in items if item.get_closest_marker("slow")]
  _leave_out(slow, "rest", unless=("sweep",), mark="sweep")
  for item in slow:
    if item.get_closest_marker("kin") and item.callspec.params["name"] in KIN:
      item.add_marker(pytest.mark.sweep)


def _leave_out(items, kept: str, unless: tuple[str, ...], mark: str) -> None:
  """Gives a mark to the cases that do not cover the axes of a test marked `kept`."""
  swept: dict = {}
  for item in items:
    if item.get_closest_marker(kept) and not any(map(item.get_closest_marker, unless)):
      swept.setdefault(item.nodeid.partition("[")[0], []).append(item)
  for cases in swept.values():
    most = cases[0].get_closest_marker(kept).args
    chosen = covering([axes(item) for item in cases], *most)
    for i, item in enumerate(cases):
      if i not in chosen:
        item.add_marker(getattr(pytest.mark, mark))
