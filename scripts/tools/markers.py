"""Parts of a document that programs write: what stands between `<!-- NAME: begin -->` and `end`."""

import re
from collections.abc import Sequence

import pandas as pd

_BEGIN = re.compile(r"^<!-- (.+): begin -->$", re.MULTILINE)


def names(text: str) -> list[str]:
  """The parts of a document, in their order."""
  return _BEGIN.findall(text)


def filled(text: str, name: str, lines: Sequence[str]) -> str:
  """The document with other lines between the markers of one part.

  Raises:
    ValueError: the markers are not there once, one after the other.
  """
  begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
  before, found, rest = text.partition(begin)
  _, closed, after = rest.partition(end)
  if not (found and closed) or begin in after or end in before + after:
    raise ValueError(f"{name}: found no single pair of markers, expected {begin.strip()} and {end}")
  return "\n".join([before + begin, *lines, "", end + after])


def outside(text: str) -> str:
  """The document without the parts that programs write."""
  for name in names(text):
    text = filled(text, name, [])
  return text


def dashed(table: pd.DataFrame) -> pd.DataFrame:
  """A table with its labels as columns, and dashes for what is not there."""
  whole = table.reset_index(allow_duplicates=True).astype(object)
  return whole.where(whole.notna(), "–")


def markdown(table: pd.DataFrame) -> list[str]:
  """The lines of a table, and its note below; none without rows."""
  whole, note = dashed(table), table.attrs.get("note")
  rows = [f"| {' | '.join(map(format, row))} |" for row in [whole.columns, *whole.to_numpy()]]
  rows.insert(1, "|---" * whole.shape[1] + "|")
  return [*rows, *(["", f"`{note}`"] if note else [])] if len(whole) else []
