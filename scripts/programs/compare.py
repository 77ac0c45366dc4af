"""Two runs of benchmarks beside each other, as `kvjax.programs.bench --compare` prints them."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.kernels.common import devices
from kvjax.programs import bench_files, console

LEAST = 0.01  # a median that moves by less is the same, whatever its interval
_RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Change:
  """A contender of a case in both runs.

  Attributes:
    suite, case, contender: whose times.
    old, new: median microseconds.
    ratio: new over old.
    interval: 95 % of the ratio by the bootstrap; None where either side has no two times that
      differ, which says nothing of their spread.
  """

  suite: str
  case: str
  contender: str
  old: float
  new: float
  ratio: float
  interval: tuple[float, float] | None

  @property
  def slower(self) -> bool:
    return self.interval is not None and self.interval[0] > 1 and self.ratio > 1 + LEAST

  @property
  def faster(self) -> bool:
    return self.interval is not None and self.interval[1] < 1 and self.ratio < 1 - LEAST

  def row(self) -> list[str]:
    times = [f"{us:.1f}" for us in (self.old, self.new)]
    between = "–" if self.interval is None else "{:.3f} – {:.3f}".format(*self.interval)
    return [self.suite, self.case, self.contender, *times, f"{self.ratio:.3f}", between]


@dataclasses.dataclass(frozen=True)
class Compared:
  """Comparison of two runs, with what only one has: lines for the reader."""

  changes: list[Change]
  differences: list[str]

  def text(self) -> str:
    """The differences, the table of all, and the lists of what became slower and faster."""
    head = ("suite", "case", "contender", "old µs", "new µs", "new / old", "95 % interval")
    parts = ["\n".join(self.differences)] if self.differences else []
    parts.append(console.table(head, [change.row() for change in self.changes], left=(0, 1, 2)))
    parts += [self._listed("slower", "above"), self._listed("faster", "below")]
    return "\n\n".join(parts)

  def _listed(self, which: str, side: str) -> str:
    found = [change for change in self.changes if getattr(change, which)]
    lines = [f"{which} by more than {LEAST:.0%}, the interval {side} 1: {len(found)}"]
    for change in sorted(found, key=lambda change: change.ratio, reverse=which == "slower"):
      lines.append(
        f"  {change.ratio:.3f} [{'{:.3f}, {:.3f}'.format(*change.interval or ())}]  "
        f"{change.suite}, {change.case}: {change.contender}"
      )
    return "\n".join(lines)


def compare(old: pathlib.Path, new: pathlib.Path) -> Compared:
  """Every case and contender that both have; two folders of results, or two bench_*.json.

  Raises:
    FileNotFoundError: one is not there, or has no results.
    ValueError: one is a folder and one a file, has results of several devices, or they have
      nothing in common, or are of unlike cards.
  """
  sides = _paths(old, new)
  changes, differences = [], _alone(*sides, "suite {}")
  for suite in (suite for suite in sides[0] if suite in sides[1]):
    files = [side[suite] for side in sides]
    before, after = (bench_files.read(path) for path in files)
    _check_alike(*files, before, after)
    ours, theirs = _times(files[0], before), _times(files[1], after)
    alone = _alone(ours, theirs, "{0[0]}, {0[1]}")
    differences += [f"{suite}: {line}" for line in [*_facts(before, after), *alone]]
    changes += [
      change((suite, *named), ours[named], theirs[named]) for named in ours if named in theirs
    ]
  if not changes:
    raise ValueError(f"{old} and {new}: found no case and contender that both have")
  return Compared(changes, differences)


def _check_alike(
  old: pathlib.Path, new: pathlib.Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
  """Raises where the files are of cards whose times say nothing of each other."""
  cards = [held.get("device", "") for held in (before, after)]
  if cards[0] != cards[1] and not devices.alike(*map(devices.device, cards)):
    raise ValueError(
      f"{old} and {new}: found {cards[0]} and {cards[1]}, expected equal kinds of cards"
    )


def _alone(old: dict[Any, Any], new: dict[Any, Any], form: str) -> list[str]:
  """Entries of one side alone."""
  return [
    f"only in the {side}: {form.format(key)}"
    for side, one, other in (("old", old, new), ("new", new, old))
    for key in one
    if key not in other
  ]


def change(named: tuple[str, str, str], old: Sequence[float], new: Sequence[float]) -> Change:
  """The medians' ratio with its interval, from all repetitions."""
  before, after = float(np.median(old)), float(np.median(new))
  return Change(*named, before, after, after / before, interval(old, new))


def interval(old: Sequence[float], new: Sequence[float]) -> tuple[float, float] | None:
  """95 % of the ratio new / old of medians: 2,000 resamples of either side, from a fixed seed."""
  if len(set(old)) < 2 or len(set(new)) < 2:
    return None
  rng = np.random.default_rng(0)
  drawn = (rng.choice(times, (_RESAMPLES, len(times))) for times in (old, new))
  before, after = (np.median(each, -1) for each in drawn)
  low, high = np.quantile(after / before, (0.025, 0.975))
  return float(low), float(high)


def _paths(old: pathlib.Path, new: pathlib.Path) -> list[dict[str, pathlib.Path]]:
  """The files of either side, by the names of their suites."""
  for path in (old, new):
    if not path.exists():
      raise FileNotFoundError(f"{path}: found nothing there, expected results of bench")
  if old.is_dir() != new.is_dir():
    raise ValueError(f"{old} and {new}: found a folder and a file, expected two of a kind")
  if not old.is_dir():
    return [{_suite(old): path} for path in (old, new)]
  sides = [_suites(old), _suites(new)]
  if not sides[0].keys() & sides[1].keys():
    raise ValueError(
      f"{old} and {new}: found no suite in both, but {list(sides[0])} and {list(sides[1])}"
    )
  return sides


def _suites(folder: pathlib.Path) -> dict[str, pathlib.Path]:
  found: dict[str, pathlib.Path] = {}
  for path in bench_files.inside(folder):
    if (name := _suite(path)) in found:
      raise ValueError(
        f"{folder}: found {found[name]} and {path}, expected the results of one device"
      )
    found[name] = path
  return found


def _suite(path: pathlib.Path) -> str:
  return path.stem.removeprefix("bench_")


def _facts(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
  """Device and versions that differ, and cases whose shapes do."""
  names = [key for key in {**old, **new} if key not in ("cases", "command")]
  lines = [
    f"{key} {old.get(key, 'none')}, then {new.get(key, 'none')}"
    for key in names
    if old.get(key) != new.get(key)
  ]
  shapes = [{case["case"]: case.get("shapes", "") for case in held["cases"]} for held in (old, new)]
  for case, before in shapes[0].items():
    if (after := shapes[1].get(case, before)) != before:
      lines.append(f"{case} is of other shapes: {before}, then {after}")
  return lines


def _times(path: pathlib.Path, held: dict[str, Any]) -> dict[tuple[str, str], list[float]]:
  """Microseconds of all repetitions, by case and contender; who was wrong has none."""
  times = {}
  for case in held["cases"]:
    for row in case["results"]:
      if "us" not in row:
        continue
      if not row.get("us_all"):
        raise ValueError(
          f"{path}, {case['case']}: found no repetitions (us_all) of {row['name']!r}"
        )
      times[case["case"], row["name"]] = row["us_all"]
  return times
