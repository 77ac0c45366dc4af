"""Divergence from the full cache: by position, and its mean."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvjax.programs.evals.pictures import look
from kvjax.programs.evals.standing import FULL, between
from kvjax.programs.evals.stats import estimate

WIDTH = 16  # tokens over which curves are smoothed
_LEAST = 1e-6  # what a logarithmic axis shows of zero, in nats


def divergence(rows: look.Rows, styles: look.Styles) -> Figure | None:
  """KL to the full cache by position and its mean, two panels per length and budget.

  Curves are means over rows, smoothed; bars are 95 % intervals of the mean of all positions.
  """
  curves: dict[Any, dict[str, list[Any]]] = {}
  for row in rows:
    if "positions" in row and row["method"] != FULL:
      place = row["length"], row["budget"]
      curves.setdefault(place, {}).setdefault(row["method"], []).append(row["positions"]["kl"])
  free = {length: listed for (length, budget), listed in curves.items() if budget is None}
  places = sorted(place for place in curves if place[1] is not None)
  if not places:
    return None
  most = max(len({**free.get(length, {}), **curves[length, budget]}) for length, budget in places)
  figure, axes = look.sheet(2 * len(places), 2, 4.6, max(2.5, 0.6 + 0.12 * most))
  for i, (length, budget) in enumerate(places):
    shown = {**free.get(length, {}), **curves[length, budget]}
    by_position, means = axes[2 * i : 2 * i + 2]
    for method, listed in shown.items():
      kl = np.maximum(_smooth(np.mean(listed, 0)), _LEAST)
      x = length - len(kl) + np.arange(len(kl))
      by_position.plot(x, kl, **{**styles.line(method), "marker": "", "label": method})
    _means(means, shown, styles)
    where = f"{length:,} tokens, budget {budget:,}, {between(map(len, shown.values()))}"
    by_position.set_title(where, fontsize=look.SMALL)
    by_position.set_yscale("log")
    look.name_axes(by_position, "position in tokens", "KL(full ‖ method), nats; logarithmic")
    look.name_axes(means, "mean KL, nats; logarithmic", "")
    means.tick_params(axis="y", labelsize=6)
    for axis in (by_position, means):
      axis.tick_params(which="minor", labelsize=7)
  look.legend(figure, axes)
  figure.suptitle(
    f"Divergence from the full cache on given text\nleft: means of rows, smoothed over {WIDTH} "
    "tokens; right: means of all positions with 95 % intervals",
    fontsize=10,
  )
  return figure


def _means(axis: Axes, shown: dict[str, list[Any]], styles: look.Styles) -> None:
  """A dot with its interval for each method, the least divergence on top."""
  found = {
    name: estimate([np.mean(kl) for kl in each], shares=False) for name, each in shown.items()
  }
  ranked = sorted(found, key=lambda name: -found[name].mean)
  for y, name in enumerate(ranked):
    mean, low, high = (
      max(x, _LEAST) for x in (found[name].mean, found[name].low, found[name].high)
    )
    colour = styles.line(name)["color"]
    axis.errorbar(mean, y, xerr=[[mean - low], [high - mean]], fmt="o", color=colour, markersize=3)
  look.logarithmic(axis, 1, 3)
  axis.set_yticks(range(len(ranked)), ranked)


def _smooth(values: np.ndarray) -> np.ndarray:
  """Means over `WIDTH` neighbours, fewer at the ends."""
  ones = np.ones(min(WIDTH, len(values)))
  total = np.convolve(values, ones, "same")
  return total / np.convolve(np.ones(len(values)), ones, "same")
