"""The pictures of a report, each from rows of results; None where the rows have nothing to show."""

from .cost import score_by_cost
from .divergences import divergence
from .first import first_page
from .kept import score_by_bytes
from .look import Styles
from .needles import needle_maps
from .tasks import task_tables
from .times import speed
from .visited import visits

__all__ = [
  "Styles",
  "divergence",
  "first_page",
  "needle_maps",
  "score_by_bytes",
  "score_by_cost",
  "speed",
  "task_tables",
  "visits",
]
