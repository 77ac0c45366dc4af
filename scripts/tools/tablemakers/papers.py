"""The papers' headline figures, kept in papers.json, for the tables that set ours beside them."""

from scripts.tools.tablemakers.records import Figure, Record
from scripts.tools.tablemakers.results import Results

FILE = "papers.json"


def figures(results: Results) -> dict[str, str]:
  """The first three cells of a row: what, where in the paper, and the paper's figure."""
  found: dict[str, str] = {}
  for page, rows in results.json(FILE)["pages"].items():
    for i, row in enumerate(rows):
      cells = [row[name] for name in ("what", "where", "figure")]
      record = Record(FILE, ("pages", page, i, "figure"), row["card"], 1, ", ".join(cells[:2]))
      found[f"{page}-{i}"] = Figure(" | ".join(cells), (record,))
  return found
