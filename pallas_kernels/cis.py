"""CIS: which heads share an earlier retrieval, and the list that each of them reads (§IV-A).

Three small launches around the retrieval and attention: between its queries of the block and its
cache entries a step has a dozen small operations, two of them sorts and three scatters, each of
which would be a launch of its own.

`anchors`, one program per row: cosines with the block's queries (Eq. 12), the most recent that is
alike, and whose retrieval it used. `listed`, one program per row: first tokens, newest ones, the
chosen ones, and for those who share their neighbours (Eq. 13), none twice. What is listed already
is marked in a scratch row of one integer per slot, of which only the list's entries are touched.
`note` writes down what the block's later queries look for.

Bytes: the block's queries, 4 s G H per row; else next to nothing.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import _backend, _lists
from pallas_kernels._split import columns_of

WARPS = 4


def _anchors_kernel(*refs: Any, tau: float, alone: bool) -> None:
  """q [R, G, H], queries [R, s, G, H], anchor [R, s, U], step [B] ->
  query [R, G, H] of norm 1, anchor [R, U], shares [R, U]. `alone`: U = G.
  """
  q_ref, queries_ref, anchor_ref, step_ref, query_ref, found_ref, shares_ref = refs
  rows, block, groups, head_dim = queries_ref.shape
  row = pl.program_id(0)
  step = step_ref[row // (rows // step_ref.shape[0])]
  column, turn = jnp.arange(columns_of(head_dim)), jnp.arange(pl.next_power_of_2(block))
  inside, earlier = column < head_dim, (turn < block) & (turn < step)

  def find(unit: int, alike: Array) -> None:
    latest = jnp.where(alike, turn, -1).max()
    anchor = anchor_ref[row, jnp.maximum(latest, 0), unit]
    found_ref[row, unit] = jnp.where(latest >= 0, anchor, step)
    shares_ref[row, unit] = (latest >= 0).astype(jnp.int32)

  every = earlier
  for g in range(groups):
    q = _backend.load(q_ref, row, g, column, mask=inside).astype(jnp.float32)
    q = q / jnp.maximum(jnp.abs(q).max(), 1e-30)  # its square must not overflow
    q = q / jnp.maximum(jnp.sqrt((q * q).sum()), 1e-30)
    _backend.store(query_ref, row, g, column, value=q, mask=inside)
    mask = earlier[:, None] & inside[None, :]
    others = _backend.load(queries_ref, row, turn[:, None], g, column[None, :], mask=mask)
    cosine = (others * q[None, :]).sum(axis=1)
    alike = earlier & (jnp.minimum(cosine, 1.0) > tau)
    if alone:
      find(g, alike)
    every = every & alike
  if not alone:
    find(0, every)


def anchors(
  q: Float[Array, "B K G H"],
  queries: Float[Array, "B K s G H"],
  anchor: Int[Array, "B K s U"],
  step: Int[Array, " B"],
  *,
  tau: float,
  interpret: bool | None = None,
) -> tuple[Float[Array, "B K G H"], Int[Array, "B K U"], Int[Array, "B K U"]]:
  """The queries at norm 1, the step whose retrieval each unit uses, and whether it shares it.

  Args:
    q: queries of the newest token, rotated.
    queries: those of the block, float32, of norm 1.
    anchor: the step whose retrieval each of them used.
    step: of the block, this one's.
    tau: the cosine that all queries of a unit must exceed: a KV head (U = 1) or a query head.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.
  """
  batch, heads, _, groups, head_dim = queries.shape
  rows, units = batch * heads, anchor.shape[3]
  query, found, shares = _backend.call(
    functools.partial(_anchors_kernel, tau=tau, alone=units == groups),
    *(x.reshape(rows, *x.shape[2:]) for x in (q, queries, anchor)),
    step,
    grid=(rows,),
    out=[
      jax.ShapeDtypeStruct((rows, groups, head_dim), jnp.float32),
      jax.ShapeDtypeStruct((rows, units), jnp.int32),
      jax.ShapeDtypeStruct((rows, units), jnp.int32),
    ],
    warps=WARPS,
    stages=1,
    name="cis_anchors",
    interpret=interpret,
  )
  shape = batch, heads, units
  return query.reshape(q.shape), found.reshape(shape), shares.reshape(shape)


def _listed_kernel(
  *refs: Any, sinks: int, local: int, heaviest: int, radius: int, span_sinks: int, interpret: bool
) -> None:
  """retrieved [R, s, U, k], fresh [R, U, k'], anchor, shares [R, U], seen [B], start [R] or one per
  batch row -> table [R, W], count [R], kept [R, U, k], mark [R, S].
  """
  retrieved_ref, fresh_ref, anchor_ref, shares_ref, seen_ref, start_ref = refs[:6]
  table_ref, count_ref, kept_ref, mark_ref = refs[6:]
  rows, _, units, k = retrieved_ref.shape
  slots = mark_ref.shape[1]
  row = pl.program_id(0)
  seen = seen_ref[row // (rows // seen_ref.shape[0])]
  start = start_ref[row // (rows // start_ref.shape[0])]
  away = [d for r in range(1, radius + 1) for d in (-r, r)] if heaviest else []
  i, j = jnp.arange(pl.next_power_of_2(k)), jnp.arange(pl.next_power_of_2(max(heaviest, 1)))

  def visible(token: Array) -> Array:
    return (token >= 0) & (token < seen) & ((token < span_sinks) | (token >= start))

  def middle(token: Array) -> Array:
    return visible(token) & (token >= sinks) & (token < seen - local)

  def mark(token: Array, ok: Array, value: int) -> None:
    place = jnp.where(ok, token, slots)
    _backend.store(mark_ref, row, place, value=jnp.full(token.shape, value), mask=ok)

  def wait() -> None:
    if not interpret:
      _backend.barrier()  # threads read what others wrote

  def chosen(u: int) -> Array:
    """What a unit retrieved, or shares."""
    shares = shares_ref[row, u] > 0
    index = row, anchor_ref[row, u], u, i
    old = _backend.load(retrieved_ref, *index, mask=(i < k) & shares, other=-1)
    new_here = (i < fresh_ref.shape[2]) & jnp.logical_not(shares)
    new = _backend.load(fresh_ref, row, u, i, mask=new_here, other=-1)
    return jnp.where(shares, old, new)

  def near(u: int, d: int) -> tuple[Array, Array]:
    """The neighbours d away of a shared retrieval's heaviest tokens."""
    here = (j < heaviest) & (shares_ref[row, u] > 0)
    heavy = _backend.load(retrieved_ref, row, anchor_ref[row, u], u, j, mask=here, other=-1)
    return heavy + d, (heavy >= 0) & middle(heavy + d)

  for u in range(units):
    token = chosen(u)
    fresh = jnp.where(shares_ref[row, u] > 0, -1, token)
    _backend.store(kept_ref, row, u, i, value=fresh, mask=i < k)
    mark(token, middle(token), 0)
    for d in away:
      mark(*near(u, d), 0)
  always, ok = _lists.always(sinks, local, seen)
  count = _lists.append(table_ref, row, jnp.int32(0), always, ok & visible(always))

  def add(count: Array, token: Array, ok: Array) -> Array:
    """Appends tokens, no two alike, those aside that are listed already."""
    wait()
    place = jnp.where(ok, token, 0)
    ok &= _backend.load(mark_ref, row, place, mask=ok, other=1) == 0
    count = _lists.append(table_ref, row, count, token, ok)
    wait()  # all have read
    mark(token, ok, 1)
    return count

  for u in range(units):
    token = chosen(u)
    count = add(count, token, middle(token))
    for d in away:
      count = add(count, *near(u, d))
  count_ref[row] = count
  _lists.end(table_ref, row, count)


def listed(
  retrieved: Int[Array, "B K s U k"],
  fresh: Int[Array, "B K U f"],
  anchor: Int[Array, "B K U"],
  shares: Int[Array, "B K U"],
  seen: Int[Array, " B"],
  start: Int[Array, "B #K"],
  *,
  slots: int,
  sinks: int,
  local: int,
  heaviest: int,
  radius: int,
  span_sinks: int = 0,
  interpret: bool | None = None,
) -> tuple[Int[Array, "B K W"], Int[Array, "B K"], Int[Array, "B K U k"]]:
  """The tokens that every KV head reads, none twice: all that any of its units chose.

  Args:
    retrieved: of the steps of the block, heaviest first, −1 = none.
    fresh: this step's, f ≤ k of them; anything where a unit shares.
    anchor: the step whose retrieval a unit that `shares` uses.
    seen: cached tokens of every row.
    start, span_sinks: the tokens that may be read, as in `sparse_decode`.
    slots: S.
    sinks, local: numbers of first and of newest tokens that are always listed.
    heaviest, radius: a shared retrieval's first `heaviest` tokens gain neighbours this far away.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    table: first tokens, newest ones backwards, then unit by unit the chosen ones and their
    neighbours, the nearest first; −1 behind the end; its count; and the fresh retrieval, −1 where a
    unit shares.
  """
  batch, heads, _, units, k = retrieved.shape
  rows = batch * heads
  width = sinks + local + units * (k + 2 * radius * heaviest)
  table, count, kept, _ = _backend.call(
    functools.partial(
      _listed_kernel,
      sinks=sinks,
      local=local,
      heaviest=heaviest,
      radius=radius,
      span_sinks=span_sinks,
      interpret=_backend.interpreted(interpret),
    ),
    *(x.reshape(rows, *x.shape[2:]) for x in (retrieved, fresh, anchor, shares)),
    *(seen, start.reshape(-1)),
    grid=(rows,),
    out=[
      jax.ShapeDtypeStruct((rows, width), jnp.int32),
      jax.ShapeDtypeStruct((rows,), jnp.int32),
      jax.ShapeDtypeStruct((rows, units, k), jnp.int32),
      jax.ShapeDtypeStruct((rows, slots), jnp.int32),
    ],
    warps=WARPS,
    stages=1,
    name="cis_listed",
    interpret=interpret,
  )
  shape = batch, heads
  return table.reshape(*shape, width), count.reshape(shape), kept.reshape(*shape, units, k)


def _note_kernel(*refs: Any) -> None:
  """step, counted [B], query [R, G, H], anchor [R, U], fresh [R, U, k], the block's as they are ->
  queries [R, s, G, H], anchors [R, s, U], retrieved [R, s, U, k].
  """
  step_ref, counted_ref, query_ref, anchor_ref, fresh_ref = refs[:5]
  queries_ref, anchors_ref, retrieved_ref = refs[8:]
  rows, groups, head_dim = query_ref.shape
  units, k = fresh_ref.shape[1:]
  row = pl.program_id(0)
  batch_row = row // (rows // step_ref.shape[0])
  step = step_ref[batch_row]
  column, i = jnp.arange(columns_of(head_dim)), jnp.arange(pl.next_power_of_2(k))

  @pl.when(counted_ref[batch_row] > 0)
  def _():
    for g in range(groups):
      query = _backend.load(query_ref, row, g, column, mask=column < head_dim)
      _backend.store(queries_ref, row, step, g, column, value=query, mask=column < head_dim)
    for u in range(units):
      anchors_ref[row, step, u] = anchor_ref[row, u]
      fresh = _backend.load(fresh_ref, row, u, i, mask=i < k, other=-1)
      _backend.store(retrieved_ref, row, step, u, i, value=fresh, mask=i < k)


def note(
  step: Int[Array, " B"],
  counted: Int[Array, " B"],
  query: Float[Array, "B K G H"],
  anchor: Int[Array, "B K U"],
  fresh: Int[Array, "B K U k"],
  queries: Float[Array, "B K s G H"],
  anchors: Int[Array, "B K s U"],
  retrieved: Int[Array, "B K s U k"],
  *,
  interpret: bool | None = None,
) -> tuple[Float[Array, "B K s G H"], Int[Array, "B K s U"], Int[Array, "B K s U k"]]:
  """The block's queries, anchors and retrievals with this step's, in place; rows that count only.

  Args:
    step: of the block, this one's.
    counted: rows that are noted; the others stay as they are.
    query, anchor, fresh: this step's.
    queries, anchors, retrieved: those of the block, updated in place where donated.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.
  """
  rows = query.shape[0] * query.shape[1]
  held = queries, anchors, retrieved
  flat = [x.reshape(rows, *x.shape[2:]) for x in (query, anchor, fresh, *held)]
  noted = _backend.call(
    _note_kernel,
    *(step, counted, *flat),
    grid=(rows,),
    out=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat[3:]],
    warps=WARPS,
    stages=1,
    name="cis_note",
    interpret=interpret,
    aliases={5 + i: i for i in range(3)},
  )
  queries, anchors, retrieved = (x.reshape(y.shape) for x, y in zip(noted, held, strict=True))
  return queries, anchors, retrieved
