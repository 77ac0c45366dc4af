"""The best tiles of every row, exactly, as a table that sparse decode walks.

A search (`search`) finds a bound with the k largest scores above it. Those are then put together
by a running sum, in order of index, which also settles ties; where a caller asks for the order of
scores, a second launch brings them into it (`ranking`). No atomics, no sort: a second run is equal
to the bit. Rows that are few, or longer than `LANES`, are cut (`cuts`).

Bytes: the scores, 4 per tile. Latency is the cost, so that everything that a plan needs (first
tiles, newest ones, holes closed, scores) is written by the same launch.

Grid: one program per row and part.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.kernels.common import backend, devices, ranking
from kvjax.kernels.common.bounds import Bounds, Sight, Wanted
from kvjax.kernels.common.cuts import cuts, given_by, lanes_of, warps_of
from kvjax.kernels.common.search import EACH, LEAST, keys, places, threshold

LANES = 8192  # most scores that one program searches, twice as many where k is more than half of it


class _Chosen(NamedTuple):
  """Tiles and scores of a part's lanes [T]; which are chosen, their places, and how many are."""

  tile: Array
  value: Array
  keep: Array
  place: Array
  total: Array


class _Task(NamedTuple):
  """Other work of a search's programs, on refs of these operands and results: `others`."""

  run: Callable[..., None]
  operands: tuple[Array, ...]
  results: tuple[jax.ShapeDtypeStruct, ...]


def _kernel(
  scores_ref: Any | None,
  index_ref: Any | None,
  start_ref: Any,
  stop_ref: Any,
  active_ref: Any | None,
  operands: tuple[Any, ...],
  tables: tuple[Any, ...],
  ranked: tuple[Any, ...],
  counts: tuple[Any, ...],
  results: tuple[Any, ...],
  *,
  part: int,
  bounds: Bounds,
  wanted: Wanted,
  forces: bool,
  ahead: Callable[..., None] | None,
  behind: Callable[..., None] | None,
) -> None:
  """scores [N R, P], (index [N R, P],) start, stop of all of them or of those that share one,
  (active [N R],) operands -> N tables [R, C W], N times their scores, N counts [R C], results; C
  parts of a row.

  Rows take turns in N lists, which have room for `k` each. index: candidates of an earlier launch,
  −1 = none. `forces`: forced tiles come first. `ahead`, `behind`: what a row's program does at its
  beginning and at its end, see `others`. With `ahead` the last of the results are the scores.
  """
  if ahead is not None:
    scores_ref = results[-1]
  assert scores_ref is not None
  rows, lists = scores_ref.shape[0], len(tables)
  row, piece = pl.program_id(0), pl.program_id(1)

  def select() -> None:
    if ahead is not None:
      ahead(row, piece, part, *operands, *results)
    start, stop = (ref[row // (rows // ref.shape[0])] for ref in (start_ref, stop_ref))
    sight = Sight.of(bounds, start, stop)
    chosen = _choose(scores_ref, index_ref, row, piece, part, sight, wanted)
    forcing = sight if forces else None
    for n, refs in enumerate(zip(tables, ranked, counts, strict=True)):

      def write(refs: tuple[Any, Any, Any] = refs) -> None:
        _write(*refs, row // lists, piece, chosen, forcing)

      if lists == 1:
        write()
      else:
        pl.when(row % lists == n)(write)

  backend.where_active(active_ref, row, select)
  if behind is not None:
    behind(row, tables[0], *operands, *results)


def _choose(
  scores_ref: Any,
  index_ref: Any | None,
  row: Array,
  piece: Array,
  part: int,
  sight: Sight,
  wanted: Wanted,
) -> _Chosen:
  """The search of one part of a row; candidates of a first launch are what is not forced."""
  sinks, local = sight.bounds.sinks, sight.bounds.local

  def load(lane: Array) -> tuple[Array, Array, Array]:
    """Tiles, scores and keys of some lanes of this part."""
    at = piece * part + lane
    inside = (lane < part) & (at < scores_ref.shape[1])
    value = backend.load(scores_ref, row, at, mask=inside, other=0.0)
    if index_ref is None:
      tile = at
      real = inside & sight.visible(tile) & (tile >= sinks) & (tile <= sight.newest - local)
    else:
      tile = backend.load(index_ref, row, at, mask=inside, other=-1)
      real = tile >= 0
    value = jnp.where(value == value, value, jnp.inf)  # NaN is chosen first, and heard of
    value = jnp.maximum(value, jnp.finfo(jnp.float32).min)
    return tile, value, jnp.where(real, keys(value), jnp.int32(LEAST))

  lanes = lanes_of(part)
  tile, value, key = load(jnp.arange(lanes))
  grid = load(jnp.arange(lanes // EACH)[:, None] * EACH + jnp.arange(EACH)[None, :])[2]
  real = grid > LEAST
  held = real.astype(jnp.int32).sum()
  want = jnp.minimum(held, jnp.maximum(wanted.of(row, sight.stop), 0))
  lowest = jnp.where(real, grid, jnp.int32(2**31 - 1)).min()
  low, held = threshold(grid, lowest, held, want, jnp.maximum(want, wanted.room))
  want = jnp.where(held <= wanted.room, held, want)
  keep, place = places(key, low, want)
  if wanted.first:
    # Of those the best ones once more: they change places with the others.
    some = jnp.minimum(want, wanted.first)
    low, _ = threshold(grid, low, held, some, some)
    best, best_before = places(key, low, some)
    place = jnp.where(best, best_before, some + place - best_before)
  return _Chosen(tile, value, keep, place, want)


def _write(
  table_ref: Any,
  ranked_ref: Any,
  count_ref: Any,
  row: Array,
  piece: Array,
  chosen: _Chosen,
  forcing: Sight | None,
) -> None:
  """A part's piece of row `row` of table and ranked [R, C W], and its count [R C].

  Forced tiles, if any are, then the chosen ones, then −1.
  """
  parts = count_ref.shape[0] // table_ref.shape[0]
  width, nowhere = table_ref.shape[1] // parts, table_ref.shape[1]
  base, head = piece * width, jnp.int32(0)

  def put(ok: Array, place: Array, tile: Array, value: Array) -> None:
    """Entries and their scores, or one for all, where they are ok."""
    place = jnp.where(ok, place, nowhere)
    for ref, x in ((table_ref, tile), (ranked_ref, value)):
      backend.store(ref, row, place, value=jnp.broadcast_to(x, place.shape), mask=ok)

  if forcing is not None and forcing.bounds.sinks + forcing.bounds.local:
    tile, ok, place, head = forcing.forced()
    put(ok, base + place, tile, jnp.float32(jnp.inf))
  put(chosen.keep, base + head + chosen.place, chosen.tile, chosen.value)
  count_ref[row * parts + piece] = head + chosen.total

  i = jnp.arange(pl.next_power_of_2(width))
  tail = (i >= head + chosen.total) & (i < width)
  put(tail, base + i, jnp.int32(-1), jnp.float32(-jnp.inf))


def best(
  scores: Float[Array, "B K P"],
  start: Int[Array, "B #K"],
  stop: Int[Array, "B #K"],
  *,
  unit: int,
  span_sinks: int = 0,
  sinks: int,
  local: int,
  k: int,
  limit: int | None = None,
  dense_below: int = 0,
  ordered: bool = True,
  interpret: bool | None = None,
) -> tuple[Int[Array, "B K W"], Int[Array, "B K"], Float[Array, "B K W"]]:
  """First tiles, newest tiles from the newest on, then the best of the rest: `ops.tiles.best`.

  Args:
    scores: of every tile, float32; NaN counts as infinity.
    start, stop, span_sinks: the slots that may be touched, as in `sparse_decode`.
    unit: slots per tile.
    sinks, local: numbers of first and of newest tiles that are always listed.
    k: how many others are, at most; equal scores go to the lowest index.
    limit, dense_below: rows of `dense_below` slots and more list `limit` others, up to k.
    ordered: whether the others are listed by score, or by index, which takes less time.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    table (−1 after the end), count of its entries, and their scores (∞ for forced ones, −∞ after
    the end).

  Raises:
    TypeError: scores are not float32.
    NotImplementedError: more tiles are to be chosen than a program can hold.
  """
  made = best_of_each(
    *(scores[:, :, None], start, stop[..., None]),
    unit=unit,
    span_sinks=span_sinks,
    sinks=sinks,
    local=local,
    k=(k,),
    limit=None if limit is None else (limit,),
    dense_below=dense_below,
    ordered=ordered,
    interpret=interpret,
  )
  return made[0]


def best_of_each(
  scores: Float[Array, "B K N P"],
  start: Int[Array, "B #K"] | Int[Array, "B #K #N"],
  stop: Int[Array, "B #K #N"],
  *,
  unit: int,
  span_sinks: int = 0,
  sinks: int,
  local: int,
  k: Sequence[int],
  limit: Sequence[int] | None = None,
  dense_below: int = 0,
  ordered: bool = False,
  interpret: bool | None = None,
) -> list[tuple[Int[Array, "B K W"], Int[Array, "B K"], Float[Array, "B K W"]]]:
  """The results of N calls of `best`, by one search: each list has its own stops, k and limit."""
  batch, heads, _, tiles = scores.shape

  def flat(x: Array) -> Array:
    """One for each batch row, KV head or list."""
    apart = x.ndim == 3 and x.shape[2] > 1
    return (jnp.broadcast_to(x, scores.shape[:3]) if apart else x).reshape(-1)

  most = tuple(min(n, tiles) for n in k)
  tables, ranked, counts, _ = _launch(
    scores.reshape(-1, tiles),
    _Where(flat(start), flat(stop)),
    Bounds(unit, span_sinks, min(sinks, tiles), min(local, tiles)),
    Wanted(most, most if limit is None else tuple(limit), dense_below),
    forces=True,
    ordered=ordered,
    interpret=interpret,
  )
  shape = batch, heads, -1
  return [
    (table.reshape(shape), count.reshape(batch, heads), values.reshape(shape))
    for table, count, values in zip(tables, counts, ranked, strict=True)
  ]


def others(
  scores: Float[Array, "B K P"] | jax.ShapeDtypeStruct,
  start: Int[Array, "B #K"],
  stop: Int[Array, "B #K"],
  *,
  unit: int,
  span_sinks: int = 0,
  sinks: int,
  local: int,
  k: int,
  active: Int[Array, "B K"] | None = None,
  ordered: bool = True,
  first: int = 0,
  ahead: Callable[..., None] | None = None,
  sources: Sequence[Array] = (),
  behind: Callable[..., None] | None = None,
  operands: Sequence[Array] = (),
  results: Sequence[jax.ShapeDtypeStruct] = (),
  interpret: bool | None = None,
) -> tuple[Array, ...]:
  """The best tiles that are neither first nor newest, and their scores: `ops.tiles.others`.

  Arguments as in `best`; rows whose `active` is 0 are skipped, and hold anything. Where they need
  not be `ordered`, the best `first` of them may still be asked for ahead of the others, both by
  index: that takes no launch of its own. Nor does what else is to be done with a row's tiles then:
  `behind(row, tiles, *operands, *results)`, in refs, whose program has just written the row's tiles
  unless it was skipped. The results come after the two of [B, K, k]. And the scores, of which
  `scores` is the shape then, may be made by the programs that search them, where there are several
  of these for a row (`cut_rows`): `ahead(row, piece, part, *sources, scores)` writes a piece.
  """
  batch, heads, tiles = scores.shape
  rows = batch * heads
  before = after = None
  if not isinstance(scores, jax.Array):
    assert ahead is not None, "scores have to be made"
    written = jax.ShapeDtypeStruct((rows, tiles), jnp.float32)
    before = _Task(ahead, tuple(sources), (written,))
  if behind is not None:
    after = _Task(behind, tuple(operands), tuple(results))
  most = (min(k, tiles),)
  (table,), (ranked,), _, made = _launch(
    scores.reshape(rows, tiles) if isinstance(scores, jax.Array) else None,
    _Where(start.reshape(-1), stop.reshape(-1), None if active is None else active.reshape(-1)),
    Bounds(unit, span_sinks, sinks, local),
    Wanted(most, most, first=0 if ordered else min(first, k, tiles)),
    forces=False,
    ordered=ordered,
    ahead=before,
    behind=after,
    interpret=interpret,
  )
  shape = batch, heads, -1
  return ranked.reshape(shape), table.reshape(shape), *made


def cut_rows(rows: int, tiles: int, k: int) -> bool:
  """True if a row is searched by several programs."""
  return bool(cuts(rows, tiles, min(k, tiles), LANES, devices.this_device().cores))


class _Where(NamedTuple):
  """The slots that rows may see, for all of them or of those that share one; rows to be skipped."""

  start: Array
  stop: Array
  active: Array | None = None


def _launch(
  scores: Array | None,
  where: _Where,
  bounds: Bounds,
  wanted: Wanted,
  *,
  forces: bool,
  ordered: bool,
  ahead: _Task | None = None,
  behind: _Task | None = None,
  interpret: bool | None,
) -> tuple[Sequence[Array], Sequence[Array], Sequence[Array], Sequence[Array]]:
  """N tables [R, W], N times their scores, N counts [R], and what `behind` makes."""
  if scores is not None and scores.dtype != jnp.float32:
    raise TypeError(f"scores: found dtype {scores.dtype.name}, expected float32")
  shaped: Any = ahead.results[0] if ahead else scores
  rows, tiles = shaped.shape
  most = max(wanted.k)
  parts = cuts(rows, tiles, most, LANES, devices.this_device().cores)
  if parts is None:
    raise NotImplementedError(
      f"k: found {most} of {tiles} tiles, expected at most {LANES} of more than {LANES}"
    )
  if ahead is not None and not parts:
    raise ValueError(f"ahead: found {tiles} tiles, which one program searches, expected more")
  run = functools.partial(_call, rows=rows, where=where, bounds=bounds, interpret=interpret)
  index, length = None, tiles
  few = max(wanted.limit) if wanted.dense_below else most
  for part in parts:
    count = pl.cdiv(length, part)
    room = given_by(count, part, most)
    some = Wanted((min(most, part),), (min(few, part),), wanted.dense_below, room=room)
    how: dict[str, Any] = {"parts": count, "part": part, "widths": (room,), "wanted": some}
    (index,), (scores,), *_ = run(scores, index, **how, ahead=ahead)
    ahead, length = None, index.shape[1]
  forced = bounds.sinks + bounds.local
  widths = [max(min(forced + n, tiles) if forces else n, 1) for n in wanted.k]
  how = {"parts": 1, "part": length if most else 1, "widths": widths, "wanted": wanted}
  tables, ranked, counts, made = run(scores, index, **how, forces=forces, behind=behind)
  if ordered and most > 1:
    order = functools.partial(ranking.by_score, active=where.active, interpret=interpret)
    tables, ranked = zip(*map(order, tables, ranked), strict=True)
  return tables, ranked, counts, made


def _call(
  scores: Array | None,
  index: Array | None,
  *,
  rows: int,
  where: _Where,
  bounds: Bounds,
  wanted: Wanted,
  parts: int,
  part: int,
  widths: Sequence[int],
  forces: bool = False,
  ahead: _Task | None = None,
  behind: _Task | None = None,
  interpret: bool | None,
) -> Sequence[Any]:
  """One launch over rows in `parts` parts of `part` scores, into as many lists as `widths` has."""
  task = ahead or behind
  each, of = rows // len(widths), jax.ShapeDtypeStruct
  return backend.call(
    functools.partial(
      _kernel,
      part=part,
      bounds=bounds,
      wanted=wanted,
      forces=forces,
      ahead=ahead and ahead.run,
      behind=behind and behind.run,
    ),
    *(scores, index, *where),
    task.operands if task else (),
    grid=(rows, parts),
    out=[
      tuple(of((each, parts * width), jnp.int32) for width in widths),
      tuple(of((each, parts * width), jnp.float32) for width in widths),
      tuple(of((each * parts,), jnp.int32) for _ in widths),
      task.results if task else (),
    ],
    warps=warps_of(part),
    stages=1,
    name="top_k",
    interpret=interpret,
  )
