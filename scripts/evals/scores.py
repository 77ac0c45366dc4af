"""Scorers: an answer and its row to a number in [0, 1]."""

from scripts.evals.task import Row


def all_found(answer: str, row: Row) -> float:
  """RULER's `string_match_all`: the share of references that the answer contains, in any case."""
  said = answer.lower()
  return sum(reference.lower() in said for reference in row.answers) / len(row.answers)


def any_found(answer: str, row: Row) -> float:
  """RULER's `string_match_part`: whether the answer contains a reference, in any case."""
  said = answer.lower()
  return float(any(reference.lower() in said for reference in row.answers))
