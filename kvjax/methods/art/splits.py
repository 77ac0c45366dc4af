"""Walks side by side, which are ours: split s of P walks tiles s, s + P, … and ends by itself."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Attended, Plan
from kvjax.methods.art.mass import Weights
from kvjax.methods.art.order import Order, tiles_of
from kvjax.methods.art.walk import Stop, Walk, walk
from kvjax.primitives import softmax_state

ROW_WALKS = 128  # of one row, over its KV heads, under splits = "auto": enough to fill a GPU


class Walked(NamedTuple):
  """Note of attention: the tiles, int32 [B, K, G], that query heads took, as of `read_by`."""

  tiles: Array


def usual_splits(kv_heads: int, tiles: int) -> int:
  """P of splits = "auto", for rows of so many KV heads and an order of so many tiles."""
  return max(1, min(ROW_WALKS // kv_heads, tiles))


def spares_half(tiles: int, splits: int, patience: float | int) -> bool:
  """True where walks can leave out half of their tiles: each reads p + 1 at least."""
  return -(-tiles // splits) >= 2 * (patience + 1)


def joined(
  at: At, cache: Cache, order: Order, q: Float[Array, "B K G H"], splits: int, stop: Stop
) -> Attended:
  """Algorithm 1 in every split, the walks joined; notes `Walked`.

  A certificate is that of the query in the dtype of the keys: q is rounded first.
  """
  if stop.certify is not None:
    q = q.astype(cache.slots["k"].dtype)
  logits = None
  if order.plan.needs.logits:
    logits = jnp.full((*cache.pos.shape, q.shape[2]), -jnp.inf)
  walks: list[Walk] = []
  for split in range(splits):
    walks.append(walk(at, cache, order, q, split, splits, stop, logits))
    logits = walks[-1].logits
  state = functools.reduce(softmax_state.merge, (w.state for w in walks))
  taken = sum((w.tiles for w in walks[1:]), walks[0].tiles)
  visited = sum((w.keys for w in walks[1:]), walks[0].keys).max(-1)
  if order.whole is not None:
    assert order.plan.table is not None and splits == 1
    weighed = Weights(order.plan.table, walks[0].lse)
    return Attended(state, None, None, visited).noting(weighed).noting(Walked(taken))
  if logits is None:
    return Attended(state, None, None, visited).noting(Walked(taken))
  every = jnp.broadcast_to(jnp.arange(cache.size, dtype=jnp.int32), cache.pos.shape)
  logits = jnp.moveaxis(logits, 3, 2)
  return Attended(state, logits, every, visited).noting(Walked(taken))


def read_by(
  plan: Plan, size: int, walked: Int[Array, "B K P G"], tile: int
) -> tuple[Int[Array, "B K G"], Int[Array, "B K"]]:
  """Tiles with a key that each query head took, and slots that any of a KV head's read.

  Split s of P has walked its first `walked` tiles s, s + P, … of the plan's table.
  """
  assert plan.table is not None and plan.count is not None
  tiles, splits = tiles_of(plan, size, tile), walked.shape[2]
  key = jnp.arange(tiles * tile, dtype=jnp.int32)
  entry = jnp.take(plan.table, key // plan.unit, 2, mode="fill", fill_value=-1)
  slot = entry * plan.unit + key % plan.unit
  real = (key // plan.unit < plan.count[..., None]) & (entry >= 0) & (slot < size)
  held = (real & plan.span.holds(slot)).reshape(*slot.shape[:2], tiles, tile)
  held = held.sum(-1, dtype=jnp.int32)[:, :, None]  # keys of every tile
  t = jnp.arange(tiles, dtype=jnp.int32)
  read = t // splits < jnp.moveaxis(walked, 2, 3)[..., t % splits]
  return (read & (held > 0)).sum(-1, dtype=jnp.int32), jnp.where(read, held, 0).sum(-1).max(-1)
