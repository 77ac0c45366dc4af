"""Files of `kvjax.programs.bench`, read by programs that run nothing."""

import math
import pathlib
from typing import Any

from kvjax.models.io import files

SPREAD = 0.05  # of a median: what has wider quartiles is timed again, and not divided by


def steady(low: float, median: float, high: float) -> bool:
  """True if others may be divided by a time with these quartiles."""
  return high - low <= SPREAD * median


def read(path: pathlib.Path) -> dict[str, Any]:
  """Content of a bench_*.json.

  Raises:
    FileNotFoundError: there is none.
    ValueError: it is something else, or has a time that none can be.
  """
  held = files.read_json(path, "results of bench")
  if not isinstance(held.get("cases"), list) or not isinstance(held.get("device"), str):
    raise ValueError(f"{path}: found no cases or no device, expected results of bench")
  with files.whole(path, "results of bench"):
    for case in held["cases"]:
      for row in case["results"]:
        named = {"case": case["case"], "shapes": case.get("shapes", ""), "name": row["name"]}
        if wrong := {key: value for key, value in named.items() if not isinstance(value, str)}:
          raise ValueError(f"{wrong}, expected texts")
        times = [row.get("us", 1), *row.get("us_all", ())]
        if not all(0 < us < math.inf for us in times):
          raise ValueError(f"times {times} of {named['case']}, {named['name']}, expected positive")
  return held


def inside(folder: pathlib.Path) -> list[pathlib.Path]:
  """Its bench_*.json, and those of its folders, one for each device.

  Raises:
    FileNotFoundError: there are none.
  """
  found = sorted([*folder.glob("bench_*.json"), *folder.glob("*/bench_*.json")])
  if not found:
    raise FileNotFoundError(f"{folder}: found no bench_*.json, expected results of bench")
  return found
