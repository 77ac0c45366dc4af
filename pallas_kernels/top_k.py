"""The best tiles of every row, exactly, as a table that sparse decode walks.

Scores become integers of the same order, and a search finds the k-th largest: each pass divides the
window that holds it into eight, counts what lies in and below each part, and goes on with one; it
ends as soon as k lie above. Those are then put together by a running sum, in order of index, which
also settles ties; where somebody asks for the order of scores, a second launch counts for each how
many come before it. No atomics, no sort: a second run is equal to the bit.

Where rows are few, or longer than `LANES`, they are cut: each part gives its own k best, or a few
more where its search is over sooner for it, and what they give is searched once more. How rows are
cut follows from how many programs run at once.

Bytes: the scores, 4 per tile. Latency is the cost, so that everything that a plan needs (first
tiles, newest ones, holes closed, scores) is written by the same launch.

Grids: one program per row and part; one per row and `SOME` entries.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from . import _backend, config

LANES = 8192  # most scores that one program searches, twice as many where k is more than half of it
SHORTEST = 512  # shortest part
LAUNCH = 2048  # a launch takes as long as it takes to search that many more scores
LEVEL = 1024  # fewer scores than that take a program hardly less time: a warp for every scheduler
AT_ONCE = 8192  # scores that a multiprocessor's registers hold
EACH = 4  # neighbours counted together: their number fits four bits
SOME = 64  # entries that a program puts in order, and by how many others at once
LEAST = -(2**31)  # below the key of every float


def _keys(value: Array) -> Array:
  """int32 keys in the order of floats that are not NaN; 0 and −0 are equal."""
  bits = lax.bitcast_convert_type(jnp.where(value == 0, 0.0, value), jnp.int32)
  return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _threshold(
  key: Array, low: Array, held: Array, want: Array, room: Array
) -> tuple[Array, Array]:
  """A bound at or above which lie the `want` largest keys, and how many lie there.

  That is at most `room`, unless more are equal to the bound.

  Args:
    key: [E, T], E ≤ 15; `LEAST` is none.
    low, held: a bound, and how many keys lie at or above it.
    want, room: at least `want` are asked for, at most `held`; up to `room` will do.
  """
  high = key.max()
  width = high - low  # below 0 where it is past int32
  exponent = lax.bitcast_convert_type(width.astype(jnp.float32), jnp.int32) >> 23
  bits = jnp.where(width < 0, 32, jnp.maximum(exponent - 126, 0))
  # Nothing is above the largest key.
  low, held = jnp.where(want > 0, low, high), jnp.where(want > 0, held, want)
  quarter = jnp.arange(4, dtype=jnp.int32)

  def unsettled(state: tuple[Array, Array, Array]) -> Array:
    _, bits, held = state
    return (held > room) & (bits > 0)

  def narrow(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """The window [low, low + 2^bits) holds the bound; its eight parts are 2^shift wide."""
    low, bits, held = state
    shift = jnp.maximum(bits - 3, 0)
    at = lax.shift_right_logical(key - low, shift)
    inside = (key >= low) & (at >= 0) & (at < (1 << (bits - shift)))
    counts = jnp.where(inside, jnp.int32(1) << ((at & 7) * 4), 0).sum(axis=1)
    below = counts * jnp.int32(0x11111111)  # each four bits: those of this part and lower ones
    # Parts n and n + 4 side by side, 16 bits each.
    pairs = lax.shift_right_logical(below[:, None], quarter[None, :] * 4) & 0x000F000F
    pairs = pairs.sum(axis=0)

    def passing(below: Array, part: Array) -> Array:
      """How many lie above a part where enough do, and how many parts that is, in one number."""
      above = held - below
      return jnp.where(above >= want, above * 16 + (7 - part), held * 16 + 8)

    upper = passing(lax.shift_right_logical(pairs, 16), quarter + 4)
    best = jnp.minimum(passing(pairs & 0xFFFF, quarter), upper).min()
    return low + ((8 - (best & 15)) << shift), shift, best >> 4

  low, _, held = lax.while_loop(unsettled, narrow, (low, bits, held))
  return low, held


def _kernel(
  *refs: Any,
  part: int,
  k: tuple[int, ...],
  limit: tuple[int, ...],
  dense_below: int,
  first: int,
  unit: int,
  span_sinks: int,
  sinks: int,
  local: int,
  forces: bool,
  indexed: bool,
  room: int,
  skips: bool,
  ahead: Callable[..., None] | None,
  behind: Callable[..., None] | None,
  beside: tuple[int, int],
) -> None:
  """scores [N R, P], (index [N R, P],) start, stop of all of them or of those that share one,
  (active [N R]) -> N tables [R, C W], N times their scores, N counts [R C]; C parts of a row.

  Rows take turns in N lists, which have room for `k` each. `indexed`: candidates of an earlier
  launch, −1 = none. `forces`: forced tiles come first. `room`: up to so many may be given instead
  of k; 0: just k. `ahead`, `behind`: what a row's program does at its beginning and at its end, see
  `others`; `beside` counts the operands and results for it, which come behind the other ones. With
  `ahead` the last of them are the scores.
  """
  lists = len(k)
  count = len(refs) - beside[1]
  inputs, outs = list(refs[: count - 3 * lists]), refs[count - 3 * lists : count]
  own = [inputs.pop() for _ in range(beside[0])][::-1] + list(refs[count:])
  scores_ref = inputs.pop(0) if ahead is None else own[-1]
  index_ref = inputs.pop(0) if indexed else None
  start_ref, stop_ref = inputs.pop(0), inputs.pop(0)
  active_ref = inputs.pop(0) if skips else None
  rows = scores_ref.shape[0]
  row, piece = pl.program_id(0), pl.program_id(1)

  def of_list(values: Sequence[int]) -> Array:
    """The value of this row's list."""
    mine = jnp.int32(values[-1])
    for n in range(lists - 1):
      mine = jnp.where(row % lists == n, jnp.int32(values[n]), mine)
    return mine

  def select() -> None:
    if ahead is not None:
      ahead(row, piece, part, *own)
    start, stop = (ref[row // (rows // ref.shape[0])] for ref in (start_ref, stop_ref))
    newest = lax.div(stop + (unit - 1), jnp.int32(unit)) - 1

    def visible(tile: Array) -> Array:
      return (tile * unit < stop) & ((tile * unit < span_sinks) | ((tile + 1) * unit > start))

    def seen(first: Any, last: Any) -> Array:
      """How many tiles of [first, last) are visible, where the newest one is not before the last.

      Those before the `early` ones end, and from the first one of the window on.
      """
      early, window = jnp.int32(pl.cdiv(span_sinks, unit)), lax.div(start, jnp.int32(unit))
      after = jnp.maximum(jnp.maximum(window, early), first)
      return jnp.maximum(jnp.minimum(last, early) - first, 0) + jnp.maximum(last - after, 0)

    def load(lane: Array) -> tuple[Array, Array, Array]:
      """Tiles, scores and keys of some lanes of this part."""
      at = piece * part + lane
      inside = (lane < part) & (at < scores_ref.shape[1])
      value = _backend.load(scores_ref, row, at, mask=inside, other=0.0)
      if index_ref is None:
        tile = at
        rest = inside & visible(tile) & (tile >= sinks) & (tile <= newest - local)
      else:
        tile = _backend.load(index_ref, row, at, mask=inside, other=-1)
        rest = tile >= 0
      value = jnp.where(value == value, value, jnp.inf)  # NaN is chosen first, and heard of
      value = jnp.maximum(value, jnp.finfo(jnp.float32).min)
      return tile, value, jnp.where(rest, _keys(value), jnp.int32(LEAST))

    lanes = lanes_of(part)
    columns = lanes // EACH
    tile, value, key = load(jnp.arange(lanes))
    grid = load(jnp.arange(columns)[:, None] * EACH + jnp.arange(EACH)[None, :])[2]
    real = grid > LEAST
    held = real.astype(jnp.int32).sum()
    want = of_list(k)
    if dense_below or limit != k:
      want = jnp.where(stop < dense_below, want, of_list(limit))
    want = jnp.minimum(held, jnp.maximum(want, 0))
    lowest = jnp.where(real, grid, jnp.int32(2**31 - 1)).min()
    low, held = _threshold(grid, lowest, held, want, jnp.maximum(want, room))
    want = jnp.where(held <= room, held, want)

    above, equal = key > low, key == low
    short = want - above.astype(jnp.int32).sum()
    before = _before(above, equal)
    above_before, equal_before = before & 0xFFFF, before >> 16
    keep = above | (equal & (equal_before < short))
    slot = above_before + jnp.minimum(equal_before, short)
    if first:
      # Of those the best ones once more: they change places with the others.
      some = jnp.minimum(want, first)
      low, _ = _threshold(grid, low, held, some, some)
      above, equal = key > low, key == low
      short = some - above.astype(jnp.int32).sum()
      before = _before(above, equal)
      equal_before = before >> 16
      best_before = (before & 0xFFFF) + jnp.minimum(equal_before, short)
      best = above | (equal & (equal_before < short))
      slot = jnp.where(best, best_before, some + slot - best_before)

    def write(table_ref: Any, ranked_ref: Any, count_ref: Any) -> None:
      listed = row // lists
      parts = count_ref.shape[0] // table_ref.shape[0]
      width, nowhere = table_ref.shape[1] // parts, table_ref.shape[1]
      base, head = piece * width, jnp.int32(0)
      if forces and sinks + local:
        i = jnp.arange(pl.next_power_of_2(sinks + local))
        forced = jnp.where(i < sinks, i, newest - (i - sinks))
        ok = visible(forced) & (i < sinks + local) & ((i < sinks) | (forced >= sinks))
        ahead = seen(0, jnp.minimum(sinks, newest + 1))
        oldest = jnp.maximum(newest + 1 - local, sinks)
        head = ahead + seen(oldest, newest + 1)
        place = jnp.where(i < sinks, seen(0, forced), ahead + seen(forced + 1, newest + 1))
        place = jnp.where(ok, base + place, nowhere)
        _backend.store(table_ref, listed, place, value=forced, mask=ok)
        infinite = jnp.full(i.shape, jnp.inf, jnp.float32)
        _backend.store(ranked_ref, listed, place, value=infinite, mask=ok)
      place = jnp.where(keep, base + head + slot, nowhere)
      _backend.store(table_ref, listed, place, value=tile, mask=keep)
      _backend.store(ranked_ref, listed, place, value=value, mask=keep)
      count_ref[listed * parts + piece] = head + want

      i = jnp.arange(pl.next_power_of_2(width))
      tail = (i >= head + want) & (i < width)
      place = jnp.where(tail, base + i, nowhere)
      _backend.store(table_ref, listed, place, value=jnp.full(i.shape, -1), mask=tail)
      lowest = jnp.full(i.shape, -jnp.inf, jnp.float32)
      _backend.store(ranked_ref, listed, place, value=lowest, mask=tail)

    for n in range(lists):
      of_this = functools.partial(write, *outs[n::lists])
      if lists == 1:
        of_this()
      else:
        pl.when(row % lists == n)(of_this)

  if active_ref is None:
    select()
  else:
    pl.when(active_ref[row] > 0)(select)
  if behind is not None:
    behind(row, outs[0], *own)


def _before(above: Array, equal: Array) -> Array:
  """How many lanes before each are above, and in the upper 16 bits how many are equal."""
  both = above.astype(jnp.int32) + (equal.astype(jnp.int32) << 16)
  return jnp.cumsum(both) - both


def _order_kernel(*refs: Any, skips: bool) -> None:
  """table, ranked [R, W], (active [R]) -> both in the order of ranked, equal ones as they stand."""
  table_ref, ranked_ref, *active_ref = refs[:3] if skips else refs[:2]
  out_table_ref, out_ranked_ref = refs[-2:]
  width = table_ref.shape[1]
  row, own = pl.program_id(0), pl.program_id(1)

  def order() -> None:
    i = own * SOME + jnp.arange(SOME)
    mine = i < width
    tile = _backend.load(table_ref, row, i, mask=mine, other=-1)
    value = _backend.load(ranked_ref, row, i, mask=mine, other=-jnp.inf)

    def other(n: Any) -> Array:
      j = n * SOME + jnp.arange(SOME)
      return _backend.load(ranked_ref, row, j, mask=j < width, other=-jnp.inf)[None, :]

    def ahead(n: Any, earlier: Array) -> Array:
      return earlier + (other(n) >= value[:, None]).astype(jnp.int32)

    def behind(n: Any, earlier: Array) -> Array:
      return earlier + (other(n) > value[:, None]).astype(jnp.int32)

    # What stands before an entry comes before its equals too.
    earlier = lax.fori_loop(0, own, ahead, jnp.zeros((SOME, SOME), jnp.int32))
    earlier = lax.fori_loop(own, pl.cdiv(width, SOME), behind, earlier)
    here = other(own)
    before = jnp.arange(SOME)[None, :] < jnp.arange(SOME)[:, None]
    earlier += ((here == value[:, None]) & before).astype(jnp.int32)
    place = jnp.where(mine, earlier.sum(axis=1), width)
    _backend.store(out_table_ref, row, place, value=tile, mask=mine)
    _backend.store(out_ranked_ref, row, place, value=value, mask=mine)

  if skips:
    pl.when(active_ref[0][row] > 0)(order)
  else:
    order()


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
    table (−1 behind the end), count of its entries, and their scores (∞ for forced ones, −∞ behind
    the end).

  Raises:
    TypeError: scores are not float32.
    NotImplementedError: more tiles are to be chosen than a program can hold.
  """
  static: dict[str, Any] = {"unit": unit, "span_sinks": span_sinks, "sinks": sinks, "local": local}
  limits = None if limit is None else (limit,)
  stop = stop[..., None]
  made = best_of_each(
    *(scores[:, :, None], start, stop),
    **static,
    k=(k,),
    limit=limits,
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
  """What N calls of `best` give, by one search: each list has its own stops, k and limit."""
  batch, heads, lists, tiles = scores.shape

  def flat(x: Array) -> Array:
    """One for each batch row, KV head or list."""
    apart = x.ndim == 3 and x.shape[2] > 1
    return (jnp.broadcast_to(x, scores.shape[:3]) if apart else x).reshape(-1)

  made = _launch(
    scores.reshape(-1, tiles),
    flat(start),
    flat(stop),
    unit=unit,
    span_sinks=span_sinks,
    sinks=min(sinks, tiles),
    local=min(local, tiles),
    k=[min(n, tiles) for n in k],
    limit=limit,
    dense_below=dense_below,
    forces=True,
    ordered=ordered,
    interpret=interpret,
  )
  shape = batch, heads, -1
  return [
    (table.reshape(shape), count.reshape(batch, heads), ranked.reshape(shape))
    for table, ranked, count in (made[n::lists] for n in range(lists))
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
  unless it was skipped. The results come behind the two of [B, K, k]. And the scores, of which
  `scores` is the shape then, may be made by the programs that search them, where there are several
  of these for a row (`cut_rows`): `ahead(row, piece, part, *sources, scores)` writes a piece.
  """
  batch, heads, tiles = scores.shape
  rows = batch * heads
  table, ranked, _, *made = _launch(
    scores.reshape(rows, tiles) if isinstance(scores, jax.Array) else None,
    start.reshape(-1),
    stop.reshape(-1),
    unit=unit,
    span_sinks=span_sinks,
    sinks=sinks,
    local=local,
    k=[min(k, tiles)],
    active=None if active is None else active.reshape(-1),
    shape=(rows, tiles),
    forces=False,
    first=0 if ordered else min(first, k, tiles),
    ordered=ordered,
    ahead=ahead,
    sources=sources,
    behind=behind,
    operands=operands,
    results=results,
    interpret=interpret,
  )
  shape = batch, heads, -1
  return ranked.reshape(shape), table.reshape(shape), *made


def cut_rows(rows: int, tiles: int, k: int) -> bool:
  """Whether a row is searched by several programs."""
  return bool(cuts(rows, tiles, min(k, tiles), LANES, config.this_device().cores))


def _launch(
  scores: Array | None,
  start: Array,
  stop: Array,
  *,
  sinks: int,
  local: int,
  k: Sequence[int],
  limit: Sequence[int] | None = None,
  dense_below: int = 0,
  active: Array | None = None,
  forces: bool,
  first: int = 0,
  ordered: bool,
  shape: tuple[int, int] | None = None,
  ahead: Callable[..., None] | None = None,
  sources: Sequence[Array] = (),
  behind: Callable[..., None] | None = None,
  operands: Sequence[Array] = (),
  results: Sequence[jax.ShapeDtypeStruct] = (),
  interpret: bool | None,
  **span: int,
) -> Sequence[Array]:
  """N tables [R, W], N times their scores, N counts [R], and what `behind` makes."""
  if scores is not None and scores.dtype != jnp.float32:
    raise TypeError(f"scores: found dtype {scores.dtype.name}, expected float32")
  rows, tiles = scores.shape if scores is not None else shape or (0, 0)
  length = tiles
  where = [start, stop, *([] if active is None else [active])]
  static: dict[str, Any] = {**span, "sinks": sinks, "local": local, "skips": active is not None}
  most = max(k)
  index: list[Array] = []
  parts = cuts(rows, tiles, most, LANES, config.this_device().cores)
  if parts is None:
    raise NotImplementedError(
      f"k: found {most} of {tiles} tiles, expected at most {LANES} of more than {LANES}"
    )
  few = max(limit) if limit and dense_below else most
  if scores is None and not parts:
    raise ValueError(f"ahead: found {tiles} tiles, which one program searches, expected more")
  for part in parts:
    count = pl.cdiv(length, part)
    room = _given(count, part, most)
    made_by: dict[str, Any] = {"rows": rows}
    given = [*index, *where]
    if scores is None:
      written = jax.ShapeDtypeStruct((rows, tiles), jnp.float32)
      made_by |= {"ahead": ahead, "beside": (len(sources), 1), "results": [written]}
      given += sources
    else:
      given.insert(0, scores)
    tile, scores, *_ = _call(
      given,
      **made_by,
      parts=count,
      part=part,
      widths=[room],
      k=(min(most, part),),
      limit=(min(few, part),),
      dense_below=dense_below,
      first=0,
      forces=False,
      indexed=bool(index),
      room=room,
      interpret=interpret,
      **static,
    )
    index, length = [tile], tile.shape[1]
  assert scores is not None
  made = _call(
    [scores, *index, *where, *operands],
    rows=rows,
    parts=1,
    part=length if most else 1,
    widths=[max(min(sinks + local + n, tiles) if forces else n, 1) for n in k],
    k=tuple(k),
    limit=tuple(k if limit is None else limit),
    dense_below=dense_below,
    first=first,
    forces=forces,
    indexed=bool(index),
    room=0,
    behind=behind,
    beside=(len(operands), len(results)),
    results=results,
    interpret=interpret,
    **static,
  )
  if not ordered or most <= 1:
    return made
  pairs: list[Array] = []
  for table, ranked in zip(made[: len(k)], made[len(k) : 2 * len(k)], strict=True):
    skipping = where[2:]
    pairs += _backend.call(
      functools.partial(_order_kernel, skips=bool(skipping)),
      *(table, ranked, *skipping),
      grid=(table.shape[0], pl.cdiv(table.shape[1], SOME)),
      out=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (table, ranked)],
      warps=4,
      stages=1,
      name="top_k_order",
      interpret=interpret,
    )
  return [*pairs[::2], *pairs[1::2], *made[2 * len(k) :]]


def _call(
  operands: list[Array],
  *,
  parts: int,
  part: int,
  widths: Sequence[int],
  rows: int,
  ahead: Callable[..., None] | None = None,
  behind: Callable[..., None] | None = None,
  beside: tuple[int, int] = (0, 0),
  results: Sequence[jax.ShapeDtypeStruct] = (),
  interpret: bool | None,
  **static: Any,
) -> Sequence[Array]:
  each = rows // len(widths)
  shapes = [(each, parts * width) for width in widths]
  return _backend.call(
    functools.partial(_kernel, part=part, ahead=ahead, behind=behind, beside=beside, **static),
    *operands,
    grid=(rows, parts),
    out=[
      *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes),
      *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
      *(jax.ShapeDtypeStruct((each * parts,), jnp.int32) for _ in widths),
      *results,
    ],
    warps=warps_of(part),
    stages=1,
    name="top_k",
    interpret=interpret,
  )


@functools.cache
def cuts(rows: int, length: int, k: int, most: int, cores: int) -> tuple[int, ...] | None:
  """Lengths of the parts of one search after another, before the last one; None: k is too large.

  What takes least time by a rough account: all scores that run at once take as long as those of one
  program, and `LAUNCH` stands for a launch.
  """
  return _cheapest(rows, length, k, most, cores)[1]


@functools.cache
def _cheapest(
  rows: int, length: int, k: int, most: int, cores: int
) -> tuple[float, tuple[int, ...] | None]:
  """The least cost of finding the k best of rows of some length, and how they are cut for it."""
  if k == 0:
    return 0.0, ()
  longest = most if 2 * k <= most else 2 * most

  def cost(parts: int, lanes: int) -> float:
    waves = pl.cdiv(rows * parts * lanes, cores * AT_ONCE)
    return waves * float(LAUNCH + max(lanes, min(LEVEL, most)))

  found: tuple[float, tuple[int, ...] | None] = math.inf, None
  if length <= longest:
    found = cost(1, lanes_of(length)), ()
  lanes = longest
  while lanes >= min(SHORTEST, most // 2):
    parts = pl.cdiv(length, lanes)
    part = pl.cdiv(length, parts)
    given = parts * _given(parts, part, k)
    if parts > 1 and given < length:
      rest, more = _cheapest(rows, given, k, most, cores)
      total = cost(parts, lanes) + rest
      if more is not None and total < found[0]:
        found = total, (part, *more)
    lanes //= 2
  return found


def _given(parts: int, part: int, k: int) -> int:
  """How many scores each part gives at most: k, or as many as are searched in the same time."""
  least = min(k, part)
  lanes = max(lanes_of(parts * least), LEVEL)
  return max(least, min(part // 2, lanes // parts))


def lanes_of(part: int) -> int:
  """Scores that a program holds that searches `part` of them."""
  return max(pl.next_power_of_2(part), 32 * EACH)


def warps_of(part: int) -> int:
  """Warps of a program that searches `part` scores: eight per thread, sixteen in long ones."""
  lanes = lanes_of(part)
  return min(max(lanes // 256, 1), 8 if lanes <= 4096 else 16)
