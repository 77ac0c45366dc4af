"""Windows, spans and plans: the slots a query sees, their order, and the result of attention.

Dimensions are those of `kvjax.core.cache`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.primitives.codes import rounded_query
from kvjax.primitives.softmax_state import State
from kvjax.primitives.trees import pytree

Note = TypeVar("Note")


@pytree("sinks")
@dataclasses.dataclass(frozen=True)
class Window:
  """The part of the past that queries may see: positions < sinks, and positions ≥ first.

  Attributes:
    sinks: number of first tokens that stay visible (static).
    first: int32 [B, T], oldest visible position of each query except the sinks; or [B, K, T], each
      head's own.
    view: int32 [B, T], the position from which a query looks at the sinks; None: its own.
  """

  sinks: int
  first: Array
  view: Array | None = None

  @property
  def by_head(self) -> bool:
    """True if each KV head has its own window."""
    return self.first.ndim == 3

  def sees(self, kpos: Int[Array, "B K S"]) -> Bool[Array, "B K T S"]:
    """True where a query may see a slot whose token has this position."""
    k = kpos[:, :, None]
    first = self.first[..., None] if self.by_head else self.first[:, None, :, None]
    return (k < self.sinks) | (k >= first)


@pytree("sinks")
@dataclasses.dataclass(frozen=True)
class Span:
  """The slots of a plan without a table: [0, min(sinks, stop)) ∪ [max(start, sinks), stop).

  Attributes:
    start, stop: int32 [B, K], or [B, 1] if all heads are equal.
    sinks: leading slots that are always included (static).
    before: slots of other devices that stand before the first one (`ops.slot_shards`), int32 [];
      the leading slots count from there. None: there are none.
  """

  start: Array
  stop: Array
  sinks: int = 0
  before: Array | None = None

  def holds(self, slot: Int[Array, "*#BKS"]) -> Bool[Array, "B K S"]:
    """True where a slot lies in the span."""
    start, stop = self.start[..., None], self.stop[..., None]
    sinks = self.sinks if self.before is None else self.sinks - self.before
    return (slot < stop) & ((slot < sinks) | (slot >= start))

  def length(self) -> Int[Array, "B _"]:
    """Number of slots in the span."""
    sinks = jnp.minimum(self.sinks, self.stop)
    return sinks + jnp.maximum(self.stop - jnp.maximum(self.start, self.sinks), 0)


@dataclasses.dataclass(frozen=True)
class Needs:
  """Requirements of a method on the operations of a step; static.

  Attributes:
    logits: whether `observe` reads the logits.
    order: whether attention depends on the order of a table's tiles; else kernels may use any.
    own_span: whether the method says itself which slots its window covers: spans may then end
      before the newest token, or after.
    hidden: moves for which a window may hide slots of such a span, which is all that kernels see.
  """

  logits: bool = False
  order: bool = False
  own_span: bool = False
  hidden: tuple[str, ...] = ()


@pytree("bits", "impl")
@dataclasses.dataclass(frozen=True)
class CodedSlots:
  """Keys and values in codes (`kvjax.primitives.codes`), for operations that read these.

  The cache next to them has the decoded numbers, which take no memory until an operation reads
  them, and the query next to this one is rounded.

  Attributes:
    q: the query as it was, [B, K, G, H].
    k, v: words [B, K, S, W].
    per_slot: scales of keys and values, then zero points if there are any, float32 [B, K, S], or
      [B, K, S, N] of N groups of channels.
    mean: what codes of keys stand for less than the keys, float32 [B, K, H].
    bits: of a code (static).
    impl: which implementation reads codes, as in `kvjax.Env` (static).
  """

  q: Array
  k: Array
  v: Array
  per_slot: tuple[Array, ...]
  mean: Array
  bits: int
  impl: str

  def of_keys(self, state: State, logits: Array | None = None) -> tuple[State, Array | None]:
    """Results over codes made those over keys: all logits are larger by the query's with the mean.

    Args:
      state: of the codes; its output is that of the keys.
      logits: float32 [B, K, G, S].
    """
    q = rounded_query(self.q)
    alike = (q * self.mean[:, :, None]).sum(-1) * q.shape[-1] ** -0.5
    state = dataclasses.replace(state, m=state.m + alike)
    return state, None if logits is None else logits + alike[..., None]


@pytree("unit", "pinned", "needs")
@dataclasses.dataclass(frozen=True)
class Plan:
  """The slots that one query sees, in the order of visiting.

  The driver makes the plan of all visible slots (`kvjax.families.sight`), and the move `plan`
  narrows it (`listed`).

  Attributes:
    span: the slots that may be touched at all.
    table: int32 [B, K, W], indices of tiles of `unit` slots in visiting order, no duplicates;
      None: every tile of the span, pinned tiles first, then newest first.
    count: int32 [B, K], valid entries of the table; None without a table.
    scores: float32 [B, K, W], the selection's score of each entry, where it has one.
    unit: slots per tile (static; 1 = single tokens).
    pinned: first entries that an early stop may not skip (static).
    window: the positions that the query may see; None: all.
    needs: further requirements of the method (static).
    codes: of the slots, where keys and values are kept as such.
    live: bool [B], rows that take part in the step, for moves that write where nobody chooses
      between rows; None: not said.
  """

  span: Span
  table: Array | None = None
  count: Array | None = None
  scores: Array | None = None
  unit: int = 64
  pinned: int = 0
  window: Window | None = None
  needs: Needs = Needs()
  codes: CodedSlots | None = None
  live: Array | None = None

  def listed(
    self,
    table: Int[Array, "B K W"],
    count: Int[Array, "B K"],
    *,
    unit: int,
    pinned: int = 0,
    scores: Float[Array, "B K W"] | None = None,
  ) -> Plan:
    """The same sight, narrowed to the tiles of a table."""
    return dataclasses.replace(
      self, table=table, count=count, unit=unit, pinned=pinned, scores=scores
    )

  def sizes(self, size: int) -> Int[Array, "B K W"]:
    """Slots of every entry of the table that are attended to, in a cache of `size` slots."""
    assert self.table is not None and self.count is not None
    listed = (jnp.arange(self.table.shape[-1]) < self.count[..., None]) & (self.table >= 0)
    low, high = self.table * self.unit, jnp.minimum((self.table + 1) * self.unit, size)
    start, stop = self.span.start[..., None], self.span.stop[..., None]
    high = jnp.minimum(high, stop)
    sinks = jnp.minimum(high, self.span.sinks) - low
    rest = high - jnp.maximum(low, jnp.maximum(start, self.span.sinks))
    return jnp.where(listed, jnp.maximum(sinks, 0) + jnp.maximum(rest, 0), 0)

  def visited(self, size: int) -> Int[Array, "B K"]:
    """Slots that a walk of the whole table attends to, in a cache of `size` slots."""
    return self.sizes(size).sum(-1, dtype=jnp.int32)


@pytree()
@dataclasses.dataclass(frozen=True)
class View:
  """The slots of a plan, fetched: k, v [B, K, W, H], their positions and slots int32 [B, K, W].

  Entries outside the plan have position −1 and slot S.
  """

  k: Array
  v: Array
  pos: Array
  slot: Array


@pytree()
@dataclasses.dataclass(frozen=True)
class Attended:
  """The result of walking a plan.

  Attributes:
    state: softmax state, o [B, K, G, H].
    logits: float32 [B, K, G, W] at the slots of `slot` (−inf = not attended), or None where the
      implementation does not return them.
    slot: int32 [B, K, W], or None.
    visited: int32 [B, K], slots attended.
    out: state.o in the dtype of q, where the implementation returns it too.
    notes: records for `observe` of what `plan` or `attend` found (`noting`).
    counted: bool [B], rows whose statistics `observe` may change: live ones without NaN. Filled in
      between the two, as is `live`.
    live: bool [B], rows that take part.
  """

  state: State
  logits: Array | None
  slot: Array | None
  visited: Array
  out: Array | None = None
  notes: tuple[Any, ...] = ()
  counted: Array | None = None
  live: Array | None = None

  def noting(self, note: Any) -> Attended:
    """The same with a record for `observe`, of a type of which its method has no other."""
    return dataclasses.replace(self, notes=(note, *self.notes))

  def noted(self, kind: type[Note]) -> Note | None:
    """The record of this type; None: there is none."""
    return next((note for note in self.notes if isinstance(note, kind)), None)
