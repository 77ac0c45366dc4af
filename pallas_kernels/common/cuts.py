"""Cut of a search of long rows, or of few, over programs: `top_k`.

Each part of a row gives its own k best, or a few more where its search is over sooner for it, and
what they give is searched once more.
"""

import functools
import math

from jax.experimental import pallas as pl

from kvjax.kernels.common.search import EACH

SHORTEST = 512  # shortest part
LAUNCH = 1536  # a launch takes as long as it takes to search that many more scores
LEVEL = 1024  # fewer scores than that take a program hardly less time: a warp for every scheduler
AT_ONCE = 8192  # scores that a multiprocessor's registers hold


@functools.cache
def cuts(rows: int, length: int, k: int, most: int, cores: int) -> tuple[int, ...] | None:
  """Lengths of the parts of one search after another, before the last one; None: k is too large.

  What takes least time by a rough account: all scores that run at once take as long as those of one
  program, and `LAUNCH` stands for a launch.
  """
  return _cheapest(rows, length, k, most, cores)[1]


@functools.cache
def _cheapest(
  rows: int, length: int, k: int, most: int, cores: int
) -> tuple[float, tuple[int, ...] | None]:
  """The least cost of finding the k best of rows of some length, and how they are cut for it."""
  if k == 0:
    return 0.0, ()
  longest = most if 2 * k <= most else 2 * most

  def cost(parts: int, lanes: int) -> float:
    waves = pl.cdiv(rows * parts * lanes, cores * AT_ONCE)
    return waves * float(LAUNCH + max(lanes, min(LEVEL, most)))

  found: tuple[float, tuple[int, ...] | None] = math.inf, None
  if length <= longest:
    found = cost(1, lanes_of(length)), ()
  lanes = longest
  while lanes >= min(SHORTEST, most // 2):
    parts = pl.cdiv(length, lanes)
    part = pl.cdiv(length, parts)
    given = parts * given_by(parts, part, k)
    if parts > 1 and given < length:
      rest, more = _cheapest(rows, given, k, most, cores)
      total = cost(parts, lanes) + rest
      if more is not None and total < found[0]:
        found = total, (part, *more)
    lanes //= 2
  return found


def given_by(parts: int, part: int, k: int) -> int:
  """Most scores that each part gives: k, or as many as are searched in the same time."""
  least = min(k, part)
  lanes = max(lanes_of(parts * least), LEVEL)
  return max(least, min(part // 2, lanes // parts))


def lanes_of(part: int) -> int:
  """Scores that a program holds that searches `part` of them."""
  return max(pl.next_power_of_2(part), 32 * EACH)


def warps_of(part: int) -> int:
  """Warps of a program that searches `part` scores: eight per thread, sixteen in long ones."""
  lanes = lanes_of(part)
  return min(max(lanes // 256, 1), 8 if lanes <= 4096 else 16)
