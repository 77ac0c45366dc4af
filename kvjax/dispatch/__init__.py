"""Operations of the moves, each by the implementation that `Env.impl` names (`table`).

A file has what an operation computes (or `kvjax.ops` does), what its kernel cannot do, and the
choice. The only place that imports kernels, and lazily.
"""

from kvjax.dispatch.entering import enter_shared, enter_token, enters, keep_rows
from kvjax.dispatch.prompt import attend_anywhere, attend_prompt, column_mass
from kvjax.dispatch.scores import block_weights, page_bounds, pooled, token_weights
from kvjax.dispatch.selection import (
  Table,
  best_tiles,
  best_tiles_of_each,
  other_tiles,
  searches_together,
)
from kvjax.dispatch.step import (
  attend,
  attend_entries,
  attend_ranges,
  rounded,
  sparing,
  with_codes,
)
from kvjax.dispatch.summaries import renew_extremes, renew_mean
from kvjax.dispatch.table import KERNELS, UNRUN, choose, kernel

__all__ = [
  "KERNELS",
  "UNRUN",
  "Table",
  "attend",
  "attend_anywhere",
  "attend_entries",
  "attend_prompt",
  "attend_ranges",
  "best_tiles",
  "best_tiles_of_each",
  "block_weights",
  "choose",
  "column_mass",
  "enter_shared",
  "enter_token",
  "enters",
  "keep_rows",
  "kernel",
  "other_tiles",
  "page_bounds",
  "pooled",
  "renew_extremes",
  "renew_mean",
  "rounded",
  "searches_together",
  "sparing",
  "token_weights",
  "with_codes",
]
