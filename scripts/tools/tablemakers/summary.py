"""The results in short: a line for each section of the results, six of them on the first page."""

from collections.abc import Iterable

from scripts.tools.tablemakers import (
  art,
  cells,
  decode,
  gpus,
  longflow,
  prr,
  quantised,
  real,
  selection,
  steps,
  streams,
)
from scripts.tools.tablemakers.records import Part
from scripts.tools.tablemakers.results import Results

LINES = {
  "dense decode": decode.in_short,
  "whole steps, Llama-3.1-8B's shape": steps.in_short,
  "LongFlow": longflow.in_short,
  "Quest, InfLLM-v2 at T128K": selection.in_short,
  "PRR": prr.in_short,
  "ART": art.in_short,
  "codes": quantised.in_short,
  "Ltri": streams.in_short,
  "two GPUs": gpus.in_short,
  "a real model": real.in_short,
}


FIRST_PAGE = (
  "whole steps, Llama-3.1-8B's shape",
  "LongFlow",
  "Quest, InfLLM-v2 at T128K",
  "Ltri",
  "two GPUs",
)


def table(results: Results) -> Part:
  return _lines(results, LINES)


def first_page(results: Results) -> Part:
  return _lines(results, FIRST_PAGE)


def _lines(results: Results, labels: Iterable[str]) -> list[str]:
  lines = ([label, LINES[label](results)] for label in labels)
  return cells.table(("", ""), (row for row in lines if row[1]))
