"""Files of `kvjax.programs.bench`, read by programs that run nothing."""

import json
import pathlib
from typing import Any

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
  try:
    held = json.loads(path.read_text("utf-8"))
  except FileNotFoundError:
    raise FileNotFoundError(f"{path}: found no such file, expected results of bench") from None
  except json.JSONDecodeError as error:
    raise ValueError(f"{path}: found no JSON ({error}), expected results of bench") from None
  if not isinstance(held, dict) or "cases" not in held:
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
