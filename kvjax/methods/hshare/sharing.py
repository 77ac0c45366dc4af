"""HShare: who shares with whom (Eq. 3, Alg. 1), and what a step reads (Wu et al., ICLR 2025)."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.core.cache import Cache
from kvjax.core.plan import Plan
from kvjax.ops import tiles

# ---- a prompt: who shares with whom


def overlaps(sets: Int[Array, "B N k"]) -> Int[Array, "B N N"]:
  """Numbers of elements that every two sets share (Eq. 3); −1 is none, none else stands twice."""

  def with_all(one: Int[Array, "B k"]) -> Int[Array, "B N"]:
    pair = jnp.concatenate([sets, jnp.broadcast_to(one[:, None], sets.shape)], -1)
    pair = jnp.sort(pair, -1)
    return ((pair[..., 1:] == pair[..., :-1]) & (pair[..., 1:] >= 0)).sum(-1, dtype=jnp.int32)

  return jnp.moveaxis(jax.lax.map(with_all, jnp.moveaxis(sets, 1, 0)), 0, 1)


def shared_sources(alike: Int[Array, "B N N"], share: float) -> Int[Array, "B N"]:
  """The member whose set each of N members uses, when ⌈share·N⌉ of them keep their own (Alg. 1).

  The two that are most alike are joined first (ties: the lowest one that gives up its own, then the
  lowest other one): the higher uses what the lower does, and so do those that used the higher's. A
  member that gave up its own is joined to no more.
  """
  count = alike.shape[-1]
  joins = count - math.ceil(share * count - 1e-9)
  below = jnp.tril(jnp.ones((count, count), bool), -1)

  def of_row(alike: Int[Array, "N N"]) -> Int[Array, " N"]:
    def join(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
      source, alike = state
      high, low = jnp.divmod(jnp.argmax(alike).astype(jnp.int32), count)
      joined = alike[high, low] > 0
      source = jnp.where(joined & (source == high), low, source)
      return source, jnp.where(joined, alike.at[high].set(0).at[:, high].set(0), alike)

    start = jnp.arange(count, dtype=jnp.int32), jnp.where(below, alike, 0)
    return jax.lax.fori_loop(0, joins, join, start)[0].astype(jnp.int32)

  return jax.vmap(of_row)(alike)


# ---- a step: the sets in use


@dataclasses.dataclass(frozen=True)
class Sets:
  """Tokens that a step reads.

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
  """Gives each head whose set is due that of a head of its layer, or of a layer below it.

  Args:
    cache, visible: of a decode step; "heavy", "from_head" and "from_layer" are the cache's.
    retrieved: what all heads of the layer, those of other shards too, retrieved in this step.
    of_layers: the sets of all layers, so far.
    own: this layer's place among them.
    steps, budget: as in `due`.
    sinks, local: numbers of first and of newest tokens that are always read.
  """
  from_head, from_layer = cache.heads["from_head"], cache.rows["from_layer"]
  of_heads = jnp.take_along_axis(retrieved, from_head[..., None], 1)
  below = jnp.take_along_axis(of_layers, from_layer[:, None, None, None], 2)[:, :, 0]
  new = jnp.where((from_layer == own)[:, None, None], of_heads, below)
  heavy = jnp.where(due(cache, steps, budget)[:, None, None], new, cache.heads["heavy"])
  how = {"unit": 1, "sinks": sinks, "local": local, "tiles": cache.size}
  table, count, _ = tiles.listed(visible.span, heavy, **how)
  return Sets(table, count, heavy, of_layers.at[:, :, own].set(heavy))
