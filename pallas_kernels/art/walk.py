"""ART: a walk over a plan's tiles that ends once the output has stopped moving (ART, Alg. 1).

Bytes: keys and values of the tiles walked, and of a few after the stop.

Grid: `splits` programs for each (batch row, KV head). Program s walks tiles s, s + splits, … of the
visiting order (`ordering`) and stops by itself (`stopping`); the parts are joined as those of
dense decode are (`split_k`). One split is the paper's walk.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.kernels.art import ordering, reading, spread, stopping
from kvjax.kernels.art.stopping import Certificate, Detector, Stop
from kvjax.kernels.common import backend, config, devices, split_k, tiling
from kvjax.kernels.common.backend import by_row
from kvjax.kernels.common.operands import check, check_table
from kvjax.kernels.decode import stored
from kvjax.primitives.softmax_state import State

CHUNK = 8  # tiles between two tests for the end of a walk that is not calm
LONG = 96  # tiles of a walk that is worth a part more
MAX_TILE = 256


def _kernel(
  sources: reading.Sources,
  unread_ref: Any | None,
  outputs: tuple[Any, ...],
  walked_ref: Any,
  *,
  sizes: ordering.Sizes,
  until: Stop | None,
  splits: int,
  chunk: int,
  sinks: int,
  scale: stored.Scale,
  loaded: bool,
) -> None:
  """`Sources`, (unread [R, G, W + 1]) -> what `split_k.results` lists, and tiles walked
  [R · splits, G].
  """
  groups, head_dim = sources.held.q.shape[1:]
  pid = pl.program_id(0)
  row, split = pid // splits, pid % splits
  read = reading.reading(sources, row, sizes=sizes, sinks=sinks, scale=scale)
  lanes, columns = jnp.arange(split_k.lanes_of(groups)), jnp.arange(split_k.columns_of(head_dim))

  def advance(
    i: Any, j: Any, carry: tiling.Carry, going: Array | None = None
  ) -> tuple[tiling.Carry, Array]:
    """Adds part j of tile i of this program, and gives its largest logits."""
    return read.add(split + i * splits, j, carry, going)

  def unread(i: Any) -> Array:
    """ln of the most mass after tile i."""
    return backend.load(unread_ref, row, lanes, i + 1, mask=lanes < groups, other=-jnp.inf)

  mine = jnp.maximum(read.tiles - split + splits - 1, 0) // splits
  parts = pl.cdiv(sizes.tile, sizes.part)
  carry = tiling.start(lanes.size, columns.size)
  if until is None:

    def step(n: Any, carry: tiling.Carry) -> tiling.Carry:
      return advance(*stopping.divided(n, parts), carry)[0]

    carry, walked = lax.fori_loop(0, mine * parts, step, carry), mine
  else:
    if isinstance(until.rule, Detector):
      judge = until.rule.judge(columns, head_dim)
    else:
      judge = until.rule.judge(unread)
    how: dict[str, Any] = {"split": split, "splits": splits, "parts": parts, "chunk": chunk}
    how["heads"] = stopping.Heads(lanes, groups)
    walk, fetched = stopping.walk(until, advance, judge, carry, mine, **how)
    carry, walked = walk.carry, fetched if loaded else walk.walked

  piece = split_k.Piece(pid, row, split, jnp.int32(splits), jnp.bool_(True))
  split_k.store(piece, carry, outputs, groups=groups, head_dim=head_dim)
  walked = jnp.broadcast_to(walked, lanes.shape)
  backend.store(walked_ref, pid, lanes, value=walked, mask=lanes < groups)


def walk(
  q: Float[Array, "B K G H"],
  k: Float[Array, "B K S H"] | Int[Array, "B K S _"],
  v: Float[Array, "B K S H"] | Int[Array, "B K S _"],
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
  relative: bool = False,
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
  share: int | None = None,
  per_slot: Sequence[Float[Array, "B K S"]] | None = None,
  bits: int = 8,
  scale: float | None = None,
  soft_cap: float | None = None,
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
    k, v: cached keys and values in the dtype of q; with `per_slot` words of codes, and the query is
      rounded to 8 bits per head.
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
      at, and the result is that of infinity, of floats to the bit.
    relative: whether tau is a share of the probe's norm.
    full: whether the probe is the whole output; else 32 of its dimensions.
    per_head: whether query heads stop one by one; else all of a KV head's at once.
    kept: first tiles of the order before whose end no walk stops.
    unread: float32, ln of the most mass of tiles t and later, with one split and a table of tiles:
      a walk then ends once `unread` after its tile is at most ln of the mass read + `log_ratio`,
      whatever the output does.
    log_ratio: see `unread`.
    ring: int32, of a cache whose slots are used in turn (`kvjax.primitives.ring`), with `seen`.
    seen: int32, the position after the newest token.
    splits: P; None: as many as fill the device, by the shapes alone.
    chunk: tiles between two tests for the end while the output moves, at least `patience`; the
      calmer it is, the sooner the next one. Tiles after the end are loaded for nothing. Has no part
      in a walk by shares.
    loaded: count these too.
    share: with one split and a detector, tiles that each of several programs reads of one walk,
      ahead of the detector (`spread`), which loads whole waves of them; 0: one program walks
      alone. The walk is the same. None: `SHARE` where rows leave programs idle.
    per_slot, bits: of codes, see `decode_with_output`.
    scale: factor of the logits; H^−½ if None.
    soft_cap: c of logits c·tanh(x/c); None: x itself.
    cut: keys per matrix product, warps and stages; by device and shape if None.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    The softmax state, float32: o [B, K, G, H], m and l [B, K, G]; o in the dtype of q; and how many
    tiles every split walked for every query head, or with `loaded` read.

  Raises:
    TypeError, ValueError, NotImplementedError: as `sparse_decode`, or a bad tile or splits.
  """
  check(q, k, v, start, stop, sinks, None, per_slot, bits)
  if table is not None:
    check_table(table, count, unit, q.shape[:2])
  if not 1 <= tile <= MAX_TILE:
    raise NotImplementedError(f"tile: found {tile}, expected 1 to {MAX_TILE}")
  batch, heads, groups, head_dim = q.shape
  rows = batch * heads
  interpreted = backend.interpreted(interpret)
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
  if ring is not None and (table is not None or seen is None):
    raise ValueError("ring: expected with seen and without a table")
  until = None
  if patience is not None:
    rule = Detector(tau, phi, int(min(patience, stopping.NEVER)), full, relative)
    until = Stop(rule if log_ratio is None else Certificate(log_ratio), per_head, kept)
  entry = None if table is None else unit
  size: dict[str, Any] = {"groups": groups, "unit": entry, "interpret": interpreted}
  cut = cut or choose_cut(tile, head_dim, q.dtype.itemsize, **size)

  sources = reading.Sources(
    stored.Sources.of(q, k, v, per_slot),
    None if ring is None else ordering.Ring(by_row(ring), seen),
    None if table is None or count is None else ordering.Table(by_row(table), by_row(count)),
    *(start.reshape(-1), stop.reshape(-1)),
  )
  how: dict[str, Any] = {
    "sizes": ordering.Sizes(unit, tile, cut.tile, max(kept, -(-sinks // tile))),
    "sinks": sinks,
    "scale": stored.scale_of(q, scale, soft_cap, bits if per_slot else None, interpreted),
  }
  detected = splits == 1 and (until is None or isinstance(until.rule, Detector))
  if share is None:
    share = spread.SHARE if detected and helped(rows, interpret=interpreted) else 0
  if share:
    if not detected:
      raise ValueError(f"share: found {share}, expected 0 with several splits or a certificate")
    *done, walked = spread.walk(
      *(sources, until, -(-length // tile)),
      share=share,
      cut=cut,
      loaded=loaded,
      interpret=interpret,
      **how,
    )
    return *split_k.finished(done, q.shape[:2]), walked.reshape(batch, heads, 1, groups)
  programs = rows * splits
  written, walked = backend.call(
    functools.partial(_kernel, until=until, splits=splits, chunk=chunk, loaded=loaded, **how),
    *(sources, None if unread is None else by_row(unread)),
    grid=(programs,),
    out=[
      tuple(split_k.results(rows, groups, head_dim, programs - rows, q.dtype)),
      jax.ShapeDtypeStruct((programs, groups), jnp.int32),
    ],
    warps=cut.warps,
    stages=cut.stages,
    name="art_walk",
    interpret=interpret,
  )
  made = split_k.joined(written, q.shape[:2], split=splits > 1, interpret=interpret)
  return *made, walked.reshape(batch, heads, splits, groups)


def helped(rows: int, *, interpret: bool = False, kind: str | None = None) -> bool:
  """True if so many walks leave room for a second program each."""
  return not interpret and 2 * rows <= 2 * devices.this_device(kind).cores


def choose_splits(
  rows: int, length: int, tile: int, *, interpret: bool = False, kind: str | None = None
) -> int:
  """Splits with which no multiprocessor has more than two programs; one where rows have that many.

  Twice as many where each still has many tiles: programs that wait for a place even out walks of
  different lengths. More would read more, as each split needs a calm stretch of its own to stop.
  """
  if interpret:
    return 1
  tiles, full = -(-length // tile), 2 * devices.this_device(kind).cores
  if 2 * full // rows * LONG <= tiles:
    full *= 2
  return max(1, min(full // rows, tiles))


def choose_cut(
  tile: int,
  head_dim: int,
  itemsize: int,
  *,
  groups: int = 1,
  unit: int | None = None,
  interpret: bool = False,
) -> config.Config:
  """Keys per matrix product, at most a tile of the walk, and stages that fit two programs.

  Two parts of 32 KiB are on their way beside the one in use, less where many query heads leave no
  shared memory for them. `unit`: of the entries of a table, where there is one; slots that it gives
  key by key take a stage before each of theirs.
  """
  whole = max(16, pl.next_power_of_2(tile))
  if interpret:
    return config.Config(tile=whole, programs=1, warps=4, stages=1)
  columns = split_k.columns_of(head_dim)
  part = max(16, min(whole, (32 << 10) // (2 * columns * itemsize)))
  # float32 tiles want the registers of eight warps.
  warps = 4 if itemsize < 4 else 8
  cut = config.Config(tile=part, programs=1, warps=warps, stages=3)
  shape = {"groups": groups, "head_dim": head_dim, "itemsize": itemsize}
  cut = config.fitted(cut, devices.this_device(), **shape)
  run = unit is None or ordering.is_run(unit, tile, cut.tile)
  return cut if run else dataclasses.replace(cut, stages=2 * cut.stages - 1)
