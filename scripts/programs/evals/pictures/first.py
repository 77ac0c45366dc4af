"""The first page's picture: what a step takes and what it scores, at like tokens attended to."""

from matplotlib.figure import Figure

from kvjax.programs.evals import choices, families
from kvjax.programs.evals.costs import Board, Point
from kvjax.programs.evals.pictures.callouts import place
from kvjax.programs.evals.pictures.look import SMALL, name_axes
from kvjax.programs.evals.standing import FULL

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
  tokens = sorted({f"{point.cost.attended:,}" for point in points})
  attended = tokens[0] if len(tokens) == 1 else f"{tokens[0]} to {tokens[-1]}"
  name_axes(axis, f"ms a token, median step of {board.batch} rows", "score, percent")
  axis.set_ylim(-4, 109)
  axis.margins(x=0.15)
  axis.grid(axis="y", color="0.93", linewidth=0.6)
  axis.set_title(
    f"{held.length:,} tokens; all but the full cache attend to {attended} of them\n"
    f"mean of {len(held.tasks)} tasks, {held.n} shared prompts each, 95 % intervals",
    fontsize=SMALL + 1,
  )
  figure.draw_without_rendering()
  place(axis, named, [(x, y) for _, x, y, _ in named])
  return figure


def _shown(same: Board) -> list[Point]:
  found = {point.method: point for point in same.points}
  return [found[name] for name in SHOWN if name in found]
