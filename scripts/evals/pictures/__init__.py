"""The pictures of a report, each from rows of results; None where the rows have nothing to show."""

from .divergences import divergence
from .kept import score_by_bytes
from .look import FULL, Styles
from .needles import needle_maps
from .tasks import task_tables
from .times import speed
from .visited import visits

__all__ = [
  "FULL",
  "Styles",
  "divergence",
  "needle_maps",
  "score_by_bytes",
  "speed",
  "task_tables",
  "visits",
]
