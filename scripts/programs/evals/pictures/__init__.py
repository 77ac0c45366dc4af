"""The pictures of a report, each from rows of results; None where the rows have nothing to show."""

from kvjax.programs.evals.pictures.cost import first_page, score_by_cost
from kvjax.programs.evals.pictures.divergences import divergence
from kvjax.programs.evals.pictures.kept import score_by_bytes
from kvjax.programs.evals.pictures.look import Styles
from kvjax.programs.evals.pictures.needles import needle_maps
from kvjax.programs.evals.pictures.tasks import task_tables
from kvjax.programs.evals.pictures.times import speed
from kvjax.programs.evals.pictures.visited import visits

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
