"""CIS: all that a step does between entering its token and noting what it used, in one launch.

With whom a row shares (`cis.anchors`), the heaviest tokens of a row that shares with none, its list
(`cis.listed`) and attention over that (`sparse_decode`) ask for nothing of other rows. So a row's
program goes from one to the next where separate launches wait for the slowest row, and for each
other. That takes about as many rows as programs run at once: a row that retrieves has no more than
one program for all of its keys.

Bytes: keys and values of the listed tokens; all keys of rows that look; else next to nothing.

Grid: one program per row.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.kernels.cis.anchors import decide
from kvjax.kernels.cis.listed import Sizes, list_behind
from kvjax.kernels.common import backend, listing, split_k, tiling
from kvjax.kernels.common.backend import by_row
from kvjax.kernels.common.bounds import Bounds, Sight
from kvjax.kernels.common.config import Config
from kvjax.kernels.common.devices import this_device
from kvjax.kernels.common.search import EACH, LEAST, keys, threshold
from kvjax.kernels.decode import stored
from kvjax.kernels.decode.sparse import attend_kernel
from kvjax.kernels.selection.key_weights import TILE, score_keys
from kvjax.primitives.softmax_state import State

STAGES = 3  # tiles of keys on their way to a row that looks
PARTS = 4  # of a tile of the walk: fewer sums to a thread, so that as many programs run at once
LANES = 6144  # most slots that one program searches: more do not fit its registers
CHUNK = 1024  # scores that are put in their places at once


class _Held(NamedTuple):
  """A block's queries [R, s, G, H], anchors [R, s, 1], retrieved [R, s, 1, W], and by batch row its
  step and the tokens seen [B]: refs, or arrays.
  """

  queries: Any
  anchors: Any
  retrieved: Any
  step: Any
  seen: Any


class _Keys(NamedTuple):
  """q [R, G, H] in the dtype of k, v [R, S, H], and the end of the occupied slots [B]."""

  q: Any
  k: Any
  v: Any
  stop: Any


class _Made(NamedTuple):
  """Operands of `cis.note`, and the list: query [R, G, H] of norm 1, anchor, retrieves [R, 1],
  step, start [R], found, weight [R, k], table [R, X], count [R].
  """

  query: Any
  anchor: Any
  retrieves: Any
  step: Any
  start: Any
  found: Any
  weight: Any
  table: Any
  count: Any


def _kernel(
  q_ref: Any,
  held: _Held,
  cached: _Keys,
  made: _Made,
  logits: tuple[Any, ...],
  outs: tuple[Any, ...],
  *,
  tau: float,
  first: Callable[[Array], Array] | None,
  score: Callable[..., None],
  sizes: Sizes,
  scale: tiling.Scale,
  cut: Config,
  interpret: bool,
) -> None:
  """q [R, 1, H], `_Held`, `_Keys` -> `_Made`; scratch: logits [R, 1, S], m, l [R, 1, 1]; o
  [R, 1, H], m, l [R, 1], o rounded.
  """
  row, nothing = pl.program_id(0), jnp.int32(0)
  batch_row = row // (q_ref.shape[0] // held.step.shape[0])
  step, stop = held.step[batch_row], cached.stop[batch_row]
  start = nothing if first is None else first(held.seen[batch_row])
  made.step[row], made.start[row] = step, start
  looks = decide(row, step, q_ref, held.queries, held.anchors, *made[:3], tau, True)

  @pl.when(looks)
  def retrieve() -> None:
    score(row, nothing, (cached.q, cached.k), logits, start, stop, stop)
    backend.barrier(interpret)  # threads read what others wrote
    bounds = Bounds(1, sizes.span_sinks, sizes.sinks, sizes.local)
    _find(row, logits[0], Sight.of(bounds, start, stop), made.found, made.weight)

  listed = held.retrieved, made.anchor, made.retrieves, held.seen, made.start
  lists = made.table, made.count
  list_behind(row, made.found, *listed, *lists, sizes=sizes, interpret=interpret)
  backend.barrier(interpret)
  attend_kernel(
    *(stored.Sources(*cached[:3]), *lists, made.start, cached.stop, outs),
    unit=1,
    config=cut,
    scale=scale,
    sinks=sizes.span_sinks,
    whole=True,
    alone=True,
    parts=PARTS,
  )


def _find(row: Array, scores_ref: Any, sight: Sight, found_ref: Any, weight_ref: Any) -> None:
  """The k best tokens of the middle by position, then −1, and their scores [R, k], of [R, 1, S].

  As `top_k.others` finds them (ties: the lowest; NaN first), but scores are read once for the bound
  and once more for their places: held in between, they would take twice the registers.
  """
  k, slots, bounds = found_ref.shape[1], scores_ref.shape[2], sight.bounds

  def load(token: Array) -> tuple[Array, Array]:
    """Scores and keys of tokens; of those that cannot be chosen `LEAST`."""
    real = (token < slots) & sight.visible(token)
    real &= (token >= bounds.sinks) & (token <= sight.newest - bounds.local)
    value = backend.load(scores_ref, row, 0, token, mask=real)
    value = jnp.where(value == value, value, jnp.inf)
    value = jnp.maximum(value, jnp.finfo(jnp.float32).min)
    return value, jnp.where(real, keys(value), jnp.int32(LEAST))

  lanes = max(32, pl.next_power_of_2(slots) // EACH)
  _, key = load(jnp.arange(lanes)[:, None] * EACH + jnp.arange(EACH)[None, :])
  real = key > LEAST
  held = real.astype(jnp.int32).sum()
  want = jnp.minimum(held, k)
  lowest = jnp.where(real, key, jnp.int32(2**31 - 1)).min()
  low, _ = threshold(key, lowest, held, want, want)
  short = want - (key > low).astype(jnp.int32).sum()
  chunk = min(CHUNK, pl.next_power_of_2(slots))

  def place(i: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    """Those above the bound, and of its equals the first ones."""
    count, equals = carry
    token = i * chunk + jnp.arange(chunk)
    value, key = load(token)
    equal = (key == low).astype(jnp.int32)
    keep = (key > low) | ((equal > 0) & (equals + jnp.cumsum(equal) <= short))
    listing.append(weight_ref, row, count, value, keep)
    return listing.append(found_ref, row, count, token, keep), equals + equal.sum()

  zero = jnp.int32(0), jnp.int32(0)
  count, _ = lax.fori_loop(0, pl.cdiv(slots, chunk), place, zero)
  listing.end(found_ref, row, count)


def takes(rows: int, groups: int, slots: int) -> bool:
  """True if a row is one program's: of one query head, not long, and as many as run at once."""
  return groups == 1 and slots <= LANES and 4 * rows >= 3 * _at_once()


def _at_once() -> int:
  """Programs that run at once, about."""
  return 2 * this_device().cores


def cut_of(rows: int, head_dim: int, itemsize: int) -> Config:
  """Cut of the walk of a row's list: as in `sparse_decode`, with half the warps.

  They have twice the registers each, which a program that does more than one thing needs, and as
  many bytes on their way.
  """
  warps = 8 if rows <= _at_once() else 4
  size = 2 * split_k.columns_of(head_dim) * itemsize
  return Config(max(16, warps * (4 << 10) // size), _at_once(), warps, STAGES)


def read(
  q: Float[Array, "B K G H"],
  cache_k: Float[Array, "B K S H"],
  cache_v: Float[Array, "B K S H"],
  queries: Float[Array, "B K s G H"],
  anchors: Int[Array, "B K s 1"],
  retrieved: Int[Array, "B K s 1 W"],
  step: Int[Array, " B"],
  seen: Int[Array, " B"],
  stop: Int[Array, " B"],
  *,
  tau: float,
  k: int,
  sinks: int,
  local: int,
  first: Callable[[Array], Array] | None = None,
  span_sinks: int = 0,
  soft_cap: float | None = None,
  config: Config | None = None,
  interpret: bool | None = None,
) -> tuple[tuple[Array, ...], tuple[Array, ...], tuple[State, Array]]:
  """The set that each KV head shares or retrieves, its list, and attention over that.

  Args:
    q: queries of the newest token, rotated; G = 1.
    cache_k, cache_v: cached keys and values, the newest token's among them.
    queries, anchors, retrieved, step: of the block, as in `cis.anchors` and `cis.listed`.
    seen, stop: cached tokens of every row, and the end of its occupied slots.
    tau: the cosine that must be exceeded.
    k: tokens retrieved; as many as there are if the middle has fewer.
    sinks, local: numbers of first and of newest tokens that are always listed.
    first, span_sinks: the tokens in sight, as in `cis.anchors`.
    soft_cap: c of logits c·tanh(x/c); None: x itself.
    config: how a row's list is walked; by device and shape if None.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    Of `cis.anchors`: queries at norm 1, anchors, retrieves and steps; and each head's first token
    in sight, int32 [B, K]. Of `cis.listed`: tokens found and their weights [B, K, k], the table and
    its count. Of `sparse_decode`: the softmax state, and o in the dtype of the cache.

  Raises:
    NotImplementedError: several query heads to a KV head, or more slots than `LANES`.
  """
  batch, heads, groups, head_dim = q.shape
  rows, slots = batch * heads, cache_k.shape[2]
  if groups != 1:
    raise NotImplementedError(f"q: found {groups} query heads to a KV head, expected one")
  if slots > LANES:
    raise NotImplementedError(f"cache_k: found {slots} slots, expected at most {LANES}")
  floats = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
  ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)

  interpreted = backend.interpreted(interpret)
  few, width = min(k, slots), sinks + local + retrieved.shape[-1]
  scale = tiling.Scale.of(head_dim, None, soft_cap)
  cut = config or cut_of(rows, head_dim, cache_k.dtype.itemsize)
  tile = min(TILE, cut.tile)
  looked: dict[str, Any] = {"tile": tile, "steps": pl.cdiv(slots, tile), "stride": 1, "width": 1}
  looked |= {"span_sinks": span_sinks, "scale": scale}
  each, found = ints((rows,)), (rows, few)
  made, _, state = backend.call(
    functools.partial(
      _kernel,
      tau=tau,
      first=first,
      score=functools.partial(score_keys, **looked),
      sizes=Sizes(sinks, local, span_sinks),
      scale=scale,
      cut=cut,
      interpret=interpreted,
    ),
    by_row(q),
    _Held(by_row(queries), by_row(anchors), by_row(retrieved), step, seen),
    _Keys(by_row(q.astype(cache_k.dtype)), by_row(cache_k), by_row(cache_v), stop),
    grid=(rows,),
    out=[
      _Made(
        *(floats((rows, 1, head_dim)), ints((rows, 1)), ints((rows, 1)), each, each),
        *(ints(found), floats(found), ints((rows, width)), each),
      ),
      tuple(floats((rows, 1, size)) for size in (slots, 1, 1)),
      tuple(split_k.results(rows, 1, head_dim, 0, cache_k.dtype)),
    ],
    warps=cut.warps,
    stages=cut.stages,
    name="cis_read",
    interpret=interpret,
  )
  made, state = jax.tree.map(lambda x: x.reshape(batch, heads, *x.shape[1:]), (made, state))
  return made[:5], made[5:], (State(*state[:3]), state[3])
