"""Reference attention: one query over a plan, and a prompt's queries over the slots they see.

Both accumulate in float32 and return the softmax state. The Pallas kernels are checked against
these; `kvjax.ops` chooses between them.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.core import slots as slots_of
from kvjax.core.cache import Cache
from kvjax.core.context import At, Turn
from kvjax.core.plan import Attended, Plan, View, Window
from kvjax.ops import shared_slots
from kvjax.primitives import softmax_state
from kvjax.primitives.softmax_state import State

QUERY_BLOCK = 512
KEY_BLOCK = 1024


def logits_of(
  q: Float[Array, "B K G T H"], k: Float[Array, "B K S H"], soft_cap: float | None = None
) -> Float[Array, "B K G T S"]:
  """q·k/√H in float32, under `Env.soft_cap`."""
  x = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32)
  return softmax_state.capped(x * (q.shape[-1] ** -0.5), soft_cap)


def read(cache: Cache, plan: Plan) -> View:
  """The slots that a plan names."""
  if plan.table is None:
    slot = jnp.broadcast_to(jnp.arange(cache.size, dtype=jnp.int32), cache.pos.shape)
    return View(cache.slots["k"], cache.slots["v"], cache.pos, slot)
  assert plan.count is not None  # a table comes with its count
  batch, heads, width = plan.table.shape
  within = jnp.arange(plan.unit, dtype=jnp.int32)
  listed = (jnp.arange(width) < plan.count[..., None]) & (plan.table >= 0)
  slot = (plan.table[..., None] * plan.unit + within).reshape(batch, heads, -1)
  ok = jnp.repeat(listed, plan.unit, -1) & (slot < cache.size)
  pos = jnp.where(ok, slots_of.take(cache.pos, slot), -1)
  k, v = (slots_of.take(cache.slots[name], slot) for name in ("k", "v"))
  return View(k, v, pos, jnp.where(ok, slot, cache.size))


def seen(plan: Plan, pos: Int[Array, "B K W"], slot: Int[Array, "*#BKW"]) -> Bool[Array, "B K W"]:
  """True where the newest token's queries see what a slot holds."""
  ok = (pos >= 0) & plan.span.holds(slot)
  return ok if plan.window is None else ok & plan.window.sees(pos)[:, :, 0]


def attend(at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Attended:
  """Attention of the newest token's queries over a plan (q rotated at its own position)."""
  view, qpos, window = read(cache, plan), (cache.seen - 1)[:, None], plan.window
  ok = seen(plan, view.pos, view.slot)
  logits = windowed_logits(at, q[:, :, :, None], qpos, view.k, view.pos, window)[:, :, :, 0]
  logits = jnp.where(ok[:, :, None], logits, -jnp.inf)
  v = jnp.where(ok[..., None], view.v, 0)  # empty slots may hold NaN
  state = softmax_state.of_logits(logits, v)
  return Attended(state, logits, view.slot, ok.sum(-1, dtype=jnp.int32))


def at_slots(attended: Attended, size: int) -> Attended:
  """The same with its logits [B, K, G, S] at the S = `size` slots of a cache, −inf at the others.

  For statistics of every slot, after a plan that listed some.
  """
  assert attended.logits is not None and attended.slot is not None
  batch, heads = (jnp.arange(n) for n in attended.slot.shape[:2])
  place = batch[:, None, None], heads[:, None], slice(None), attended.slot  # that of none is S
  empty = jnp.full((*attended.logits.shape[:3], size), -jnp.inf)
  logits = empty.at[place].set(jnp.moveaxis(attended.logits, 2, 3), mode="drop")
  return dataclasses.replace(attended, logits=logits, slot=None)


def attend_shared(at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Attended:
  """As `attend` over a span, where heads share slots (`kvjax.ops.shared_slots`).

  The heads of a row are one head with all their queries, each of which sees its own span. NaN in a
  value of one of them is NaN in the output of all.
  """
  rows, k, v = cache.pos.shape[1], cache.slots["k"], cache.slots["v"]
  pos = jnp.repeat(cache.pos, shared_slots.sharers(cache), 1)
  slot = jnp.broadcast_to(jnp.arange(cache.size, dtype=jnp.int32), pos.shape)
  ok = seen(plan, pos, slot)
  joined = q.reshape(q.shape[0], rows, -1, q.shape[3])[:, :, :, None]
  qpos = (cache.seen - 1)[:, None]
  logits = windowed_logits(at, joined, qpos, k, cache.pos, plan.window)
  logits = jnp.where(ok[:, :, None], logits.reshape(*q.shape[:3], -1), -jnp.inf)
  v = jnp.where((cache.pos >= 0)[..., None], v, 0)  # empty slots may hold NaN
  state = softmax_state.of_logits(logits.reshape(*joined.shape[:3], -1), v)
  state = jax.tree.map(lambda x: x.reshape(*q.shape[:3], *x.shape[3:]), state)
  return Attended(state, logits, slot, ok.sum(-1, dtype=jnp.int32))


def attend_ranges(
  at: At,
  q: Float[Array, "B K G H"],
  k: Float[Array, "B K S H"],
  v: Float[Array, "B K S H"],
  ranges: Sequence[tuple[Int[Array, "B _"], Int[Array, "B _"]]],
) -> tuple[State, Float[Array, "B K G S"]]:
  """One query per head over the slots of any of the ranges [start, stop), and their logits."""
  slot = jnp.arange(k.shape[2], dtype=jnp.int32)
  ok = jnp.zeros((k.shape[0], 1, k.shape[2]), bool)
  for start, stop in ranges:
    ok |= (slot >= start[..., None]) & (slot < stop[..., None])
  logits = logits_of(q[:, :, :, None], k, at.env.soft_cap)[:, :, :, 0]
  logits = jnp.where(ok[:, :, None], logits, -jnp.inf)
  # Empty slots may hold NaN.
  return softmax_state.of_logits(logits, jnp.where(ok[..., None], v, 0)), logits


def attend_entries(
  at: At,
  q: Float[Array, "B K G H"],
  k: Float[Array, "B K S H"],
  v: Float[Array, "B K S H"],
  table: Int[Array, "B W"],
  unit: int,
) -> State:
  """One query per head over the tiles of `unit` slots that a table lists; negative: none."""
  slot = (table[..., None] * unit + jnp.arange(unit, dtype=jnp.int32)).reshape(len(table), 1, -1)
  slot = jnp.broadcast_to(slot, (*k.shape[:2], slot.shape[2]))
  ok = (slot >= 0) & (slot < k.shape[2])
  k, v = slots_of.take(k, slot), slots_of.take(v, slot)
  logits = logits_of(q[:, :, :, None], k, at.env.soft_cap)[:, :, :, 0]
  logits = jnp.where(ok[:, :, None], logits, -jnp.inf)
  return softmax_state.of_logits(logits, jnp.where(ok[..., None], v, 0))


def attend_tiles(at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Attended:
  """As `attend` over a plan with a table, but with a state of its own for every entry.

  The state's arrays are o [B, K, G, W, H], m and l [B, K, G, W]; visited is int32 [B, K, W].
  """
  assert plan.table is not None
  every = attend(at, cache, plan, q)
  assert every.logits is not None
  v = read(cache, plan).v
  logits = every.logits.reshape(*q.shape[:3], -1, plan.unit)
  v = v.reshape(*q.shape[:2], -1, plan.unit, v.shape[-1])
  seen = logits[:, :, 0] > -jnp.inf
  state = jax.vmap(softmax_state.of_logits, (3, 2), 3)(logits, jnp.where(seen[..., None], v, 0))
  return Attended(state, every.logits, every.slot, seen.sum(-1, dtype=jnp.int32))


def windowed_logits(
  at: At,
  q: Float[Array, "B K G T H"],
  qpos: Int[Array, "B T"],
  k: Float[Array, "B K S H"],
  kpos: Int[Array, "B K S"],
  window: Window | None,
) -> Float[Array, "B K G T S"]:
  """Scaled logits; keys before window.sinks are scored by the query moved to window.view."""
  cap = at.env.soft_cap
  logits = logits_of(q, k, cap)
  if window is None or window.view is None:
    return logits
  moved = at.env.rope.shift(q, (window.view - qpos)[:, None, None])
  return jnp.where((kpos < window.sinks)[:, :, None, None], logits_of(moved, k, cap), logits)


def attend_prompt(
  at: At,
  q: Float[Array, "B K G A H"],
  qpos: Int[Array, "B A"],
  slots: dict[str, Array],
  window: Window | None,
  reach: Int[Array, " A"] | None,
) -> State:
  """Causal attention of many queries over slots, in blocks: no map of A × S is ever held.

  Args:
    at: where this runs (layer, rope, soft cap).
    q: queries, rotated at their positions.
    qpos: positions; −1 = padding (its state is empty).
    slots: "k", "v" [B, K, S, H] and "pos" [B, K, S] in any order.
    window: what queries may see of the past; None = everything.
    reach: for each query, how many leading slots can hold keys that it sees (a bound that saves
      work, never a mask); None = all.
  """
  batch, heads, groups, count, head_dim = q.shape
  size = slots["pos"].shape[2]
  qb, kb = min(QUERY_BLOCK, count), min(KEY_BLOCK, size)
  queries, blocks = -(-count // qb), -(-size // kb)
  reach = jnp.full((count,), size, jnp.int32) if reach is None else reach

  k, v = (_pad(slots[name], 2, blocks * kb) for name in ("k", "v"))
  kpos = _pad(slots["pos"], 2, blocks * kb, -1)
  q, qpos = _pad(q, 3, queries * qb), _pad(qpos, 1, queries * qb, -1)
  reach = _pad(reach, 0, queries * qb)
  window = window and jax.tree.map(lambda x: _pad(x, x.ndim - 1, queries * qb), window)

  def of_queries(start: Array) -> State:
    def cut(x: Array, axis: int) -> Array:
      return jax.lax.dynamic_slice_in_dim(x, start, qb, axis)

    q_, qpos_ = cut(q, 3), cut(qpos, 1)
    window_ = window and jax.tree.map(lambda x: cut(x, x.ndim - 1), window)

    def add_keys(i: Array, state: State) -> State:
      k_, v_, kpos_ = (jax.lax.dynamic_slice_in_dim(x, i * kb, kb, 2) for x in (k, v, kpos))
      ok = (kpos_ >= 0)[:, :, None] & (kpos_[:, :, None] <= qpos_[:, None, :, None])
      if window_ is not None:
        ok &= window_.sees(kpos_)
      logits = windowed_logits(at, q_, qpos_, k_, kpos_, window_)
      logits = jnp.where(ok[:, :, None], logits, -jnp.inf)
      v_ = jnp.where((kpos_ >= 0)[..., None], v_, 0)  # empty slots may hold NaN
      return softmax_state.merge(state, softmax_state.of_logits(logits, v_))

    trips = (cut(reach, 0).max() + kb - 1) // kb
    start_state = softmax_state.empty((batch, heads, groups, qb), head_dim)
    return jax.lax.fori_loop(0, jnp.minimum(trips, blocks), add_keys, start_state)

  def join(x: Array) -> Array:
    x = jnp.moveaxis(x, 0, 3)
    return x.reshape(*x.shape[:3], queries * qb, *x.shape[5:])[:, :, :, :count]

  if queries == 1:
    return jax.tree.map(lambda x: x[:, :, :, :count], of_queries(jnp.int32(0)))
  starts = jnp.arange(queries, dtype=jnp.int32) * qb
  return jax.tree.map(join, jax.lax.map(of_queries, starts))


def column_mass(
  at: At,
  q: Float[Array, "B K G A H"],
  qpos: Int[Array, "B A"],
  slots: dict[str, Array],
  window: Window | None,
  state: State,
) -> Float[Array, "B K S"]:
  """Probability that the queries give to every slot: summed over queries, mean over the group.

  In blocks of queries: no map of A × S is held.

  Args:
    at: where this runs.
    q: queries, rotated at their positions.
    qpos: their positions; −1 = does not count.
    slots: what they attended to, "k" [B, K, S, H] and "pos" [B, K, S].
    window: what they may see.
    state: their softmax states [B, K, G, A], whose m and l normalise.
  """
  count, pos = q.shape[3], slots["pos"]
  block = min(QUERY_BLOCK, count)
  blocks = -(-count // block)
  size = blocks * block
  q, qpos = _pad(q, 3, size), _pad(qpos, 1, size, -1)
  m, l = _pad(state.m, 3, size), _pad(state.l, 3, size)
  window = jax.tree.map(lambda x: _pad(x, x.ndim - 1, size), window)

  def add(i: Array, mass: Array) -> Array:
    def cut(x: Array, axis: int) -> Array:
      return jax.lax.dynamic_slice_in_dim(x, i * block, block, axis)

    q_, qpos_ = cut(q, 3), cut(qpos, 1)
    window_ = jax.tree.map(lambda x: cut(x, x.ndim - 1), window)
    ok = (pos >= 0)[:, :, None] & (pos[:, :, None] <= qpos_[:, None, :, None])
    if window_ is not None:
      ok &= window_.sees(pos)
    logits = windowed_logits(at, q_, qpos_, slots["k"], pos, window_)
    logits = jnp.where(ok[:, :, None], logits, -jnp.inf)
    p = softmax_state.probabilities(State(q_, cut(m, 3), cut(l, 3)), logits)
    return mass + p.sum(3).mean(2)

  return jax.lax.fori_loop(0, blocks, add, jnp.zeros(pos.shape, jnp.float32))


def last_queries(
  turn: Turn, count: int
) -> tuple[Float[Array, "B K G W H"], Int[Array, "B W"], State]:
  """The newest `count` queries of every row, their positions (−1 = there are fewer), and states."""
  qpos, state = turn.qpos, turn.attended.state
  real = (qpos >= 0).sum(1, dtype=jnp.int32)  # padding stands after them
  index = real[:, None] - count + jnp.arange(count, dtype=jnp.int32)
  where = jnp.maximum(index, 0)[:, None, None]

  def take(x: Array) -> Array:
    return jnp.take_along_axis(x, where.reshape(where.shape + (1,) * (x.ndim - 4)), 3)

  pos = jnp.where(index >= 0, jnp.take_along_axis(qpos, where[:, 0, 0], 1), -1)
  return take(turn.q), pos, State(take(state.o), take(state.m), take(state.l))


def _pad(x: Array, axis: int, to: int, fill: int = 0) -> Array:
  """x lengthened to `to` along an axis."""
  if to == x.shape[axis]:
    return x
  width = [(0, to - n if a == axis else 0) for a, n in enumerate(x.shape)]
  return jnp.pad(x, width, constant_values=fill)
