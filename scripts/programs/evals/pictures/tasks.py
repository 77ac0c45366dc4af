"""A table of tasks, coloured by the score relative to the full cache."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvjax.programs.evals.pictures.look import SMALL, name_of
from kvjax.programs.evals.standing import FULL, aware_first, between
from kvjax.programs.evals.stats import Estimate, mean_of
from kvjax.programs.evals.summary import Summary


def task_tables(summaries: Sequence[Summary], tasks: Sequence[str]) -> dict[str, Figure]:
  """By mode and length: every method's score on every task, and below it its interval.

  Fields are coloured by the score relative to the full cache's; the mean over the tasks that all
  methods have done stands at the end.
  """
  chosen = [s for s in summaries if s.task in tasks]
  keys = sorted({(s.mode, s.length) for s in chosen}, key=lambda k: (aware_first(k[0]), k[1]))
  return {
    f"{mode}_{length}": _task_table(
      [s for s in chosen if (s.mode, s.length) == (mode, length)], tasks
    )
    for mode, length in keys
  }


def _task_table(summaries: Sequence[Summary], tasks: Sequence[str]) -> Figure:
  found = {(s.method, s.budget, s.task): s for s in summaries}
  named = sorted(dict.fromkeys((s.method, s.budget) for s in summaries), key=lambda m: m[0] != FULL)
  columns = [task for task in tasks if any(s.task == task for s in summaries)]
  shared = [task for task in columns if all((*who, task) in found for who in named)]
  size = 2.4 + 0.72 * (len(columns) + 1), 1.1 + 0.34 * len(named)
  figure = Figure(figsize=size, layout="constrained")
  axis = figure.subplots()
  grid = np.full((len(named), len(columns) + 1), np.nan)
  for i, (method, budget) in enumerate(named):
    mine = [found.get((method, budget, task)) for task in columns]
    for j, s in enumerate(mine):
      if s is None:
        axis.text(j, i, "not run", ha="center", va="center", fontsize=6, color="0.6")
      else:
        grid[i, j] = np.nan if s.relative is None else s.relative
        _field(axis, j, i, s.score, grid[i, j])
    scores = [(found[method, budget, t], found.get((FULL, None, t))) for t in shared]
    if shared and all(full for _, full in scores):
      mean = mean_of([s.score for s, _ in scores])
      whole = np.mean([full.score.mean for _, full in scores if full])
      grid[i, -1] = mean.mean / whole if whole else np.nan
      _field(axis, len(columns), i, mean, grid[i, -1])
  image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
  names = [name_of(method, budget) for method, budget in named]
  axis.set_yticks(range(len(named)), names, fontsize=SMALL)
  axis.xaxis.tick_top()
  labels = [task.replace("niah_", "").replace("_", "\n", 1) for task in columns]
  axis.set_xticks(range(len(columns) + 1), [*labels, f"mean\nof {len(shared)}"], fontsize=7)
  axis.axvline(len(columns) - 0.5, color="white", linewidth=3)
  axis.tick_params(length=0)
  first = summaries[0]
  n = between(s.score.n for s in summaries)
  figure.suptitle(
    f"{first.length:,} tokens, {first.mode}\npercent, 95 % interval, {n}", fontsize=10
  )
  bar = figure.colorbar(image, ax=axis, fraction=0.03, pad=0.01)
  bar.set_label("relative to the full cache", fontsize=SMALL)
  bar.ax.tick_params(labelsize=7)
  return figure


def _field(axis: Axes, x: int, y: int, score: Estimate, shade: float) -> None:
  text = "{}\n{}–{}".format(*(round(100 * v) for v in (score.mean, score.low, score.high)))
  colour = "black" if np.isnan(shade) or shade > 0.6 else "white"
  axis.text(x, y, text, ha="center", va="center", fontsize=6, color=colour, linespacing=0.95)
