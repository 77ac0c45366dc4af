"""Speculation beside selection, in one launch: some programs attend, the others score pages.

XLA runs the kernels of a program one after another; programs of one launch run side by side. The
first ones attend to the predicted tiles as sparse decode does, and leave partial softmax states for
`repair`. The others bound the logits of a tile of pages each (Quest, Alg. 1), and since nothing
else is needed for it, advance the predictor of the same pages: their level, their trend and their
forecast for the next step (PRR, Eqs. 2 and 3). What comes next is one search for the best of both,
scores and forecasts.

Bytes: keys and values of the predicted tiles, minimum and maximum of all pages, 8 + 16 bytes of
predictor per page, once.

Grid: pieces of the predicted lists, then rows by tiles of pages.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import _backend, _split, _tiles
from pallas_kernels.config import Config, choose
from pallas_kernels.sparse_decode import attend_kernel

PAGES = 32  # per scoring program


def _kernel(
  *refs: Any,
  groups: int,
  unit: int,
  config: Config,
  scale: float,
  pieces: int,
  pages: int,
  group: str,
  predictor: str,
) -> None:
  """q [R, G, H], k, v [R, S, H], guess [R, V], count [R], start, stop [B], low, high [R, P, H],
  level, trend [R, P], factors [B, 3] -> what `_split.results` lists, and both [R, 2, P] (scores,
  forecasts), level, trend [R, P], stops [R, 2].
  """
  attend = refs[:7]
  pid = pl.program_id(0)

  @pl.when(pid < pieces)
  def _():
    outs = refs[12:20]
    attend_kernel(
      *attend, *outs, groups=groups, unit=unit, config=config, scale=scale, sinks=0, pid=pid
    )

  @pl.when(pid >= pieces)
  def _():
    q_ref, stop_ref = refs[0], refs[6]
    _score(
      pid - pieces,
      q_ref,
      stop_ref,
      refs[7:12],
      refs[20:],
      unit=unit,
      pages=pages,
      group=group,
      predictor=predictor,
      scale=scale,
    )


def _score(
  pid: Array,
  q_ref: Any,
  stop_ref: Any,
  inputs: Sequence[Any],
  outs: Sequence[Any],
  *,
  unit: int,
  pages: int,
  group: str,
  predictor: str,
  scale: float,
) -> None:
  """Bounds of one tile of pages, and their predictors' next state."""
  low_ref, high_ref, level_ref, trend_ref, factors_ref = inputs
  both_ref, new_level_ref, new_trend_ref, stops_ref = outs
  rows, count, head_dim = low_ref.shape
  groups = q_ref.shape[1]
  tiles = pl.cdiv(count, pages)
  row = lax.div(pid, jnp.int32(tiles))
  page = (pid - row * tiles) * pages + jnp.arange(pages)
  batch_row = lax.div(row, jnp.int32(rows // stop_ref.shape[0]))
  stop = stop_ref[batch_row]
  inside = page < count
  seen = inside & (page * unit < stop)
  column = jnp.arange(_split.columns_of(head_dim))
  real = column < head_dim
  mask = seen[:, None] & real[None, :]
  low, high = (
    _backend.load(ref, row, page[:, None], column[None, :], mask=mask, evict="evict_first").astype(
      jnp.float32
    )
    for ref in (low_ref, high_ref)
  )

  def query(g: int) -> Array:
    return _backend.load(q_ref, row, g, column, mask=real).astype(jnp.float32)

  def bound(q: Array) -> Array:
    q = (q * scale)[None, :]
    return jnp.maximum(q * low, q * high).sum(axis=1)

  if group == "mean":
    score = bound(sum(query(g) for g in range(groups)) / groups)
  else:
    score = functools.reduce(jnp.maximum, (bound(query(g)) for g in range(groups)))

  alpha, beta, gamma = (factors_ref[batch_row, i] for i in range(3))
  old_level = _backend.load(level_ref, row, page, mask=inside)
  old_trend = _backend.load(trend_ref, row, page, mask=inside)
  newest = stop - 1  # the new token's position; the last one's is one less
  begun = page < lax.div(jnp.maximum(newest - 1, 0), jnp.int32(unit))
  there = page < lax.div(newest, jnp.int32(unit))
  before = old_level + old_trend if predictor == "holt" else old_level
  level = alpha * score + (1 - alpha) * before
  trend = beta * (level - old_level) + (1 - beta) * old_trend
  level = jnp.where(begun, level, jnp.where(there, score, 0.0))
  trend = jnp.where(begun, trend, 0.0)
  ahead = jnp.where(there, level + gamma * trend, jnp.inf)
  _backend.store(both_ref, row, 0, page, value=score, mask=seen)
  _backend.store(both_ref, row, 1, page, value=ahead, mask=inside)
  _backend.store(new_level_ref, row, page, value=level, mask=inside)
  _backend.store(new_trend_ref, row, page, value=trend, mask=inside)
  stops_ref[row, 0] = stop  # all programs of a row write the same
  stops_ref[row, 1] = stop + 1


def speculate(
  q: Float[Array, "B K G H"],
  k: Float[Array, "B K S H"],
  v: Float[Array, "B K S H"],
  guess: Int[Array, "B K V"],
  stop: Int[Array, " B"],
  low: Float[Array, "B K P H"],
  high: Float[Array, "B K P H"],
  level: Float[Array, "B K P"],
  trend: Float[Array, "B K P"],
  factors: Float[Array, "B 3"],
  *,
  unit: int,
  group: str = "mean",
  predictor: str = "holt",
  config: Config | None = None,
  interpret: bool | None = None,
) -> tuple[
  Sequence[Array],
  Float[Array, "B K 2 P"],
  Int[Array, "B K 2"],
  Float[Array, "B K P"],
  Float[Array, "B K P"],
]:
  """Attention over predicted pages, and scores and forecasts of all pages.

  Args:
    q, k, v: as in `sparse_decode`.
    guess: int32, the predicted pages, no duplicates, −1 behind the end.
    stop: int32, occupied slots of every row, the new token's included.
    low, high: minimum and maximum of every page's keys.
    level, trend: of every page, after the last step.
    factors: α, β and γ of every row.
    unit: tokens per page.
    group, predictor: as in `kvjax.Quest` and `kvjax.PRR`.
    config: how attention is cut; by device and shape if None.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    What `repair` takes as `written` with stored="pieces"; scores and forecasts (undefined and ∞
    where there is no page), and the `stop` that each is for; level and trend.
  """
  batch, heads, groups, head_dim = q.shape
  rows, pages = batch * heads, low.shape[2]
  interpret = _backend.interpreted(interpret)
  config = config or choose(
    "sparse_decode",
    rows=rows,
    groups=groups,
    slots=guess.shape[2] * unit,
    head_dim=head_dim,
    itemsize=q.dtype.itemsize,
    interpret=interpret,
  )
  flat = [x.reshape(rows, *x.shape[2:]) for x in (q, k, v, guess)]
  count = jnp.full((rows,), guess.shape[2], jnp.int32)  # holes are skipped
  pieces = _split.most_pieces(rows, config.programs)
  written = _backend.call(
    functools.partial(
      _kernel,
      groups=groups,
      unit=unit,
      config=config,
      scale=head_dim**-0.5,
      pieces=pieces,
      pages=PAGES,
      group=group,
      predictor=predictor,
    ),
    *flat,
    count,
    jnp.zeros_like(stop),
    stop,
    *(x.reshape(rows, *x.shape[2:]) for x in (low, high, level, trend)),
    factors,
    grid=(pieces + rows * pl.cdiv(pages, PAGES),),
    out=[
      *_split.results(rows, groups, head_dim, config.programs, q.dtype),
      jax.ShapeDtypeStruct((rows, 2, pages), jnp.float32),
      *[jax.ShapeDtypeStruct((rows, pages), jnp.float32)] * 2,
      jax.ShapeDtypeStruct((rows, 2), jnp.int32),
    ],
    warps=config.warps,
    stages=config.stages,
    name="speculate",
    interpret=interpret,
  )
  both, level, trend, stops = (x.reshape(batch, heads, *x.shape[1:]) for x in written[8:])
  return written[:8], both, stops, level, trend


def _tile_kernel(*refs: Any, groups: int, unit: int, tile: int, scale: float, sinks: int) -> None:
  """q [R, G, H], k, v [R, S, H], table [R, W], start, stop [R] or one per batch row -> acc
  [R W, G, H], m (base 2), l [R W, G].
  """
  q_ref, k_ref, v_ref, table_ref, start_ref, stop_ref, acc_ref, m_ref, l_ref = refs
  rows, slots, head_dim = k_ref.shape
  row, entry = pl.program_id(0), pl.program_id(1)
  place = row * table_ref.shape[1] + entry
  shared = rows // start_ref.shape[0]
  start, stop = start_ref[row // shared], jnp.minimum(stop_ref[row // shared], slots)
  lanes = jnp.arange(_split.lanes_of(groups))
  columns = jnp.arange(_split.columns_of(head_dim))
  inside = (columns < head_dim)[None, :]
  real = (lanes < groups)[:, None] & inside
  named = table_ref[row, entry]

  def fetch(i: Any) -> _tiles.Tile:
    within = i * tile + jnp.arange(tile)
    slot = named * unit + within
    keep = (within < unit) & (slot < stop) & ((slot < sinks) | (slot >= start))
    slot = jnp.where(keep, slot, 0)
    index, mask = (row, slot[:, None], columns[None, :]), keep[:, None] & inside
    k, v = (_backend.load(ref, *index, mask=mask) for ref in (k_ref, v_ref))
    return _tiles.Tile(k, v, keep)

  q = _backend.load(q_ref, row, lanes[:, None], columns[None, :], mask=real)
  carry = _tiles.start(lanes.size, columns.size)
  walked = jnp.where(named >= 0, jnp.int32(pl.cdiv(unit, tile)), 0)
  carry = _tiles.walk(carry, q, fetch, 0, walked, scale=scale)
  _backend.store(acc_ref, place, lanes[:, None], columns[None, :], value=carry.acc, mask=real)
  _backend.store(m_ref, place, lanes, value=carry.m, mask=lanes < groups)
  _backend.store(l_ref, place, lanes, value=carry.l, mask=lanes < groups)


def attend_tiles(
  q: Float[Array, "B K G H"],
  k: Float[Array, "B K S H"],
  v: Float[Array, "B K S H"],
  table: Int[Array, "B K W"],
  start: Int[Array, "B #K"],
  stop: Int[Array, "B #K"],
  *,
  unit: int,
  sinks: int = 0,
  interpret: bool | None = None,
) -> Sequence[Array]:
  """Attention to every listed tile by itself: acc [B K W, G, H], m (base 2) and l [B K W, G].

  A merged state cannot give up what turns out not to be wanted; these can be left out.
  Arguments as in `sparse_decode`; −1 in the table = hole, whose state is empty.
  """
  batch, heads, groups, head_dim = q.shape
  rows, width = batch * heads, table.shape[2]
  flat = [x.reshape(rows, *x.shape[2:]) for x in (q, k, v, table)]
  return _backend.call(
    functools.partial(
      _tile_kernel,
      groups=groups,
      unit=unit,
      tile=min(64, max(16, pl.next_power_of_2(unit))),
      scale=head_dim**-0.5,
      sinks=sinks,
    ),
    *flat,
    start.reshape(-1),
    stop.reshape(-1),
    grid=(rows, width),
    out=_split.state_shapes(rows * width, groups, head_dim),
    warps=4,
    stages=2,
    name="attend_tiles",
    interpret=interpret,
  )
