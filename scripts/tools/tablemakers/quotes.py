"""Tables that quote others: the papers' figures beside ours, and the results in short.

A quotation reads {MODULE.NAME ARGUMENT :: ROW :: COLUMN}. ROW is how a row's labels end; with a
star it matches several rows, of which the least and the largest ratio are quoted.
"""

import fnmatch
import functools
import pathlib
import re

import pandas as pd

from scripts.tools import markers, tablemakers
from scripts.tools.tablemakers import Part, Results, cells


def beside(results: Results, page: str) -> Part:
  rows = results.json("papers.json")["pages"][page]
  here = "here", lambda row: filled(results, row["here"])
  return cells.table(rows, [("", "what"), "where"], ("the paper", "figure"), here)


def short(results: Results, where: str = "") -> Part:
  """The rows of short.md; those of the first page alone if so asked."""
  rows, text = {}, pathlib.Path(__file__).with_name("short.md").read_text("utf-8")
  for line in text.partition("|---|\n")[2].splitlines():
    place, label, template = line.strip("| ").split(" | ")
    if where in place:
      rows[label] = filled(results, template)
  return pd.Series(rows, name="").rename_axis("").to_frame()


def filled(results: Results, template: str) -> str:
  """A text with the cells that it quotes."""
  return re.sub(r"\{([^{}]*)\}", lambda found: quoted(results, found[1]), template)


def quoted(results: Results, reference: str) -> str:
  """The cell that a reference names; ValueError if there is none, or several."""
  name, row, column = reference.split(" :: ")
  table, several = _labelled(results, name), "*" in row
  fits = fnmatch.fnmatchcase if several else str.endswith
  there = table[[fits(label, row) for label in table.index]]
  if there.empty or (len(there) > 1 and not several):
    raise ValueError(f"{name}: found {len(there)} rows like {row!r}, expected one")
  if column not in there:
    raise ValueError(f"{name}: found no column {column!r} among {list(there)}")
  found = there[column].dropna().to_list()
  steady = [x for x in found if not several or x.reference.steady]
  shown = sorted(steady, key=lambda ratio: ratio.value) if several else steady
  if not shown:
    raise ValueError(f"{reference}: found no figure, expected one")
  text = " to ".join(dict.fromkeys(map(format, (shown[0], shown[-1])))).replace("**", "")
  wide = len(found) - len(shown)
  return text + (f" ({wide} of {len(found)} left out, not steady)" if wide else "")


@functools.cache
def _labelled(results: Results, name: str) -> pd.DataFrame:
  """A table, each row's labels as one text."""
  table = tablemakers.maker(name)(results)
  labels = markers.dashed(table).iloc[:, : table.index.nlevels]
  return table.set_axis([", ".join(row) for row in labels.to_numpy()])
