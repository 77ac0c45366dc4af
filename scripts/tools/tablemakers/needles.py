"""Needles in streams: of every method what was asked, what it answered, and what it retrieved."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.programs.evals import stats
from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.records import NOTHING, Figure, Number, Part, Record
from scripts.tools.tablemakers.results import GPU, Maker, Results

SHORT, LONG = ("cpu/needles", "CPU"), (f"{GPU}/needles", "NVIDIA H200")
REAL = ("nvidia-h100-80gb-hbm3/real/needles", "NVIDIA H100 80GB HBM3")
STREAM = (f"{GPU}/real/stream", "NVIDIA H200")
# Their retrieval heads were found on these very needles, and they do not say on which.
WITHDRAWN = "withdrawn"


def _run(folder: str, card: str) -> Maker:
  """A maker of one run's table; nothing while it is not there."""

  def made(results: Results) -> Part:
    path = results.folder / folder / FILE
    return _table(folder, card, json.loads(path.read_text("utf-8"))) if path.is_file() else Part()

  return made


FILE = "needles.json"
short, long, real, stream = (_run(*where) for where in (SHORT, LONG, REAL, STREAM))


def right(results: Results, where: tuple[str, str], name: str) -> Figure:
  """Right answers of all that a method gave in a run."""
  folder, card = where
  held = results.json(f"{folder}/{FILE}")
  found = held["answers"][name]
  record = _record(folder, card, held["about"], name, found)
  return _right(record, found, list(found))


def _right(record: Record, found: dict[str, Any], listed: Sequence[str]) -> Figure:
  hits = sum(found[i]["right"] for i in listed)
  low, high = (round(100 * x) for x in stats.wilson(hits, len(listed)))
  return Figure(f"{hits} of {len(listed)} ({low}–{high} %)", (record,))


def _table(folder: str, card: str, held: dict[str, Any]) -> Part:
  """Right answers of all that were asked, and of those that everybody answered."""
  about, answers = held["about"], {name: found for name, found in held["answers"].items() if found}
  kept = {name: found for name, found in answers.items() if not _withdrawn(name, about)}
  shared = set.intersection(*(set(found) for found in kept.values()))
  rows = []
  for name in about["methods"]:
    label = f"`{name.partition(',')[0]}`{''.join(name.partition(',')[1:])}"
    if name not in answers:
      why = "not run: longer than its context" if name == "full" else "not run"
      rows.append([label, why, "–", "–", "–", "–"])
    elif name not in kept:
      rows.append([label, WITHDRAWN, "–", "–", "–", "–"])
    else:
      record = _record(folder, card, about, name, answers[name])
      rows.append([label, *_cells(record, about, name, answers[name], shared)])
  head = ("method", "right of answered", "right where all answered", "recall", "by chance")
  return cells.table((*head, "best layer"), rows)


def _withdrawn(name: str, about: dict[str, Any]) -> bool:
  return name.startswith("ltri") and "all heads" not in name and not about.get("fitted")


def _record(
  folder: str, card: str, about: dict[str, Any], name: str, found: dict[str, Any]
) -> Record:
  setting = f"{about['methods'][name]}, {about['length']} tokens"
  fitted = "; ".join(about.get("fitted", ())) or NOTHING
  place = ("answers", name)
  samples = frozenset(found)
  return Record(f"{folder}/{FILE}", place, card, len(found), setting, fitted, samples)


def _cells(
  record: Record, about: dict[str, Any], name: str, found: dict[str, Any], shared: set[str]
) -> list[str]:
  row = [_right(record, found, listed) for listed in (list(found), sorted(shared))]
  if not next(iter(found.values()))["recall"]:
    return [*row, "–", "–", "–"]
  by_layer = _recall(list(found.values()))
  drawn = "–" if "inject" in name else cells.number(Number(_chance(about), record), "{:.3f}")
  best = Figure(f"{by_layer.max():.2f} ({by_layer.argmax()})", (record,))
  return [*row, cells.number(Number(by_layer.mean(), record), "{:.3f}"), drawn, best]


def _recall(answers: list[dict[str, Any]]) -> np.ndarray:
  """By layer: mean over answers that have a step, then over steps."""
  steps = max(len(found["recall"]) for found in answers)
  rows = [[a["recall"][i] for a in answers if len(a["recall"]) > i] for i in range(steps)]
  return np.mean([np.mean(row, 0) for row in rows], 0)


def _chance(about: dict[str, Any]) -> float:
  """Recall of as many blocks drawn from all that leave the window before the answer."""
  gone = (about["length"] - 16 - about["init"] - about["window"]) // about["block"]
  return min(1.0, about["retrieved"] / max(gone, 1))
