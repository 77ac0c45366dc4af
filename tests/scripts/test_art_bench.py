"""ART's bench compares tiles walked: outputs alone would let a walk pass that never stops."""

import functools
import math

import pytest

from pallas_kernels import art as kernel
from scripts import bench
from scripts.benches import art


@functools.cache
def quick(**options):
  """The report of the quick case whose walks stop, by a kernel with these options instead."""
  walk = kernel.walk
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(kernel, "walk", lambda *args, **how: walk(*args, **{**how, **options}))
    (case,) = art.cases(True, only="decay")
    return case, bench.measure(case, 1)


def ours(report):
  return next(row for row in report["results"] if row["name"] == "ART")


def test_walks_of_the_quick_shapes_stop_where_the_references_do():
  case, report = quick()
  tiles = -(-art.QUICK_STOPS.slots // art.QUICK_TILE)
  walked = case.steps()
  assert (walked < tiles).any() and (walked > 2 * 6).any()  # some stop, not all at once
  assert ours(report)["steps_apart"] == 0 and "us" in ours(report)


@pytest.mark.parametrize(
  "options",
  [{"patience": math.inf}, {"patience": 6}, {"tau": 1e-4}],
  ids=["never stops", "stops a tile later", "stops sooner"],
)
def test_a_walk_that_stops_elsewhere_gets_no_time(options):
  case, report = quick(**options)
  row = ours(report)
  assert row["steps_apart"] > case.slack and "us" not in row
  assert row["error"] <= report["tolerance"]  # which is why outputs are not enough
  assert f"{row['steps_apart']} steps apart, expected at most 0" in bench.table(report)
