"""CIS: which heads share an earlier retrieval, and the list that each of them reads (§IV-A).

Three small launches around the retrieval and attention: between its queries of the block and its
cache entries a step has a dozen small operations, two of them sorts and three scatters, each of
which would be a launch of its own.

`anchors`, one program per row: cosines with the block's queries (Eq. 12), the most recent that is
alike, and whose retrieval it used; a row that shares with none may look at its keys at once, as
`key_logits` does, cut into pieces as there. `listed`, one program per row, and where each KV head
chooses for itself the one that has just found what it retrieves: first tokens, newest ones and the
chosen ones; what is shared was dilated when it was noted, so that nothing is there twice. Where
query heads choose on their own and a KV head reads all of it, what is listed already is marked in a
scratch row of one integer per slot, of which only the list's entries are touched.
`note` writes down what the block's later queries look for: a retrieval with the neighbours of its
heaviest tokens (Eq. 13).

Bytes: the block's queries, 4 s G H per row, and the keys of rows that look; else next to nothing.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from . import _backend, _lists, top_k
from ._split import columns_of
from .key_weights import STAGES, cut, score_keys, weigh_part, weights_of

WARPS = 4
AHEAD = 4  # query heads whose queries `anchors` holds at once
LEAST = -(2**31)  # below the key of every float


def _anchors_kernel(
  *refs: Any,
  tau: float,
  alone: bool,
  first: Callable[[Array], Array] | None,
  scoring: tuple[tuple[str, Any], ...],
) -> None:
  """q [R, G, H], queries [R, s, G, H], anchor [R, s, U], step, seen [B](, q [R, G, H], keys
  [R, S, H], stop [B]) -> query [R, G, H] of norm 1, anchor, retrieves [R, U], step [R]
  (, first [B])(, logits [R, G, S], m, l [R, G, C]). `alone`: U = G. `scoring`: options of
  `score_keys`, where keys are given.
  """
  q_ref, queries_ref, anchor_ref, step_ref, seen_ref, *seen_keys = refs[: 8 if scoring else 5]
  outs = list(refs[8 if scoring else 5 :])
  logits_refs = [outs.pop() for _ in range(3)][::-1] if scoring else []
  query_ref, found_ref, retrieves_ref, steps_ref, *first_ref = outs
  rows, block, groups, head_dim = queries_ref.shape
  row, piece = pl.program_id(0), pl.program_id(1)
  shared = rows // step_ref.shape[0]
  step = step_ref[row // shared]
  steps_ref[row] = step
  start = jnp.int32(0)
  if first is not None:
    start = first(seen_ref[row // shared])

    @pl.when(row % shared == 0)
    def _():
      first_ref[0][row // shared] = start

  column, turn = jnp.arange(columns_of(head_dim)), jnp.arange(pl.next_power_of_2(block))
  inside, earlier = column < head_dim, (turn < block) & (turn < step)

  def find(unit: int, alike: Array) -> Array:
    latest = jnp.where(alike, turn, -1).max()
    anchor = anchor_ref[row, jnp.maximum(latest, 0), unit]
    found_ref[row, unit] = jnp.where(latest >= 0, anchor, step)
    retrieves_ref[row, unit] = (latest < 0).astype(jnp.int32)
    return latest < 0

  def load(g: int) -> tuple[Array, Array]:
    """A query of this step, and those of the block."""
    mask = earlier[:, None] & inside[None, :]
    others = _backend.load(queries_ref, row, turn[:, None], g, column[None, :], mask=mask)
    return _backend.load(q_ref, row, g, column, mask=inside).astype(jnp.float32), others

  every, looks = earlier, jnp.bool_(False)
  ahead: list[tuple[Array, Array]] = []
  for g in range(groups):
    if not ahead:  # those of a few heads at once, as their memory is waited for
      ahead = [load(i) for i in range(g, min(g + AHEAD, groups))]
    q, others = ahead.pop(0)
    q = q / jnp.maximum(jnp.abs(q).max(), 1e-30)  # its square must not overflow
    q = q / jnp.maximum(jnp.sqrt((q * q).sum()), 1e-30)
    _backend.store(query_ref, row, g, column, value=q, mask=inside)
    cosine = (others * q[None, :]).sum(axis=1)
    alike = earlier & (jnp.minimum(cosine, 1.0) > tau)
    if alone:
      looks |= find(g, alike)
    every = every & alike
  if not alone:
    looks = find(0, every)

  if scoring:
    *operands, stop_ref = seen_keys
    stop = stop_ref[row // shared]

    @pl.when(looks)
    def _():
      score_keys(row, piece, operands, logits_refs, start, stop, stop, **dict(scoring))


def anchors(
  q: Float[Array, "B K G H"],
  queries: Float[Array, "B K s G H"],
  anchor: Int[Array, "B K s U"],
  step: Int[Array, " B"],
  seen: Int[Array, " B"],
  *,
  tau: float,
  first: Callable[[Array], Array] | None = None,
  keys: tuple[Array, Array] | None = None,
  span_sinks: int = 0,
  interpret: bool | None = None,
) -> tuple[Array, ...]:
  """The queries at norm 1, the step whose retrieval each unit uses, and whether it is its own.

  Args:
    q: queries of the newest token, rotated.
    queries: those of the block, float32, of norm 1.
    anchor: the step whose retrieval each of them used.
    step: of the block, this one's.
    seen: cached tokens of every row.
    tau: the cosine that all queries of a unit must exceed: a KV head (U = 1) or a query head.
    first: the first token in sight as a function of `seen`, int32 scalars.
    keys: cached keys [B, K, S, H] and occupied slots of every row, int32 [B]: rows that share with
      none look at them.
    span_sinks: first tokens that are in sight whatever `first` says.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    float32 [B, K, G, H]; int32 [B, K, U]; int32 [B, K, U], 1 where a unit shares with none; the
    step of every KV head, int32 [B, K]; with `first` what it gives, int32 [B]; and with `keys` the
    logits of `key_logits`, float32 [B, K, G, S], which hold anything in rows that share.
  """
  batch, heads, _, groups, head_dim = queries.shape
  rows, units = batch * heads, anchor.shape[3]
  flat = [x.reshape(rows, *x.shape[2:]) for x in (q, queries, anchor)] + [step, seen]
  out = [
    jax.ShapeDtypeStruct((rows, groups, head_dim), jnp.float32),
    jax.ShapeDtypeStruct((rows, units), jnp.int32),
    jax.ShapeDtypeStruct((rows, units), jnp.int32),
    jax.ShapeDtypeStruct((rows,), jnp.int32),
    *([] if first is None else [jax.ShapeDtypeStruct((batch,), jnp.int32)]),
  ]
  scoring: dict[str, Any] = {}
  pieces = 1
  if keys is not None:
    k, stop = keys
    slots = k.shape[2]
    tile, steps = cut(q, k, None, None)
    pieces = pl.cdiv(slots, tile * steps)
    scoring = {"tile": tile, "steps": steps, "stride": 1, "width": 1, "span_sinks": span_sinks}
    scoring["scale"] = head_dim**-0.5
    flat += [x.reshape(rows, *x.shape[2:]) for x in (q.astype(k.dtype), k)] + [stop]
    sizes = slots, pieces, pieces
    out += [jax.ShapeDtypeStruct((rows, groups, size), jnp.float32) for size in sizes]
  query, found, retrieves, block_step, *more = _backend.call(
    functools.partial(
      _anchors_kernel,
      tau=tau,
      alone=units == groups,
      first=first,
      scoring=tuple(scoring.items()),
    ),
    *flat,
    grid=(rows, pieces),
    out=out,
    warps=WARPS,
    stages=STAGES,
    name="cis_anchors",
    interpret=interpret,
  )
  more = more[: -2 if scoring else None]
  if scoring:
    more[-1] = more[-1].reshape(*q.shape[:3], -1)
  shape = batch, heads, units
  made = found.reshape(shape), retrieves.reshape(shape), block_step.reshape(batch, heads)
  return query.reshape(q.shape), *made, *more


class _Now(NamedTuple):
  """Cached tokens of a row, and the first one in sight behind the sinks."""

  seen: Array
  start: Array

  @staticmethod
  def of(row: Array, seen_ref: Any, start_ref: Any, rows: int) -> "_Now":
    return _Now(*(ref[row // (rows // ref.shape[0])] for ref in (seen_ref, start_ref)))

  def visible(self, span_sinks: int, token: Array) -> Array:
    return (token >= 0) & (token < self.seen) & ((token < span_sinks) | (token >= self.start))


def _chosen(
  row: Array,
  now: _Now,
  sources: tuple[Any, ...],
  sinks: int,
  local: int,
  span_sinks: int,
  u: int,
  i: Array,
) -> tuple[Array, Array]:
  """What a unit retrieved, or shares, and which of it lies in the middle of now.

  `sources`: fresh [R U, f], retrieved [R, s, U, W], anchor, retrieves [R, U].
  """
  fresh_ref, retrieved_ref, anchor_ref, retrieves_ref = sources
  _, _, units, width = retrieved_ref.shape
  own = retrieves_ref[row, u] > 0
  here = (i >= 0) & (i < width) & jnp.logical_not(own)
  old = _backend.load(retrieved_ref, row, anchor_ref[row, u], u, i, mask=here, other=-1)
  here = (i >= 0) & (i < fresh_ref.shape[1]) & own
  token = jnp.where(own, _backend.load(fresh_ref, row * units + u, i, mask=here, other=-1), old)
  middle = (token >= sinks) & (token < now.seen - local)
  return token, now.visible(span_sinks, token) & middle


def _list_one(
  row: Array,
  fresh_ref: Any,
  retrieved_ref: Any,
  anchor_ref: Any,
  retrieves_ref: Any,
  seen_ref: Any,
  start_ref: Any,
  table_ref: Any,
  count_ref: Any,
  *,
  sinks: int,
  local: int,
  span_sinks: int,
) -> None:
  """The list of a row of one unit: no two alike, so that each has its place, and some are holes."""
  now = _Now.of(row, seen_ref, start_ref, retrieved_ref.shape[0])
  sources = fresh_ref, retrieved_ref, anchor_ref, retrieves_ref
  i = jnp.arange(pl.next_power_of_2(table_ref.shape[1]))
  token, ok = _chosen(row, now, sources, sinks, local, span_sinks, 0, i - (sinks + local))
  newest = now.seen - 1 - (i - sinks)
  forced = jnp.where(i < sinks, i, newest)
  first = now.visible(span_sinks, forced) & ((i < sinks) | (newest >= sinks))
  ok = jnp.where(i < sinks + local, first, ok)
  token = jnp.where(ok, jnp.where(i < sinks + local, forced, token), -1)
  _backend.store(table_ref, row, i, value=token, mask=i < table_ref.shape[1])
  count_ref[row] = jnp.where(ok, i + 1, 0).max()


def _list_behind(row: Array, *refs: Any, interpret: bool, **sizes: int) -> None:
  """As `_list_one`, in the program that has just found what is fresh."""
  if not interpret:
    _backend.barrier()  # threads read what others wrote
  _list_one(row, *refs, **sizes)


def _listed_kernel(*refs: Any, sinks: int, local: int, span_sinks: int, interpret: bool) -> None:
  """retrieved [R, s, U, W], fresh [R U, f], anchor, retrieves [R, U], seen [B], start [R] or one
  per batch row -> table [R, X], count [R] (, mark [R, S]: U > 1).
  """
  retrieved_ref, fresh_ref, anchor_ref, retrieves_ref, seen_ref, start_ref = refs[:6]
  table_ref, count_ref, *mark_ref = refs[6:]
  _, _, units, width = retrieved_ref.shape
  row = pl.program_id(0)
  now = _Now.of(row, seen_ref, start_ref, retrieved_ref.shape[0])
  seen, visible = now.seen, functools.partial(now.visible, span_sinks)
  sources = fresh_ref, retrieved_ref, anchor_ref, retrieves_ref
  chosen = functools.partial(_chosen, row, now, sources, sinks, local, span_sinks)
  if units == 1:
    sizes = {"sinks": sinks, "local": local, "span_sinks": span_sinks}
    _list_one(row, *sources, seen_ref, start_ref, table_ref, count_ref, **sizes)
    return

  slots, i = mark_ref[0].shape[1], jnp.arange(pl.next_power_of_2(width))

  def mark(token: Array, ok: Array, value: int) -> None:
    place = jnp.where(ok, token, slots)
    _backend.store(mark_ref[0], row, place, value=jnp.full(token.shape, value), mask=ok)

  def wait() -> None:
    if not interpret:
      _backend.barrier()  # threads read what others wrote

  for u in range(units):
    mark(*chosen(u, i), 0)
  always, ok = _lists.always(sinks, local, seen)
  count = _lists.append(table_ref, row, jnp.int32(0), always, ok & visible(always))
  for u in range(units):
    token, ok = chosen(u, i)
    wait()
    place = jnp.where(ok, token, 0)
    ok &= _backend.load(mark_ref[0], row, place, mask=ok, other=1) == 0
    count = _lists.append(table_ref, row, count, token, ok)
    wait()  # all have read
    mark(token, ok, 1)
  count_ref[row] = count
  _lists.end(table_ref, row, count)


def listed(
  retrieved: Int[Array, "B K s U W"],
  fresh: Int[Array, "B K U f"],
  anchor: Int[Array, "B K U"],
  retrieves: Int[Array, "B K U"],
  seen: Int[Array, " B"],
  start: Int[Array, "B #K"],
  *,
  slots: int,
  sinks: int,
  local: int,
  span_sinks: int = 0,
  interpret: bool | None = None,
) -> tuple[Int[Array, "B K X"], Int[Array, "B K"]]:
  """The tokens that every KV head reads, none twice: all that any of its units chose.

  Args:
    retrieved: of the steps of the block, dilated, −1 = none.
    fresh: this step's, f ≤ W of them; anything where a unit shares.
    anchor: the step whose retrieval a unit uses.
    retrieves: 1 where that is this step.
    seen: cached tokens of every row.
    start, span_sinks: the tokens that may be read, as in `sparse_decode`.
    slots: S.
    sinks, local: numbers of first and of newest tokens that are always listed.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    table: first tokens, newest ones backwards, then unit by unit the chosen ones of the middle; −1
    behind the end, and with one unit in place of what is left out; and its count.
  """
  batch, heads, _, units, widest = retrieved.shape
  rows, width = batch * heads, sinks + local + units * widest
  fresh = fresh.reshape(rows * units, -1)
  table, count, *_ = _backend.call(
    functools.partial(
      _listed_kernel,
      sinks=sinks,
      local=local,
      span_sinks=span_sinks,
      interpret=_backend.interpreted(interpret),
    ),
    *(retrieved.reshape(rows, *retrieved.shape[2:]), fresh),
    *(anchor.reshape(rows, units), retrieves.reshape(rows, units), seen, start.reshape(-1)),
    grid=(rows,),
    out=[
      jax.ShapeDtypeStruct((rows, width), jnp.int32),
      jax.ShapeDtypeStruct((rows,), jnp.int32),
      *([jax.ShapeDtypeStruct((rows, slots), jnp.int32)] if units > 1 else []),
    ],
    warps=WARPS,
    stages=1,
    name="cis_listed",
    interpret=interpret,
  )
  return table.reshape(batch, heads, width), count.reshape(batch, heads)


def found_and_listed(
  weights: Sequence[Array],
  start: Int[Array, "B #K"],
  stop: Int[Array, "B #K"],
  retrieved: Int[Array, "B K s 1 W"],
  anchor: Int[Array, "B K 1"],
  retrieves: Int[Array, "B K 1"],
  seen: Int[Array, " B"],
  *,
  k: int,
  sinks: int,
  local: int,
  span_sinks: int = 0,
  interpret: bool | None = None,
) -> tuple[Array, ...]:
  """The heaviest tokens of rows that retrieve, and `listed` for one unit by the same launch.

  Args:
    weights: of every token, float32 [B, K, S], where a row retrieves; or the three that
      `key_logits` gives, which are weighed on the way.
    start, stop, span_sinks: the tokens that may be read.
    k: how many are found, see `top_k.others`.
    retrieved, anchor, retrieves, seen, sinks, local, interpret: as in `listed`.

  Returns:
    Weights and tokens found [B, K, k], those by position; the table and its count.

  Raises:
    NotImplementedError: k is more than a program can hold.
  """
  batch, heads = anchor.shape[:2]
  rows, width = batch * heads, sinks + local + retrieved.shape[-1]
  interpreted = _backend.interpreted(interpret)
  sizes: dict[str, Any] = {"sinks": sinks, "local": local, "span_sinks": span_sinks}
  flat = [x.reshape(rows, *x.shape[2:]) for x in (retrieved, anchor, retrieves)]
  slots = weights[0].shape[-1]
  scores: Any = weights[0]
  making: dict[str, Any] = {}
  if len(weights) > 1:
    partial = [x.reshape(rows, *x.shape[2:]) for x in weights]
    if top_k.cut_rows(rows, slots, k):
      making = {"ahead": functools.partial(weigh_part, interpret=interpreted), "sources": partial}
      scores = jax.ShapeDtypeStruct((batch, heads, slots), jnp.float32)
    else:
      flags = retrieves.reshape(rows)
      how: dict[str, Any] = {"blocks": slots, "interpret": interpret}
      scores = weights_of(partial, flags, **how).reshape(batch, heads, slots)
  best, index, table, count = top_k.others(
    scores,
    start,
    stop,
    **sizes,
    unit=1,
    k=k,
    active=retrieves[..., 0],
    ordered=False,
    **making,
    behind=functools.partial(_list_behind, interpret=interpreted, **sizes),
    operands=[*flat, seen, start.reshape(-1)],
    results=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, width), (rows,))],
    interpret=interpret,
  )
  return best, index, table.reshape(batch, heads, width), count.reshape(batch, heads)


def _keys(value: Array) -> Array:
  """int32 keys in the order of floats that are not NaN; 0 and −0 are equal."""
  bits = lax.bitcast_convert_type(jnp.where(value == 0, 0.0, value), jnp.int32)
  return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _note_kernel(*refs: Any, sinks: int, heaviest: int, radius: int) -> None:
  """live [B], l [R, G], step [R], query [R, G, H], anchor, retrieves [R, U], found, weight
  [R, U, f], and in place queries [R, s, G, H], anchors [R, s, U], retrieved [R, s, U, W], step [B].
  """
  live_ref, l_ref, steps_ref, query_ref, anchor_ref, retrieves_ref = refs[:6]
  found_ref, weight_ref = refs[6:8]
  queries_ref, anchors_ref, retrieved_ref, step_ref = refs[-4:]
  rows, groups, head_dim = query_ref.shape
  _, block, units, _ = retrieved_ref.shape
  row = pl.program_id(0)
  heads = rows // live_ref.shape[0]
  batch_row = row // heads
  step = steps_ref[row]  # the one that counts is written by another program
  column = jnp.arange(columns_of(head_dim))
  head, group = jnp.arange(pl.next_power_of_2(heads)), jnp.arange(pl.next_power_of_2(groups))
  mask = (head < heads)[:, None] & (group < groups)[None, :]
  l = _backend.load(l_ref, batch_row * heads + head[:, None], group[None, :], mask=mask, other=1.0)
  finite = (jnp.abs(l) < jnp.inf).astype(jnp.int32).min(axis=1).min()

  @pl.when(live_ref[batch_row] & (finite > 0))
  def note() -> None:
    for g in range(groups):
      query = _backend.load(query_ref, row, g, column, mask=column < head_dim)
      _backend.store(queries_ref, row, step, g, column, value=query, mask=column < head_dim)
    for u in range(units):
      anchors_ref[row, step, u] = anchor_ref[row, u]

      @pl.when(retrieves_ref[row, u] > 0)
      def dilated(u: int = u) -> None:
        where = {"sinks": sinks, "heaviest": heaviest, "radius": radius}
        _dilate(found_ref, weight_ref, (row, u), retrieved_ref, (row, step, u), **where)

    @pl.when(row % heads == 0)
    def advance() -> None:
      step_ref[batch_row] = jnp.where(step + 1 < block, step + 1, 0)


def _dilate(
  found_ref: Any,
  weight_ref: Any,
  source: tuple,
  out_ref: Any,
  target: tuple,
  *,
  sinks: int,
  heaviest: int,
  radius: int,
) -> None:
  """Writes found [f], by position, and the neighbours of its heaviest: each once, −1 behind."""
  count, width = found_ref.shape[2], out_ref.shape[3]
  i = jnp.arange(pl.next_power_of_2(count))

  def at(i: Array) -> tuple[Array, Array]:
    """Tokens and the keys of their weights."""
    inside = (i >= 0) & (i < count)
    token = _backend.load(found_ref, *source, i, mask=inside, other=-1)
    weight = _backend.load(weight_ref, *source, i, mask=inside, other=-jnp.inf)
    weight = jnp.maximum(weight, jnp.finfo(jnp.float32).min)
    return token, jnp.where(token >= 0, _keys(weight), jnp.int32(LEAST))

  token, key = at(i)
  held = (token >= 0).astype(jnp.int32).sum()
  _backend.store(out_ref, *target, i, value=token, mask=token >= 0)

  def bit(n: Any, low: Array) -> Array:
    higher = low + (jnp.int32(1) << (31 - n))
    return jnp.where((key >= higher).astype(jnp.int32).sum() >= heaviest, higher, low)

  end = held
  if heaviest and radius:
    # The largest bound at or above which lie that many; of its equals the first ones belong.
    low = lax.fori_loop(0, 32, bit, jnp.int32(LEAST))
    equal = (key == low) & (token >= 0)
    short = heaviest - (key > low).astype(jnp.int32).sum()
    last = jnp.where(equal & (jnp.cumsum(equal.astype(jnp.int32)) <= short), i, -1).max()

    def heavy(i: Array, token: Array, key: Array) -> Array:
      return (token >= 0) & ((key > low) | ((key == low) & (i <= last)))

    def neighbours(n: Any, end: Array) -> Array:
      """Appends those on one side, at one distance: −1, 1, −2, 2, …"""
      distance = (n >> 1) + 1
      away = jnp.where((n & 1) == 0, -distance, distance)
      near = token + away

      def others(e: Any, new: Array) -> Array:
        """By position, a token within reach is within as many places."""
        other, its_key = at(i + e)
        its = near - other
        sooner = (jnp.abs(its) < distance) | ((its == -distance) & (away > 0))
        listed = (its == 0) | (sooner & heavy(i + e, other, its_key))
        return jnp.where(listed & (other >= 0), 0, new)

      new = (heavy(i, token, key) & (near >= sinks)).astype(jnp.int32)
      new = lax.fori_loop(-2 * distance, 2 * distance + 1, others, new)
      place = jnp.where(new > 0, end + jnp.cumsum(new) - 1, width)
      _backend.store(out_ref, *target, place, value=near, mask=new > 0)
      return end + new.sum()

    end = lax.fori_loop(0, 2 * radius, neighbours, held)
  i = jnp.arange(pl.next_power_of_2(width))
  tail = (i >= end) & (i < width)
  _backend.store(out_ref, *target, i, value=jnp.full(i.shape, -1), mask=tail)


def note(
  live: Bool[Array, " B"],
  l: Float[Array, "B K G"],
  steps: Int[Array, "B K"],
  query: Float[Array, "B K G H"],
  anchor: Int[Array, "B K U"],
  retrieves: Int[Array, "B K U"],
  found: Int[Array, "B K U f"],
  weight: Float[Array, "B K U f"],
  queries: Float[Array, "B K s G H"],
  anchors: Int[Array, "B K s U"],
  retrieved: Int[Array, "B K s U W"],
  step: Int[Array, " B"],
  *,
  sinks: int,
  heaviest: int,
  radius: int,
  interpret: bool | None = None,
) -> tuple[Array, ...]:
  """The block's queries, anchors and retrievals with this step's, and the next step; in place.

  Rows that are not live stay as they are, and those with a denominator that is not finite.

  Args:
    live: rows that take part.
    l: the softmax denominators of this step's attention.
    steps: of the block, this one's.
    query, anchor: this step's.
    retrieves: 1 where a unit retrieved.
    found: what it retrieved, by position; −1 = none, behind. Anything where it did not.
    weight: of what was found, on a scale that keeps their order.
    queries, anchors, retrieved, step: those of the block, updated in place where donated.
    sinks: first tokens, which are no neighbours.
    heaviest, radius: the first `heaviest` by weight (ties: the lowest) gain neighbours this far
      away.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.
  """
  rows = query.shape[0] * query.shape[1]
  new = l, steps, query, anchor, retrieves, found, weight
  held = queries, anchors, retrieved
  flat = [x.reshape(rows, *x.shape[2:]) for x in (*new, *held)]
  operands = [live, *flat, step]
  first = len(operands) - 4
  noted = _backend.call(
    functools.partial(_note_kernel, sinks=sinks, heaviest=heaviest, radius=radius),
    *operands,
    grid=(rows,),
    out=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[first:]],
    warps=WARPS,
    stages=1,
    name="cis_note",
    interpret=interpret,
    aliases={first + i: i for i in range(4)},
  )
  return tuple(x.reshape(y.shape) for x, y in zip(noted, (*held, step), strict=True))
