"""The study of shared selections: what it measures on a tiny model, and what it makes of it."""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.testing.tiny import TOKENS, model
from scripts.sharing_study import Args, draw, measure, settings, table

CIS = kvjax.CIS(k=4, sinks=1, local=3, block=4)


@pytest.mark.slow
def test_who_never_shares_keeps_the_oracles_selection():
  """Without groups what a head retrieves is the oracle's, but for first and newest tokens."""
  ids = TOKENS[0]
  alone = measure(model(), dataclasses.replace(CIS, tau=1.0), ids, 24)
  always = measure(model(), dataclasses.replace(CIS, tau=-1.0), ids, 24)
  assert alone["retrieved"] == 1 and always["retrieved"] == pytest.approx(0.25, abs=0.1)
  for found in (alone, always):
    assert 0 < found["overlap"] <= 1 and 0 <= found["dropped"] < 1
  everything = measure(model(), dataclasses.replace(CIS, local=len(ids)), ids, 24)
  assert everything["overlap"] == 1 and everything["dropped"] == pytest.approx(0, abs=1e-6)


def test_points_and_picture(tmp_path):
  lines = settings(Args(tmp_path, budget=64, blocks=(8,)))
  assert set(lines) == {"CIS, s = 8", "HShare"}
  found = {
    line: {
      point: {"retrieved": 1 / (i + 1), "overlap": 0.9, "dropped": 0.1}
      for i, point in enumerate(points)
    }
    for line, points in lines.items()
  }
  assert np.char.count(table(found), "HShare") == 5
  draw(found, "tiny", tmp_path / "picture.png")
  assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
