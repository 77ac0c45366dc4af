"""Speculation beside selection, in one launch: some programs attend, the others score.

XLA runs the kernels of a program one after another; programs of one launch run side by side. The
first ones attend to the predicted tiles, a few keys each, and leave partial softmax states for
`repair`, or one for every tile where those read in vain are to be left out. The others bound the
logits of a tile of pages each (Quest, Alg. 1), and since nothing else is needed for it, advance the
predictor of the same pages: their level, their trend and their forecast for the next step (PRR,
Eqs. 2 and 3). For InfLLM-v2 they leave logits of compressed keys, and a second launch does the
rest. What comes next is one search for the best of both, scores and forecasts.

All programs of a launch get the registers and the shared memory of the more demanding kind. So both
kinds are small, and do one thing at once: many then run on a multiprocessor, each with its bytes in
flight from its first instruction on, and none holds a place that another waits for. On an H200 both
take 5.7 µs of 32K tokens side by side and 10.8 one after the other, 13.9 and 17.6 of 128K; at 512K,
where the bytes take as long, 40.8 and 42.1 (`bench prr`).

Bytes: keys and values of the predicted tiles, minimum and maximum of all pages, 8 + 16 bytes of
predictor per page, once (8 without a state).

Grid: parts of the predicted lists, then rows by tiles of pages.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.kernels.common import backend, smoothing, split_k, tiling
from kvjax.kernels.common.config import fitted_tile
from kvjax.kernels.common.devices import this_device
from kvjax.kernels.decode import stored
from kvjax.kernels.selection.key_weights import cut, forecasts, score_keys

PAGES = 32  # of a scoring program
KEYS = 32  # per step of an attending program
# Attending programs that a multiprocessor gets, at most, before they take more steps than one.
ATTENDING = 4
WARPS, STAGES = 4, 3


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


def _attend(
  pid: Array, shared: Sequence[Any], outs: Sequence[Any], *, parts: int, **how: Any
) -> None:
  """Attention to one of the `parts` of a row's list, all of which may be read."""
  row = lax.div(pid, jnp.int32(parts))
  refs = *shared[:4], None, shared[4], *outs[:3]
  _attend_part(row, pid - row * parts, *refs, sinks=0, **how)


def _score_pages(
  pid: Array,
  q_ref: Any,
  stop_ref: Any,
  inputs: Sequence[Any],
  refs: Sequence[Any],
  *,
  unit: int,
  group: str,
  predictor: str,
  scale: float,
) -> None:
  """Bounds of one tile of a row's pages, and their predictors' next state.

  inputs: low, high [R, P, H], and what `smoothing.loaded` lists; behind them and attention's
  outputs the refs are what `smoothing.advance` lists.
  """
  edge_refs, state_refs = inputs[:2], inputs[2:]
  rows, count, head_dim = edge_refs[0].shape
  groups = q_ref.shape[1]
  pieces = jnp.int32(pl.cdiv(count, PAGES))
  row = lax.div(pid, pieces)
  batch_row = lax.div(row, jnp.int32(rows // stop_ref.shape[0]))
  stop = stop_ref[batch_row]
  column = jnp.arange(split_k.columns_of(head_dim))
  real = column < head_dim
  page = (pid - row * pieces) * PAGES + jnp.arange(PAGES)
  seen = (page < count) & (page * unit < stop)
  index, mask = (row, page[:, None], column[None, :]), seen[:, None] & real[None, :]
  low, high = (backend.load(x, *index, mask=mask, evict="evict_first") for x in edge_refs)
  held = smoothing.loaded(row, batch_row, page, state_refs)
  low, high = low.astype(jnp.float32), high.astype(jnp.float32)

  def query(g: int) -> Array:
    return backend.load(q_ref, row, g, column, mask=real).astype(jnp.float32) * scale

  queries = [query(g) for g in range(groups)]
  if group == "mean":
    queries = [sum(queries[1:], queries[0]) / groups]
  bounds = (jnp.maximum(q[None, :] * low, q[None, :] * high).sum(axis=1) for q in queries)
  score = functools.reduce(jnp.maximum, bounds)
  how: dict[str, Any] = {"unit": unit, "predictor": predictor}
  outs = refs[-len(smoothing.outputs(rows, count, state_refs)) :]
  smoothing.advance(row, page, score, held, outs, stop, **how)


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
  level: Float[Array, "B K P"] | None = None,
  trend: Float[Array, "B K P"] | None = None,
  factors: Float[Array, "B 3"] | None = None,
  *,
  unit: int,
  group: str = "mean",
  predictor: str = "holt",
  apart: bool = False,
  soft_cap: float | None = None,
  tile: int | None = None,
  programs: int | None = None,
  interpret: bool | None = None,
) -> tuple[Sequence[Array], Sequence[Array]]:
  """Attention over predicted pages, and scores and forecasts of all pages.

  Args:
    q, k, v: as in `sparse_decode`.
    guess: int32, the predicted pages, no duplicates, −1 = hole.
    stop: int32, occupied slots of every row, the new token's included.
    low, high: minimum and maximum of every page's keys.
    level, trend: of every page, after the last step; of `predictor` "last" there are none.
    factors: α, β and γ of every row; as these.
    unit: tokens per page.
    group, predictor: as in `kvjax.Quest` and `kvjax.PRR`.
    apart: whether every predicted page is attended to by itself.
    soft_cap: as in `sparse_decode`; bounds are without it.
    tile, programs: keys per step of attention, and how many programs attend; by shape and device
      if None.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    What `repair` takes as `written` with stored="pieces", or with `apart` stored="tiles"; and
    scores and forecasts [B, K, 2, P] (undefined and ∞ where there is no page), the `stop` that each
    of them is for [B, K, 2], and level and trend, if there are any.
  """
  rows, pages = q.shape[0] * q.shape[1], low.shape[2]
  state = [x for x in (level, trend) if x is not None]
  own = [] if factors is None else [factors]
  how: dict[str, Any] = {"unit": unit, "group": group, "predictor": predictor}
  score = functools.partial(_score_pages, scale=q.shape[3] ** -0.5, **how)
  return _beside(
    *(q, k, v, guess, stop),
    score,
    [*(x.reshape(rows, *x.shape[2:]) for x in (low, high, *state)), *own],
    smoothing.outputs(rows, pages, state),
    rows * pl.cdiv(pages, PAGES),
    unit=unit,
    apart=apart,
    soft_cap=soft_cap,
    tile=tile,
    programs=programs,
    interpret=interpret,
  )


def speculate_keys(
  q: Float[Array, "B K G H"],
  k: Float[Array, "B K S H"],
  v: Float[Array, "B K S H"],
  guess: Int[Array, "B K V"],
  stop: Int[Array, " B"],
  keys: Float[Array, "B K M H"],
  level: Float[Array, "B K P"] | None = None,
  trend: Float[Array, "B K P"] | None = None,
  factors: Float[Array, "B 3"] | None = None,
  *,
  unit: int,
  stride: int,
  width: int,
  predictor: str = "holt",
  apart: bool = False,
  soft_cap: float | None = None,
  tile: int | None = None,
  programs: int | None = None,
  interpret: bool | None = None,
) -> tuple[Sequence[Array], Sequence[Array]]:
  """Attention over predicted blocks beside the logits of compressed keys; then what they foresee.

  Scores need whole denominators, and so a second, small launch.

  Args:
    q, k, v, guess, stop, level, trend, factors, predictor, apart, soft_cap, tile, programs,
      interpret: as in `speculate`.
    keys: what stands for slots [j·stride, j·stride + width).
    unit: slots per block.
    stride, width: as in `key_logits`.

  Returns:
    As `speculate`.
  """
  rows, groups, count = q.shape[0] * q.shape[1], q.shape[2], keys.shape[2]
  at_once, steps = cut(q, keys, None, None)
  pieces = pl.cdiv(count, at_once * steps)
  how: dict[str, Any] = {"tile": at_once, "steps": steps, "stride": stride, "width": width}
  how["scale"] = tiling.Scale.of(q.shape[3], None, soft_cap)
  score = functools.partial(_score_keys, pieces=pieces, **how)
  part = jax.ShapeDtypeStruct((rows, groups, pieces), jnp.float32)
  written, partial = _beside(
    *(q, k, v, guess, stop),
    score,
    [keys.reshape(rows, *keys.shape[2:])],
    [jax.ShapeDtypeStruct((rows, groups, count), jnp.float32), part, part],
    rows * pieces,
    unit=unit,
    apart=apart,
    soft_cap=soft_cap,
    tile=tile,
    programs=programs,
    interpret=interpret,
  )
  how = {"stride": stride, "width": width, "unit": unit, "predictor": predictor}
  state = level, trend, factors
  blocks = pl.cdiv(k.shape[2], unit)
  return written, forecasts(partial, stop, blocks, *state, interpret=interpret, **how)


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
  soft_cap: float | None,
  tile: int | None,
  programs: int | None,
  interpret: bool | None,
) -> tuple[Sequence[Array], Sequence[Array]]:
  """One launch: attention over the predicted tiles, and `scoring` programs of `score`."""
  batch, heads, groups, head_dim = q.shape
  rows, width = batch * heads, guess.shape[2]
  shape = {"groups": groups, "head_dim": head_dim, "itemsize": k.dtype.itemsize}
  tile = tile or fitted_tile(KEYS, STAGES, **shape)
  if apart:
    span, parts, tile = unit, width, min(tile, max(16, pl.next_power_of_2(unit)))
  else:
    span, parts = share(rows, width * unit, tile, programs or ATTENDING * this_device().cores)
  scale = tiling.Scale.of(head_dim, None, soft_cap)
  how: dict[str, Any] = {"unit": unit, "span": span, "tile": tile, "scale": scale}
  attend = functools.partial(_attend, parts=parts, **how)
  flat = [*map(backend.by_row, (q, k, v, guess))]
  takes, attending = len(held), rows * parts
  out = split_k.state_shapes(attending, groups, head_dim)
  made = backend.call(
    functools.partial(_kernel, attend=attend, score=score, programs=attending, takes=takes),
    *(*flat, stop, *held),
    grid=(attending + scoring,),
    out=[*out, *scored],
    warps=WARPS if q.dtype.itemsize == 2 else 2 * WARPS,
    stages=STAGES,
    name="speculate",
    interpret=interpret,
  )
  more = made[len(out) :]
  return made[: len(out)], [x.reshape(batch, heads, *x.shape[1:]) for x in more]


def share(rows: int, keys: int, tile: int, programs: int) -> tuple[int, int]:
  """Number of keys of a row that a program gets, whole tiles, and of the parts of the row.

  Not more parts than `repair` joins at once.
  """
  tiles = pl.cdiv(keys, tile)
  steps = pl.cdiv(tiles, min(max(1, programs // rows), split_k.JOINED))
  return steps * tile, pl.cdiv(tiles, steps)


def _tile_kernel(*refs: Any, **how: Any) -> None:
  """q [R, G, H], k, v [R, S, H], table [R, W], start, stop [R] or one per batch row -> acc
  [R W, G, H], m (base 2), l [R W, G].
  """
  _attend_part(pl.program_id(0), pl.program_id(1), *refs, **how)


def _attend_part(
  row: Array,
  part: Array,
  *refs: Any,
  unit: int,
  span: int,
  tile: int,
  scale: tiling.Scale,
  sinks: int,
) -> None:
  """`span` of the keys that a row's table lists, whole entries or whole tiles; refs as above, with
  a state for every part.
  """
  q_ref, k_ref, v_ref, table_ref, start_ref, stop_ref, acc_ref, m_ref, l_ref = refs
  rows, slots, _ = k_ref.shape
  groups, listed = q_ref.shape[1], table_ref.shape[1] * unit
  place = row * pl.cdiv(listed, span) + part
  shared = rows // stop_ref.shape[0]
  start = jnp.int32(0) if start_ref is None else start_ref[row // shared]
  stop = jnp.minimum(stop_ref[row // shared], slots)
  held = stored.Floats(stored.Sources(q_ref, k_ref, v_ref), row, scale)
  lanes, columns = held.lanes, held.columns

  def find(i: Any) -> tuple[Array, Array]:
    first = part * span + i * tile
    key = first + jnp.arange(tile)
    ours = (key < (part + 1) * span) & (key < listed)
    if span == unit or unit % tile == 0:  # one entry for the whole tile
      entry = backend.load(table_ref, row, first // unit, mask=first < listed, other=-1)
    else:
      entry = backend.load(table_ref, row, key // unit, mask=ours, other=-1)
    slot = entry * unit + key % unit
    keep = ours & (entry >= 0) & (slot < stop) & ((slot < sinks) | (slot >= start))
    return jnp.where(keep, slot, 0), keep

  q, carry = held.query(), held.start()
  if span <= tile:
    carry = held.step(carry, q, held.fetch(*find(0)))
  else:
    carry = held.walk(carry, q, find, 0, pl.cdiv(span, tile))
  real = (lanes < groups)[:, None] & held.inside
  backend.store(acc_ref, place, lanes[:, None], columns[None, :], value=carry.acc, mask=real)
  backend.store(m_ref, place, lanes, value=carry.m, mask=lanes < groups)
  backend.store(l_ref, place, lanes, value=carry.l, mask=lanes < groups)


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
  soft_cap: float | None = None,
  interpret: bool | None = None,
) -> Sequence[Array]:
  """Attention to every listed tile by itself: acc [B K W, G, H], m (base 2) and l [B K W, G].

  A merged state cannot give up what turns out not to be wanted; these can be left out.
  Arguments as in `sparse_decode`; −1 in the table = hole, whose state is empty.
  """
  batch, heads, groups, head_dim = q.shape
  rows, width = batch * heads, table.shape[2]
  shape = {"groups": groups, "head_dim": head_dim, "itemsize": k.dtype.itemsize}
  flat = [*map(backend.by_row, (q, k, v, table))]
  return backend.call(
    functools.partial(
      _tile_kernel,
      unit=unit,
      span=unit,
      tile=fitted_tile(min(64, max(16, pl.next_power_of_2(unit))), 2, **shape),
      scale=tiling.Scale.of(head_dim, None, soft_cap),
      sinks=sinks,
    ),
    *flat,
    start.reshape(-1),
    stop.reshape(-1),
    grid=(rows, width),
    out=split_k.state_shapes(rows * width, groups, head_dim),
    warps=4,
    stages=2,
    name="attend_tiles",
    interpret=interpret,
  )
