"""six whole steps that stand for the library, in minutes: run before and after a change

kvjax bench gate --out before
kvjax bench gate --out after
kvjax bench --compare before after --fail-slower
"""

from collections.abc import Iterator

import kvjax
from kvjax.programs.suites import Case, suite
from scripts.benches import e2e_sparse

REPETITIONS = 8


def marks(quick: bool) -> dict[str, tuple[kvjax.Method, int, int]]:
  """Methods, rows and tokens of a row, by name."""
  if quick:
    return {"LongFlow": (kvjax.LongFlow(64, window_size=8), 2, 128)}
  return {
    "Full B1 T4K": (kvjax.Full(), 1, 4 << 10),
    "Full B8 T32K": (kvjax.Full(), 8, 32 << 10),
    "Quest B1 T128K": (kvjax.Quest(4096), 1, 128 << 10),
    "SnapKV B64 3,200 slots": (kvjax.SnapKV(3200), 64, 16 << 10),
    "LongFlow B64 3,200 slots": (kvjax.LongFlow(3200), 64, 16 << 10),
    "int8 B8 T32K": (kvjax.Quantised(kvjax.Full(), bits=8), 8, 32 << 10),
  }


@suite
def cases(quick: bool, peers: bool) -> Iterator[tuple]:
  """One after another: each has the memory to itself."""
  name = "tiny" if quick else "Llama-3.1-8B"
  for label, mark in marks(quick).items():
    yield label, case, name, *mark, quick


def case(label: str, name: str, method: kvjax.Method, batch: int, tokens: int, quick: bool) -> Case:
  """A step of a method whose caches are full, beside the bytes that it moves."""
  return e2e_sparse.case(label, name, {"kvjax": method}, batch, tokens, quick)
