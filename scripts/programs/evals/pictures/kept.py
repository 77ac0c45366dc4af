"""Score against the bytes that are really kept."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from kvjax.programs.evals.pictures import look
from kvjax.programs.evals.standing import FULL, aware_first, between
from kvjax.programs.evals.stats import Estimate, mean_of
from kvjax.programs.evals.summary import Summary


def score_by_bytes(summaries: Sequence[Summary], styles: look.Styles) -> Figure | None:
  """Mean score, with its 95 % interval, against a row's bytes, by mode, length and tasks.

  A panel has the tasks that the same methods have done; means over other tasks are other numbers.
  """
  chosen = [s for s in summaries if s.answered]
  done: dict[tuple[str, int, str], set[Any]] = {}
  for s in chosen:
    if s.method != FULL:
      done.setdefault((s.mode, s.length, s.task), set()).add((s.method, s.budget))
  panels: dict[Any, list[str]] = {}
  for (mode, length, task), methods in done.items():
    panels.setdefault((aware_first(mode), length, frozenset(methods)), []).append(task)
  if not panels:
    return None
  keys = sorted(panels, key=lambda key: (key[:2], -len(key[2])))
  figure, axes = look.sheet(len(keys), min(4, len(keys)), 3.8, 3.1)
  for ((_, mode), length, methods), axis in zip(keys, axes, strict=False):
    tasks = set(panels[aware_first(mode), length, methods])
    here = [s for s in chosen if (s.mode, s.length) == (mode, length) and s.task in tasks]
    points: dict[str, list[tuple[float, Estimate]]] = {}
    for method, budget in dict.fromkeys((s.method, s.budget) for s in here):
      mine = [s for s in here if (s.method, s.budget) == (method, budget)]
      if {s.task for s in mine} == tasks:
        size = np.mean([s.cache_bytes for s in mine]) / 1e6
        points.setdefault(method, []).append((size, mean_of([s.score for s in mine])))
    sizes = iter(look.apart([size for listed in points.values() for size, _ in listed], log=True))
    for method, listed in points.items():
      drawn = [(next(sizes), score) for _, score in listed]
      x, scores = zip(*sorted(drawn, key=lambda point: point[0]), strict=True)
      y = [score.mean for score in scores]
      style = styles.line(method)
      if method == FULL:
        axis.axhline(y[0], **{**style, "linewidth": 1})
        axis.plot(x, y, "o", color="black", label=method)
      else:
        axis.plot(x, y, **style, label=method)
        ends = [score.low for score in scores], [score.high for score in scores]
        axis.vlines(x, *ends, color=style["color"], linewidth=0.8, alpha=0.6)
    look.logarithmic(axis, 1, 2, 5)
    axis.set_ylim(-0.03, 1.03)
    n = between(s.score.n for s in here)
    many = f"{len(tasks)} tasks, {n} each" if len(tasks) > 1 else f"{tasks.pop()}, {n}"
    axis.set_title(f"{length:,} tokens, {mode}\n{many}", fontsize=look.SMALL)
    look.name_axes(axis, "MB of cache a row; logarithmic", "mean score, 95 % interval")
  look.legend(figure, axes)
  title = (
    "Score against the bytes that are really kept\npoints of the same bytes stand side by side"
  )
  figure.suptitle(title, fontsize=10)
  return figure
