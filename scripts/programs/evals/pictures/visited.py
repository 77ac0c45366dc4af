"""Pictures of what methods visited, by layer and step."""

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvjax.programs.evals.pictures.look import SMALL, name_axes, name_of, sheet
from kvjax.programs.evals.standing import FULL


def visits(traces: Sequence[Any]) -> Figure | None:
  """Reports of methods, by layer and step: the share of tokens visited first.

  Reports that are the same everywhere, within 5 %, are told below the panels: a bounded method
  visits its budget and nothing else.
  """
  panels, alike = [], []
  for trace in traces:
    for name, values in sorted(trace["reports"].items(), key=lambda item: item[0] != "visited"):
      grid = np.array([[np.nan if v is None else v for v in row] for row in values], float).T
      if trace["method"] == FULL or not np.isfinite(grid).any():
        continue
      title = f"{name_of(trace['method'], trace['budget'])}: {name}"
      low, high = np.nanmin(grid), np.nanmax(grid)
      if high - low <= 0.05 * abs(high):
        alike.append(f"{title} {np.nanmean(grid):.3g}")
      else:
        panels.append((title, grid))
  if not panels:
    return None
  figure, axes = sheet(len(panels), min(4, len(panels)), 3.0, 2.3)
  for (title, grid), axis in zip(panels, axes, strict=False):
    image = axis.imshow(grid, aspect="auto", origin="lower", vmin=0, cmap="viridis")
    axis.set_title(title, fontsize=SMALL)
    name_axes(axis, "step", "layer")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    bar = figure.colorbar(image, ax=axis, fraction=0.05, pad=0.02)
    bar.ax.tick_params(labelsize=6)
  length = traces[0]["length"]
  title = f"Reports by layer and step after {length:,} tokens; visited: share of the tokens seen"
  figure.suptitle(title, fontsize=10)
  if alike:
    listed = textwrap.fill("the same everywhere: " + "; ".join(alike), 150)
    figure.supxlabel(listed, fontsize=7)
  return figure
