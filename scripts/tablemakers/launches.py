"""What a layer's step is made of: its launches, one by one."""

from . import cells
from .results import GPU, Results

FILE = f"{GPU}/launches.json"


def table(results: Results) -> list[str]:
  """A line for each layer: the sum of its launches, and each of them in order."""
  rows = []
  for layer, found in results.json(FILE, "layers").items():
    parts = ", ".join(f"{name.partition('__')[0]} {time:.1f}" for name, time in found)
    rows.append([layer, f"**{sum(time for _, time in found):.1f} µs**", parts])
  return cells.table(("a layer's step", "all", "launches, µs"), rows)
