"""The cases of a sweep that the core runs: every value of two axes, every pair of more."""

import itertools

import pytest

from tests.cover import covering


@pytest.mark.parametrize(("sizes", "most"), [((4, 6), 6), ((2, 2, 4), 8), ((3, 4, 2, 5), 24)])
def test_every_pair(sizes, most):
  cases = list(itertools.product(*map(range, sizes)))
  chosen = [cases[i] for i in covering(cases)]
  assert len(chosen) <= most
  for axes in itertools.combinations(range(len(sizes)), 1 if len(sizes) == 2 else 2):
    found = {tuple(case[axis] for axis in axes) for case in chosen}
    assert found == set(itertools.product(*(range(sizes[axis]) for axis in axes)))


def test_at_most_so_many():
  assert covering([(0,), (1,), (2,)], 2) == [0, 1]
  assert covering([("a", 0), ("b", 0), ("c", 1)], 2) == [0, 2]  # the most values
