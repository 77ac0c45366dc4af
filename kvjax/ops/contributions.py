"""LongFlow: the token that contributes least to the newest output (§3.2, Alg. 1)."""

import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.core import slots
from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Attended, Plan
from kvjax.ops.table import pallas


class Named(NamedTuple):
  """What attention has named on its way: the least contributor's slot, int32 [B, K]."""

  slot: Array


def attend_and_name(
  at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"], *, sinks: int, recent: int
) -> Attended | None:
  """Attention over all that is cached whose launch names the least contributor of each KV head.

  `least_contributor` finds it in the memo. None: it has to look for it, no kernel does both here.
  """
  k, v = cache.slots["k"], cache.slots["v"]
  run = pallas(at, "longflow_read", q, k, whole=True)
  if run is None or plan.table is not None or plan.codes is not None or plan.window is not None:
    return None
  takes = importlib.import_module("kvjax.kernels.longflow.read").takes
  batch, heads, groups, _ = q.shape
  if not takes(batch * heads, groups, cache.size, k.dtype.itemsize):
    return None
  operands = q.astype(k.dtype), k, v, cache.slots["norm"], cache.pos, cache.used, cache.seen
  how: dict[str, Any] = {"sinks": sinks, "recent": recent, "soft_cap": at.env.soft_cap}
  state, out, victim = run(*operands, **how)
  visited = jnp.broadcast_to(plan.span.length(), q.shape[:2])
  return Attended(state, None, None, visited, out.astype(q.dtype), memo=Named(victim))


def least_contributor(
  at: At,
  cache: Cache,
  attended: Attended,
  old: Int[Array, "B K"],
  *,
  sinks: int,
  recent: int,
  per_layer: bool,
) -> Int[Array, "B K"]:
  """Slot of the token of least log Σ_g α_g + log ‖v‖₁ that may leave (Alg. 1).

  Args:
    at, cache, attended: of a decode step, with logits unless it has been named; the cache keeps
      "norm".
    old: what rows that do not count keep.
    sinks, recent: as in `stays`.
    per_layer: whether all heads of a layer, those of other shards too, have one victim, by the sum
      of their contributions.
  """
  counted = attended.counted
  counted = jnp.ones_like(cache.seen, bool) if counted is None else counted
  if isinstance(attended.memo, Named):
    return jnp.where(counted[:, None], attended.memo.slot, old)
  assert attended.logits is not None
  norm, safe = cache.slots["norm"], {"sinks": sinks, "recent": recent}
  # A kernel does not see the heads of other shards.
  alone = not per_layer or at.env.head_axis is None
  if alone and (run := pallas(at, "longflow_victim")):
    # It looks at the denominators itself, all but those of other devices' heads.
    live = counted if attended.live is None or at.env.head_axis else attended.live
    state, where = attended.state, (cache.pos, cache.used, cache.seen)
    operands = attended.logits, state.m, state.l, norm, *where, live, old
    return run(*operands, **safe, per_layer=per_layer)
  share = attended.logits - attended.state.lse[..., None]  # log α, [B, K, G, S]
  score = jax.nn.logsumexp(share, 2) + jnp.log(norm)
  if per_layer:
    score = _over_heads(at, score)
  named = least(cache, score, **safe)
  return jnp.where(counted[:, None], named, old)


def least(
  cache: Cache, score: Float[Array, "B K S"], *, sinks: int, recent: int
) -> Int[Array, "B K"]:
  """The slot of least score among those that may leave."""
  staying = stays(cache.pos, cache.seen, sinks=sinks, recent=recent) | (cache.pos < 0)
  return slots.lowest(jnp.where(staying, jnp.inf, score), cache.pos)


def stays(
  pos: Int[Array, "B K S"], end: Int[Array, " B"], *, sinks: int, recent: int
) -> Bool[Array, "B K S"]:
  """Tokens that may not leave: the first ones, and the newest before `end`."""
  return (pos < sinks) | (pos >= (end - recent)[:, None, None])


def _over_heads(at: At, score: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
  """log of the sum over all heads, those of other shards included."""
  top = at.max_heads(score.max(1, keepdims=True))
  top = jnp.where(jnp.isneginf(top), 0.0, top)
  total = at.sum_heads(jnp.exp(score - top).sum(1, keepdims=True))
  return jnp.broadcast_to(jnp.log(total) + top, score.shape)
