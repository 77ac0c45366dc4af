"""How much PRR speculates by default: the choice from a file of measurements."""

import json

import numpy as np
import pytest

from kvjax import PRR, Cache, InfLLMv2, Quest
from kvjax.kernels.common import devices
from kvjax.kernels.prr import ratio
from kvjax.testing.layer import Stream


def entry(slots, select, speculate, prr, serial, batch=1):
  return {
    "bucket": {"selector": "Quest", "unit": 16, "best": 63, "batch": batch, "slots": slots},
    "select_us": select,
    "speculate_us": dict(zip(("1", "1.25", "1.5"), speculate, strict=True)),
    "prr_us": dict(zip(("1", "1.25", "1.5"), prr, strict=True)),
    "serial_us": serial,
  }


ENTRIES = [
  entry(4096, 5, (8, 9, 10), (14, 15, 16), 15),  # nothing fits
  entry(8192, 9, (8, 9, 10), (14, 15, 16), 17),  # 1.25 fits, and pays
  entry(16384, 12, (8, 9, 10), (21, 22, 23), 20),  # 1.5 fits, and nothing pays
  entry(8192, 40, (30, 35, 39), (50, 55, 58), 70, batch=4),
]


@pytest.mark.parametrize(("slots", "rho"), [(4096, 1), (8192, 1.25), (16384, 0)])
def test_the_largest_that_fits_and_pays(slots, rho):
  assert ratio.largest(ENTRIES[:3], slots) == rho


def test_one_that_fits_gives_way_to_one_that_pays():
  assert ratio.largest([entry(4096, 12, (8, 9, 10), (14, 15, 21), 20)], 4096) == 1.25


def test_nothing_is_speculated_beyond_what_was_measured():
  pays = [entry(n << 10, 9, (8, 9, 10), (14, 15, 16), 20) for n in (8, 16)]
  for slots, rho in ((4, 0), (8, 1.25), (12, 1.25), (16, 1.25), (64, 0)):
    assert ratio.largest(pays, slots << 10) == rho


@pytest.mark.parametrize(("serial", "rho"), [(14.41, 0), (14.43, 1)])
def test_a_gain_is_one_of_three_percent(serial, rho):
  assert ratio.largest([entry(4096, 5, (8, 9, 10), (14, 15, 16), serial)], 4096) == rho


def test_lengths_between_are_fitted():
  x = np.array([4, 8, 16, 32]) * 1024
  times = 3 + 2e-3 * x + 1e-7 * x**2
  assert ratio.fitted(x.tolist(), times.tolist(), 8192) == times[1]
  for length in (6000, 65536):
    want = 3 + 2e-3 * length + 1e-7 * length**2
    np.testing.assert_allclose(ratio.fitted(x.tolist(), times.tolist(), length), want)


def test_a_cache_asks_its_device(monkeypatch, tmp_path):
  """By selector, unit, k, length and the nearest batch; what was not measured gets 0."""
  device = devices.this_device().name
  monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
  folder = devices.folders()[0] / device
  folder.mkdir(parents=True)
  (folder / "prr.json").write_text(json.dumps({"entries": ENTRIES}))
  devices.tables.cache_clear()
  method = PRR(Quest(1024, 16))
  assert [method._ratio(1, n) for n in (4096, 8192, 16384)] == [1, 1.25, 0]
  assert method._ratio(3, 8192) == 1.5
  assert method._ratio(8, 8192) == 0  # a larger batch than any
  assert PRR(Quest(512, 16))._ratio(1, 8192) == PRR(InfLLMv2())._ratio(1, 8192) == 0
  assert PRR(Quest(1024, 16), variant="S2")._ratio(1, 16384) == 1
  heads = {n: Cache.empty(method, Stream.random(0).spec(n), 2).heads for n in (8192, 16384)}
  assert heads[8192]["foreseen"].shape[-1] == 1 + 78  # ⌊1.25 · 63⌋ beside the newest
  assert "foreseen" not in heads[16384]
  devices.tables.cache_clear()
