"""Tiles in the order of their mass in earlier steps, which is ours.

Each tile keeps the largest share of softmax mass that a query head of its group gave it, averaged
over the steps that read it, the newer the heavier. A prompt begins it with what its last queries
attend to, as SnapKV scores tokens. Tiles that are not read keep what they had, so that a walk of
all of them comes every so many steps. Tiles of first tokens come first, then the newest.

Or the order stays as a prompt's last queries made it (`ranking`, `ranked`): no step then computes
a mass. Tiles that came after the prompt are walked before its own, newest first.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Turn
from kvjax.core.leaves import Leaf
from kvjax.core.plan import Plan
from kvjax.methods.art.order import Order
from kvjax.ops import attention, prefill, selection

DECAY = 0.5  # of a tile's mass, at each step that reads it
WINDOW = 32  # last queries of a prompt whose mass begins it


class Weights(NamedTuple):
  """Note of attention: tiles [B, K, W] as they were walked, and ln of the mass that query heads
  gave each, [B, K, G, W]; −∞: not read.
  """

  table: Array
  lse: Array


def leaf(spec: CacheSpec, tile: int) -> Leaf:
  """The mass of each tile, float32 [B, K, P]."""
  return Leaf("heads", (-(-spec.capacity // tile),), along_slots=True)


def order(at: At, cache: Cache, plan: Plan, tile: int, sinks: int, every: int) -> Order:
  """Tiles by mass; every `every`-th token's walk reads all of them."""
  mass, span = cache.heads["mass"], plan.span
  t, pinned = jnp.arange(mass.shape[-1], dtype=jnp.int32), -(-sinks // tile)
  newest = (span.stop - 1)[..., None] // tile
  rank = jnp.where(t < pinned, 3.0, jnp.where(t == newest, 2.0, mass))
  _, table = selection.other_tiles(at, rank, span, unit=tile, sinks=0, local=0, k=t.size)
  count = (table >= 0).sum(-1, dtype=jnp.int32)
  where: dict[str, Any] = {"table": table, "count": count, "unit": tile, "pinned": pinned + 1}
  whole = cache.seen % every == 0
  return Order(dataclasses.replace(plan, **where), tile, whole=whole)


def begun(at: At, cache: Cache, turn: Turn, tile: int) -> Cache:
  """With the mean mass that the last queries of a prompt give each tile."""
  return cache.put(heads={"mass": _of_prompt(at, turn, tile, cache.heads["mass"].shape[2])})


def ranks_leaf(spec: CacheSpec, tile: int) -> Leaf:
  """Tiles of the last prompt in their order, 1 more than their index, int32 [B, K, P]; then 0."""
  return Leaf("heads", (-(-spec.capacity // tile),), jnp.int32, along_slots=True)


def ranking(at: At, cache: Cache, turn: Turn, tile: int, sinks: int) -> Cache:
  """With a prompt's tiles after those of first tokens: its last one, then by mass."""
  mass = _of_prompt(at, turn, tile, cache.heads["ranks"].shape[2])
  t, last = jnp.arange(mass.shape[2], dtype=jnp.int32), turn.staged["pos"].max(-1) // tile
  rank = jnp.where(t == last[..., None], jnp.inf, mass)
  rank = jnp.where((t >= -(-sinks // tile)) & (t <= last[..., None]), rank, -1.0)
  index = jnp.argsort(-rank, -1, stable=True)
  ranks = jnp.where(jnp.take_along_axis(rank, index, 2) >= 0, index + 1, 0)
  return cache.put(heads={"ranks": ranks.astype(jnp.int32)})


def ranked(cache: Cache, plan: Plan, tile: int, sinks: int) -> Order:
  """Tiles of first tokens, those after the prompt from the newest down, and the prompt's."""
  ranks, pinned = cache.heads["ranks"], -(-sinks // tile)
  last = jnp.broadcast_to((plan.span.stop - 1) // tile, ranks.shape[:2])[..., None]
  t, own = jnp.arange(ranks.shape[2], dtype=jnp.int32), (ranks > 0).sum(-1, keepdims=True)
  after = jnp.maximum(last + 1 - own - pinned, 0)  # tiles that came after the prompt
  place = t - pinned - after
  prompts = jnp.take_along_axis(ranks, jnp.maximum(place, 0), 2) - 1
  table = jnp.where(t < pinned, t, jnp.where(place < 0, last + pinned - t, prompts))
  where: dict[str, Any] = {"table": jnp.where(t <= last, table, -1), "count": last[..., 0] + 1}
  return Order(dataclasses.replace(plan, **where, unit=tile, pinned=pinned + 1), tile)


def _of_prompt(at: At, turn: Turn, tile: int, tiles: int) -> Float[Array, "B K P"]:
  """Mean mass that the last queries of a prompt give each tile."""
  last, at_last, state = attention.last_queries(turn, WINDOW)
  seen = at.top.window(at, at_last)
  mass = prefill.column_mass(at, last, at_last, turn.staged, seen, state)  # [B, K, S]
  mass = mass / jnp.maximum((at_last >= 0).sum(-1), 1)[:, None, None]
  zero = jnp.zeros((*mass.shape[:2], tiles), jnp.float32)
  return _add(zero, turn.staged["pos"], tile, mass)


def renewed(cache: Cache, found: Weights) -> Cache:
  """With the shares of the tiles that were read."""
  old, table = cache.heads["mass"], found.table
  share = jax.nn.softmax(found.lse, -1).max(2)  # [B, K, W]
  read = (found.lse > -jnp.inf).any(2) & (table >= 0)
  was = jnp.take_along_axis(old, jnp.maximum(table, 0), -1)
  change = jnp.where(read, (1 - DECAY) * (share - was), 0)
  return cache.put(heads={"mass": _add(old, jnp.where(read, table, -1), 1, change)})


def _add(
  mass: Float[Array, "B K P"], place: Int[Array, "B K N"], unit: int, x: Float[Array, "B K N"]
) -> Float[Array, "B K P"]:
  """Mass and what x adds to tiles of `unit` places; places below 0 are none."""
  tile = jnp.where(place >= 0, place // unit, mass.shape[-1])
  row, head = (jnp.arange(n)[:, None] for n in mass.shape[:2])
  return mass.at[row[..., None], head, tile].add(x, mode="drop")
