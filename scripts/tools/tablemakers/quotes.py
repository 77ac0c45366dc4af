"""Tables that quote others: the papers' figures beside ours, and the results in short.

A quotation reads {MODULE.NAME ARGUMENT :: ROW :: COLUMN}. ROW is how a row's labels end; with a
star it matches several rows, of which the least and the largest figure are quoted.
"""

import fnmatch
import functools
import pathlib
import re

from scripts.tools import tablemakers
from scripts.tools.tablemakers import Figure, Part, Record, Results, cells, records

PAPERS = "papers.json"
SHORT = pathlib.Path(__file__).with_name("short.md")
_CELL = re.compile(r"\{([^{}]*)\}")


def beside(results: Results, page: str) -> Part:
  """The headline figures of a page's paper, where the paper has them, and ours."""
  rows = []
  for i, row in enumerate(results.json(PAPERS)["pages"][page]):
    place = ("pages", page, i, "figure")
    record = Record(PAPERS, place, row["card"], 1)
    here = filled(results, row["here"])
    rows.append([row["what"], row["where"], Figure(row["figure"], (record,)), here])
  return cells.table(("", "where", "the paper", "here"), rows, labels=2)


def short(results: Results, where: str = "") -> Part:
  """The rows of short.md; those of the first page alone if so asked."""
  rows = []
  for line in SHORT.read_text("utf-8").partition("|---|\n")[2].splitlines():
    place, label, template = line.strip("| ").split(" | ")
    if where in place:
      rows.append([label, filled(results, template)])
  return cells.table(("", ""), rows)


def filled(results: Results, template: str) -> str:
  """A text with the cells that it quotes."""
  quoted = [cell(results, reference) for reference in _CELL.findall(template)]
  return cells.say(_CELL.sub("{}", template), *quoted) if quoted else template


def cell(results: Results, reference: str) -> Figure:
  """The cell that a reference names; of several rows, the least to the largest.

  Raises:
    ValueError: there is no such row or column, or several rows end so.
  """
  table, row, column = reference.split(" :: ")
  several = "*" in row
  fits = fnmatch.fnmatchcase if several else str.endswith
  rows = [values for label, values in _part(results, table).rows if fits(label, row)]
  if not rows or (len(rows) > 1 and not several):
    raise ValueError(f"{table}: found {len(rows)} rows like {row!r}, expected one")
  if column not in rows[0]:
    raise ValueError(f"{table}: found no column {column!r} among {list(rows[0])}")
  found, left = [values[column] for values in rows], ""
  if several:
    there = [x for x in found if x != "–"]
    steady = (x for x in there if not x.startswith("– ("))
    found = sorted(steady, key=lambda x: float(x.strip("*").split()[0]))
    if wide := len(there) - len(found):
      left = f" ({wide} of {len(there)} left out, not steady)"
  if not found:
    raise ValueError(f"{reference}: found no figure, expected one")
  text = " to ".join(dict.fromkeys((found[0], found[-1]))).replace("**", "")
  return Figure(text + left, records.of(*found))


@functools.cache
def _part(results: Results, table: str) -> Part:
  return tablemakers.maker(table)(results)
