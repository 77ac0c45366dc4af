"""LongFlow's fused launches: attention that names the next victim, and victims alone (Alg. 1)."""

import importlib
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Attended, Plan
from kvjax.methods.longflow import contribution
from kvjax.ops import insertion
from kvjax.ops.table import declare, pallas

declare("longflow_victim", pallas="kvjax.kernels.longflow.victim:victim")
declare("longflow_read", pallas="kvjax.kernels.longflow.read:read")


class Named(NamedTuple):
  """Note of attention that has named the least contributor, slot int32 [B, K], on its way."""

  slot: Array


def attend_and_name(
  at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"], *, sinks: int, recent: int
) -> Attended | None:
  """Attention over all that is cached whose launch names the least contributor of each KV head.

  `least_contributor` finds the note `Named`. None: it has to look for it, no kernel does both here.
  """
  k, v = cache.slots["k"], cache.slots["v"]
  run = pallas(at, "longflow_read", q, k, whole=True)
  if run is None or plan.window is not None:
    return None
  takes = importlib.import_module("kvjax.kernels.longflow.read").takes
  batch, heads, groups, _ = q.shape
  if not takes(batch * heads, groups, cache.size, k.dtype.itemsize):
    return None
  operands = q.astype(k.dtype), k, v, cache.slots["norm"], cache.pos, cache.used, cache.seen
  how: dict[str, Any] = {"sinks": sinks, "recent": recent, "soft_cap": at.env.soft_cap}
  state, out, victim = run(*operands, **how)
  visited = jnp.broadcast_to(plan.span.length(), q.shape[:2])
  return Attended(state, None, None, visited, out.astype(q.dtype)).noting(Named(victim))


def least_contributor(
  at: At, cache: Cache, attended: Attended, old: Int[Array, "B K"], *, per_layer: bool, **safe: int
) -> Int[Array, "B K"]:
  """`contribution.least` of the scores of a step, by a kernel where one runs.

  Args:
    at, cache, attended: of a decode step, with logits unless it has been named; the cache keeps
      "norm".
    old: what rows that do not count keep.
    per_layer: whether all heads of a layer have one victim, by the sum of their contributions.
    safe: sinks and recent, as in `contribution.stays`.
  """
  counted = attended.counted
  counted = jnp.ones_like(cache.seen, bool) if counted is None else counted
  if (named := attended.noted(Named)) is not None:
    rows = counted if attended.counted is None else insertion.counted_rows(at, attended, old)
    return jnp.where(rows[:, None], named.slot, old)
  # A kernel does not see the heads of other shards.
  alone = not per_layer or at.env.head_axis is None
  if alone and (run := pallas(at, "longflow_victim")):
    # It looks at the denominators itself, all but those of other devices' heads.
    live = counted if attended.live is None or at.env.head_axis else attended.live
    state, where = attended.state, (cache.pos, cache.used, cache.seen)
    operands = attended.logits, state.m, state.l, cache.slots["norm"], *where, live, old
    return run(*operands, **safe, per_layer=per_layer)
  score = contribution.scores(attended, cache.slots["norm"])
  if per_layer:
    score = contribution.over_heads(at, score)
  victim = contribution.least(cache, score, **safe)
  return jnp.where(counted[:, None], victim, old)
