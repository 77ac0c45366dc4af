"""The README's results in short: a line for each section."""

from . import art, cells, decode, gpus, longflow, prr, real, selection, steps, streams
from .results import Results

LINES = {
  "dense decode": decode.in_short,
  "whole steps, Llama-3.1-8B's shape": steps.in_short,
  "LongFlow": longflow.in_short,
  "Quest, InfLLM-v2, CPE at T128K": selection.in_short,
  "PRR": prr.in_short,
  "ART": art.in_short,
  "Ltri": streams.in_short,
  "two GPUs": gpus.in_short,
  "a real model": real.in_short,
}


def table(results: Results) -> list[str]:
  lines = ([label, line(results)] for label, line in LINES.items())
  return cells.table(("", ""), (row for row in lines if row[1]))
