"""A step's best tiles by the launch that scores them: `page_bounds` or `key_weights`, and `top_k`.

Programs score a piece of a row each and leave what they found; the last one of the row to arrive
searches that and writes the row's list (`_sieve`). Bytes: those of the scores, which are all that
costs; what is left is a few KiB a row, which the L2 cache holds.

Quest's pages take one launch. InfLLM-v2's blocks take two, since a weight needs its head's whole
denominator: the first leaves the logits of compressed keys (`key_logits`), as without this file.

Grid: one program per row and piece, as for the scores alone.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from . import _arrivals, _backend, quest
from ._bounds import Bounds, Sight, Wanted
from ._sieve import Left, Sieve, finish, leave, listed
from .key_weights import denominators, key_logits, weigh

PAGES, BLOCKS, WARPS = quest.TILE, 128, 4

Table = tuple[Int[Array, "B K W"], Int[Array, "B K"], Float[Array, "B K W"]]


def _kernel(
  scored: tuple[Any, ...],
  start_ref: Any,
  stop_ref: Any,
  _: Any,
  tables: tuple[Any, Any, Any],
  left: Left,
  *,
  score: Callable[..., Array],
  size: int,
  bounds: Bounds,
  wanted: Wanted,
  sieve: Sieve,
  interpret: bool,
) -> None:
  """What is scored, start, stop [R] or one per batch row, counters [R] -> table, scores [R, W],
  count [R], and `Left`. `score(row, tiles, sight, *scored)` makes the scores of some tiles.
  """
  row, piece = pl.program_id(0), pl.program_id(1)
  shared = left.scores.shape[0] // start_ref.shape[0]
  sight = Sight.of(bounds, start_ref[row // shared], stop_ref[row // shared])
  tile = piece * size + jnp.arange(size)
  leave(row, piece, score(row, tile, sight, *scored), sight, left, sieve)
  pieces = pl.cdiv(sieve.tiles, size)
  finish(row, pieces, sight, wanted, left, tables, sieve, interpret=interpret)


def _page_scores(
  row: Array, page: Array, sight: Sight, *refs: Any, group: str, scale: float
) -> Array:
  """q [R, G, H], low, high [R, P, H] -> bounds of some pages."""
  seen = sight.visible(page) & (page < refs[1].shape[1])
  columns = quest.columns(refs[0].shape[2])
  return quest.bounds(row, page, seen, columns, refs, group=group, scale=scale)


def _block_scores(
  row: Array, block: Array, sight: Sight, *refs: Any, blocks: int, ahead: int, each: int
) -> Array:
  """logits [R, G, M], m, l [R, G, C] -> weights of some blocks."""
  lse = denominators(row, refs[1:])
  return weigh(row, block, refs[0], lse, blocks=blocks, ahead=ahead, each=each, log=False)


def best_pages(
  q: Float[Array, "B K G H"],
  low: Float[Array, "B K P H"],
  high: Float[Array, "B K P H"],
  start: Int[Array, "B #K"],
  stop: Int[Array, "B #K"],
  arrivals: Int[Array, "B K"],
  *,
  unit: int,
  group: str = "mean",
  tile: int = PAGES,
  warps: int = WARPS,
  interpret: bool | None = None,
  **chosen: Any,
) -> tuple[Table, Int[Array, "B K"]]:
  """The pages of largest bounds: `top_k.best` of `quest.page_bounds`, by index, in one launch.

  Args:
    q, low, high, start, stop, unit, group, tile, warps, interpret: as of `quest.page_bounds`.
    arrivals: counters, int32, all 0, see `decode.decode_joined`.
    chosen: span_sinks, sinks, local, k, limit and dense_below, as of `top_k.best`.

  Returns:
    Table, count and scores as `top_k.best` gives them where they need not be ordered; and the
    counters, all 0.

  Raises:
    TypeError, ValueError: bad counters.
    NotImplementedError: more pages are to be chosen than one program looks at.
  """
  score = functools.partial(_page_scores, group=group, scale=q.shape[-1] ** -0.5)
  how: dict[str, Any] = {"score": score, "size": tile, "warps": warps, "unit": unit}
  how |= {"interpret": interpret, **chosen}
  return _launch((q, low, high), start, stop, arrivals, low.shape[2], **how)


def best_blocks(
  q: Float[Array, "B K G H"],
  keys: Float[Array, "B K M H"],
  start: Int[Array, "B #K"],
  stop: Int[Array, "B #K"],
  known: Int[Array, "B #K"],
  arrivals: Int[Array, "B K"],
  *,
  blocks: int,
  stride: int,
  width: int,
  unit: int,
  newest: int = 0,
  soft_cap: float | None = None,
  interpret: bool | None = None,
  **chosen: Any,
) -> tuple[Table, Int[Array, "B K"]]:
  """The blocks of largest weights: `top_k.best` of `key_weights`, by index, in two launches.

  Args:
    q, keys, start, stop, known, blocks, stride, width, newest, soft_cap: as of `key_weights`.
    arrivals: counters, int32, all 0, see `decode.decode_joined`.
    unit: slots per block, a multiple of stride.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.
    chosen: span_sinks, sinks, local, k, limit and dense_below, as of `top_k.best`.

  Returns, Raises: as `best_pages`.
  """
  partial = key_logits(
    *(q, keys, start, stop, known),
    stride=stride,
    width=width,
    span_sinks=chosen.get("span_sinks", 0),
    newest=newest,
    soft_cap=soft_cap,
    interpret=interpret,
  )
  overlap: dict[str, Any] = {"ahead": width // stride - 1, "each": unit // stride}
  score = functools.partial(_block_scores, blocks=blocks, **overlap)
  how: dict[str, Any] = {"score": score, "size": BLOCKS, "unit": unit, "interpret": interpret}
  return _launch(partial, start, stop, arrivals, blocks, **how, **chosen)


def _launch(
  scored: Sequence[Array],
  start: Array,
  stop: Array,
  arrivals: Array,
  tiles: int,
  *,
  score: Callable[..., Array],
  size: int,
  warps: int = WARPS,
  unit: int,
  span_sinks: int = 0,
  sinks: int,
  local: int,
  k: int,
  limit: int | None = None,
  dense_below: int = 0,
  interpret: bool | None,
) -> tuple[Table, Array]:
  """Scores a row's tiles in pieces of `size`, and lists the best."""
  shape = scored[0].shape[:2]
  _arrivals.check(arrivals, shape)
  rows, k = shape[0] * shape[1], min(k, tiles)
  limit = k if limit is None else min(limit, k)
  bounds = Bounds(unit, span_sinks, min(sinks, tiles), min(local, tiles))
  sieve = Sieve.of(tiles, k, size)
  if sieve is None:
    raise NotImplementedError(f"k: found {k} of {tiles} tiles, expected fewer")
  width = max(min(bounds.sinks + bounds.local + k, tiles), 1)
  (table, ranked, count), left = _backend.call(
    functools.partial(
      _kernel,
      score=score,
      size=size,
      bounds=bounds,
      wanted=Wanted((k,), (limit,), dense_below),
      sieve=sieve,
      interpret=_backend.interpreted(interpret),
    ),
    tuple(x.reshape(rows, *x.shape[2:]) for x in scored),
    *(start.reshape(-1), stop.reshape(-1), arrivals.reshape(rows)),
    grid=(rows, pl.cdiv(tiles, size)),
    out=[tuple(listed(rows, width)), Left.like(rows, sieve)],
    warps=warps,
    stages=1,
    name="score_and_select",
    interpret=interpret,
    aliases={len(scored) + 2: 6},
  )
  each = *shape, -1
  found = table.reshape(each), count.reshape(shape), ranked.reshape(each)
  return found, left.arrivals.reshape(shape)
