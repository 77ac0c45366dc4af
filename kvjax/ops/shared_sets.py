"""HShare: the sets of heavy tokens that heads read, their own or another's (Wu et al., 2025)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Plan
from kvjax.ops import tiles
from kvjax.ops.table import pallas


@dataclasses.dataclass(frozen=True)
class Sets:
  """What a step reads.

  Attributes:
    table, count: int32 [B, K, W] and [B, K], of the plan: first tokens, newest, heavy ones.
    heavy: int32 [B, K, k], the heavy tokens in use, −1 = none.
    of_layers: int32 [B, K, L, k], those of all layers with them.
  """

  table: Array
  count: Array
  heavy: Array
  of_layers: Array


def due(cache: Cache, steps: int, budget: int) -> Bool[Array, " B"]:
  """Rows whose sets are made anew in this step: every `steps`, and all up to the budget."""
  return (cache.seen % steps == 0) | (cache.seen <= budget)


def share_sets(
  at: At,
  cache: Cache,
  visible: Plan,
  retrieved: Int[Array, "B N k"],
  of_layers: Int[Array, "B K L k"],
  *,
  own: int,
  steps: int,
  budget: int,
  sinks: int,
  local: int,
) -> Sets:
  """Where sets are due, each head takes that of a head of its layer, or of a layer below it.

  Args:
    at, cache, visible: of a decode step; "heavy", "from_head" and "from_layer" are the cache's.
    retrieved: what all heads of the layer, those of other shards too, retrieved in this step.
    of_layers: the sets of all layers, so far.
    own: this layer's place among them.
    steps, budget: as in `due`.
    sinks, local: numbers of first and of newest tokens that are always read.
  """
  kept, from_head = cache.heads["heavy"], cache.heads["from_head"]
  from_layer, forced = cache.rows["from_layer"], {"sinks": sinks, "local": local}
  span, ends = visible.span, not visible.needs.own_span  # the kernel's end at the newest token
  if ends and (run := pallas(at, "hshare_listed")):
    operands = retrieved, kept, from_head, from_layer, cache.seen, span.start, of_layers
    sizes = {"own": own, "slots": cache.size, "steps": steps, "budget": budget}
    return Sets(*run(*operands, span_sinks=span.sinks, **sizes, **forced))
  of_heads = jnp.take_along_axis(retrieved, from_head[..., None], 1)
  below = jnp.take_along_axis(of_layers, from_layer[:, None, None, None], 2)[:, :, 0]
  new = jnp.where((from_layer == own)[:, None, None], of_heads, below)
  heavy = jnp.where(due(cache, steps, budget)[:, None, None], new, kept)
  table, count, _ = tiles.listed(span, heavy, unit=1, **forced, tiles=cache.size)
  return Sets(table, count, heavy, of_layers.at[:, :, own].set(heavy))
