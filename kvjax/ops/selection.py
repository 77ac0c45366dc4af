"""Search for the tiles of highest score."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core.context import At
from kvjax.core.plan import Span
from kvjax.ops import tiles
from kvjax.ops.table import declare, pallas

declare("best_tiles", pallas="kvjax.kernels.selection.top_k:best")
declare("best_tiles_of_each", pallas="kvjax.kernels.selection.top_k:best_of_each")
declare("other_tiles", pallas="kvjax.kernels.selection.top_k:others")

Table = tuple[Int[Array, "B K W"], Int[Array, "B K"], Float[Array, "B K W"]]


def holds(at: At, count: int, k: int) -> bool:
  """True if the kernels' programs can hold the k best of `count` tiles.

  If not, the reference searches; under `impl="pallas"` the kernel is called, and says so.
  """
  if at.env.impl != "auto":
    return True
  search = importlib.import_module("kvjax.kernels.selection.top_k")
  # How rows are cut depends on the device and on how many there are; whether they can be does not.
  return search.cuts(1, count, min(k, count), search.LANES, 1) is not None


def _search(at: At, operation: str, count: int, k: int) -> Callable | None:
  """The kernel of a search for the k best of `count` tiles; None: the reference."""
  run = pallas(at, operation)
  return run if run is not None and holds(at, count, k) else None


def searches_together(at: At) -> bool:
  """True if two searches take hardly longer than one, made as `best_tiles_of_each`."""
  return pallas(at, "best_tiles") is not None


def best_tiles(
  at: At,
  scores: Array,
  span: Span,
  *,
  k: int,
  limit: int | None = None,
  dense_below: int = 0,
  ordered: bool = False,
  **forced: int,
) -> Table:
  """`ops.tiles.best`. A kernel lists tiles by index where attention is to all of them anyway.

  Rows of `dense_below` slots and more get `limit` tiles, if it is given; shorter ones get k.
  `ordered`: whether attention minds the order of the table.
  """
  if run := _search(at, "best_tiles", scores.shape[-1], k):
    where = scores.astype(jnp.float32), span.start, span.stop
    how: dict[str, Any] = {"span_sinks": span.sinks, "ordered": ordered, **forced}
    return run(*where, k=k, limit=limit, dense_below=dense_below, **how)
  each = None if limit is None else jnp.where(span.stop < dense_below, k, limit)
  return tiles.best(scores, span, k=k, limit=each, **forced)


def best_tiles_of_each(
  at: At,
  scores: Float[Array, "B K N P"],
  spans: Sequence[Span],
  *,
  stops: Int[Array, "B K N"] | None = None,
  alike: bool = False,
  k: Sequence[int],
  limit: Sequence[int],
  dense_below: int = 0,
  ordered: bool = False,
  **forced: int,
) -> Sequence[Table]:
  """The results of N calls of `best_tiles`, by one search where a kernel does that.

  Args:
    at: where this runs; slots are not split.
    scores: of every tile, for each call.
    spans, k, limit: of each call; `dense_below`, `ordered` and what is forced are the same.
    stops: one past the last slot of each span, where the caller has them.
    alike: whether all spans start where the first one does.
  """
  run = _search(at, "best_tiles_of_each", scores.shape[-1], max(k))
  if run is None:
    each = zip(spans, k, limit, strict=True)
    same: dict[str, Any] = {"dense_below": dense_below, "ordered": ordered, **forced}
    return [
      best_tiles(at, scores[:, :, i], span, k=n, limit=most, **same)
      for i, (span, n, most) in enumerate(each)
    ]

  def joined(each: Sequence[Array]) -> Int[Array, "B K N"]:
    return jnp.stack([jnp.broadcast_to(x, (x.shape[0], scores.shape[1])) for x in each], 2)

  start = spans[0].start if alike else joined([s.start for s in spans])
  stop = joined([s.stop for s in spans]) if stops is None else stops
  how: dict[str, Any] = {"span_sinks": spans[0].sinks, "ordered": ordered, **forced}
  wide = scores.astype(jnp.float32)
  return run(wide, start, stop, k=k, limit=limit, dense_below=dense_below, **how)


def other_tiles(
  at: At,
  scores: Array,
  span: Span,
  *,
  active: Array | None = None,
  ordered: bool = True,
  first: int = 0,
  k: int,
  **chosen: int,
) -> tuple[Array, Array]:
  """`ops.tiles.others`; heads that are not `active` [B, K] may be given anything.

  Unless they are to be `ordered`, a kernel lists the best `first` of them by index, then the others
  by index.
  """
  if run := _search(at, "other_tiles", scores.shape[-1], k):
    active = None if active is None else active.astype(jnp.int32)
    where = scores.astype(jnp.float32), span.start, span.stop
    how: dict[str, Any] = {"span_sinks": span.sinks, "ordered": ordered, "first": first, "k": k}
    return run(*where, active=active, **how, **chosen)
  best, index = tiles.others(scores, span, k=k, **chosen)
  if ordered or pallas(at, "other_tiles") is None:
    return best, index
  behind = jnp.where(index < 0, scores.shape[-1], index)
  behind, best = jax.lax.sort((behind, best), num_keys=1)
  return best, jnp.where(behind == scores.shape[-1], -1, behind)
