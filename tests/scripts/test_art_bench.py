"""ART's bench compares tiles walked: outputs alone would let a walk pass that never stops."""

import functools
import math

import numpy as np
import pytest

from kvjax.kernels.art import walk as kernel
from kvjax.programs import bench, suites
from scripts.benches import art


@functools.cache
def quick(**options):
  """The quick case whose walks stop, by a kernel with these options instead."""
  walk = kernel.walk
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(kernel, "walk", lambda *args, **how: walk(*args, **{**how, **options}))
    case = next(art.cases(True, only="decay"))
    return case, bench.check(case)["ART"], bench.check_steps(case)["ART"]


@pytest.mark.slow
def test_walks_of_the_quick_shapes_stop_where_the_references_do():
  case, error, apart = quick()
  walked = case.steps()
  assert (walked < -(-art.QUICK_STOPS.slots // art.QUICK_TILE)).any() and len(set(walked.flat)) > 1
  assert error <= case.tolerance and apart == 0


@pytest.mark.slow  # that other steps get no time is shown below, of a case that takes none
@pytest.mark.parametrize("patience", [math.inf, 6], ids=["never", "a tile later"])
def test_a_walk_that_stops_elsewhere_is_wrong(patience):
  case, error, apart = quick(patience=patience)
  assert apart > case.slack
  assert error <= case.tolerance  # which is why outputs are not enough


def test_a_contender_of_other_steps_gets_no_time():
  """As many steps apart as the case allows pass."""

  def contender(name, steps):
    counted = functools.partial(np.array, [[3, steps]])
    return suites.Contender(name, lambda: 1e-6, lambda: np.ones(2), steps=counted)

  case = suites.Case(
    *("case", "none", 1, lambda: np.ones(2), 1e-3, (contender("near", 8), contender("far", 9))),
    subject="near",
    steps=lambda: np.array([[3, 7]]),
    slack=1,
  )
  report = bench.measure(case, 1)
  near, far = report["results"]
  assert "us" in near and near["steps_apart"] == 1
  assert "us" not in far and far["error"] == 0
  assert "2 steps apart, expected at most 1" in bench.table(report)


@pytest.mark.slow
@pytest.mark.sweep
def test_known_lengths_read_what_they_say():
  """Everything where nothing stops; else each head its own share."""
  cases = list(art.cases(True, only="known"))
  assert len({tuple(case.steps().flat) for case in cases}) == len(cases) == 3
  for case in cases:
    assert bench.check(case)["ART, known"] <= case.tolerance
    assert bench.check_steps(case)["ART, known"] == 0
