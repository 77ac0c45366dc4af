"""Slots split over devices: what a move does where each device holds a part of a layer's slots.

For caches in which slot = position. Device d of n holds slots [d·S, (d + 1)·S) of n·S. Rows (such
as "seen"), plans, and what `heads` holds beside summaries are alike on all of them; slots and
summaries are a device's own. A step exchanges its softmax state and, where it selects, candidates
(at most k scores and indices per device and KV head); slots never move. The tokens of a chunk of a
prompt are alike everywhere: to the first chunk each device attends with a share of the heads, to
later ones over its slots.

Without `env.slot_axis` nothing here does anything.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Attended, Plan, Span
from kvjax.core.slots import Slots, put
from kvjax.ops import shared_slots
from kvjax.primitives import softmax_state
from kvjax.primitives.softmax_state import State


def size(at: At, cache: Cache) -> int:
  """Slots of a head on all devices together; where heads share slots, those of one on average."""
  return shared_slots.tokens(cache) * _devices(at)


def first(at: At, size: int) -> Int[Array, ""] | int:
  """The first of the `size` slots that this device holds."""
  axis = at.env.slot_axis
  return jax.lax.axis_index(axis) * size if axis else 0


def own(at: At, cache: Cache, slot: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
  """A slot as this device counts it; S for those of others."""
  if at.env.slot_axis is None:
    return slot
  local = slot - first(at, cache.size)
  return jnp.where((local >= 0) & (local < cache.size), local, cache.size)


def reach(at: At, slots: Int[Array, " A"], size: int) -> Int[Array, " A"]:
  """Number of this device's `size` slots that are among the first so many of all."""
  if at.env.slot_axis is None:
    return slots
  return jnp.clip(slots - first(at, size), 0, size)


def part(at: At, cache: Cache, plan: Plan) -> Plan:
  """The part of a plan that this device reads, in the plan's order."""
  if at.env.slot_axis is None:
    return plan
  before = first(at, cache.size)
  start, stop = (jnp.clip(x - before, 0, cache.size) for x in (plan.span.start, plan.span.stop))
  covered = Span(start, stop, plan.span.sinks, jnp.asarray(before))
  if plan.table is None:
    return dataclasses.replace(plan, span=covered)
  if cache.size % plan.unit:
    raise ValueError(
      f"{at.name}: found {cache.size} slots on each device, expected a multiple of "
      f"its tiles of {plan.unit} slots"
    )
  assert plan.count is not None  # a table comes with its count
  tiles = cache.size // plan.unit
  local = plan.table - before // plan.unit
  listed = jnp.arange(local.shape[-1]) < plan.count[..., None]
  ok = listed & (plan.table >= 0) & (local >= 0) & (local < tiles)
  order = jnp.argsort(~ok, -1, stable=True)[..., : min(tiles, local.shape[-1])]
  local, ok = (jnp.take_along_axis(x, order, -1) for x in (local, ok))
  table = jnp.where(ok, local, -1).astype(jnp.int32)
  count = ok.sum(-1, dtype=jnp.int32)
  return dataclasses.replace(plan, span=covered, table=table, count=count, scores=None, pinned=0)


def merged(at: At, attended: Attended) -> Attended:
  """The result of a decode step over all devices' parts: one gather of (o, m, l)."""
  axis = at.env.slot_axis
  if axis is None:
    return attended
  # [devices, B, K, G, ...]; XLA makes one collective of the three.
  every = jax.tree.map(lambda x: jax.lax.all_gather(x, axis), attended.state)
  parts = [jax.tree.map(lambda x, i=i: x[i], every) for i in range(every.m.shape[0])]
  whole = functools.reduce(softmax_state.merge, parts)  # one launch, unlike `merge_all`
  return Attended(whole, None, None, jax.lax.psum(attended.visited, axis))


def shared(
  at: At,
  attend: Callable[[At, Slots, Array], Attended],
  staged: Slots,
  q: Float[Array, "B K G A H"],
) -> Attended:
  """A prompt's attention over slots that every device has: each takes a share of the KV heads.

  Where these do not divide evenly, each takes all.
  """
  axis, heads = at.env.slot_axis, q.shape[1]
  if axis is None:
    return attend(at, staged, q)
  alone = dataclasses.replace(at, env=dataclasses.replace(at.env, slot_axis=None))
  if heads % _devices(at):
    return attend(alone, staged, q)
  share = heads // _devices(at)
  start = jax.lax.axis_index(axis) * share
  mine = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, share, 1), (staged, q))
  found = attend(alone, *mine)
  out = found.state.o if found.out is None else found.out
  out, m, l, visited = jax.tree.map(
    lambda x: jax.lax.all_gather(x, axis, axis=1, tiled=True),
    (out, found.state.m, found.state.l, found.visited),
  )
  return Attended(State(out.astype(jnp.float32), m, l), None, None, visited, out.astype(q.dtype))


def reduced(at: At, attended: Attended) -> Attended:
  """The result of a prompt over all devices' parts: as `merged`, but nothing is held n times."""
  axis = at.env.slot_axis
  if axis is None:
    return attended
  state = attended.state
  m = jax.lax.pmax(state.m, axis)
  weight = state.l * jnp.exp(state.m - jnp.where(m == -jnp.inf, 0.0, m))
  mine = jnp.concatenate([state.o * weight[..., None], weight[..., None]], -1)
  total = jax.lax.psum(mine, axis)
  l = total[..., -1]
  whole = State(total[..., :-1] / jnp.where(l == 0, 1.0, l)[..., None], m, l)
  return Attended(whole, None, None, jax.lax.psum(attended.visited, axis))


def log_softmax(at: At, x: Float[Array, "*batch S"]) -> Float[Array, "*batch S"]:
  """ln of the softmax over the slots of all devices, of which each gets its own."""
  axis = at.env.slot_axis
  if axis is None:
    return jax.nn.log_softmax(x, -1)
  m = jax.lax.pmax(x.max(-1, keepdims=True), axis)
  m = jnp.where(m == -jnp.inf, 0.0, m)
  return x - m - jnp.log(jax.lax.psum(jnp.exp(x - m).sum(-1, keepdims=True), axis))


def candidates(
  at: At,
  scores: Float[Array, "B K P"],
  span: Span,
  *,
  unit: int,
  sinks: int,
  local: int,
  k: int,
) -> Float[Array, "B K all"]:
  """Scores of the tiles of all devices, of which each has told its k best: the others are −∞.

  First and newest tiles are no candidates, as their scores do not count. Arguments as in
  `tiles.best`; the span is that of all slots.
  """
  axis = at.env.slot_axis
  if axis is None:
    return scores
  batch, heads, tiles = scores.shape
  tile = jax.lax.axis_index(axis) * tiles + jnp.arange(tiles, dtype=jnp.int32)
  start, stop = span.start[..., None], span.stop[..., None]
  inside = (tile * unit < stop) & ((tile * unit < span.sinks) | (tile * unit + unit > start))
  rest = inside & (tile >= sinks) & (tile <= (stop - 1) // unit - local)
  scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
  scores = jnp.where(rest, jnp.maximum(scores, jnp.finfo(scores.dtype).min), -jnp.inf)
  best, index = exchanged(at, scores, min(k, tiles))
  everywhere = jnp.full((batch, heads, tiles * _devices(at)), -jnp.inf, scores.dtype)
  return put(everywhere, index, best)


def exchanged(
  at: At, scores: Float[Array, "*batch S"], k: int
) -> tuple[Float[Array, "*batch n"], Int[Array, "*batch n"]]:
  """Every device's k largest of its scores, and their indices among those of all devices.

  In the order of devices, so that equal scores keep the order of their indices.
  """
  best, index = jax.lax.top_k(scores, k)
  axis = at.env.slot_axis
  if axis is None:
    return best, index.astype(jnp.int32)
  index = index.astype(jnp.int32) + jax.lax.axis_index(axis) * scores.shape[-1]
  both = jnp.stack([best, jax.lax.bitcast_convert_type(index, best.dtype)])
  both = jax.lax.all_gather(both, axis, axis=both.ndim - 1, tiled=True)
  return both[0], jax.lax.bitcast_convert_type(both[1], jnp.int32)


def top_k(
  at: At, scores: Float[Array, "*batch S"], k: int
) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
  """The k largest scores of all devices (fewer where there are fewer), and their indices."""
  best, index = exchanged(at, scores, min(k, scores.shape[-1]))
  if at.env.slot_axis is None:
    return best, index
  best, place = jax.lax.top_k(best, min(k, best.shape[-1]))
  return best, jnp.take_along_axis(index, place, -1)


def summarised(
  at: At,
  cache: Cache,
  summarise: Callable[[Cache, Array, int], Cache],
  start: Int[Array, " B"],
  tokens: int,
) -> Cache:
  """`summarise(cache, start, tokens)`, with start and used as this device counts its slots."""
  if at.env.slot_axis is None:
    return summarise(cache, start, tokens)
  offset = first(at, cache.size)
  local = cache.put(rows={"used": cache.used - offset})
  return summarise(local, start - offset, tokens).put(rows={"used": cache.used})


def _devices(at: At) -> int:
  axis = at.env.slot_axis
  return jax.lax.axis_size(axis) if axis else 1
