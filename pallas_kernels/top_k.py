"""The best tiles of every row, exactly, as a table that sparse decode walks.

Scores become integers of the same order, and a search finds the k-th largest: each pass divides the
window that holds it into eight, counts what lies in and below each part, and goes on with one; it
ends as soon as k lie above. Those are then put together by a running sum, in order of index, which
also settles ties; where somebody asks for the order of scores, a second launch counts for each how
many come before it. No atomics, no sort: a second run is equal to the bit.

Rows longer than `LANES` are cut: each part gives its own k best, and what they give is searched
once more.

Bytes: the scores, 4 per tile. Latency is the cost, so that everything that a plan needs (first
tiles, newest ones, holes closed, scores) is written by the same launch.

Grids: one program per row and part; one per row and `SOME` entries.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import _backend

LANES = 8192  # longest part of a row that one program searches
PART = 4096  # length of a part where a row is longer
EACH = 8  # scores counted together: their number fits four bits
SOME, OTHERS = 32, 256  # entries that a program puts in order, by as many others at once
LEAST = -(2**31)  # below the key of every float


def _keys(value: Array) -> Array:
  """int32 keys in the order of floats that are not NaN; 0 and −0 are equal."""
  bits = lax.bitcast_convert_type(jnp.where(value == 0, 0.0, value), jnp.int32)
  return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _threshold(key: Array, want: Array) -> Array:
  """A bound at or above which lie the `want` largest keys, and of others only its own equals.

  Args:
    key: [E, T], E ≤ 15; `LEAST` is none.
    want: how many, at most as many as there are.
  """
  real = key > LEAST
  low = jnp.where(real, key, jnp.int32(2**31 - 1)).min()
  high = key.max()
  held = real.astype(jnp.int32).sum()  # keys at or above low
  width = high - low  # below 0 where it is past int32
  exponent = lax.bitcast_convert_type(width.astype(jnp.float32), jnp.int32) >> 23
  bits = jnp.where(width < 0, 32, jnp.maximum(exponent - 126, 0))
  # Nothing is above the largest key.
  low, held = jnp.where(want > 0, low, high), jnp.where(want > 0, held, want)
  part = jnp.arange(8, dtype=jnp.int32)

  def unsettled(state: tuple[Array, Array, Array]) -> Array:
    _, bits, held = state
    return (held != want) & (bits > 0)

  def narrow(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """The window [low, low + 2^bits) holds the bound; its parts are 2^shift wide."""
    low, bits, held = state
    shift = jnp.maximum(bits - 3, 0)
    at = lax.shift_right_logical(key - low, shift)
    inside = (key >= low) & (at >= 0) & (at < (1 << (bits - shift)))
    counts = jnp.where(inside, jnp.int32(1) << ((at & 7) * 4), 0).sum(axis=0)
    below = counts * jnp.int32(0x11111111)  # each four bits: those of this part and lower ones
    below = (lax.shift_right_logical(below[None, :], part[:, None] * 4) & 15).sum(axis=1)
    above = held - below
    enough = above >= want
    passed = enough.astype(jnp.int32).sum()
    return low + (passed << shift), shift, jnp.where(enough, above, held).min()

  return lax.while_loop(unsettled, narrow, (low, bits, held))[0]


def _kernel(
  *refs: Any,
  part: int,
  k: int,
  unit: int,
  span_sinks: int,
  sinks: int,
  local: int,
  lists: bool,
  indexed: bool,
  limited: bool,
  skips: bool,
) -> None:
  """scores [R, P], (index [R, P],) start, stop, (limit) [R] or one per batch row, (active [R]) ->
  table, ranked [R, C W], count [R C]; C parts of a row.

  `indexed`: candidates of an earlier launch, −1 = none. `lists`: forced tiles come first.
  """
  inputs, (table_ref, ranked_ref, count_ref) = list(refs[:-3]), refs[-3:]
  scores_ref = inputs.pop(0)
  index_ref = inputs.pop(0) if indexed else None
  start_ref, stop_ref = inputs.pop(0), inputs.pop(0)
  limit_ref = inputs.pop(0) if limited else None
  active_ref = inputs.pop(0) if skips else None
  rows = scores_ref.shape[0]
  row, piece = pl.program_id(0), pl.program_id(1)
  width = table_ref.shape[1] // (count_ref.shape[0] // rows)

  def select() -> None:
    shared = rows // start_ref.shape[0]
    start, stop = start_ref[row // shared], stop_ref[row // shared]
    newest = lax.div(stop + (unit - 1), jnp.int32(unit)) - 1

    def visible(tile: Array) -> Array:
      return (tile * unit < stop) & ((tile * unit < span_sinks) | ((tile + 1) * unit > start))

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

    lanes = pl.next_power_of_2(part)
    threads = max(lanes // EACH, min(lanes, 32))
    grid = jnp.arange(lanes // threads)[:, None] * threads + jnp.arange(threads)[None, :]
    key = load(grid)[2]
    want = jnp.minimum((key > LEAST).astype(jnp.int32).sum(), k)
    if limit_ref is not None:
      want = jnp.minimum(want, jnp.maximum(limit_ref[row // (rows // limit_ref.shape[0])], 0))
    low = _threshold(key, want)

    lane = jnp.arange(lanes)
    key = load(lane)[2]
    above, equal = key > low, key == low
    short = want - above.astype(jnp.int32).sum()
    both = above.astype(jnp.int32) + (equal.astype(jnp.int32) << 16)
    before = jnp.cumsum(both) - both
    above_before, equal_before = before & 0xFFFF, before >> 16
    keep = above | (equal & (equal_before < short))
    slot = above_before + jnp.minimum(equal_before, short)

    base, nowhere = piece * width, table_ref.shape[1]
    head = jnp.int32(0)
    if lists and sinks + local:
      i = jnp.arange(pl.next_power_of_2(sinks + local))
      forced = jnp.where(i < sinks, i, newest - (i - sinks))
      ok = visible(forced) & (i < sinks + local) & ((i < sinks) | (forced >= sinks))
      place = jnp.cumsum(ok.astype(jnp.int32)) - 1
      head = ok.astype(jnp.int32).sum()
      place = jnp.where(ok, base + place, nowhere)
      _backend.store(table_ref, row, place, value=forced, mask=ok)
      infinite = jnp.full(i.shape, jnp.inf, jnp.float32)
      _backend.store(ranked_ref, row, place, value=infinite, mask=ok)
    place = jnp.where(keep, base + head + slot, nowhere)
    tile, value, _ = load(lane)
    _backend.store(table_ref, row, place, value=tile, mask=keep)
    _backend.store(ranked_ref, row, place, value=value, mask=keep)
    count_ref[row * (count_ref.shape[0] // rows) + piece] = head + want

    i = jnp.arange(pl.next_power_of_2(width))
    tail = (i >= head + want) & (i < width)
    place = jnp.where(tail, base + i, nowhere)
    _backend.store(table_ref, row, place, value=jnp.full(i.shape, -1), mask=tail)
    lowest = jnp.full(i.shape, -jnp.inf, jnp.float32)
    _backend.store(ranked_ref, row, place, value=lowest, mask=tail)

  if active_ref is None:
    select()
  else:
    pl.when(active_ref[row] > 0)(select)


def _order_kernel(*refs: Any, skips: bool) -> None:
  """table, ranked [R, W], (active [R]) -> both in the order of ranked, equal ones as they stand."""
  table_ref, ranked_ref, *active_ref = refs[:3] if skips else refs[:2]
  out_table_ref, out_ranked_ref = refs[-2:]
  width = table_ref.shape[1]
  row, first = pl.program_id(0), pl.program_id(1) * SOME

  def order() -> None:
    i = first + jnp.arange(SOME)
    mine = i < width
    tile = _backend.load(table_ref, row, i, mask=mine, other=-1)
    value = _backend.load(ranked_ref, row, i, mask=mine, other=-jnp.inf)

    def step(n: Any, place: Array) -> Array:
      j = n * OTHERS + jnp.arange(OTHERS)
      other = _backend.load(ranked_ref, row, j, mask=j < width, other=-jnp.inf)
      earlier = (other[None, :] > value[:, None]) | (
        (other[None, :] == value[:, None]) & (j[None, :] < i[:, None])
      )
      return place + earlier.astype(jnp.int32).sum(axis=1)

    place = lax.fori_loop(0, pl.cdiv(width, OTHERS), step, jnp.zeros(i.shape, jnp.int32))
    place = jnp.where(mine, place, width)
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
  limit: Int[Array, " B"] | Int[Array, "B K"] | None = None,
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
    limit: how many others each row or KV head lists, up to k; None: k.
    ordered: whether the others are listed by score, or by index, which takes less time.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    table (−1 behind the end), count of its entries, and their scores (∞ for forced ones, −∞ behind
    the end).

  Raises:
    TypeError: scores are not float32.
    NotImplementedError: more tiles are to be chosen than a program can hold.
  """
  batch, heads, tiles = scores.shape
  forced = {"sinks": min(sinks, tiles), "local": min(local, tiles)}
  table, ranked, count = _launch(
    scores.reshape(batch * heads, tiles),
    start.reshape(-1),
    stop.reshape(-1),
    unit=unit,
    span_sinks=span_sinks,
    **forced,
    k=min(k, tiles),
    lists=True,
    limit=None if limit is None else limit.reshape(-1),
    active=None,
    ordered=ordered,
    interpret=interpret,
  )
  shape = batch, heads, -1
  return table.reshape(shape), count.reshape(batch, heads), ranked.reshape(shape)


def others(
  scores: Float[Array, "B K P"],
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
  interpret: bool | None = None,
) -> tuple[Float[Array, "B K k"], Int[Array, "B K k"]]:
  """The best tiles that are neither first nor newest, and their scores: `ops.tiles.others`.

  Arguments as in `best`; rows whose `active` is 0 are skipped, and hold anything.
  """
  batch, heads, tiles = scores.shape
  table, ranked, _ = _launch(
    scores.reshape(batch * heads, tiles),
    start.reshape(-1),
    stop.reshape(-1),
    unit=unit,
    span_sinks=span_sinks,
    sinks=sinks,
    local=local,
    k=min(k, tiles),
    lists=False,
    limit=None,
    active=None if active is None else active.reshape(-1),
    ordered=ordered,
    interpret=interpret,
  )
  return ranked.reshape(batch, heads, -1), table.reshape(batch, heads, -1)


def _launch(
  scores: Array,
  start: Array,
  stop: Array,
  *,
  unit: int,
  span_sinks: int,
  sinks: int,
  local: int,
  k: int,
  lists: bool,
  limit: Array | None,
  active: Array | None,
  ordered: bool,
  interpret: bool | None,
) -> tuple[Array, Array, Array]:
  """table, ranked [R, W] and count [R]."""
  if scores.dtype != jnp.float32:
    raise TypeError(f"scores: found dtype {scores.dtype.name}, expected float32")
  rows, tiles = scores.shape
  static = {"unit": unit, "span_sinks": span_sinks, "sinks": sinks, "local": local}
  skipping = [] if active is None else [active]
  limits = [] if limit is None else [limit]
  index: list[Array] = []
  # Each part gives as many as it has, up to k: halved at least, whatever k is.
  while (length := scores.shape[1]) > LANES and k > 0:
    part = max(PART, 2 * pl.next_power_of_2(k))
    if min(part, length) > 2 * LANES:
      raise NotImplementedError(
        f"k: found {k} of {tiles} tiles, expected at most {LANES} of more than {LANES}"
      )
    if part >= length:
      break
    tile, scores, _ = _call(
      [scores, *index, start, stop, *skipping],
      parts=pl.cdiv(length, part),
      part=part,
      width=k,
      k=k,
      lists=False,
      indexed=bool(index),
      limited=False,
      skips=bool(skipping),
      interpret=interpret,
      **static,
    )
    index = [tile]
  width = min(sinks + local + k, tiles) if lists else k
  table, ranked, count = _call(
    [scores, *index, start, stop, *limits, *skipping],
    parts=1,
    part=scores.shape[1] if k else 1,
    width=max(width, 1),
    k=k,
    lists=lists,
    indexed=bool(index),
    limited=bool(limits),
    skips=bool(skipping),
    interpret=interpret,
    **static,
  )
  if ordered and k > 1:
    table, ranked = _backend.call(
      functools.partial(_order_kernel, skips=bool(skipping)),
      *(table, ranked, *skipping),
      grid=(rows, pl.cdiv(table.shape[1], SOME)),
      out=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (table, ranked)],
      warps=4,
      stages=1,
      name="top_k_order",
      interpret=interpret,
    )
  return table, ranked, count


def _call(
  operands: list[Array], *, parts: int, part: int, width: int, interpret: bool | None, **static: Any
) -> Any:
  rows = operands[0].shape[0]
  return _backend.call(
    functools.partial(_kernel, part=part, **static),
    *operands,
    grid=(rows, parts),
    out=[
      jax.ShapeDtypeStruct((rows, parts * width), jnp.int32),
      jax.ShapeDtypeStruct((rows, parts * width), jnp.float32),
      jax.ShapeDtypeStruct((rows * parts,), jnp.int32),
    ],
    warps=warps_of(part),
    stages=1,
    name="top_k",
    interpret=interpret,
  )


def warps_of(part: int) -> int:
  """Warps of a program that searches `part` scores, 16 per thread.

  What a pass does once per warp is as much as it does for ten scores.
  """
  return min(max(pl.next_power_of_2(part) // 512, 2), 16)
