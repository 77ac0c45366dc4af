"""Parts that all pictures share: looks of methods, grids of panels, legends, words."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from kvjax.programs.evals.standing import FULL, aware_first

Rows = Sequence[dict[str, Any]]

RANDOM = "random"
_COLOURS = [colormaps["tab10"](i) for i in (0, 1, 2, 3, 4, 5, 6, 8, 9)]
_LINES = ("-", "--", ":")  # after as many methods as there are colours the next one
_MARKERS = "osD^vP*X<>hd"
SMALL = 8
_SAME = 0.002  # of an axis's span: what is drawn side by side
_STEP, _MOST = 0.016, 0.1  # how far apart two are, and all of them, at most


def name_of(method: str, budget: int | None) -> str:
  """Name of a method in a picture."""
  return method if budget is None else f"{method} {budget:,}"


class Styles:
  """One colour, line and marker per method in all pictures; full black, random grey."""

  def __init__(self, methods: Iterable[str]):
    others = [m for m in dict.fromkeys(methods) if m not in (FULL, RANDOM)]
    lines = itertools.cycle(itertools.product(_LINES, _COLOURS))
    looks = zip(lines, itertools.cycle(_MARKERS), strict=False)
    self._made = dict(zip(others, looks, strict=False))

  def line(self, method: str) -> dict[str, Any]:
    if method == FULL:
      return {"color": "black", "marker": "", "linestyle": "-", "linewidth": 1.5}
    if method == RANDOM:
      return {"color": "0.5", "marker": "x", "linestyle": "-.", "linewidth": 1.5}
    (line, colour), marker = self._made[method]
    look = {"color": colour, "linestyle": line, "marker": marker}
    return {**look, "markersize": 5, "linewidth": 1.2}


def modes(rows: Rows) -> list[str]:
  """Those of the rows, "aware" first."""
  return sorted({row["mode"] for row in rows}, key=aware_first)


def sheet(panels: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
  rows = -(-panels // columns)
  size = max(5.0, width * columns + 1.2), height * rows + 0.5
  figure = Figure(figsize=size, layout="constrained")
  axes = list(np.atleast_1d(figure.subplots(rows, columns)).flat)
  for axis in axes[panels:]:
    axis.set_visible(False)
  return figure, axes


def apart(places: Sequence[float], log: bool) -> list[float]:
  """Places on an axis as they are drawn: those that are all but the same lie side by side."""
  on_axis = np.log(places) if log else np.asarray(places, float)
  span = np.ptp(on_axis) or 1.0
  order = np.argsort(on_axis, kind="stable")
  groups = np.split(order, 1 + np.flatnonzero(np.diff(on_axis[order]) > _SAME * span))
  drawn = on_axis.copy()
  for group in groups:
    middle = on_axis[group].mean()
    if np.ptp(on_axis[group]) <= 2 * _SAME * span and len(group) > 1:
      step = min(_STEP, _MOST / len(group)) * span
      drawn[group] = middle + step * (np.arange(len(group)) - (len(group) - 1) / 2)
  return list(np.exp(drawn) if log else drawn)


def name_axes(axis: Axes, x: str, y: str) -> None:
  axis.set_xlabel(x, fontsize=SMALL)
  axis.set_ylabel(y, fontsize=SMALL)
  axis.tick_params(labelsize=SMALL)
  axis.spines[["top", "right"]].set_visible(False)


def logarithmic(axis: Axes, *multiples: float) -> None:
  """A logarithmic horizontal axis with plain numbers at these multiples of powers of ten."""
  axis.set_xscale("log")
  axis.xaxis.set_major_locator(LogLocator(subs=multiples))
  axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
  axis.xaxis.set_minor_formatter(NullFormatter())


def legend(figure: Figure, axes: Iterable[Axes]) -> None:
  """One legend for all panels, to their right; the figure grows by its width."""
  handles: dict[str, Any] = {}
  for axis in axes:
    for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
      handles.setdefault(label, handle)
  look = {"loc": "outside right center", "fontsize": 7, "frameon": False, "handlelength": 3}
  shown = figure.legend(handles.values(), handles.keys(), ncols=1 + len(handles) // 20, **look)
  width, height = figure.get_size_inches()
  figure.set_size_inches(width + shown.get_window_extent().width / figure.dpi, height)


def thousands(tokens: float) -> str:
  return f"{tokens / 1024:g}K" if tokens % 1024 == 0 else f"{tokens:g}"
