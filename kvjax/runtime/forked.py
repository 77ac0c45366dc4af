"""Branches of one context: several rows that share what they have read, and hold it once."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core import slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Carry, Prompt, Turn
from kvjax.core.fields import expect, least
from kvjax.core.leaves import Layout, Leaf
from kvjax.core.plan import Attended, Plan, Span
from kvjax.core.traits import Traits
from kvjax.families import forms
from kvjax.families.full import Full
from kvjax.families.method import Method
from kvjax.ops import decode, prefill
from kvjax.primitives import softmax_state
from kvjax.primitives.softmax_state import State

# Query heads that are put to a key/value head at once: of 128 the decode kernel spills registers.
QUERIES = 64
HELD = ("k", "v", "pos")
# What decides what a query sees, or how a token is read: a base that has its own is refused.
PLAIN = (
  *("window", "span", "plan", "attend", "plan_and_attend", "observe", "active", "fill", "stage"),
  *("attend_prompt", "insert", "conclude", "init_caches", "decode_step", "prefill"),
)


@dataclasses.dataclass(frozen=True)
class Forked(Method):
  """n branches of each of P contexts, B = P·n rows; a context's keys and values are held once.

  Attention falls into two sets of keys, whose softmax states merge exactly. To the context go the
  queries of all its branches at once, so that it is read once (once for every 64 query heads of a
  key/value head); to what a branch has read since, its own (Hydragen: Juravsky et al., ICML 2024,
  §3).

  Nothing leaves: what the base holds of the context is there for all branches, and a branch keeps
  all `room` tokens that it reads itself; more are refused. So branches are what copies of the
  base's cache would be, as long as those evict nothing. `kvjax.models.decode.caches.fork_shared`
  makes such caches of live ones and asks for that.

  Attributes:
    base: whose contexts they are: attends to all that it holds.
    branches: n, rows of each context. Those of one context are neighbours.
    context: slots of a context in each layer, at most.
    room: tokens that a branch has slots for, in addition to the context.
  """

  base: Method = dataclasses.field(default_factory=Full)
  branches: int = least(1, 2)
  context: int = least(1, 2048)
  room: int = least(1, 256)

  def __post_init__(self):
    own = [move for move in PLAIN if forms.overrides(self.base, move)]
    what = "a method that attends to all that it holds"
    expect(self, "base", not own, f"{what}, without {', '.join(own)} of its own")
    expect(self, "base", self.base.traits.uneven is None, f"{what}, as much for all heads")

  @property
  def traits(self) -> Traits:
    return super().traits.but(positional=False, order_independent=True)

  # ---- shapes

  def capacity(self, spec: CacheSpec, layer: int) -> int:
    """Slots of a branch."""
    return self.room

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    """A branch's slots; "context_k", "context_v" [P, K, S, H], "context_pos" [P, K, S] on the heads
    shelf; and on the rows shelf "context" int32 [P], the slots of each that hold a token.

    Raises:
      ValueError: the batch is no multiple of the branches.
    """
    if spec.batch % self.branches:
      raise ValueError(
        f"{type(self).__name__}.branches: found {self.branches}, expected a divisor of the "
        f"{spec.batch} rows"
      )
    held, contexts = super().leaves(spec, layer), spec.batch // self.branches
    size = min(self.context, self.base.capacity(spec, layer))
    leading = contexts, spec.kv_heads, size
    shared = {
      f"context_{name}": Leaf("heads", made=functools.partial(held[name].empty, leading))
      for name in HELD
    }
    made = functools.partial(jnp.zeros, contexts, jnp.int32)
    return {**held, **shared, "context": Leaf("rows", layout=Layout.BRANCHED, made=made)}

  # ---- decode

  def attend(self, at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Attended:
    """softmax over [context ‖ own] from the states of both (§3.1)."""
    _check_sees_all(at, plan.window is None and plan.table is None)
    own = super().attend(at, cache, plan, q)
    held = {name: cache.heads[f"context_{name}"] for name in HELD}
    used = cache.rows["context"]
    context = Cache(held, {}, {"seen": used, "used": used})
    state = softmax_state.merge(self._over_context(at, context, q), own.state)
    return Attended(state, None, None, own.visited + jnp.repeat(used, self.branches)[:, None])

  def _over_context(self, at: At, context: Cache, q: Float[Array, "B K G H"]) -> State:
    """Queries of all branches to their context, as more query heads of its heads (§3.2)."""
    batch, heads, groups, size = q.shape
    stop = context.used[:, None]
    plan = Plan(Span(jnp.zeros_like(stop), stop), unit=at.env.tile)
    apart = q.reshape(-1, self.branches, heads, groups, size)
    some, states = max(1, QUERIES // groups), []
    for first in range(0, self.branches, some):
      few = jnp.moveaxis(apart[:, first : first + some], 1, 2)  # [P, K, n, G, H]
      joined = few.reshape(*few.shape[:2], -1, size)
      state = decode.attend(at, context, plan, joined).state
      states.append(jax.tree.map(lambda x, few=few: x.reshape(*few.shape[:4], *x.shape[3:]), state))
    rows = jax.tree.map(lambda *x: jnp.moveaxis(jnp.concatenate(x, 2), 2, 1), *states)
    return jax.tree.map(lambda x: x.reshape(batch, *x.shape[2:]), rows)

  # ---- prompt

  def stage(
    self, at: At, cache: Cache, new: slots.Slots, q: Array, prompt: Prompt, carry: Carry
  ) -> tuple[slots.Slots, Cache, Carry]:
    """The tokens of the branch and the chunk after them, and the context."""
    context = {name: x for name, x in cache.heads.items() if name.startswith("context_")}
    return {**slots.join(cache.slots, new), **context}, cache, carry

  def attend_prompt(
    self, at: At, staged: slots.Slots, q: Array, qpos: Int[Array, "B A"], prompt: Prompt
  ) -> Attended:
    """As `attend`: the chunks of all branches are one chunk to their context."""
    _check_sees_all(at, at.top.window(at, qpos) is None)
    own = {name: staged[name] for name in HELD}
    held = {name: staged[f"context_{name}"] for name in HELD}
    apart = q.reshape(-1, self.branches, *q.shape[1:])  # [P, n, K, G, A, H]
    joined = jnp.moveaxis(apart, 1, 3).reshape(len(apart), *q.shape[1:3], -1, q.shape[-1])
    of_context = prefill.attend_anywhere(at, held, joined, qpos.reshape(len(apart), -1))

    def to_rows(x: Array) -> Array:
      x = x.reshape(*x.shape[:3], self.branches, q.shape[3], *x.shape[4:])
      return jnp.moveaxis(x, 3, 1).reshape(len(q), *q.shape[1:4], *x.shape[5:])

    of_context = jax.tree.map(to_rows, of_context)
    state = softmax_state.merge(of_context, prefill.attend_anywhere(at, own, q, qpos))
    count = [(x["pos"] >= 0).sum(-1, dtype=jnp.int32) for x in (own, held)]
    return Attended(state, None, None, count[0] + jnp.repeat(count[1], self.branches, 0))

  def keep(self, at: At, cache: Cache, turn: Turn, new: slots.Slots) -> Cache:
    """The chunk after what the branch holds."""
    kept = slots.append(cache.slots, new, cache.used, None)
    valid = turn.prompt.valid
    used = jnp.minimum(cache.used + valid, cache.size)
    cache = dataclasses.replace(cache, slots=kept)
    cache = cache.put(rows={"seen": cache.seen + valid, "used": used})
    return at.top.settle(at, cache, turn.prompt)


def _check_sees_all(at: At, sees_all: bool) -> None:
  """Raises where moves of a subclass, or of a wrapper, would hide a part of the context."""
  if not sees_all:
    raise NotImplementedError(
      f"{at.name}: found an override of window or plan, expected none: branches attend to their "
      "whole context"
    )


def branched(method: Forked, cache: Cache) -> Cache:
  """The cache of the branches of what a live cache of `method.base` holds, one layer.

  Args:
    method: how many branches, with how much room.
    cache: of P rows; it is left as it is, and its context copied once.

  Returns:
    The cache of P·n rows, which have read nothing since.
  """
  contexts, heads = cache.pos.shape[:2]
  size, dtype = min(method.context, cache.size), cache.slots["k"].dtype
  rows = contexts * method.branches
  spec = CacheSpec(rows, method.room, heads, 1, cache.head_dim, 1, dtype)
  empty = Cache.empty(Full(), spec, 0)
  where = {name: cache.slots[name].sharding for name in HELD}
  own = {name: jax.device_put(empty.slots[name], where[name]) for name in HELD}
  held = {f"context_{name}": jnp.array(cache.slots[name][:, :, :size]) for name in HELD}
  seen = jnp.repeat(cache.seen, method.branches)
  counts = {"seen": seen, "used": jnp.zeros_like(seen), "context": jnp.array(cache.used)}
  origin = cache.origin and dataclasses.replace(cache.origin, method=method)
  made = empty.put(slots=own, heads=held, rows=counts)
  return dataclasses.replace(made, layout=Layout.BRANCHED, origin=origin)
