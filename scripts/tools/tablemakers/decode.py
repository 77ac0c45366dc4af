"""Dense decode: one kernel over the whole cache."""

from scripts.tools.tablemakers import cells
from scripts.tools.tablemakers.records import Part
from scripts.tools.tablemakers.results import Case, Results

# Of torch's SDPA the faster of its two layouts.
CUDNN, FLASH = ("torch cuDNN", "torch cuDNN (heads)"), ("torch flash", "torch flash (heads)")
SHAPES = {
  "B1 T128K 8x4": "B1 T128K, 8×4",
  "B8 T32K 8x4": "B8 T32K, 8×4",
  "B32 T8K 8x4": "B32 T8K, 8×4",
  "B16 T4K 32x1": "B16 T4K, 32×1 (no groups)",
  "B8 T16K 8x4 H256": "B8 T16K, 8×4, H 256",
  "B32 T8K 3x3 H64": "B32 T8K, 3×3, H 64",
  "B1 T32K 8x4": "B1 T32K, 8×4",
  "B8 T4K 8x4": "B8 T4K, 8×4",
  "B1 T4K 8x4": "B1 T4K, 8×4",
  "B16 T32K 8x4 ragged": "16 ragged rows of 1K to 32K, 8×4",
}
LARGE = ("B1 T128K 8x4", "B8 T32K 8x4", "B32 T8K 8x4", "B1 T32K 8x4", "B8 T4K 8x4")


def share_of_read(case: Case) -> cells.Pair:
  """A streaming read of the same bytes over our time."""
  return cells.gain(case.time("kvjax"), case.time("read"))


def table(results: Results) -> Part:
  rows = []
  for name, words in SHAPES.items():
    case = results.bench("decode").case(name)
    peers = [_fastest(case, names) for names in (CUDNN, ("jax cuDNN",), FLASH, ("FlashInfer",))]
    rows.append([words, cells.ours(case.time("kvjax")), cells.ratio(*share_of_read(case)), *peers])
  head = ("shape (KV heads × group)", "kvjax", "share of read", "torch cuDNN SDPA", "jax cuDNN")
  return cells.table((*head, "torch flash SDPA", "FlashInfer"), rows)


def _fastest(case: Case, names: tuple[str, ...]) -> str:
  """The faster of a peer's layouts; a peer that does not take the shape has none."""
  there = [case.time(name) for name in names if case.has(name)]
  return cells.time(min(there, key=lambda timing: timing.us)) if there else "–"


def in_short(results: Results) -> str:
  """The line of the results in short."""
  cases = [results.bench("decode").case(name) for name in LARGE]
  beside = []
  for case in cases:
    peers = [case.time(name) for name in ("jax cuDNN", *CUDNN) if case.has(name)]
    best = min(peers, key=lambda timing: timing.us)
    beside.append(cells.over(case.time("kvjax"), best))
  return cells.join(
    "{} of a streaming read from T32K over all rows on (`8×4` heads of `128`); {} the time of "
    "cuDNN, the faster of torch's and jax's",
    cells.span(map(share_of_read, cases)),
    cells.span(beside, unit=" ×"),
  )
