"""Speed and memory against context length."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from kvjax.programs.evals.pictures.look import SMALL, Styles, legend, name_axes, sheet, thousands
from kvjax.programs.evals.summary import Summary


def speed(summaries: Sequence[Summary], benches: Sequence[Any], styles: Styles) -> Figure | None:
  """Time of a decode step, tokens per second and memory against context length, by batch.

  Medians; a batch that was timed at one length only is left out.
  """
  lines: dict[tuple[str, str], list[tuple[int, float, float, float]]] = {}
  for s in _one_per_length(s for s in summaries if s.mode == "aware"):
    if s.step_seconds:
      where = f"evaluate, batch {s.batch}"
      memory = (s.cache_bytes * s.batch) / 1e9
      point = s.length, s.step_seconds * 1e3, s.batch / s.step_seconds, memory
      lines.setdefault((s.method, where), []).append(point)
  for case in (case for bench in benches for case in bench["cases"]):
    named = re.fullmatch(r"(.+) B(\d+) T(\d+)", case["case"])
    for result in case["results"]:
      if named and "us" in result and result["name"] not in ("products", "read"):
        batch, milliseconds = int(named[2]), result["us"] / 1e3
        peak = result.get("peak_bytes", math.nan) / 1e9
        point = int(named[3]), milliseconds, batch / milliseconds * 1e3, peak
        where = f"{named[1]}, batch {batch}"
        lines.setdefault((result["name"], where), []).append(point)
  lengths: dict[str, set[int]] = {}
  for (_, where), points in lines.items():
    lengths.setdefault(where, set()).update(point[0] for point in points)
  places = sorted(where for where, timed in lengths.items() if len(timed) > 1)
  if not places:
    return None
  beside = _side_by_side(lines)
  figure, axes = sheet(3 * len(places), 3, 3.6, 2.7)
  titles = "ms per decode step", "tokens per second", "GB of caches or peak memory"
  for (method, where), points in lines.items():
    if where not in places:
      continue
    x, *values = zip(*sorted(points), strict=True)
    if where.startswith("evaluate"):
      style = styles.line(method)
    else:  # of bench: this library, or a peer
      style = {"color": "black" if method == "kvjax" else "0.6", "marker": "s", "markersize": 4}
    drawn = [n * beside[method, where] for n in x]
    for column, y in enumerate(values):
      if not np.isnan(y).all():
        axis = axes[3 * places.index(where) + column]
        axis.plot(drawn, y, **{**style, "marker": style["marker"] or "."}, label=method)
  for i, axis in enumerate(axes[: 3 * len(places)]):
    axis.set_xscale("log", base=2)
    if axis.lines:
      ticks = sorted(lengths[places[i // 3]])
      axis.set_xticks(ticks, [thousands(x) for x in ticks], fontsize=SMALL)
      axis.set_ylim(bottom=0)
    else:
      axis.set_visible(False)
    axis.set_title(f"{titles[i % 3]}\n{places[i // 3]}", fontsize=SMALL)
    name_axes(axis, "context in tokens; logarithmic", "")
  legend(figure, axes)
  title = (
    "Speed and memory against context length: medians; points of one length stand side by side"
  )
  figure.suptitle(title, fontsize=10)
  return figure


def _side_by_side(named: Iterable[tuple[str, str]]) -> dict[tuple[str, str], float]:
  """For each (method, place) the factor on its lengths: within 6 % for all methods of a place."""
  together: dict[str, list[str]] = {}
  for method, where in named:
    together.setdefault(where, []).append(method)
  return {
    (method, where): 2 ** (0.16 * ((i + 0.5) / len(methods) - 0.5))
    for where, methods in together.items()
    for i, method in enumerate(methods)
  }


def _one_per_length(summaries: Iterable[Summary]) -> list[Summary]:
  """Of every method the smallest budget, and of every length its first task."""
  found: dict[tuple[str, int], Summary] = {}
  for s in summaries:
    other = found.setdefault((s.method, s.length), s)
    if (s.budget or 0) < (other.budget or 0):
      found[s.method, s.length] = s
  return list(found.values())
