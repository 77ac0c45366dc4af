"""whole decode steps of many rows: what evicting, selecting and codes gain in a live batch"""

from collections.abc import Iterator

import kvjax
from kvjax.programs.suites import suite
from scripts.benches import gate

REPETITIONS = 8
ROWS, TOKENS = (64, 128, 256), 4 << 10


def methods(quick: bool) -> dict[str, kvjax.Method]:
  """All rows hold `TOKENS` tokens, or a budget of a quarter."""
  budget = 64 if quick else TOKENS // 4
  dense = {"dense_layers": 1, "page": 8} if quick else {}
  return {
    "Full": kvjax.Full(),
    "int8": kvjax.Quantised(kvjax.Full(), bits=8),
    f"Quest, {budget:,} tokens": kvjax.Quest(budget, **dense),
    f"SnapKV, {budget:,} slots": kvjax.SnapKV(budget),
    f"LongFlow, {budget:,} slots": kvjax.LongFlow(budget),
  }


@suite
def cases(quick: bool, peers: bool) -> Iterator[tuple]:
  """One after another; a batch that takes more than the memory is named."""
  name, tokens = ("tiny", 128) if quick else ("Llama-3.1-8B", TOKENS)
  for batch in (2,) if quick else ROWS:
    for label, method in methods(quick).items():
      yield f"{label} B{batch}", gate.case, name, method, batch, tokens, quick
