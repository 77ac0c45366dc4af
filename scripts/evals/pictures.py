"""The pictures of a report, each from rows of results; None where the rows have nothing to show."""

import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from .summary import Summary

Rows = Sequence[dict[str, Any]]

FULL, RANDOM = "full", "random"
_COLOURS = [colormaps["tab10"](i) for i in (0, 1, 2, 3, 4, 5, 6, 8, 9)]
_LINES = ("-", "--", ":")  # after as many methods as there are colours the next one
_MARKERS = "osD^vP*X<>hd"
_SMALL = 8


def name_of(method: str, budget: int | None) -> str:
  """How a method is called in a picture."""
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


# ---- 1: the needle


def needle_maps(rows: Rows) -> dict[str, Figure]:
  """By mode: score by length and depth, a panel per method, full first; always from 0 to 1."""
  rows = [row for row in rows if row["task"] == "needle"]
  return {mode: _needle_map([row for row in rows if row["mode"] == mode]) for mode in _modes(rows)}


def _needle_map(rows: Rows) -> Figure:
  panels: dict[str, dict[Any, list[float]]] = {}
  for row in sorted(rows, key=lambda row: row["method"] != FULL):
    where = round(row["about"]["depth"], 3), row["length"]
    panel = panels.setdefault(f"{row['method']}\n{_budget_name(row)}".strip(), {})
    panel.setdefault(where, []).append(row["score"])
  depths = sorted({depth for panel in panels.values() for depth, _ in panel})
  lengths = sorted({length for panel in panels.values() for _, length in panel})
  columns = min(6, len(panels))
  figure, axes = _grid(len(panels), columns, 0.9 + 0.3 * len(lengths), 2.0)
  image = None
  for at, ((name, panel), axis) in enumerate(zip(panels.items(), axes, strict=False)):
    grid = np.full((len(depths), len(lengths)), np.nan)
    for (depth, length), scores in panel.items():
      grid[depths.index(depth), lengths.index(length)] = np.mean(scores)
    image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axis.set_title(name, fontsize=_SMALL)
    axis.set_xticks(range(len(lengths)), [_thousands(x) for x in lengths], fontsize=7)
    ticks = (0, len(depths) // 2, len(depths) - 1) if at % columns == 0 else ()
    axis.set_yticks(ticks, [f"{depths[i]:.0%}" for i in ticks], fontsize=7)
    if at % columns == 0:
      axis.set_ylabel("depth", fontsize=_SMALL)
  counts = [len(scores) for panel in panels.values() for scores in panel.values()]
  n = _between(counts)
  mode = rows[0]["mode"]
  figure.suptitle(
    f"Needle found, by length in tokens and depth; {mode}, {n} per field", fontsize=10
  )
  bar = figure.colorbar(image, ax=axes, aspect=30, fraction=0.03, pad=0.01)
  bar.set_label("share found", fontsize=_SMALL)
  bar.ax.tick_params(labelsize=7)
  return figure


def _modes(rows: Rows) -> list[str]:
  return sorted({row["mode"] for row in rows}, key=lambda mode: mode != "aware")


def _between(counts: Iterable[int]) -> str:
  few, many = min(listed := list(counts)), max(listed)
  return f"n = {few}" if few == many else f"n = {few} to {many}"


def _budget_name(row: dict[str, Any]) -> str:
  """A budget for a panel over several lengths: a share of the length where it is a round one."""
  if row["budget"] is None:
    return ""
  for share in (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32):
    if row["budget"] == math.floor(share * row["length"]):
      return f"{share:.4g}"
  share = row["budget"] / row["length"]
  return f"{share:g}" if share == round(share, 2) else f"{row['budget']:,}"


# ---- 2: score against bytes


def score_by_bytes(summaries: Sequence[Summary], styles: Styles) -> Figure | None:
  """Mean score against the bytes that a row's cache takes, by mode, length and tasks.

  A panel has the tasks that the same methods have done; means over other tasks are other numbers.
  """
  chosen = [s for s in summaries if "kl" not in s.also]
  done: dict[tuple[str, int, str], set[Any]] = {}
  for s in chosen:
    if s.method != FULL:
      done.setdefault((s.mode, s.length, s.task), set()).add((s.method, s.budget))
  panels: dict[Any, list[str]] = {}
  for (mode, length, task), methods in done.items():
    panels.setdefault((mode != "aware", length, frozenset(methods)), []).append(task)
  if not panels:
    return None
  keys = sorted(panels, key=lambda key: (key[:2], -len(key[2])))
  figure, axes = _grid(len(keys), min(4, len(keys)), 3.8, 3.1)
  for (agnostic, length, methods), axis in zip(keys, axes, strict=False):
    mode, tasks = "agnostic" if agnostic else "aware", set(panels[agnostic, length, methods])
    here = [s for s in chosen if (s.mode, s.length) == (mode, length) and s.task in tasks]
    points: dict[str, list[tuple[float, float]]] = {}
    for method, budget in dict.fromkeys((s.method, s.budget) for s in here):
      mine = [s for s in here if (s.method, s.budget) == (method, budget)]
      if {s.task for s in mine} == tasks:
        size = np.mean([s.cache_bytes for s in mine]) / 1e6
        points.setdefault(method, []).append((size, np.mean([s.score.mean for s in mine])))
    for method, listed in points.items():
      x, y = zip(*sorted(listed), strict=True)
      style = styles.line(method)
      if method == FULL:
        axis.axhline(y[0], **{**style, "linewidth": 1})
        axis.plot(x, y, "o", color="black", label=method)
      else:
        axis.plot(x, y, **style, label=method)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_ylim(-0.03, 1.03)
    n = _between(s.score.n for s in here)
    many = f"{len(tasks)} tasks, {n} each" if len(tasks) > 1 else f"{tasks.pop()}, {n}"
    title = f"{length:,} tokens, {mode}; {many}"
    axis.set_title(title, fontsize=_SMALL)
    _labels(axis, "MB of cache per row (measured)", "mean score")
  _legend(figure, axes)
  figure.suptitle("Score against the bytes that are really kept", fontsize=10)
  return figure


# ---- 3: speed and memory


def speed(summaries: Sequence[Summary], benches: Sequence[Any], styles: Styles) -> Figure | None:
  """Time of a decode step, tokens per second and memory against context length, by batch."""
  lines: dict[tuple[str, str], list[tuple[int, float, float, float]]] = {}
  for s in _one_per_length(summaries):
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
  if not lines:
    return None
  places = sorted({where for _, where in lines})
  figure, axes = _grid(3 * len(places), 3, 3.6, 2.7)
  titles = "ms per decode step", "tokens per second", "GB of caches or peak memory"
  for (method, where), points in lines.items():
    x, *values = zip(*sorted(points), strict=True)
    if where.startswith("evaluate"):
      style = styles.line(method)
    else:  # of bench: this library, or a peer
      style = {"color": "black" if method == "kvjax" else "0.6", "marker": "s", "markersize": 4}
    for column, y in enumerate(values):
      if not np.isnan(y).all():
        axis = axes[3 * places.index(where) + column]
        axis.plot(x, y, **{**style, "marker": style["marker"] or "."}, label=method)
  for i, axis in enumerate(axes[: 3 * len(places)]):
    axis.set_xscale("log", base=2)
    if axis.lines:
      ticks = sorted({x for line in axis.lines for x in line.get_xdata()})
      axis.set_xticks(ticks, [_thousands(x) for x in ticks], fontsize=_SMALL)
      axis.set_ylim(bottom=0)
    else:
      axis.set_visible(False)
    axis.set_title(f"{titles[i % 3]}\n{places[i // 3]}", fontsize=_SMALL)
    _labels(axis, "context, tokens", "")
  _legend(figure, axes)
  figure.suptitle("Speed and memory against context length", fontsize=10)
  return figure


def _one_per_length(summaries: Sequence[Summary]) -> list[Summary]:
  """Of every method the smallest budget, and of every length its first task."""
  least: dict[str, int] = {}
  for s in summaries:
    least[s.method] = min(least.get(s.method, s.budget or 0), s.budget or 0)
  first: dict[tuple[str, int], Summary] = {}
  share = {(s.method, s.length): s.budget for s in reversed(summaries)}
  for s in summaries:
    if s.mode == "aware" and s.budget == share[s.method, s.length]:
      first.setdefault((s.method, s.length), s)
  return list(first.values())


# ---- 4: RULER's tasks


def task_tables(summaries: Sequence[Summary], tasks: Sequence[str]) -> dict[str, Figure]:
  """By mode and length: every method's score on every task, and below it its interval.

  Fields are coloured by the score relative to the full cache's; the mean over the tasks that all
  methods have done stands at the end.
  """
  chosen = [s for s in summaries if s.task in tasks]
  keys = sorted({(s.mode, s.length) for s in chosen}, key=lambda k: (k[0] != "aware", k[1]))
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
  figure = Figure(figsize=(2.4 + 0.72 * (len(columns) + 1), 1.1 + 0.34 * len(named)))
  figure.set_layout_engine("constrained")
  axis = figure.subplots()
  grid = np.full((len(named), len(columns) + 1), np.nan)
  for i, (method, budget) in enumerate(named):
    mine = [found.get((method, budget, task)) for task in columns]
    for j, s in enumerate(mine):
      if s is not None:
        grid[i, j] = np.nan if s.relative is None else s.relative
        text = f"{s.score.mean * 100:.0f}\n{s.score.low * 100:.0f}–{s.score.high * 100:.0f}"
        _field(axis, j, i, text, grid[i, j])
    scores = [(found[method, budget, t], found.get((FULL, None, t))) for t in shared]
    if shared and all(full for _, full in scores):
      mean, whole = np.mean([(s.score.mean, full.score.mean) for s, full in scores if full], 0)
      grid[i, -1] = mean / whole if whole else np.nan
      _field(axis, len(columns), i, f"{mean * 100:.1f}", grid[i, -1])
  image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
  names = [name_of(method, budget) for method, budget in named]
  axis.set_yticks(range(len(named)), names, fontsize=_SMALL)
  axis.xaxis.tick_top()
  labels = [task.replace("niah_", "").replace("_", "\n", 1) for task in columns]
  axis.set_xticks(range(len(columns) + 1), [*labels, f"mean\nof {len(shared)}"], fontsize=7)
  axis.axvline(len(columns) - 0.5, color="white", linewidth=3)
  axis.tick_params(length=0)
  first = summaries[0]
  n = _between(s.score.n for s in summaries)
  figure.suptitle(
    f"{first.length:,} tokens, {first.mode}; percent, 95 % interval, {n}", fontsize=10
  )
  bar = figure.colorbar(image, ax=axis, fraction=0.03, pad=0.01)
  bar.set_label("relative to the full cache", fontsize=_SMALL)
  bar.ax.tick_params(labelsize=7)
  return figure


def _field(axis: Axes, x: int, y: int, text: str, shade: float) -> None:
  colour = "black" if np.isnan(shade) or shade > 0.6 else "white"
  axis.text(x, y, text, ha="center", va="center", fontsize=6, color=colour, linespacing=0.95)


# ---- 5: divergence by position


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
  figure, axes = _grid(2 * len(places), 2, 4.6, 2.5)
  for i, (length, budget) in enumerate(places):
    shown = {**full.get(length, {}), **curves[length, budget]}
    for method, listed in shown.items():
      kl, nll = (_smooth(np.mean([x[name] for x in listed], 0)) for name in ("kl", "nll"))
      style = {**styles.line(method), "marker": "", "label": method}
      x = length - len(kl) + np.arange(len(kl))
      if method != FULL:
        axes[2 * i].plot(x, np.maximum(kl, 1e-6), **style)
      axes[2 * i + 1].plot(x, np.exp(nll), **style)
    n = _between(map(len, shown.values()))
    where = f"{length:,} tokens, budget {budget:,}, {n}"
    axes[2 * i].set_yscale("log")
    axes[2 * i].set_title(f"KL(full ‖ method), nats: {where}", fontsize=_SMALL)
    axes[2 * i + 1].set_title(f"perplexity: {where}", fontsize=_SMALL)
    for axis in axes[2 * i : 2 * i + 2]:
      _labels(axis, "position", "")
      axis.tick_params(which="minor", labelsize=7)
  _legend(figure, axes)
  figure.suptitle("Divergence from the full cache on given text", fontsize=10)
  return figure


def _smooth(values: np.ndarray, width: int = 16) -> np.ndarray:
  """Means over `width` neighbours, fewer at the ends."""
  ones = np.ones(min(width, len(values)))
  total = np.convolve(values, ones, "same")
  return total / np.convolve(np.ones(len(values)), ones, "same")


# ---- 6: what was visited


def visits(traces: Sequence[Any]) -> Figure | None:
  """What methods report, by layer and step: the share of tokens visited first.

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
  figure, axes = _grid(len(panels), min(4, len(panels)), 3.0, 2.3)
  for (title, grid), axis in zip(panels, axes, strict=False):
    image = axis.imshow(grid, aspect="auto", origin="lower", vmin=0, cmap="viridis")
    axis.set_title(title, fontsize=_SMALL)
    _labels(axis, "step", "layer")
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


# ---- shared


def _grid(panels: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
  rows = -(-panels // columns)
  figure = Figure(figsize=(max(5.0, width * columns + 1.2), height * rows + 0.5))
  figure.set_layout_engine("constrained")
  axes = list(np.atleast_1d(figure.subplots(rows, columns)).flat)
  for axis in axes[panels:]:
    axis.set_visible(False)
  return figure, axes


def _labels(axis: Axes, x: str, y: str) -> None:
  axis.set_xlabel(x, fontsize=_SMALL)
  axis.set_ylabel(y, fontsize=_SMALL)
  axis.tick_params(labelsize=_SMALL)
  axis.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, axes: Iterable[Axes]) -> None:
  """One legend for all panels, to their right."""
  handles: dict[str, Any] = {}
  for axis in axes:
    for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
      handles.setdefault(label, handle)
  look = {"loc": "outside right center", "fontsize": 7, "frameon": False, "handlelength": 3}
  figure.legend(handles.values(), handles.keys(), ncols=1 + len(handles) // 20, **look)


def _thousands(tokens: float) -> str:
  return f"{tokens / 1024:g}K" if tokens % 1024 == 0 else f"{tokens:g}"
