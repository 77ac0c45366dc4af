"""Names beside points that neither cover each other nor, where there is room, other points."""

import itertools
import math
from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

from kvjax.programs.evals.pictures.look import SMALL

_ANGLES = (35, 145, -35, -145, 80, 100, -80, -100, 10, 170, -10, -170)  # degrees
_REACHES = (10, 18, 28, 40, 54, 70, 90, 115)  # points


def place(
  axis: Axes,
  words: Sequence[tuple[str, float, float, str]],
  others: Iterable[tuple[float, float]],
) -> None:
  """Writes (text, x, y, colour) beside (x, y), each where it covers least; a line leads back.

  Args:
    axis: its limits are final, and the figure was laid out (`draw_without_rendering`).
    others: all points that should not be covered.
  """
  scale = axis.figure.dpi / 72
  frame = axis.get_window_extent()
  covered = [axis.transData.transform(point) for point in others]
  taken: list[Bbox] = []
  for text, x, y, colour in words:
    at = axis.transData.transform((x, y))
    drawn = axis.text(0, 0, text, fontsize=SMALL, weight="bold")
    size = drawn.get_window_extent().padded(1.5)
    drawn.remove()
    options = []
    for order, (reach, angle) in enumerate(itertools.product(_REACHES, _ANGLES)):
      dx, dy = (reach * f(math.radians(angle)) for f in (math.cos, math.sin))
      box = _box(at, dx * scale, dy * scale, size)
      outside = not (frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0)
      outside |= box.y1 > frame.y1
      clash = sum(box.overlaps(other) for other in taken)
      hidden = sum(box.contains(*point) for point in covered)
      options.append(((outside, clash, 2 * hidden + reach / 12, order), dx, dy, box))
    _, dx, dy, box = min(options)
    taken.append(box)
    written = axis.annotate(
      *(text, (x, y)),
      xytext=(dx, dy),
      textcoords="offset points",
      ha="left" if dx >= 0 else "right",
      va="bottom" if dy >= 0 else "top",
      fontsize=SMALL,
      weight="bold",
      color=colour,
      zorder=6,
      path_effects=[withStroke(linewidth=2, foreground="white")],
      arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 2},
    )
    written.set_in_layout(False)


def _box(at: Sequence[float], dx: float, dy: float, size: Bbox) -> Bbox:
  """Box of a text of this size that is moved from a point: to the side that it is moved to."""
  x = at[0] + dx - (size.width if dx < 0 else 0)
  y = at[1] + dy - (size.height if dy < 0 else 0)
  return Bbox.from_bounds(x, y, size.width, size.height)
