"""ART: a walk over a plan's tiles that ends once the output has stopped moving (ART, Alg. 1).

Bytes: keys and values of the tiles walked, and of a few behind the stop.

Grid: `splits` programs for each (batch row, KV head). Program s walks tiles s, s + splits, … of the
visiting order with a detector of its own and stops by itself; the parts are joined as those of
dense decode are (`_split`). One split is the paper's walk.

A loop that tests for its end after every tile is not pipelined: it waits for the memory each time.
So tiles are walked in chunks by an inner loop of known length, which is pipelined; an outer loop
tests for the end where there may be one. Until then the detector hides the keys of the tiles behind
the stop, which leaves the softmax state as it is, to the bit.

The inner loop takes tiles in parts, so that two parts fit beside the one that is multiplied, and
those are on their way while the detector looks.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from ..ring import place_of
from ..softmax_state import State
from . import _backend, _split, _tiles, config
from .decode import check
from .sparse_decode import check_table

CHUNK = 8  # tiles between two tests for the end of a walk that is not calm
LONG = 96  # tiles of a walk that is worth a part more
PROBES = 32  # dimensions of the output that a strided probe looks at
MAX_TILE = 256
NEVER = 1 << 30  # a patience that no walk exhausts


@dataclasses.dataclass(frozen=True)
class Detector:
  """When a walk ends; fields as the arguments of `walk`."""

  tau: float | int
  phi: float | int
  patience: float | int
  full: bool
  per_head: bool
  kept: int


class _Walk(NamedTuple):
  """A walk: softmax state; behind its last whole tile the probe x, ‖x‖, stable tiles in a row,
  whether it goes on (1 or 0) and tiles walked, the last two scalars where query heads stop
  together; and the largest logit of the tile that it is in.
  """

  carry: _tiles.Carry
  probe: Array
  norm: Array
  calm: Array
  going: Array
  walked: Array
  top: Array


def _probed(columns: Array, head_dim: int, full: bool) -> Array:
  """Whether the output is looked at in each column: those of ⌊i·H/32⌋, i < 32, or all."""
  if full or head_dim <= PROBES:
    return columns < head_dim
  apart = head_dim // PROBES
  if head_dim == apart * PROBES and apart & (apart - 1) == 0:
    # In this form the compiler sees which registers are never looked at, and drops them.
    return (columns & (apart - 1) == 0) & (columns < head_dim)
  i = (columns * PROBES + head_dim - 1) // head_dim  # the first i with i·H/32 ≥ column
  return (i < PROBES) & (i * head_dim // PROBES == columns)


def _stepper(
  advance: Callable[[Any, _tiles.Carry, Array], tuple[_tiles.Carry, Array]],
  detector: Detector,
  *,
  parts: int,
  probed: Array,
  lanes: Array,
  groups: int,
  part: Array,
  splits: int,
  proven: Callable[[Any, _tiles.Carry], Array] | None,
) -> Callable[[Any, _Walk], _Walk]:
  """The body of the loop: a part of a tile, and the detector behind the last one.

  `advance(n, carry, going)` adds part n % parts of tile n // parts of this program, and gives its
  largest logits; `proven(i, carry)` says, in the detector's place, which rows need no more than
  tile i.
  """
  patience = int(min(detector.patience, NEVER))
  nothing = jnp.full(lanes.shape, -jnp.inf, jnp.float32)

  def step(n: Any, walk: _Walk) -> _Walk:
    carry, top = advance(n, walk.carry, walk.going)
    if parts == 1:
      return _Walk(carry, *behind(n, carry, top, *walk[1:-1]))
    i, j = _divided(n, parts)
    top, held = jnp.maximum(walk.top, top), walk[1:-1]
    rest = lax.cond(j == parts - 1, lambda: behind(i, carry, top, *held), lambda: (*held, top))
    return _Walk(carry, *rest)

  def behind(
    i: Any, carry: _tiles.Carry, top: Array, old: Array, norm: Array, calm: Array, *counts: Array
  ) -> tuple[Array, ...]:
    """All of a walk but its state, behind tile i."""
    going, walked = counts
    new = old
    if proven is not None:
      done = proven(i, carry).astype(jnp.int32)
    else:
      new = jnp.where(probed[None, :], carry.acc * (1 / _tiles.nonzero(carry.l))[:, None], 0.0)
      before, norm = norm, jnp.sqrt((new * new).sum(axis=1))
      stable = is_stable(new, old, norm, before)
      calm = jnp.where(top == -jnp.inf, calm, jnp.where(stable, calm + 1, 0))
      done = (calm >= patience).astype(jnp.int32)
    enough = (part + (i + 1) * splits >= detector.kept).astype(jnp.int32)
    if not detector.per_head:
      done = jnp.where(lanes < groups, done, 1).min()
    return new, norm, calm, going * (1 - done * enough), walked + going, nothing

  def is_stable(new: Array, old: Array, norm: Array, before: Array) -> Array:
    """Whether the probe neither moved nor turned; `norm` and `before` are the norms of both."""
    moved = jnp.sqrt(((new - old) * (new - old)).sum(axis=1))  # d_scale
    both = norm * before
    # 1 − cos(a, b) = (‖a − b‖² − (‖a‖ − ‖b‖)²) / 2‖a‖‖b‖, which cancels nothing near 0.
    apart = moved * moved - (norm - before) * (norm - before)
    turn = apart / (2 * jnp.where(both > 0, both, 1.0))
    return (both > 0) & (moved < detector.tau) & (turn < detector.phi)

  return step


def _is_run(unit: int, tile: int, part: int) -> bool:
  """Whether all slots of a part of a tile come from one entry of a table."""
  return unit % part == 0 and tile % part == 0


def _divided(n: Any, parts: int) -> tuple[Any, Any]:
  """Tile and part of step n of a walk."""
  if parts == 1:
    return n, 0
  i = lax.div(n, jnp.int32(parts))
  return i, n - i * parts


def _until_test(walk: _Walk, detector: Detector, chunk: int, real: Array) -> Array:
  """Tiles until the next test for the end: no sooner than a walk can have ended.

  A head that has been calm for c tiles needs p − c more, the one that needs most decides. A walk of
  two tiles is the shortest, as each waits for the memory once; where a head is not calm at all, one
  of `chunk` tiles, since it will hardly end there.
  """
  patience = int(min(detector.patience, NEVER))
  calm = jnp.where(real & (walk.going > 0), walk.calm, NEVER).min()
  return jnp.where(calm == 0, max(chunk, patience), jnp.maximum(patience - calm, 2))


def _walk_kernel(
  *refs: Any,
  groups: int,
  unit: int,
  tile: int,
  splits: int,
  chunk: int,
  pinned: int,
  sinks: int,
  scale: float,
  cut: config.Config,
  detector: Detector | None,
  log_ratio: float | None,
  rings: bool,
  loaded: bool,
) -> None:
  """q [R, G, H], k, v [R, S, H], (table [R, W], count [R], (unread [R, G, W + 1],))
  (ring [R, 2], seen [B],) start, stop [R] or one per batch row -> what `_split.results` lists, and
  tiles walked [R · splits, G].
  """
  written = 4 if splits == 1 else 8
  inputs, outputs, walked_ref = refs[: -written - 1], refs[-written - 1 : -1], refs[-1]
  if rings:
    inputs, ring_ref, seen_ref = (*inputs[:3], *inputs[5:]), *inputs[3:5]
  q_ref, k_ref, v_ref, *table_refs, start_ref, stop_ref = inputs
  rows, slots, head_dim = k_ref.shape
  pid = pl.program_id(0)
  row, part = pid // splits, pid % splits
  shared = rows // start_ref.shape[0]  # rows of one range: all heads of a batch row, or one
  start, stop = start_ref[row // shared], jnp.minimum(stop_ref[row // shared], slots)

  lanes, columns = jnp.arange(_split.lanes_of(groups)), jnp.arange(_split.columns_of(head_dim))
  inside = (columns < head_dim)[None, :]
  if table_refs:
    table_ref, count_ref, *unread_refs = table_refs
    keys = jnp.minimum(count_ref[row], table_ref.shape[1]) * unit
    tiles = pl.cdiv(keys, tile)
  else:  # first tiles, then from the newest one down, and around
    last = (stop + tile - 1) // tile - 1
    oldest = jnp.maximum(start // tile, pinned)
    tiles = jnp.minimum(pinned, last + 1) + jnp.maximum(last - oldest + 1, 0)
    newest = last
    if rings:
      position = seen_ref[row // (rows // seen_ref.shape[0])] - 1
      slot = place_of(ring_ref[row, 0], ring_ref[row, 1], position, slots)
      newest = jnp.maximum(jnp.maximum(slot, 0) // tile, pinned - 1)

  parts = pl.cdiv(tile, cut.tile)  # of a tile: the shared memory holds two of them, or more

  # Addresses of a run of slots need few registers.
  run = not table_refs or _is_run(unit, tile, cut.tile)

  def slots_of(t: Any, j: Any) -> tuple[Array, Array]:
    """Slots of the keys of part j of tile t of the order, and which of them are visible."""
    lane = j * cut.tile + jnp.arange(cut.tile)
    if table_refs and run:
      key = t * tile + j * cut.tile
      entry = table_ref[row, key // unit]
      slot, real = entry * unit + key % unit + jnp.arange(cut.tile), (key < keys) & (entry >= 0)
    elif table_refs:
      key = t * tile + lane
      listed = (key < keys) & (lane < tile)
      entry = _backend.load(table_ref, row, key // unit, mask=listed, other=-1)
      slot, real = entry * unit + key % unit, entry >= 0
    else:
      down = newest - (t - pinned)
      if rings:
        down = jnp.where(down < pinned, down + last - pinned + 1, down)
      slot = jnp.where(t < pinned, t, down) * tile + lane
      real = lane < tile
    return slot, real & (slot < stop) & ((slot < sinks) | (slot >= start))

  def fetch(t: Any, j: Any) -> _tiles.Tile:
    slot, keep = slots_of(t, j)
    if not run:
      slot = jnp.where(keep, slot, 0)
    index, mask = (row, slot[:, None], columns[None, :]), keep[:, None] & inside
    k, v = (_backend.load(ref, *index, mask=mask, evict="evict_first") for ref in (k_ref, v_ref))
    return _tiles.Tile(k, v, keep)

  real = (lanes < groups)[:, None] & inside
  q = _backend.load(q_ref, row, lanes[:, None], columns[None, :], mask=real)

  def advance(
    n: Any, carry: _tiles.Carry, going: Array | None = None
  ) -> tuple[_tiles.Carry, Array]:
    """Adds part n % parts of tile n // parts of this program, and gives its largest logits.

    One loop over all parts: a loop inside of a loop would wait for the memory in each turn.
    """
    i, j = _divided(n, parts)
    loaded = fetch(part + i * splits, j)
    keep = loaded.keep
    if going is not None:
      keep = keep & (going > 0) if going.ndim == 0 else keep[None, :] & (going > 0)[:, None]
    logits: list[Array] = []
    carry = _tiles.step(carry, q, loaded._replace(keep=keep), scale=scale, see=logits.append)
    return carry, logits[0].max(axis=1)

  def proven(i: Any, carry: _tiles.Carry) -> Array:
    """ln of the mass unread ≤ ln of the mass read + log_ratio."""
    assert log_ratio is not None
    unread = _backend.load(unread_refs[0], row, lanes, i + 1, mask=lanes < groups, other=-jnp.inf)
    return unread <= (carry.m + jnp.log2(carry.l)) * _tiles.LN2 + log_ratio

  mine = jnp.maximum(tiles - part + splits - 1, 0) // splits
  carry = _tiles.start(lanes.size, columns.size)
  if detector is None:
    carry = lax.fori_loop(0, mine * parts, lambda n, carry: advance(n, carry)[0], carry)
    walked = mine
  else:
    zero = jnp.zeros(lanes.shape, jnp.int32)
    many = zero if detector.per_head else jnp.int32(0)
    none = jnp.full(lanes.shape, -jnp.inf, jnp.float32)
    empty = jnp.zeros(carry.acc.shape, jnp.float32), jnp.zeros(lanes.shape, jnp.float32)
    walk = _Walk(carry, *empty, zero, many + 1, many, none)
    step = _stepper(
      advance,
      detector,
      parts=parts,
      probed=_probed(columns, head_dim, detector.full),
      lanes=lanes,
      groups=groups,
      part=part,
      splits=splits,
      proven=None if log_ratio is None else proven,
    )

    def unfinished(state: tuple[Array, _Walk]) -> Array:
      first, walk = state
      going = walk.going.max() if detector.per_head else walk.going
      return (first < mine) & (going > 0)

    def walk_chunk(state: tuple[Array, _Walk]) -> tuple[Array, _Walk]:
      first, walk = state
      many = jnp.int32(chunk)
      if log_ratio is None:
        many = _until_test(walk, detector, chunk, lanes < groups)
      last = first + jnp.minimum(many, mine - first)
      return last, lax.fori_loop(first * parts, last * parts, step, walk)

    fetched, walk = lax.while_loop(unfinished, walk_chunk, (jnp.int32(0), walk))
    carry, walked = walk.carry, fetched if loaded else walk.walked

  piece = _split.Piece(pid, row, part, jnp.int32(splits), jnp.bool_(True))
  _split.store(piece, carry, outputs, groups=groups, head_dim=head_dim)
  walked = jnp.broadcast_to(walked, lanes.shape)
  _backend.store(walked_ref, pid, lanes, value=walked, mask=lanes < groups)


def walk(
  q: Float[Array, "B K G H"],
  k: Float[Array, "B K S H"],
  v: Float[Array, "B K S H"],
  table: Int[Array, "B K W"] | None,
  count: Int[Array, "B K"] | None,
  start: Int[Array, "B #K"],
  stop: Int[Array, "B #K"],
  *,
  unit: int = 1,
  sinks: int = 0,
  tile: int = 128,
  tau: float | int = 1e-5,
  phi: float | int = 1e-3,
  patience: float | int | None,
  full: bool = False,
  per_head: bool = False,
  kept: int = 0,
  unread: Float[Array, "B K G _"] | None = None,
  log_ratio: float | None = None,
  ring: Int[Array, "B K 2"] | None = None,
  seen: Int[Array, " B"] | None = None,
  splits: int | None = None,
  chunk: int = CHUNK,
  loaded: bool = False,
  scale: float | None = None,
  cut: config.Config | None = None,
  interpret: bool | None = None,
) -> tuple[State, Float[Array, "B K G H"], Int[Array, "B K P G"]]:
  """Attention over the listed slots of [0, min(sinks, stop)) ∪ [max(start, sinks), stop), in order.

  Tile t holds keys t·tile to (t + 1)·tile − 1 of the list. Split s of P walks tiles s, s + P, …
  and ends when the detector says so, of its own output: what the others have read it does not
  know. With one split this is Algorithm 1. A tile without a visible key is walked over and is no
  step for the detector.

  Args:
    q: queries, rotated; bfloat16, float16 or float32, H ≤ 256, G ≤ 128.
    k, v: cached keys and values in the dtype of q.
    table: int32 indices of tiles of `unit` slots in visiting order, no duplicates; negative ones
      are holes. None: tiles of `tile` slots, the first `kept` and those of the sinks, then from the
      newest down; the last one, or with a `ring` the newest token's, and around.
    count: int32, how many entries of a list are valid, holes included; None without a table.
    start, stop: int32, the range of slots that may be read at all, see `decode_attention`.
    unit: slots per entry of the table, 1 to 256.
    sinks: leading slots that may be read whatever `start` is.
    tile: keys between two looks at the output, up to 256.
    tau, phi: largest movement of the probe, and largest 1 − cosine of two probes, that are stable.
    patience: stable tiles in a row that end a walk; infinity never ends it; None: nothing is looked
      at, and the result is that of infinity to the bit.
    full: whether the probe is the whole output; else 32 of its dimensions.
    per_head: whether query heads stop one by one; else all of a KV head's at once.
    kept: first tiles of the order before whose end no walk stops.
    unread: float32, ln of the most mass of tiles t and later, with one split and a table of tiles:
      a walk then ends once `unread` behind its tile is at most ln of the mass read + `log_ratio`,
      whatever the output does.
    log_ratio: see `unread`.
    ring: int32, of a cache whose slots are used in turn (`kvjax.ring`), with `seen`.
    seen: int32, the position behind the newest token.
    splits: P; None: as many as fill the device, by the shapes alone.
    chunk: tiles between two tests for the end while the output moves, at least `patience`; the
      calmer it is, the sooner the next one. Tiles behind the end are loaded for nothing.
    loaded: count these too.
    scale: factor of the logits; H^−½ if None.
    cut: keys per matrix product, warps and stages; by device and shape if None.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    The softmax state, float32: o [B, K, G, H], m and l [B, K, G]; o in the dtype of q; and how many
    tiles every split walked for every query head, or with `loaded` read.

  Raises:
    TypeError, ValueError, NotImplementedError: as `sparse_decode`, or a bad tile or splits.
  """
  check(q, k, v, start, stop, sinks, None)
  if table is not None:
    check_table(table, count, unit, q.shape[:2])
  if not 1 <= tile <= MAX_TILE:
    raise NotImplementedError(f"tile: found {tile}, expected 1 to {MAX_TILE}")
  batch, heads, groups, head_dim = q.shape
  rows = batch * heads
  interpreted = _backend.interpreted(interpret)
  length = k.shape[2] if table is None else table.shape[2] * unit
  if splits is None:
    splits = choose_splits(rows, length, tile, interpret=interpreted)
  if splits < 1:
    raise ValueError(f"splits: found {splits}, expected 1 or more")
  splits = min(splits, pl.cdiv(length, tile))
  if (unread is None) != (log_ratio is None) or (
    unread is not None and (table is None or splits > 1)
  ):
    raise ValueError("unread: expected with log_ratio, a table and one split")
  detector = None
  if patience is not None:
    detector = Detector(tau, phi, patience, full, per_head, kept)
  if cut is None:
    choose = functools.partial(choose_cut, tile, head_dim, q.dtype.itemsize, groups=groups)
    cut = choose(interpret=interpreted)
    if table is not None and not _is_run(unit, tile, cut.tile):
      cut = choose(interpret=interpreted, listed=True)
  flat = [x.reshape(rows, *x.shape[2:]) for x in (q, k, v)]
  if ring is not None:
    if table is not None or seen is None:
      raise ValueError("ring: expected with seen and without a table")
    flat += [ring.reshape(rows, 2), seen]
  if table is not None and count is not None:
    flat += [table.reshape(rows, -1), count.reshape(rows)]
    if unread is not None:
      flat.append(unread.reshape(rows, groups, -1))
  programs = rows * splits
  *written, walked = _backend.call(
    functools.partial(
      _walk_kernel,
      groups=groups,
      unit=unit,
      tile=tile,
      splits=splits,
      chunk=chunk,
      pinned=max(kept, -(-sinks // tile)),
      sinks=sinks,
      scale=head_dim**-0.5 if scale is None else scale,
      cut=cut,
      detector=detector,
      log_ratio=log_ratio,
      rings=ring is not None,
      loaded=loaded,
    ),
    *flat,
    *(start.reshape(-1), stop.reshape(-1)),
    grid=(programs,),
    out=[
      *_split.results(rows, groups, head_dim, programs - rows, q.dtype),
      jax.ShapeDtypeStruct((programs, groups), jnp.int32),
    ],
    warps=cut.warps,
    stages=cut.stages,
    name="art_walk",
    interpret=interpret,
  )
  o, m, l, rounded = _split.join(written, split=splits > 1, interpret=interpret)
  o, m, l, rounded = (x.reshape(batch, heads, *x.shape[1:]) for x in (o, m, l, rounded))
  return State(o, m, l), rounded, walked.reshape(batch, heads, splits, groups)


def choose_splits(
  rows: int, length: int, tile: int, *, interpret: bool = False, kind: str | None = None
) -> int:
  """Splits with which no multiprocessor has more than two programs; one where rows have that many.

  Twice as many where each still has many tiles: programs that wait for a place even out walks of
  different lengths. More would read more, as each split needs a calm stretch of its own to stop.
  """
  if interpret:
    return 1
  tiles, full = -(-length // tile), 2 * config.this_device(kind).cores
  if 2 * full // rows * LONG <= tiles:
    full *= 2
  return max(1, min(full // rows, tiles))


def choose_cut(
  tile: int,
  head_dim: int,
  itemsize: int,
  *,
  groups: int = 1,
  listed: bool = False,
  interpret: bool = False,
  kind: str | None = None,
) -> config.Config:
  """Keys per matrix product, at most a tile of the walk, and stages that fit two programs.

  Two parts of 32 KiB are on their way beside the one in use, less where many query heads leave no
  shared memory for them. `listed`: slots come from a table, key by key, which takes a stage before
  each of theirs.
  """
  whole = max(16, pl.next_power_of_2(tile))
  if interpret:
    return config.Config(tile=whole, programs=1, warps=4, stages=1)
  columns = _split.columns_of(head_dim)
  part = max(16, min(whole, (32 << 10) // (2 * columns * itemsize)))
  # float32 tiles want the registers of eight warps.
  warps = 4 if itemsize < 4 else 8
  cut = config.Config(tile=part, programs=1, warps=warps, stages=3)
  shape = {"groups": groups, "head_dim": head_dim, "itemsize": itemsize}
  cut = config.fitted(cut, config.this_device(kind), **shape)
  return dataclasses.replace(cut, stages=2 * cut.stages - 1) if listed else cut
