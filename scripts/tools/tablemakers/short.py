"""The results in short: the rows of short.md with their figures."""

import pathlib
import re

from scripts.tools import tablemakers
from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.records import Figure, Part
from scripts.tools.tablemakers.results import Results

TEXT = pathlib.Path(__file__).with_suffix(".md")


def every(results: Results) -> Part:
  return _rows(results, "")


def first(results: Results) -> Part:
  return _rows(results, "first page")


def _rows(results: Results, where: str) -> Part:
  """Those that stand in a place."""
  rows = []
  for line in TEXT.read_text("utf-8").partition("|---|\n")[2].splitlines():
    place, label, template = line.strip("| ").split(" | ")
    if where in place:
      text, figures = tablemakers.quoted(template, results)
      sources = [record for figure in figures for record in figure.records]
      rows.append([label, Figure(re.sub("<!--.*?-->", "", text), sources)])
  return cells.table(("", ""), rows)
