"""How much to speculate on a device, from what was measured there (PRR, §4.4).

`tuned/<device>/prr.json` holds, per selector and length, how long it takes to select, and for
several ρ how long attention over ρ·k tiles takes and how long whole steps do, with speculation and
without (written by `scripts/tune.py prr`). Lengths between the measured ones are fitted.
"""

import functools
import importlib.resources
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from . import config

Entry = dict[str, Any]


@functools.cache
def measured(device: str) -> tuple[Entry, ...]:
  """The entries of a device's file; none if there is none."""
  path = importlib.resources.files(__package__) / "tuned" / device / "prr.json"
  return tuple(json.loads(path.read_text())["entries"]) if path.is_file() else ()


def ratio(selector: str, *, unit: int, best: int, batch: int, slots: int) -> float | None:
  """ρ for a selector of `best` tiles of `unit` slots on this device; None: nothing was measured.

  Of the entries of that selector, unit and k, those of the nearest batch count; numbers and sizes
  of heads are taken to be those of the measured model.
  """
  device = config.device(jax.devices()[0].device_kind).name
  wanted = {"selector": selector, "unit": unit, "best": best}
  mine = [e for e in measured(device) if all(e["bucket"][name] == x for name, x in wanted.items())]
  if not mine:
    return None
  near = min((e["bucket"]["batch"] for e in mine), key=lambda b: (abs(b - batch), b))
  return largest([e for e in mine if e["bucket"]["batch"] == near], slots)


def largest(entries: Sequence[Entry], slots: int) -> float:
  """The largest measured ρ whose attention takes no longer than selection and whose steps take less
  time than those that select first; where no attention is as short, the smallest ρ if it pays.

  0 if none pays. What is longer or shorter than all that was measured counts as the nearest length.
  """
  lengths = [e["bucket"]["slots"] for e in entries]
  near = min(max(slots, min(lengths)), max(lengths))

  def at(of: Callable[[Entry], float]) -> float:
    return fitted(lengths, [float(of(e)) for e in entries], near)

  ratios = sorted(float(name) for name in entries[0]["speculate_us"])

  def taken(name: str, rho: float) -> float:
    return at(lambda e: e[name][f"{rho:g}"])

  select, serial = at(lambda e: e["select_us"]), at(lambda e: e["serial_us"])
  hidden = [r for r in ratios if taken("speculate_us", r) <= select] or ratios[:1]
  return max((r for r in hidden if taken("prr_us", r) < serial), default=0.0)


def fitted(lengths: Sequence[int], times: Sequence[float], length: int) -> float:
  """The time at a length: as measured, else on a parabola through the measurements' middle."""
  if length in lengths:
    return float(times[list(lengths).index(length)])
  x = np.asarray(lengths, float) / max(lengths)
  degree = min(2, len(lengths) - 1)
  return float(np.polyval(np.polyfit(x, times, degree), length / max(lengths)))
