"""The papers' headline figures, kept in papers.json, for the tables that set ours beside them."""

from scripts.tools.tablemakers.records import NOTHING, Figure, Record
from scripts.tools.tablemakers.results import Results

FILE = "papers.json"


def figures(results: Results) -> dict[str, str]:
  """The first three cells of a row: what, where in the paper, and the paper's figure."""
  found: dict[str, str] = {}
  for page, rows in results.json(FILE, "pages").items():
    for i, row in enumerate(rows):
      what, where, figure = (row[name] for name in ("what", "where", "figure"))
      place, setting = ("pages", page, i, "figure"), f"{what}, {where}"
      record = Record(FILE, place, row["card"], 1, setting, NOTHING)
      found[f"{page}-{i}"] = Figure(f"{what} | {where} | {figure}", (record,))
  return found
