"""Score against what it costs: milliseconds a token, bytes kept, bytes read a step.

And the first page's picture: milliseconds and scores at like tokens attended to.
"""

import itertools
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvjax.programs.evals import choices, families
from kvjax.programs.evals.costs import Board, Cost, Point
from kvjax.programs.evals.pictures import look
from kvjax.programs.evals.pictures.callouts import place
from kvjax.programs.evals.standing import FULL

Measure = Callable[[Cost], float]
Looks = dict[str, dict[str, Any]]  # colour and marker by method

_MARKERS = "osD^vP*X<>hdp8H"
_PANELS: tuple[tuple[str, Measure], ...] = (
  ("ms a token: median step of the batch", lambda cost: cost.milliseconds),
  ("GB kept on the device, a row", lambda cost: cost.kept),
  ("GB read a step at most: weights and caches", lambda cost: cost.read),
)
_WIDE = 4  # a panel whose values differ by more is logarithmic
_READING = (
  "bars: 95 % intervals; nothing is smoothed; points of one cost stand side by side; thin "
  "lines join a method's budgets; the black line is the full cache's score"
)
_MODES = {
  "aware": "the question was there when caches were cut",
  "agnostic": "caches were cut before the question came",
  "second": "of a second question, after the first and its answer",
  "reuse": "of two questions on one context, which was cut before both",
}


def score_by_cost(boards: Sequence[Board]) -> dict[str, Figure]:
  """By mode and batch: a row of three panels per length, points with 95 % intervals.

  Colours say what a family of methods promises, markers which of them it is, sizes the budget. A
  grey line joins the best scores for their cost, upper bound and control aside; these have names.
  """
  by: dict[tuple[str, int], list[Board]] = {}
  for board in boards:
    by.setdefault((board.standings.mode, board.batch), []).append(board)
  return {f"{mode}_b{batch}": _figure(listed) for (mode, batch), listed in by.items()}


def _figure(boards: Sequence[Board]) -> Figure:
  looks = _looks({point.method for board in boards for point in board.points})
  figure = Figure(figsize=(16.5, 5.4 * len(boards) + 1.1), layout="constrained")
  grid = figure.subplots(len(boards), len(_PANELS), sharey="row", squeeze=False)
  drawn = []
  for board, axes in zip(boards, grid, strict=True):
    for axis, (name, cost) in zip(axes, _PANELS, strict=True):
      look.name_axes(axis, name, "")
      drawn.append((axis, board, cost, _panel(axis, board, cost, looks)))
    axes[0].set_ylabel(f"{board.standings.length:,} tokens\nscore, percent", fontsize=look.SMALL)
  _legend(figure, looks, boards)
  first = boards[0]
  mode = first.standings.mode
  title = f"Score against cost, batch {first.batch}"
  title += f": {mode}, {_MODES[mode]}" if mode in _MODES else f": {mode}"
  figure.suptitle(title, fontsize=11)
  notes = [*map(_said, boards), _READING]
  figure.supxlabel("\n".join(notes), fontsize=look.SMALL, x=0.01, ha="left")
  figure.draw_without_rendering()
  for axis, board, cost, at in drawn:
    named = [board.full, *(point for point in front(board.points, cost) if point.method != FULL)]
    words = [(_short(point), *at[point], looks[point.method]["color"]) for point in named]
    place(axis, words, list(at.values()))
  return figure


def _short(point: Point) -> str:
  return point.method if point.budget is None else f"{point.method} {look.thousands(point.budget)}"


def _said(board: Board) -> str:
  """Names what the scores of a row of panels are the mean of."""
  held = board.standings
  words = f"{held.length:,} tokens: mean of {', '.join(held.tasks)}, {held.n} each"
  if held.weak:
    words += f"; without {', '.join(held.weak)}, which the full cache does not solve"
  if held.missing:
    names = ", ".join(look.name_of(one.method, one.budget) for one in held.missing)
    words += f"; not here, since a task is missing: {names}"
  return textwrap.fill(words, 230)


def _looks(methods: set[str]) -> Looks:
  """Colour and marker of each method: the colour is its family's, markers go round within it."""
  made: Looks = {}
  for family in families.FAMILIES:
    members = sorted(method for method in methods if families.of(method) == family)
    for method, marker in zip(members, itertools.cycle(_MARKERS), strict=False):
      made[method] = {"color": family.colour, "marker": marker}
  return made


def _panel(
  axis: Axes, board: Board, cost: Measure, looks: Looks
) -> dict[Point, tuple[float, float]]:
  """Draws a panel, and says where its points lie."""
  costs = [cost(point.cost) for point in board.points]
  log = min(costs) > 0 and max(costs) > _WIDE * min(costs)
  xs = look.apart(costs, log)
  at = {p: (x, 100 * p.score.mean) for p, x in zip(board.points, xs, strict=True)}
  budgets = sorted({point.budget for point in board.points if point.budget is not None})
  sizes = {None: 7.0, **{budget: 6.0 + 2.5 * i for i, budget in enumerate(budgets)}}
  lines: dict[str, list[tuple[float, float]]] = {}
  for point, (x, y) in at.items():
    style, whole = looks[point.method], point.method == FULL
    low, high = 100 * point.score.low, 100 * point.score.high
    width, alpha = (1.4, 1) if whole else (0.7, 0.4)
    axis.vlines(x, low, high, color=style["color"], linewidth=width, alpha=alpha)
    edge = {"markeredgecolor": "white", "markeredgewidth": 0.4, "zorder": 4 if whole else 3}
    axis.plot(x, y, linestyle="", markersize=sizes[point.budget], **style, **edge)
    lines.setdefault(point.method, []).append((x, y))
  for method, listed in lines.items():
    axis.plot(*zip(*listed, strict=True), color=looks[method]["color"], linewidth=0.5, alpha=0.25)
  best = [at[point] for point in front(board.points, cost)]
  axis.plot(*zip(*best, strict=True), color="0.8", linewidth=3, drawstyle="steps-post", zorder=1)
  axis.axhline(100 * board.full.score.mean, color="black", linewidth=0.8, zorder=2)
  if log:
    look.logarithmic(axis, 1, 2, 5)
    axis.set_xlabel(f"{axis.get_xlabel()}; logarithmic")
  axis.margins(x=0.12)
  axis.set_ylim(-4, 109)
  axis.set_yticks(range(0, 101, 20))
  axis.grid(axis="y", color="0.93", linewidth=0.6)
  axis.set_axisbelow(True)
  return at


def front(points: Sequence[Point], cost: Measure) -> list[Point]:
  """Those that nothing cheaper scores as much as, by cost; upper bound and control aside.

  Costs within 2 % are the same.
  """
  able = [point for point in points if point.method not in families.YARDSTICKS]
  best: list[Point] = []
  for point in sorted(able, key=lambda point: (cost(point.cost), -point.score.mean)):
    if best and point.score.mean <= best[-1].score.mean:
      continue
    if best and cost(point.cost) <= 1.02 * cost(best[-1].cost):
      best.pop()
    best.append(point)
  return best


def _legend(figure: Figure, looks: Looks, boards: Sequence[Board]) -> None:
  """Methods below the name of their family, to the right of all panels."""
  handles: list[Line2D] = []
  for family in families.FAMILIES:
    members = [method for method in looks if families.of(method) == family]
    if members:
      handles.append(Line2D([], [], linestyle="", label=textwrap.fill(family.name, 26)))
    for method in members:
      handles.append(Line2D([], [], linestyle="", **looks[method], markersize=7, label=method))
  budgets = sorted({p.budget for board in boards for p in board.points if p.budget is not None})
  if len(budgets) > 1:
    words = f"larger: budget {', '.join(f'{budget:,}' for budget in budgets)}"
    handles.append(Line2D([], [], linestyle="", label=words))
  handles.append(Line2D([], [], color="0.75", linewidth=3, label="best for its cost, within 2 %"))
  names = {textwrap.fill(family.name, 26) for family in families.FAMILIES}
  shown = figure.legend(
    handles=handles, loc="outside right upper", fontsize=8, frameon=False, labelspacing=0.35
  )
  for text in shown.get_texts():
    if text.get_text() in names:
      text.set_weight("bold")


# ---- the first page

# With the full cache eight points: what keeps, cuts, shares, and what loses the needle.
SHOWN = ("chunkkv", "criticalkv", "tova", "snapkv", "longflow", "hshare", "h2o")


def first_page(board: Board) -> Figure | None:
  """One panel: score by milliseconds a token, with intervals; every point has its name.

  Of the methods that attend to as many tokens, those of the class that has most of `SHOWN`; None
  where no class has two of them.
  """
  classes = [_shown(same) for same in choices.classes(board)]
  points = max(classes, key=len, default=[])
  if len(points) < 2:
    return None
  figure = Figure(figsize=(7.5, 4.4), layout="constrained")
  axis = figure.subplots()
  held, named = board.standings, []
  for point in (board.full, *points):
    colour = "black" if point.method == FULL else families.of(point.method).colour
    x, y = point.cost.milliseconds, 100 * point.score.mean
    axis.vlines(x, 100 * point.score.low, 100 * point.score.high, color=colour, linewidth=1)
    axis.plot(x, y, "o", color=colour, markersize=6, markeredgecolor="white")
    named.append((point.method, x, y, colour))
  tokens = sorted({point.cost.attended or 0 for point in points})
  attended = " to ".join(f"{each:,}" for each in dict.fromkeys((tokens[0], tokens[-1])))
  look.name_axes(axis, f"ms a token, median step of {board.batch} rows", "score, percent")
  axis.set_ylim(-4, 109)
  axis.margins(x=0.15)
  axis.grid(axis="y", color="0.93", linewidth=0.6)
  axis.set_title(
    f"{held.length:,} tokens; all but the full cache attend to {attended} of them\n"
    f"mean of {len(held.tasks)} tasks, {held.n} shared prompts each, 95 % intervals",
    fontsize=look.SMALL + 1,
  )
  figure.draw_without_rendering()
  place(axis, named, [(x, y) for _, x, y, _ in named])
  return figure


def _shown(same: Board) -> list[Point]:
  found = {point.method: point for point in same.points}
  return [found[name] for name in SHOWN if name in found]
