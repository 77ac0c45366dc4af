"""Share to speculate on a device, from what was measured there (PRR, §4.4).

`tuned/<device>/prr.json` holds, per selector and length, how long it takes to select, and for
several ρ how long attention over ρ·k tiles takes and how long whole steps do, with speculation and
without, where forecasts hit as many tiles as they do on text (written by `kvjax tune prr`). Lengths
between the measured ones are fitted; where nothing was measured, nothing is speculated.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvjax.kernels.common import devices

Entry = dict[str, Any]
LEAST_GAIN = 1.03  # below that, a gain is within what other shapes and texts may cost


def measured(device: str) -> Sequence[Entry]:
  """The entries of a device's file, the user's where there is one; none if there is none."""
  return next(iter(devices.tables(device, "prr", _entries)), ())


def _entries(held: Any) -> list[Entry]:
  """The entries of a file, each with all that is asked of one."""
  for entry in held["entries"]:
    _ = [entry["bucket"][x] for x in ("selector", "unit", "best", "batch", "slots")]
    _ = [entry[f"{x}_us"] for x in ("select", "serial", "speculate", "prr")]
  return held["entries"]


def ratio(selector: str, *, unit: int, best: int, batch: int, slots: int) -> float:
  """ρ for a selector of `best` tiles of `unit` slots on this device; 0 where nothing was measured.

  Of the entries of that selector, unit and k, those of the nearest batch count, between the least
  and the largest that were measured; numbers and sizes of heads are taken to be those of the
  measured model.
  """
  device = devices.this_device().name
  wanted = {"selector": selector, "unit": unit, "best": best}
  mine = [e for e in measured(device) if all(e["bucket"][name] == x for name, x in wanted.items())]
  batches = [e["bucket"]["batch"] for e in mine]
  if not mine or not min(batches) <= batch <= max(batches):
    return 0.0
  near = min(batches, key=lambda b: (abs(b - batch), b))
  return largest([e for e in mine if e["bucket"]["batch"] == near], slots)


def largest(entries: Sequence[Entry], slots: int) -> float:
  """The largest measured ρ whose attention takes no longer than selection and whose steps gain 3 %
  over those that select first; where no attention is as short, the smallest ρ if it gains as much.

  0 if none does, and for lengths outside of those that were measured.
  """
  lengths = [e["bucket"]["slots"] for e in entries]
  if not min(lengths) <= slots <= max(lengths):
    return 0.0

  def at(of: Callable[[Entry], float]) -> float:
    return fitted(lengths, [float(of(e)) for e in entries], slots)

  ratios = sorted(float(name) for name in entries[0]["speculate_us"])

  def taken(name: str, rho: float) -> float:
    return at(lambda e: e[name][f"{rho:g}"])

  select, serial = at(lambda e: e["select_us"]), at(lambda e: e["serial_us"])
  hidden = [r for r in ratios if taken("speculate_us", r) <= select] or ratios[:1]
  return max((r for r in hidden if taken("prr_us", r) * LEAST_GAIN <= serial), default=0.0)


def fitted(lengths: Sequence[int], times: Sequence[float], length: int) -> float:
  """The time at a length: as measured, else on a parabola through the measurements' middle."""
  if length in lengths:
    return float(times[list(lengths).index(length)])
  x = np.asarray(lengths, float) / max(lengths)
  degree = min(2, len(lengths) - 1)
  return float(np.polyval(np.polyfit(x, times, degree), length / max(lengths)))
