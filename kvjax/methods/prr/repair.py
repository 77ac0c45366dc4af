"""Repair: missed tiles are folded into attention over predicted ones (PRR, §4.3).

Since nothing can be taken out of a merged state, the output covers what was read in vain, Ŝ∖S, too;
or one state per tile of Ŝ is kept (`strict`), and those of Ŝ∩S and S∖Ŝ are merged.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Attended, Plan
from kvjax.methods.prr.hit_rates import among
from kvjax.ops.decode import attend
from kvjax.primitives import softmax_state
from kvjax.primitives.softmax_state import State


def repaired(
  at: At, cache: Cache, plan: Plan, guess: Plan, q: Array, early: Attended, *, strict: bool
) -> Attended:
  """Attention over a selection, given that over a predicted one: what was missed is folded in.

  Args:
    at, cache, q: as in `attend`.
    plan, guess: the selection, and the prediction.
    early: attention over the prediction; with `strict` a state for each of its tiles
      (`kernel.attend_tiles`), and tiles that are in the prediction alone are left out.
  """
  assert plan.table is not None and guess.table is not None
  if strict:
    early = without_wasted(early, plan, guess)
  hit = among(plan.table, guess.table)
  missed = dataclasses.replace(plan, table=jnp.where(hit, -1, plan.table))
  late = attend(at, cache, missed, q)  # S∖Ŝ
  logits, slot = _joined(early, late)
  state = softmax_state.merge(early.state, late.state)  # Eqs. 6–8
  return Attended(state, logits, slot, early.visited + late.visited)


def without_wasted(early: Attended, plan: Plan, guess: Plan) -> Attended:
  """The states of those predicted tiles that the plan lists, merged."""
  assert plan.table is not None and guess.table is not None
  wanted = among(guess.table, plan.table)
  state, logits = early.state, early.logits
  ok = wanted[:, :, None]
  l, m = jnp.where(ok, state.l, 0), jnp.where(ok, state.m, -jnp.inf)
  state = softmax_state.merge_all(State(jnp.where(ok[..., None], state.o, 0), m, l))
  if logits is not None:
    logits = jnp.where(jnp.repeat(wanted, guess.unit, -1)[:, :, None], logits, -jnp.inf)
  visited = jnp.where(wanted, early.visited, 0).sum(-1, dtype=jnp.int32)
  return Attended(state, logits, early.slot, visited)


def either(early: Attended, late: Attended, anew: Bool[Array, "B K"]) -> Attended:
  """Speculated attention, or the later one in KV heads that attended `anew` (A.8, S1)."""

  def pick(late: Array, early: Array) -> Array:
    return jnp.where(anew.reshape(anew.shape + (1,) * (late.ndim - 2)), late, early)

  logits = early.logits
  if logits is not None:
    early = dataclasses.replace(early, logits=pick(jnp.full_like(logits, -jnp.inf), logits))
  logits, slot = _joined(early, late)
  state = jax.tree.map(pick, late.state, early.state)
  return Attended(state, logits, slot, pick(late.visited, early.visited))


def _joined(a: Attended, b: Attended) -> tuple[Array | None, Array | None]:
  """Logits and slots of two walks, where both have them."""
  if a.logits is None or b.logits is None:
    return None, None
  assert a.slot is not None and b.slot is not None
  return jnp.concatenate([a.logits, b.logits], -1), jnp.concatenate([a.slot, b.slot], -1)
