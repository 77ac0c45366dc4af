"""CPE's step without groups, where retrievals are shared."""

from kvjax.programs import bench_files
from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.records import Part
from scripts.tools.tablemakers.results import Results

SHAPES = tuple((batch, tokens) for batch in (8, 16) for tokens in (1024, 2048, 4096))


def table(results: Results) -> Part:
  rows = []
  for batch, tokens in SHAPES:
    for keys in ("random", "clustered"):
      case = results.bench("cpe").case(f"B{batch} T{tokens} 32x1 1/8, {keys} keys")
      ours, dense, flash = (case.time(name) for name in ("kvjax", "dense decode", "torch flash"))
      (share,) = case.numbers(r"([\d.]+) of the limit by bytes")
      (visited,) = case.numbers(r"([\d.]+) tokens a head at a budget")
      rows.append(
        [
          f"B{batch} T{tokens >> 10}K, {keys} keys",
          cells.number(visited, "{:.0f}"),
          cells.ours(ours),
          cells.time(dense),
          cells.ratio(*cells.gain(ours, dense)),
          cells.ratio(share, dense),
          cells.time(flash),
          cells.ratio(*cells.gain(ours, flash)),
        ]
      )
  head = ("", "tokens a head", "CPE", "dense", "times as fast", "of the limit by bytes")
  return cells.table((*head, "torch flash SDPA", "times as fast"), rows)


def alone(results: Results) -> Part:
  """Attention to a step's list alone, by how its tokens lie, beside dense decode over as many."""
  rows = []
  for batch, tokens in SHAPES:
    case = results.bench("cpe").case(f"B{batch} T{tokens} 32x1 1/8, the list alone")
    dense = case.time("dense decode")
    lists = [case.time(name) for name in ("apart", "runs of 8", "in a row")]
    share = case.bytes / bench_files.BANDWIDTH / (lists[0].us * 1e-6)
    times = [cells.ours(lists[0]), *map(cells.time, (*lists[1:], dense))]
    rows.append([f"B{batch} T{tokens >> 10}K", *times, cells.worked_out(share, "{:.2f}", lists[0])])
  head = ("", "apart", "in runs of 8", "in a row", "dense decode over as many")
  return cells.table((*head, "apart, of 4.45 TB/s"), rows)
