"""What a layer's step is made of: its launches, one by one."""

from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.records import Part
from scripts.tools.tablemakers.results import GPU, Results

FILE = f"{GPU}/launches.json"


def table(results: Results) -> Part:
  """A line for each layer: the sum of its launches, and each of them in order."""
  rows, device = [], results.json(FILE, "about", "device")
  study = results.study(FILE, card=device, n=1, setting="cold caches, no CUDA graph")
  for layer, found in study.get("layers").items():
    times = [study.number("layers", layer, i, 1, setting=layer) for i in range(len(found))]
    names = [name.partition("__")[0] for name, _ in found]
    parts = [
      cells.number(time, f"{name} {{:.1f}}") for name, time in zip(names, times, strict=True)
    ]
    rows.append([layer, cells.worked_out(sum(times), "**{:.1f} µs**", *times), cells.listed(parts)])
  return cells.table(("a layer's step", "all", "launches, µs"), rows)
