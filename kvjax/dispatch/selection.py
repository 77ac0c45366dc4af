"""Which tiles have the highest scores."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.dispatch.table import choose, kernel
from kvjax.ops import tiles
from kvjax.types import At, Span


def best_tiles(
  at: At,
  scores: Array,
  span: Span,
  *,
  k: int,
  limit: int | None = None,
  dense_below: int = 0,
  **forced: int,
) -> tuple[Array, Array, Array]:
  """`ops.tiles.best`. A kernel lists tiles by index where attention is to all of them anyway.

  Rows of `dense_below` slots and more get `limit` tiles, if it is given; shorter ones get k.
  """
  if choose("best_tiles", at.env.impl) == "pallas":
    run = kernel("best_tiles", "pallas")
    where = scores.astype(jnp.float32), span.start, span.stop
    how: dict[str, Any] = {"span_sinks": span.sinks, "ordered": at.top.ordered, **forced}
    try:
      return run(*where, k=k, limit=limit, dense_below=dense_below, **how)
    except NotImplementedError:  # more than the kernel can hold
      if at.env.impl != "auto":
        raise
  each = None if limit is None else jnp.where(span.stop < dense_below, k, limit)
  return tiles.best(scores, span, k=k, limit=each, **forced)


def best_tiles_of_each(
  at: At, scores: Array, start: Array, stop: Array, **how: Any
) -> Sequence[tuple[Array, Array, Array]] | None:
  """What N calls of `best_tiles` give, by one search; None where no kernel does that.

  scores [B, K, N, P], start [B, #K] or [B, #K, #N], stop [B, #K, #N]; `how` as the kernel takes it.
  """
  if choose("best_tiles_of_each", at.env.impl) != "pallas":
    return None
  run = kernel("best_tiles_of_each", "pallas")
  try:
    return run(scores.astype(jnp.float32), start, stop, ordered=at.top.ordered, **how)
  except NotImplementedError:
    if at.env.impl != "auto":
      raise
    return None


def other_tiles(
  at: At,
  scores: Array,
  span: Span,
  *,
  active: Array | None = None,
  ordered: bool = True,
  first: int = 0,
  **chosen: int,
) -> tuple[Array, Array]:
  """`ops.tiles.others`; heads that are not `active` [B, K] may be given anything.

  Unless they are to be `ordered`, a kernel lists the best `first` of them by index, then the others
  by index.
  """
  if choose("other_tiles", at.env.impl) != "pallas":
    return tiles.others(scores, span, **chosen)
  run = kernel("other_tiles", "pallas")
  active = None if active is None else active.astype(jnp.int32)
  where = scores.astype(jnp.float32), span.start, span.stop
  how: dict[str, Any] = {"span_sinks": span.sinks, "ordered": ordered, "first": first}
  try:
    return run(*where, active=active, **how, **chosen)
  except NotImplementedError:
    if at.env.impl != "auto":
      raise
    best, index = tiles.others(scores, span, **chosen)
    if ordered:
      return best, index
    behind = jnp.where(index < 0, scores.shape[-1], index)
    behind, best = jax.lax.sort((behind, best), num_keys=1)
    return best, jnp.where(behind == scores.shape[-1], -1, behind)
