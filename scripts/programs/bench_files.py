"""Files of `kvjax.programs.bench`, read by programs that run nothing."""

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
    ValueError: it is something else.
  """
  held = files.read_json(path, "results of bench")
  if "cases" not in held:
    raise ValueError(f"{path}: found no cases, expected results of bench")
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
