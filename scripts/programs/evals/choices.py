"""Choice of a method: for each aim the best of those that fit and attend to as many tokens."""

import dataclasses
import math
from collections.abc import Callable

from kvjax.programs.evals import families
from kvjax.programs.evals.costs import Board, Cost, Point

LIMITS = (8, 16, 24, 48, 80, math.inf)  # GB of device memory
ALIKE = 1.1  # methods are compared that attend to as many tokens, up to this factor


@dataclasses.dataclass(frozen=True)
class Aim:
  """An aim of a choice: the least `cost` of the methods that `allows` takes.

  Attributes:
    share: of the full cache's score on the same prompts, which is enough.
  """

  name: str
  cost: Callable[[Cost], tuple[float, ...]]
  allows: Callable[[str], bool] = lambda method: True
  share: float = 0.98


def _least(cost: Cost) -> tuple[float, ...]:
  """By bytes kept, of which 2 % are no difference, then by time."""
  return round(math.log(max(cost.kept, 1e-9), 1.02)), cost.us


AIMS = (
  Aim("fastest", lambda cost: (cost.us,)),
  Aim("least kept", _least),
  Aim("safest", lambda cost: (cost.us,), lambda method: families.of(method).safe),
  Aim("fastest at 90 %", lambda cost: (cost.us,), share=0.9),
  Aim("least kept at 90 %", _least, share=0.9),
)


@dataclasses.dataclass(frozen=True)
class Choice:
  """The method to take for some aims.

  Attributes:
    aims: their names.
    point: the method; None where nothing that was measured fits.
    loses: whether a loss to the full cache shows, or nothing that fits scores enough, so that the
      best score is taken in place of the least cost.
  """

  aims: tuple[str, ...]
  point: Point | None
  loses: bool = False


def loses(point: Point) -> bool:
  """True if the 95 % interval of what it scores less than the full cache leaves out 0."""
  return point.gap.high < 0


def classes(board: Board) -> list[Board]:
  """The methods of a board by the tokens that a layer attends to, the full cache in each.

  Whatever a budget is called, only methods are compared that attend to as many tokens. Controls
  and upper bounds are left out, and what was not seen attending.
  """
  seen = [p for p in board.points[1:] if p.cost.attended and p.method not in families.YARDSTICKS]
  found: list[list[Point]] = []
  for point in sorted(seen, key=lambda point: point.cost.attended or 0):
    if found and (point.cost.attended or 0) <= ALIKE * (found[-1][0].cost.attended or 0):
      found[-1].append(point)
    else:
      found.append([point])
  return [dataclasses.replace(board, points=[board.full, *points]) for points in found]


def choices(board: Board, limit: float = math.inf) -> list[Choice]:
  """One for every aim; aims with the same answer are one choice.

  The process may hold `limit` GB on the device.

  Raises:
    ValueError: the methods attend to unlike numbers of tokens.
  """
  if len(classes(board)) > 1:
    tokens = sorted({point.cost.attended for point in board.points[1:] if point.cost.attended})
    raise ValueError(f"board: found methods that attend to {tokens} tokens, expected as many each")
  fitting = [point for point in board.points if _fits(point.cost, limit)]
  made: list[Choice] = []
  for aim in AIMS:
    found = _best(aim, fitting, board.full)
    same = next((i for i, c in enumerate(made) if (c.point, c.loses) == found), None)
    if same is None:
      made.append(Choice((aim.name,), *found))
    else:
      made[same] = dataclasses.replace(made[same], aims=(*made[same].aims, aim.name))
  return made


def _fits(cost: Cost, limit: float) -> bool:
  return limit == math.inf or (cost.peak_bytes is not None and cost.peak_bytes <= limit * 1e9)


def _best(aim: Aim, fitting: list[Point], full: Point) -> tuple[Point | None, bool]:
  able = [
    point
    for point in fitting
    if point.method not in families.YARDSTICKS and aim.allows(point.method)
  ]
  kept = [point for point in able if point.gap.mean >= (aim.share - 1) * full.score.mean]
  if kept:
    best = min(kept, key=lambda point: aim.cost(point.cost))
    return best, loses(best)
  return max(able, key=lambda point: point.score.mean, default=None), bool(able)


def by_memory(board: Board) -> list[tuple[str, list[Choice]]]:
  """The choices under each of LIMITS; limits in a row with the same choices are one, in words.

  Where the device did not say what a process held, there are no limits.
  """
  if any(point.cost.peak_bytes is None for point in board.points):
    return [("not measured", choices(board))]
  made: list[tuple[float, float, list[Choice]]] = []
  for limit in LIMITS:
    found = choices(board, limit)
    if made and made[-1][2] == found:
      made[-1] = (made[-1][0], limit, found)
    else:
      made.append((limit, limit, found))
  return [(_words(low, high), found) for low, high, found in made]


def _words(low: float, high: float) -> str:
  if low == math.inf:
    return f"more than {LIMITS[-2]:g} GB"
  if high == math.inf:
    return f"{low:g} GB and more"
  return f"{low:g} GB" if low == high else f"{low:g} to {high:g} GB"
