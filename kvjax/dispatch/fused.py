"""Scores of tiles and the best of them by one launch."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.dispatch.selection import Table
from kvjax.dispatch.speculation import Pages, Scored
from kvjax.dispatch.table import pallas
from kvjax.plans import Plan
from kvjax.types import At, Cache, Carry


def best_scored(
  at: At,
  cache: Cache,
  visible: Plan,
  q: Float[Array, "B K G H"],
  carry: Carry,
  scored: Scored,
  *,
  unit: int,
  **chosen: int,
) -> tuple[Table, Carry] | None:
  """`best_tiles` of the scores that `scored` stands for; None: it is not to be made in one launch.

  That is asked for by `Env.fused`; entries come by index, slots are not split.

  Args:
    at, cache, visible, q: of a decode step; the plan of all visible slots.
    carry: hands counters from layer to layer, "arrivals", int32 [B, K], all 0 between launches.
    scored: what the scores are.
    unit, chosen: as in `best_tiles`.
  """
  if not at.env.fused or visible.needs.order or at.env.slot_axis:
    return None
  held, span = [cache.heads[name] for name in scored.summaries], visible.span
  if (run := pallas(at, scored.selection, q, held[0])) is None:
    return None
  arrivals = carry.heads.get("arrivals")
  if arrivals is None:  # filled once a step
    arrivals = jnp.zeros(q.shape[:2], jnp.int32)
  how: dict[str, Any] = {"unit": unit, "span_sinks": span.sinks, **chosen}
  if isinstance(scored, Pages):
    found, arrivals = run(q, *held, span.start, span.stop, arrivals, group=scored.group, **how)
  else:
    known = jnp.broadcast_to(cache.seen[:, None], span.stop.shape)
    where = span.start, span.stop, known, arrivals
    how |= {"stride": scored.stride, "width": scored.width, "newest": 1}
    how |= {"blocks": -(-cache.size // unit), "soft_cap": at.env.soft_cap}
    found, arrivals = run(q.astype(held[0].dtype), *held, *where, **how)
  return found, Carry({**carry.heads, "arrivals": arrivals}, carry.rows)
