"""Divergence from the full cache by position."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..standing import FULL
from .look import SMALL, Rows, Styles, between, legend, name_axes, sheet


def divergence(rows: Rows, styles: Styles) -> Figure | None:
  """KL to the full cache and perplexity by position, a row of panels per length and budget.

  Means over rows of results, smoothed over 16 tokens; the full cache is in every panel.
  """
  curves: dict[Any, dict[str, list[Any]]] = {}
  for row in rows:
    if "positions" in row:
      place = row["length"], row["budget"]
      curves.setdefault(place, {}).setdefault(row["method"], []).append(row["positions"])
  full = {length: listed for (length, budget), listed in curves.items() if budget is None}
  places = sorted(place for place in curves if place[1] is not None)
  if not places:
    return None
  figure, axes = sheet(2 * len(places), 2, 4.6, 2.5)
  for i, (length, budget) in enumerate(places):
    shown = {**full.get(length, {}), **curves[length, budget]}
    for method, listed in shown.items():
      kl, nll = (_smooth(np.mean([x[name] for x in listed], 0)) for name in ("kl", "nll"))
      style = {**styles.line(method), "marker": "", "label": method}
      x = length - len(kl) + np.arange(len(kl))
      if method != FULL:
        axes[2 * i].plot(x, np.maximum(kl, 1e-6), **style)
      axes[2 * i + 1].plot(x, np.exp(nll), **style)
    n = between(map(len, shown.values()))
    where = f"{length:,} tokens, budget {budget:,}, {n}"
    axes[2 * i].set_yscale("log")
    axes[2 * i].set_title(f"KL(full ‖ method), nats: {where}", fontsize=SMALL)
    axes[2 * i + 1].set_title(f"perplexity: {where}", fontsize=SMALL)
    for axis in axes[2 * i : 2 * i + 2]:
      name_axes(axis, "position", "")
      axis.tick_params(which="minor", labelsize=7)
  legend(figure, axes)
  figure.suptitle("Divergence from the full cache on given text", fontsize=10)
  return figure


def _smooth(values: np.ndarray, width: int = 16) -> np.ndarray:
  """Means over `width` neighbours, fewer at the ends."""
  ones = np.ones(min(width, len(values)))
  total = np.convolve(values, ones, "same")
  return total / np.convolve(np.ones(len(values)), ones, "same")
