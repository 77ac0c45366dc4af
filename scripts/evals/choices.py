"""Which method to take: for each aim the best of those that fit and do not lose."""

import dataclasses
import math
from collections.abc import Callable

from . import families
from .costs import Board, Cost, Point

LIMITS = (8, 16, 24, 48, 80, math.inf)  # GB of device memory


@dataclasses.dataclass(frozen=True)
class Aim:
  """What is asked for: the least `cost` of the methods that `allows` takes.

  Attributes:
    share: of the full cache's score, which is enough; None: no loss to it may show.
  """

  name: str
  cost: Callable[[Cost], tuple[float, ...]]
  allows: Callable[[str], bool] = lambda method: True
  share: float | None = None


AIMS = (
  Aim("fastest", lambda cost: (cost.us,)),
  Aim("least kept", lambda cost: (cost.kept, cost.us)),
  Aim("safest", lambda cost: (cost.us,), lambda method: families.of(method).safe),
  Aim("fastest at 90 %", lambda cost: (cost.us,), share=0.9),
  Aim("least kept at 90 %", lambda cost: (cost.kept, cost.us), share=0.9),
)


@dataclasses.dataclass(frozen=True)
class Choice:
  """What to take for some aims.

  Attributes:
    aims: their names.
    point: the method; None where nothing that was measured fits.
    loses: whether everything that fits scores below the full cache, so that the best score is
      taken in place of the least cost.
  """

  aims: tuple[str, ...]
  point: Point | None
  loses: bool = False


def loses(point: Point) -> bool:
  """Whether the 95 % interval of what it scores less than the full cache leaves out 0."""
  return point.gap.high < 0


def choices(board: Board, limit: float = math.inf) -> list[Choice]:
  """One for every aim; aims with the same answer are one choice.

  Args:
    board: methods with scores and costs.
    limit: GB that the process may hold on the device.
  """
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
  if aim.share is None:
    kept = [point for point in able if not loses(point)]
  else:
    kept = [point for point in able if point.score.mean >= aim.share * full.score.mean]
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
