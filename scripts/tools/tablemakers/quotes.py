"""Tables that quote cells of others: the papers' figures beside ours, and the results in short.

A quotation reads {MODULE.NAME ARGUMENT :: ROW :: COLUMN}. ROW is how a row's labels end; with a
star it matches several rows, of which the least and the largest figure are quoted.
"""

import fnmatch
import functools
import pathlib
import re

from scripts.tools import tablemakers
from scripts.tools.tablemakers import cells, records
from scripts.tools.tablemakers.records import Figure, Part, Record
from scripts.tools.tablemakers.results import Results

PAPERS = "papers.json"
SHORT = pathlib.Path(__file__).with_name("short.md")
_CELL = re.compile(r"\{([^{}]*)\}")


def beside(results: Results, page: str) -> Part:
  """The headline figures of a page's paper, where the paper has them, and ours."""
  rows = []
  for i, row in enumerate(results.json(PAPERS)["pages"][page]):
    place = ("pages", page, i, "figure")
    record = Record(PAPERS, place, row["card"], 1, f"{row['what']}, {row['where']}")
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
  """The cell that a reference names.

  Raises:
    ValueError: there is no such row or column, or several rows end so.
  """
  table, row, column = reference.split(" :: ")
  part = _part(results, table)
  rows = [values for label, values in part.rows if _matches(label, row)]
  if not rows or (len(rows) > 1 and "*" not in row):
    raise ValueError(f"{table}: found {len(rows)} rows like {row!r}, expected one")
  if column not in part.head:
    raise ValueError(f"{table}: found no column {column!r} among {part.head}")
  values = [values[part.head.index(column)] for values in rows]
  found = _ends(values) if "*" in row else values[0]
  return Figure(found.replace("**", ""), records.of(found))


@functools.cache
def _part(results: Results, table: str) -> Part:
  return tablemakers.maker(table)(results)


def _matches(label: str, row: str) -> bool:
  return fnmatch.fnmatchcase(label, row) if "*" in row else label.endswith(row)


def _ends(values: list[str]) -> Figure:
  """The least to the largest of some cells, and how many were divided by what was not steady."""
  held = sorted((x for x in values if x[0] != "–"), key=lambda x: float(x.strip("*").split()[0]))
  if not held:
    raise ValueError(f"cells: found {values}, expected a figure among them")
  wide = sum(x.startswith("– (") for x in values)
  text = " to ".join(dict.fromkeys((held[0], held[-1])))
  left = f" ({wide} of {len(held) + wide} left out, not steady)" if wide else ""
  return Figure(text + left, records.of(*held))
