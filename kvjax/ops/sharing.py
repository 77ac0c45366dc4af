"""CIS: which queries share what an earlier one retrieved, and what is read and noted (PrHS, §IV-A).

Each step's reference comes first, then the kernel that does the same. On the heads shelf a cache
holds what is known of the block: "queries" [B, K, s, G, H] of norm 1, "anchor" [B, K, s, U], the
step whose retrieval each used, and "retrieved" [B, K, s, U, W], dilated, −1 = none, at the end; and
on the rows shelf "step" [B], this one's. A KV head decides as one (U = 1), or each of its query
heads for itself (U = G).
"""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Attended, Plan, Span, Window
from kvjax.ops import attention, slot_shards
from kvjax.ops.selection import holds, other_tiles
from kvjax.ops.table import kernel, pallas
from kvjax.primitives.softmax_state import State
from kvjax.primitives.trees import pytree

NOWHERE = jnp.iinfo(jnp.int32).max  # after all positions
HELD = ("queries", "anchor", "retrieved")


@pytree()
@dataclasses.dataclass(frozen=True)
class Choice:
  """What a step's queries share.

  Attributes:
    query: float32 [B, K, G, H], q at norm 1.
    anchor: int32 [B, K, U], the step of the block whose retrieval is used: this one's where a unit
      retrieves.
    retrieves: int32 [B, K, U], 1 where a unit shares with none.
    step: int32 [B, K], this one, of the block.
    visible: the plan of all slots that the queries may see.
    logits: of the heads that retrieve, what `key_logits` gives, where they were scored on the way.
  """

  query: Array
  anchor: Array
  retrieves: Array
  step: Array
  visible: Plan
  logits: Sequence[Array] | None = None


@pytree()
@dataclasses.dataclass(frozen=True)
class Retrieval:
  """What a step retrieved, and what it reads. Units that share hold anything in the first two.

  Attributes:
    found: int32 [B, K, U, f], the heaviest tokens of the middle by position, −1 after them.
    weight: float32 [B, K, U, f], theirs, on any scale that keeps their order.
    table, count: int32 [B, K, X] and [B, K], of the plan: first tokens, the newest backwards, then
      the chosen ones of the middle. The kernels' lists may have holes (−1).
  """

  found: Array
  weight: Array
  table: Array
  count: Array


def select(
  at: At,
  cache: Cache,
  visible: Plan,
  q: Float[Array, "B K G H"],
  *,
  tau: float,
  window: Callable[[Int[Array, "B T"]], Window | None],
  span: Callable[[Window], Span],
  sizes: dict[str, int],
  plain: bool,
) -> tuple[Choice, Retrieval, tuple[State, Array] | None]:
  """`share`, then `retrieve`; and attention over the list, where a kernel reads it on the way.

  Args:
    at, cache, visible, q, tau, window, span: as of `share`.
    sizes: k, sinks and local of `retrieve`.
    plain: whether what is listed here is all that the step reads, and in no form of its own.
  """
  if plain and (run := _reading(at, cache, visible, q)):
    return _select_by(run, at, cache, visible, q, tau, window, span, sizes)
  choice = share(at, cache, visible, q, tau=tau, window=window, span=span)
  return choice, retrieve(at, cache, q, choice, **sizes), None


def _reading(at: At, cache: Cache, visible: Plan, q: Array) -> Callable | None:
  """The kernel that chooses and reads, where there are rows enough for it; None: several do."""
  run = _looking(at, "cis_read", visible, q, cache.slots["k"])
  by_head = visible.window is not None and visible.window.by_head
  if run is None or by_head or visible.needs.logits:
    return None
  batch, heads, groups, _ = q.shape
  takes = importlib.import_module("kvjax.kernels.cis.read").takes
  return run if takes(batch * heads, groups, cache.size) else None


def _select_by(
  run: Callable,
  at: At,
  cache: Cache,
  visible: Plan,
  q: Array,
  tau: float,
  window_of: Callable[[Array], Window | None],
  span_of: Callable[[Window], Span],
  sizes: dict[str, int],
) -> tuple[Choice, Retrieval, tuple[State, Array]]:
  """`select` by its kernel."""
  window = visible.window
  first = None if window is None else _first_of(window_of)
  held = (*(cache.heads[name] for name in HELD), cache.rows["step"], cache.seen, cache.used)
  span_sinks, soft_cap = 0 if window is None else window.sinks, at.env.soft_cap
  how: dict[str, Any] = {"first": first, "span_sinks": span_sinks, "soft_cap": soft_cap, **sizes}
  keys = cache.slots["k"], cache.slots["v"]
  (query, anchor, retrieves, step, start), found, read = run(q, *keys, *held, tau=tau, **how)
  if window is not None:
    visible = _seeing(visible, window, start[:, :1], span_of)
  choice = Choice(query, anchor, retrieves, step, visible)
  token, weight, *listed = found
  return choice, Retrieval(token[:, :, None], weight[:, :, None], *listed), read


# ---- who shares


def share(
  at: At,
  cache: Cache,
  visible: Plan,
  q: Float[Array, "B K G H"],
  *,
  tau: float,
  window: Callable[[Int[Array, "B T"]], Window | None],
  span: Callable[[Window], Span],
) -> Choice:
  """Which earlier query of the block each unit shares with, if any: the latest alike (Eq. 12).

  A kernel works out the window too, instead of a launch of its own, by what `window` makes of a
  position and `span` of a window; and where it can the logits of the heads that retrieve.
  """
  if run := pallas(at, "cis_anchors"):
    return _share_by(run, at, cache, visible, q, tau, window, span)
  query, step = _unit(q), cache.rows["step"][:, None, None]
  queries, anchors, _ = (cache.heads[name] for name in HELD)
  cosine = (query[:, :, None] * queries).sum(-1)  # Eq. 12, [B, K, s, G]
  alike = jnp.minimum(cosine, 1.0) > tau  # rounding must not let 1 exceed τ = 1
  if anchors.shape[3] < q.shape[2]:
    alike = alike.all(-1, keepdims=True)
  earlier = jnp.arange(queries.shape[2], dtype=jnp.int32)[:, None]
  latest = jnp.where(alike & (earlier < step[..., None]), earlier, -1).max(2)  # j
  anchor = _of_step(anchors, latest)
  anchor = jnp.where(latest >= 0, anchor, step)
  steps = jnp.broadcast_to(step[..., 0], q.shape[:2])
  return Choice(query, anchor, (latest < 0).astype(jnp.int32), steps, visible)


def _share_by(
  run: Callable,
  at: At,
  cache: Cache,
  visible: Plan,
  q: Array,
  tau: float,
  window_of: Callable[[Array], Window | None],
  span_of: Callable[[Window], Span],
) -> Choice:
  """`share` by its kernel."""
  window = visible.window
  block = cache.heads["queries"], cache.heads["anchor"], cache.rows["step"], cache.seen
  by_head = window is not None and window.by_head
  narrows = window is not None and window.view is None and not by_head
  how: dict[str, Any] = {"tau": tau, "first": _first_of(window_of) if narrows else None}
  k = cache.slots["k"]
  alone = cache.heads["anchor"].shape[3] == q.shape[2]
  scored = "key_logits" if alone else "cis_logits"
  looks = not by_head and _looking(at, scored, visible, q, k) is not None
  if looks:
    how |= {"keys": (k, cache.used), "span_sinks": 0 if window is None else window.sinks}
    how["soft_cap"] = at.env.soft_cap
  query, anchor, retrieves, step, *more = run(q, *block, **how)
  if narrows:
    assert window is not None
    visible = _seeing(visible, window, more[0][:, None], span_of)
  return Choice(query, anchor, retrieves, step, visible, more[-3:] if looks else None)


def _first_of(window_of: Callable[[Array], Window | None]) -> Callable[[Array], Array]:
  """The first token in sight beside the sinks, of so many that are seen: int32 scalars."""

  def first(seen: Array) -> Array:
    window = window_of(jnp.reshape(seen - 1, (1, 1)))
    assert window is not None
    return window.first.reshape(())

  return first


def _seeing(
  visible: Plan, window: Window, first: Int[Array, "B 1"], span_of: Callable[[Window], Span]
) -> Plan:
  """The plan of all visible slots where a kernel has worked out the window's first."""
  window = dataclasses.replace(window, first=first)
  return dataclasses.replace(visible, window=window, span=span_of(window))


def _looking(at: At, operation: str, visible: Plan, *attention: Array) -> Callable | None:
  """The kernel of an operation over a window, if it can do it; `attention`: q and k, if any.

  Kernels have one query for all keys, and spans that end at the newest.
  """
  window = visible.window
  if (window is not None and window.view is not None) or visible.needs.own_span:
    return None
  return pallas(at, operation, *attention, whole=True)


# ---- what is read


def retrieve(
  at: At,
  cache: Cache,
  q: Float[Array, "B K G H"],
  choice: Choice,
  *,
  k: int,
  sinks: int,
  local: int,
) -> Retrieval:
  """The k heaviest tokens of the middle (ties: the lowest), and the list of all that is read.

  Kernels read no key for units that share.
  """
  window = choice.visible.window
  if _looking(at, "key_weights", choice.visible, q, cache.slots["k"]):
    return _retrieve_by_kernels(at, cache, q, choice, k, sinks, local)
  now = (cache.seen - 1)[:, None]
  logits = attention.windowed_logits(at, q[:, :, :, None], now, cache.slots["k"], cache.pos, window)
  span = slot_shards.span(at, cache, choice.visible.span)
  visible = (cache.pos >= 0) & span.holds(jnp.arange(cache.size, dtype=jnp.int32))
  if window is not None:
    visible &= window.sees(cache.pos)[:, :, 0]
  logits = jnp.where(visible[:, :, None], logits[:, :, :, 0], -jnp.inf)
  # Logarithms of the weights: the small ones still have an order where the weights are all 0.
  weight = slot_shards.log_softmax(at, logits)  # ln A, Eq. 2
  if choice.anchor.shape[2] < q.shape[2]:
    weight = jax.nn.logsumexp(weight, 2, keepdims=True)  # of the mean, up to a constant
  place = slot_shards.first(at, cache.size) + jnp.arange(cache.size, dtype=jnp.int32)
  place = _in_middle(cache, jnp.where(visible, place, -1)[:, :, None], sinks, local)
  weight = jnp.where(place >= 0, weight, -jnp.inf)
  best, index = slot_shards.top_k(at, weight, k)
  index = jnp.where(best > -jnp.inf, index, NOWHERE)
  index, best = jax.lax.sort((index, best), num_keys=1)
  found = jnp.where(index == NOWHERE, -1, index)
  return Retrieval(found, best, *_listed(at, cache, choice, found, sinks, local))


def _retrieve_by_kernels(
  at: At, cache: Cache, q: Array, choice: Choice, k: int, sinks: int, local: int
) -> Retrieval:
  """`retrieve` by kernels: what units decide for themselves is listed by the launch that finds."""
  keys, span, needed = cache.slots["k"], choice.visible.span, choice.retrieves
  batch, heads, units = needed.shape
  operands = q.astype(keys.dtype), keys, span.start, span.stop, span.stop
  some = {"span_sinks": span.sinks, "active": needed[..., 0], "soft_cap": at.env.soft_cap}
  few, sizes = min(k, cache.size), {"sinks": sinks, "local": local}
  # Where every query head decides for itself, its logits have the order of its weights.
  direct, logits = units == q.shape[2], choice.logits
  if logits is None:  # units are KV heads
    logits = kernel("key_logits", "pallas")(*operands, **some)
  if units == 1 and holds(at, cache.size, few):
    best, index, *listed = kernel("cis_found_listed", "pallas")(
      *([logits[0][:, :, 0]] if direct else logits, span.start, span.stop),
      *(cache.heads["retrieved"], choice.anchor, needed, cache.seen),
      **sizes,
      k=few,
      span_sinks=span.sinks,
    )
    return Retrieval(index[:, :, None], best[:, :, None], *listed)
  weight = logits[0]
  if not direct:
    weight = kernel("key_weights", "pallas")(*operands, blocks=cache.size, log=True, **some)
  best, index = other_tiles(
    at,
    weight.reshape(batch, heads * units, -1),
    span,
    **sizes,
    unit=1,
    k=few,
    active=needed.reshape(batch, heads * units),
    ordered=False,
  )
  found, best = (x.reshape(*needed.shape, -1) for x in (index, best))
  return Retrieval(found, best, *_listed(at, cache, choice, found, sinks, local))


def _listed(
  at: At, cache: Cache, choice: Choice, found: Int[Array, "B K U f"], sinks: int, local: int
) -> tuple[Int[Array, "B K X"], Int[Array, "B K"]]:
  """Table and count of the plan."""
  retrieves, anchor, window = choice.retrieves, choice.anchor, choice.visible.window
  retrieved = cache.heads["retrieved"]
  if run := _looking(at, "cis_listed", choice.visible):
    span = choice.visible.span
    sizes = {"slots": cache.size, "sinks": sinks, "local": local, "span_sinks": span.sinks}
    return run(retrieved, found, anchor, retrieves, cache.seen, span.start, **sizes)
  missing = retrieved.shape[-1] - found.shape[-1]
  fresh = jnp.pad(found, [(0, 0)] * 3 + [(0, missing)], constant_values=-1)
  old = _of_step(retrieved, anchor[..., None])
  chosen = jnp.where(retrieves[..., None] > 0, fresh, old)
  chosen = _in_middle(cache, chosen, sinks, local)
  always = _always(cache, sinks, local)
  table = jnp.concatenate([always, chosen.reshape(*chosen.shape[:2], -1)], -1)
  if window is not None:
    table = jnp.where(window.sees(table)[:, :, 0], table, -1)
  return distinct(table)


def _in_middle(
  cache: Cache, token: Int[Array, "B K U X"], sinks: int, local: int
) -> Int[Array, "B K U X"]:
  """Tokens in [C_sink, n − C_local); −1 in place of the others."""
  end = (cache.seen - local)[:, None, None, None]
  return jnp.where((token >= sinks) & (token < end), token, -1)


def _always(cache: Cache, sinks: int, local: int) -> Int[Array, "B K X"]:
  """First tokens, then the newest backwards, none twice."""
  n = cache.seen[:, None]
  first = jnp.arange(sinks, dtype=jnp.int32)
  newest = n - 1 - jnp.arange(local, dtype=jnp.int32)
  newest = jnp.where(newest >= sinks, newest, -1)
  both = jnp.concatenate([jnp.where(first < n, first, -1), newest], -1)[:, None]
  return jnp.broadcast_to(both, (*cache.pos.shape[:2], both.shape[-1]))


# ---- what is noted


def note(
  at: At,
  cache: Cache,
  choice: Choice,
  retrieval: Retrieval,
  attended: Attended,
  *,
  sinks: int,
  heaviest: int,
  radius: int,
) -> Cache:
  """The cache that knows of this step, in rows that count; its retrieval dilated (Eq. 13)."""
  found, weight, step = retrieval.found, retrieval.weight, cache.rows["step"]
  dilation = {"sinks": sinks, "heaviest": heaviest, "radius": radius}
  held = queries, anchor, retrieved = [cache.heads[name] for name in HELD]
  counted = jnp.ones_like(step, bool) if attended.counted is None else attended.counted
  if run := pallas(at, "cis_note"):
    # The kernel looks at the denominators itself, all but those of other devices' heads.
    live = counted if attended.live is None or at.env.head_axis else attended.live
    mine = choice.query, choice.anchor, choice.retrieves, found, weight
    *noted, step = run(live, attended.state.l, choice.step, *mine, *held, step, **dilation)
    return cache.put(heads=dict(zip(HELD, noted, strict=True)), rows={"step": step})
  row, head, unit = jnp.indices(choice.anchor.shape, jnp.int32, sparse=True)
  block = queries.shape[2]
  place = jnp.where(counted, step, block)[:, None, None]
  own = jnp.where(choice.retrieves > 0, place, block)
  noted = {
    "queries": queries.at[row[..., 0], head[..., 0], place[..., 0]].set(choice.query, mode="drop"),
    "anchor": anchor.at[row, head, place, unit].set(choice.anchor, mode="drop"),
  }
  dilated = _dilated(found, weight, retrieved.shape[-1], **dilation)
  noted["retrieved"] = retrieved.at[row, head, own, unit].set(dilated, mode="drop")
  return cache.put(heads=noted, rows={"step": jnp.where(counted, (step + 1) % block, step)})


def _dilated(
  found: Int[Array, "B K U f"],
  weight: Float[Array, "B K U f"],
  widest: int,
  *,
  sinks: int,
  heaviest: int,
  radius: int,
) -> Int[Array, "B K U W"]:
  """A retrieval and the neighbours of its heaviest tokens (Eq. 13), none twice, then −1.

  What lies in the middle of now is for later queries to say, all but the first tokens.
  """
  order = jnp.argsort(-weight, -1, stable=True)[..., :heaviest]
  heavy = jnp.take_along_axis(found, jnp.sort(order, -1), -1)[..., None, :]
  away = jnp.array([d for r in range(1, radius + 1) for d in (-r, r)], jnp.int32)
  near = heavy + away[:, None]  # the nearest first
  near = jnp.where((heavy >= 0) & (near >= sinks), near, -1)
  both = jnp.concatenate([found, near.reshape(*found.shape[:3], -1)], -1)
  missing = max(0, widest - both.shape[-1])
  both = jnp.pad(both, [(0, 0)] * 3 + [(0, missing)], constant_values=-1)
  return distinct(both)[0][..., :widest]


def _unit(q: Float[Array, "B K G H"]) -> Float[Array, "B K G H"]:
  """q / ‖q‖, float32; 0 stays 0."""
  q = q.astype(jnp.float32)
  q = q / jnp.maximum(jnp.abs(q).max(-1, keepdims=True), 1e-30)  # its square must not overflow
  return q / jnp.maximum(jnp.linalg.norm(q, axis=-1, keepdims=True), 1e-30)


def _of_step(
  x: Int[Array, "B K s *unit"], step: Int[Array, "B K *#unit"]
) -> Int[Array, "B K *unit"]:
  """What was noted in a step of the block; −1 gives any."""
  return jnp.take_along_axis(x, step[:, :, None], 2, mode="clip")[:, :, 0]


def distinct(table: Int[Array, "*heads W"]) -> tuple[Int[Array, "*heads W"], Int[Array, "*heads"]]:
  """The table without repetitions and holes (−1), first occurrences in their order; and its count.

  Entries after the count are −1.
  """
  width = table.shape[-1]
  order = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), table.shape)
  token, order = jax.lax.sort((table, order), num_keys=2)
  again = jnp.concatenate(
    [jnp.zeros_like(token[..., :1], bool), token[..., 1:] == token[..., :-1]], -1
  )
  drop = again | (token < 0)
  order = jnp.where(drop, width, order)
  _, token = jax.lax.sort((order, jnp.where(drop, -1, token)), num_keys=1)
  return token, (~drop).sum(-1, dtype=jnp.int32)
