"""The needle by length and depth."""

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from kvjax.programs.evals.pictures.look import SMALL, Rows, modes, sheet, thousands
from kvjax.programs.evals.standing import FULL, between
from kvjax.programs.evals.stats import estimate

_LETTERS = 13  # of a title, an inch


def needle_maps(rows: Rows) -> dict[str, Figure]:
  """By mode: score by length and depth, a panel per method, full first; always from 0 to 1.

  A panel's title names the budget that was asked for, and the share of all its needles that was
  found, with its 95 % interval.
  """
  rows = [row for row in rows if row["task"] == "needle"]
  return {mode: _needle_map([row for row in rows if row["mode"] == mode]) for mode in modes(rows)}


def _needle_map(rows: Rows) -> Figure:
  panels: dict[str, dict[Any, list[float]]] = {}
  in_tokens = _alike_in_tokens(rows)
  for row in sorted(rows, key=lambda row: row["method"] != FULL):
    where = round(row["about"]["depth"], 3), row["length"]
    name = f"{row['method']}\n{_budget_name(row, in_tokens)}".strip()
    panel = panels.setdefault(name, {})
    panel.setdefault(where, []).append(row["score"])
  depths = sorted({depth for panel in panels.values() for depth, _ in panel})
  lengths = sorted({length for panel in panels.values() for _, length in panel})
  columns = min(6, len(panels))
  width = 1.1 + 0.3 * len(lengths)
  figure, axes = sheet(len(panels), columns, width, 2.1)
  image, empty = None, False
  for at, ((name, panel), axis) in enumerate(zip(panels.items(), axes, strict=False)):
    grid = np.full((len(depths), len(lengths)), np.nan)
    for (depth, length), scores in panel.items():
      grid[depths.index(depth), lengths.index(length)] = np.mean(scores)
    image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    empty |= bool(np.isnan(grid).any())
    found = estimate([score for scores in panel.values() for score in scores])
    share = f"{found.mean:.0%} ({found.low:.0%} – {found.high:.0%})"
    if len(name.split("\n")[0]) > _LETTERS * width:
      name = name.replace(":", ":\n", 1)
    axis.set_title(f"{name}\n{share}", fontsize=SMALL)
    axis.set_xticks(range(len(lengths)), [thousands(x) for x in lengths], fontsize=7)
    ticks = (0, len(depths) // 2, len(depths) - 1) if at % columns == 0 else ()
    axis.set_yticks(ticks, [f"{depths[i]:.0%}" for i in ticks], fontsize=7)
    if at % columns == 0:
      axis.set_ylabel("depth", fontsize=SMALL)
  counts = [len(scores) for panel in panels.values() for scores in panel.values()]
  n = between(counts)
  mode = rows[0]["mode"]
  figure.suptitle(
    f"Needle found, by length in tokens and depth; {mode}, {n} per field\n"
    "above each panel: the budget, and the share found in all of it, with its 95 % interval"
    + "; white: not run"
    * empty,
    fontsize=10,
  )
  bar = figure.colorbar(image, ax=axes, aspect=30, fraction=0.03, pad=0.01)
  bar.set_label("share found", fontsize=SMALL)
  bar.ax.tick_params(labelsize=7)
  return figure


def _alike_in_tokens(rows: Rows) -> bool:
  """True if every length was run with the same budgets in tokens."""
  budgets: dict[int, set[int | None]] = {}
  for row in rows:
    budgets.setdefault(row["length"], set()).add(row["budget"])
  return len(set(map(frozenset, budgets.values()))) == 1


def _budget_name(row: dict[str, Any], in_tokens: bool) -> str:
  """A budget in tokens; or as a share of the length where it is a round one."""
  if row["budget"] is None:
    return ""
  if in_tokens:
    return f"budget {row['budget']:,}"
  for part in (2, 4, 8, 16, 32):
    if row["budget"] == math.floor(row["length"] / part):
      return f"budget 1/{part}"
  share = row["budget"] / row["length"]
  return f"budget {share:g} of it" if share == round(share, 2) else f"budget {row['budget']:,}"
