"""Speculation beside selection, in one launch: some programs attend, the others score.

XLA runs the kernels of a program one after another; programs of one launch run side by side. The
first ones attend to the predicted tiles as sparse decode does, and leave partial softmax states for
`repair`, or one for every tile where those read in vain are to be left out. The others bound the
logits of a tile of pages each (Quest, Alg. 1), and since nothing else is needed for it, advance the
predictor of the same pages: their level, their trend and their forecast for the next step (PRR,
Eqs. 2 and 3). For InfLLM-v2 they leave logits of compressed keys, and a second launch does the
rest. What comes next is one search for the best of both, scores and forecasts.

Bytes: keys and values of the predicted tiles, minimum and maximum of all pages, 8 + 16 bytes of
predictor per page, once.

Grid: pieces of the predicted lists, then rows by tiles of pages.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import _backend, _smoothing, _split, _tiles
from pallas_kernels.config import Config, choose, this_device
from pallas_kernels.key_weights import cut, forecasts, score_keys
from pallas_kernels.sparse_decode import attend_kernel

PAGES = 32  # per step of a scoring program
# Programs of each kind that a multiprocessor runs: all of them at once, so that none waits for the
# memory and the registers that others hold.
ATTENDING, SCORING = 1, 3


def _kernel(*refs: Any, attend: Callable, score: Callable, programs: int, takes: int) -> None:
  """q [R, G, H], k, v [R, S, H], guess [R, V], stop [B], what scoring `takes` -> what attention
  gives, what scoring gives. The first `programs` attend.
  """
  pid = pl.program_id(0)
  shared, held = refs[:5], refs[5 : 5 + takes]

  @pl.when(pid < programs)
  def _():
    attend(pid, shared, refs[5 + takes :])

  @pl.when(pid >= programs)
  def _():
    score(pid - programs, shared[0], shared[4], held, refs)


def _score_pages(
  pid: Array,
  q_ref: Any,
  stop_ref: Any,
  inputs: Sequence[Any],
  refs: Sequence[Any],
  *,
  pieces: int,
  steps: int,
  unit: int,
  group: str,
  predictor: str,
  scale: float,
) -> None:
  """Bounds of `steps` tiles of pages, one of `pieces` of a row, and their predictors' next state.

  inputs: low, high [R, P, H], level, trend [R, P], factors [B, 3]; the last four refs are what
  `_smoothing.advance` lists.
  """
  *edge_refs, level_ref, trend_ref, factors_ref = inputs
  rows, count, head_dim = edge_refs[0].shape
  groups = q_ref.shape[1]
  row = lax.div(pid, jnp.int32(pieces))
  first = (pid - row * pieces) * steps
  batch_row = lax.div(row, jnp.int32(rows // stop_ref.shape[0]))
  stop = stop_ref[batch_row]
  column = jnp.arange(_split.columns_of(head_dim))
  real = column < head_dim

  def pages(tile: Any) -> Array:
    return tile * PAGES + jnp.arange(PAGES)

  last = jnp.minimum(first + steps, pl.cdiv(count, PAGES))

  def fetch(tile: Any) -> tuple[Array, ...]:
    page = jnp.where(tile < last, pages(tile), count)  # nothing behind the last
    seen = (page < count) & (page * unit < stop)
    mask = seen[:, None] & real[None, :]
    index = row, page[:, None], column[None, :]
    low, high = (_backend.load(x, *index, mask=mask, evict="evict_first") for x in edge_refs)
    return low, high, *_smoothing.state(row, page, (level_ref, trend_ref))

  def query(g: int) -> Array:
    return _backend.load(q_ref, row, g, column, mask=real).astype(jnp.float32) * scale

  held = fetch(first)
  factors = _smoothing.factors(factors_ref, batch_row)
  queries = [query(g) for g in range(groups)]
  if group == "mean":
    queries = [sum(queries[1:], queries[0]) / groups]

  def step(tile: Any, held: tuple[Array, ...]) -> tuple[Array, ...]:
    # The next tile is on its way while this one is weighed.
    coming = fetch(tile + 1)
    low, high, level, trend = held
    low, high = low.astype(jnp.float32), high.astype(jnp.float32)
    bounds = (jnp.maximum(q[None, :] * low, q[None, :] * high).sum(axis=1) for q in queries)
    score = functools.reduce(jnp.maximum, bounds)
    how: dict[str, Any] = {"unit": unit, "predictor": predictor}
    _smoothing.advance(row, pages(tile), score, (level, trend), factors, refs[-4:], stop, **how)
    return coming

  lax.fori_loop(first, last, step, held)


def _score_keys(
  pid: Array,
  q_ref: Any,
  stop_ref: Any,
  inputs: Sequence[Any],
  refs: Sequence[Any],
  *,
  pieces: int,
  **how: Any,
) -> None:
  """Logits of one piece of the compressed keys [R, M, H]; the last three refs are `key_logits`'."""
  row = lax.div(pid, jnp.int32(pieces))
  stop = stop_ref[lax.div(row, jnp.int32(inputs[0].shape[0] // stop_ref.shape[0]))]
  operands = (q_ref, inputs[0]), refs[-3:]
  # A key that knows the newest token takes part from the next step on.
  score_keys(row, pid - row * pieces, *operands, jnp.int32(0), stop, stop - 1, span_sinks=0, **how)


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
  apart: bool = False,
  config: Config | None = None,
  interpret: bool | None = None,
) -> tuple[Sequence[Array], Sequence[Array]]:
  """Attention over predicted pages, and scores and forecasts of all pages.

  Args:
    q, k, v: as in `sparse_decode`.
    guess: int32, the predicted pages, no duplicates, −1 = hole.
    stop: int32, occupied slots of every row, the new token's included.
    low, high: minimum and maximum of every page's keys.
    level, trend: of every page, after the last step.
    factors: α, β and γ of every row.
    unit: tokens per page.
    group, predictor: as in `kvjax.Quest` and `kvjax.PRR`.
    apart: whether every predicted page is attended to by itself.
    config: how attention is cut; by device and shape if None.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    What `repair` takes as `written` with stored="pieces", or with `apart` what `attend_tiles`
    gives; and scores and forecasts [B, K, 2, P] (undefined and ∞ where there is no page), level and
    trend, and the `stop` that each of the former is for [B, K, 2].
  """
  rows, pages = q.shape[0] * q.shape[1], low.shape[2]
  each = jax.ShapeDtypeStruct((rows, pages), jnp.float32)
  both = jax.ShapeDtypeStruct((rows, 2, pages), jnp.float32)
  tiles = pl.cdiv(pages, PAGES)
  steps = pl.cdiv(tiles, max(1, SCORING * this_device().cores // rows))
  pieces = pl.cdiv(tiles, steps)
  how: dict[str, Any] = {"unit": unit, "group": group, "predictor": predictor}
  score = functools.partial(
    _score_pages, pieces=pieces, steps=steps, scale=q.shape[3] ** -0.5, **how
  )
  return _beside(
    *(q, k, v, guess, stop),
    score,
    [*(x.reshape(rows, *x.shape[2:]) for x in (low, high, level, trend)), factors],
    [both, each, each, jax.ShapeDtypeStruct((rows, 2), jnp.int32)],
    rows * pieces,
    unit=unit,
    apart=apart,
    config=config,
    interpret=interpret,
  )


def speculate_keys(
  q: Float[Array, "B K G H"],
  k: Float[Array, "B K S H"],
  v: Float[Array, "B K S H"],
  guess: Int[Array, "B K V"],
  stop: Int[Array, " B"],
  keys: Float[Array, "B K M H"],
  level: Float[Array, "B K P"],
  trend: Float[Array, "B K P"],
  factors: Float[Array, "B 3"],
  *,
  unit: int,
  stride: int,
  width: int,
  predictor: str = "holt",
  apart: bool = False,
  config: Config | None = None,
  interpret: bool | None = None,
) -> tuple[Sequence[Array], Sequence[Array]]:
  """Attention over predicted blocks beside the logits of compressed keys; then what they foresee.

  Scores need whole denominators, and so a second, small launch.

  Args:
    q, k, v, guess, stop, level, trend, factors, predictor, apart, config, interpret: as in
      `speculate`.
    keys: what stands for slots [j·stride, j·stride + width).
    unit: slots per block.
    stride, width: as in `key_logits`.

  Returns:
    As `speculate`.
  """
  rows, groups, count = q.shape[0] * q.shape[1], q.shape[2], keys.shape[2]
  tile, steps = cut(rows, count, None, None)
  pieces = pl.cdiv(count, tile * steps)
  how: dict[str, Any] = {"tile": tile, "steps": steps, "stride": stride, "width": width}
  score = functools.partial(_score_keys, pieces=pieces, scale=q.shape[3] ** -0.5, **how)
  part = jax.ShapeDtypeStruct((rows, groups, pieces), jnp.float32)
  written, partial = _beside(
    *(q, k, v, guess, stop),
    score,
    [keys.reshape(rows, *keys.shape[2:])],
    [jax.ShapeDtypeStruct((rows, groups, count), jnp.float32), part, part],
    rows * pieces,
    unit=unit,
    apart=apart,
    config=config,
    interpret=interpret,
  )
  how = {"stride": stride, "width": width, "unit": unit, "predictor": predictor}
  return written, forecasts(partial, stop, level, trend, factors, interpret=interpret, **how)


def _beside(
  q: Array,
  k: Array,
  v: Array,
  guess: Array,
  stop: Array,
  score: Callable,
  held: list[Array],
  scored: list[jax.ShapeDtypeStruct],
  scoring: int,
  *,
  unit: int,
  apart: bool,
  config: Config | None,
  interpret: bool | None,
) -> tuple[Sequence[Array], Sequence[Array]]:
  """One launch: attention over the predicted tiles, and `scoring` programs of `score`."""
  batch, heads, groups, head_dim = q.shape
  rows, width = batch * heads, guess.shape[2]
  interpret = _backend.interpreted(interpret)
  if config is None:
    config = choose(
      "sparse_decode",
      rows=rows,
      groups=groups,
      slots=width * unit,
      head_dim=head_dim,
      itemsize=q.dtype.itemsize,
      interpret=interpret,
    )
    most = max(1, ATTENDING * this_device().cores - rows)
    config = dataclasses.replace(config, programs=min(config.programs, most))
  scale = head_dim**-0.5
  if apart:
    programs, out = rows * width, _split.state_shapes(rows * width, groups, head_dim)
    tile = min(64, max(16, pl.next_power_of_2(unit)))

    def attend(pid: Array, shared: Sequence[Any], outs: Sequence[Any]) -> None:
      row = lax.div(pid, jnp.int32(width))
      refs = *shared[:4], None, shared[4], *outs[:3]
      _attend_tile(row, pid - row * width, *refs, unit=unit, tile=tile, scale=scale, sinks=0)

  else:
    programs = _split.most_pieces(rows, config.programs)
    out = _split.results(rows, groups, head_dim, config.programs, q.dtype)

    def attend(pid: Array, shared: Sequence[Any], outs: Sequence[Any]) -> None:
      how: dict[str, Any] = {
        "groups": groups,
        "unit": unit,
        "config": config,
        "scale": scale,
        "sinks": 0,
      }
      attend_kernel(*shared, *outs[:8], **how, pid=pid, full=True)

  flat = [x.reshape(rows, *x.shape[2:]) for x in (q, k, v, guess)]
  made = _backend.call(
    functools.partial(_kernel, attend=attend, score=score, programs=programs, takes=len(held)),
    *(*flat, stop, *held),
    grid=(programs + scoring,),
    out=[*out, *scored],
    warps=config.warps,
    stages=config.stages,
    name="speculate",
    interpret=interpret,
  )
  more = made[len(out) :]
  return made[: len(out)], [x.reshape(batch, heads, *x.shape[1:]) for x in more]


def _tile_kernel(*refs: Any, **how: Any) -> None:
  """q [R, G, H], k, v [R, S, H], table [R, W], start, stop [R] or one per batch row -> acc
  [R W, G, H], m (base 2), l [R W, G].
  """
  _attend_tile(pl.program_id(0), pl.program_id(1), *refs, **how)


def _attend_tile(
  row: Array, entry: Array, *refs: Any, unit: int, tile: int, scale: float, sinks: int
) -> None:
  """One listed tile of a row; refs as above."""
  q_ref, k_ref, v_ref, table_ref, start_ref, stop_ref, acc_ref, m_ref, l_ref = refs
  rows, slots, head_dim = k_ref.shape
  groups = q_ref.shape[1]
  place = row * table_ref.shape[1] + entry
  shared = rows // stop_ref.shape[0]
  start = jnp.int32(0) if start_ref is None else start_ref[row // shared]
  stop = jnp.minimum(stop_ref[row // shared], slots)
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
