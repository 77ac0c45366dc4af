"""CIS: the list that each KV head reads: first tokens, newest ones and the chosen ones (§IV-A).

What is shared was dilated when it was noted, so that nothing is there twice. Where each KV head
chooses for itself, the program that has just found what it retrieves lists it too. Where query
heads choose on their own and a KV head reads all of it, what is listed already is marked in a
scratch row of one integer per slot, of which only the list's entries are touched. See
`cis.anchors`.

Bytes: next to nothing.

Grid: one program per row.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from kvjax.kernels.common import backend, listing
from kvjax.kernels.selection import top_k
from kvjax.kernels.selection.key_weights import weigh_part, weights_of

WARPS = 4


@dataclasses.dataclass(frozen=True)
class Sizes:
  """First and newest tokens that are always listed, and first ones that are always in sight."""

  sinks: int
  local: int
  span_sinks: int


class _Sources(NamedTuple):
  """retrieved [R, s, U, W], fresh [R U, f], anchor, retrieves [R, U], seen [B], start [R] or one
  per batch row: refs.
  """

  retrieved: Any
  fresh: Any
  anchor: Any
  retrieves: Any
  seen: Any
  start: Any


class _Row(NamedTuple):
  """Slots in sight of a row: `seen` tokens, those after the sinks from `start` on."""

  sources: _Sources
  sizes: Sizes
  row: Array
  seen: Array
  start: Array

  @staticmethod
  def of(sources: _Sources, sizes: Sizes, row: Array) -> "_Row":
    rows = sources.retrieved.shape[0]
    now = (ref[row // (rows // ref.shape[0])] for ref in (sources.seen, sources.start))
    return _Row(sources, sizes, row, *now)

  def visible(self, token: Array) -> Array:
    inside = (token >= 0) & (token < self.seen)
    return inside & ((token < self.sizes.span_sinks) | (token >= self.start))

  def chosen(self, u: int, i: Array) -> tuple[Array, Array]:
    """Of what a unit retrieved, or shares, number i, and whether that lies in the middle of now."""
    retrieved_ref, fresh_ref, anchor_ref, retrieves_ref, *_ = self.sources
    _, _, units, width = retrieved_ref.shape
    row, own = self.row, retrieves_ref[self.row, u] > 0
    here = (i >= 0) & (i < width) & jnp.logical_not(own)
    old = backend.load(retrieved_ref, row, anchor_ref[row, u], u, i, mask=here, other=-1)
    here = (i >= 0) & (i < fresh_ref.shape[1]) & own
    token = jnp.where(own, backend.load(fresh_ref, row * units + u, i, mask=here, other=-1), old)
    middle = (token >= self.sizes.sinks) & (token < self.seen - self.sizes.local)
    return token, self.visible(token) & middle


def _list_one(row: _Row, table_ref: Any, count_ref: Any) -> None:
  """The list of a row of one unit: no two alike, so that each has its place, and some are holes."""
  sinks, local = row.sizes.sinks, row.sizes.local
  i = jnp.arange(pl.next_power_of_2(table_ref.shape[1]))
  token, ok = row.chosen(0, i - (sinks + local))
  newest = row.seen - 1 - (i - sinks)
  forced = jnp.where(i < sinks, i, newest)
  first = row.visible(forced) & ((i < sinks) | (newest >= sinks))
  ok = jnp.where(i < sinks + local, first, ok)
  token = jnp.where(ok, jnp.where(i < sinks + local, forced, token), -1)
  backend.store(table_ref, row.row, i, value=token, mask=i < table_ref.shape[1])
  count_ref[row.row] = jnp.where(ok, i + 1, 0).max()


def _list_all(
  row: _Row, units: int, table_ref: Any, count_ref: Any, mark_ref: Any, *, interpret: bool
) -> None:
  """The list of a row of several units, each token where it comes first; mark [R, S]."""
  slots = mark_ref.shape[1]
  i = jnp.arange(pl.next_power_of_2(row.sources.retrieved.shape[3]))

  def mark(token: Array, ok: Array, value: int) -> None:
    place = jnp.where(ok, token, slots)
    backend.store(mark_ref, row.row, place, value=jnp.full(token.shape, value), mask=ok)

  for u in range(units):
    mark(*row.chosen(u, i), 0)
  always, ok = listing.always(row.sizes.sinks, row.sizes.local, row.seen)
  count = listing.append(table_ref, row.row, jnp.int32(0), always, ok & row.visible(always))
  for u in range(units):
    token, ok = row.chosen(u, i)
    backend.barrier(interpret)  # threads read what others wrote
    place = jnp.where(ok, token, 0)
    ok &= backend.load(mark_ref, row.row, place, mask=ok, other=1) == 0
    count = listing.append(table_ref, row.row, count, token, ok)
    backend.barrier(interpret)  # all have read
    mark(token, ok, 1)
  count_ref[row.row] = count
  listing.end(table_ref, row.row, count)


def list_behind(row: Array, fresh_ref: Any, *refs: Any, sizes: Sizes, interpret: bool) -> None:
  """As `_list_one`, in the program that has just found what is fresh.

  refs: what else `_Sources` lists, table and count.
  """
  backend.barrier(interpret)  # threads read what others wrote
  retrieved_ref, *others = refs[:-2]
  sources = _Sources(retrieved_ref, fresh_ref, *others)
  _list_one(_Row.of(sources, sizes, row), *refs[-2:])


def _kernel(
  sources: _Sources,
  table_ref: Any,
  count_ref: Any,
  mark_ref: Any | None,
  *,
  sizes: Sizes,
  interpret: bool,
) -> None:
  """`_Sources` -> table [R, X], count [R] (, mark [R, S]: U > 1)."""
  row = _Row.of(sources, sizes, pl.program_id(0))
  if mark_ref is None:
    _list_one(row, table_ref, count_ref)
  else:
    units = sources.retrieved.shape[2]
    _list_all(row, units, table_ref, count_ref, mark_ref, interpret=interpret)


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
    after the end, and with one unit in place of what is left out; and its count.
  """
  batch, heads, _, units, widest = retrieved.shape
  rows, width = batch * heads, sinks + local + units * widest
  of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
  sources = _Sources(
    retrieved.reshape(rows, *retrieved.shape[2:]),
    fresh.reshape(rows * units, -1),
    *(anchor.reshape(rows, units), retrieves.reshape(rows, units), seen, start.reshape(-1)),
  )
  sizes, interpreted = Sizes(sinks, local, span_sinks), backend.interpreted(interpret)
  table, count, _ = backend.call(
    functools.partial(_kernel, sizes=sizes, interpret=interpreted),
    sources,
    grid=(rows,),
    out=[of((rows, width)), of((rows,)), of((rows, slots)) if units > 1 else None],
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
  interpreted = backend.interpreted(interpret)
  sizes = Sizes(sinks, local, span_sinks)
  flat = [*map(backend.by_row, (retrieved, anchor, retrieves))]
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
    sinks=sinks,
    local=local,
    span_sinks=span_sinks,
    unit=1,
    k=k,
    active=retrieves[..., 0],
    ordered=False,
    **making,
    behind=functools.partial(list_behind, interpret=interpreted, sizes=sizes),
    operands=[*flat, seen, start.reshape(-1)],
    results=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, width), (rows,))],
    interpret=interpret,
  )
  return best, index, table.reshape(batch, heads, width), count.reshape(batch, heads)
