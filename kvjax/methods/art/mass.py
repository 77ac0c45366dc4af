"""Tiles in the order of their mass in earlier steps, which is ours.

Each tile keeps the largest share of softmax mass that a query head of its group gave it, averaged
over the steps that read it, the newer the heavier. A prompt begins it with what its last queries
attend to, as SnapKV scores tokens. Tiles that are not read keep what they had, so that a walk of
all of them comes every so many steps. Tiles of first tokens come first, then the newest.
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
  last, at_last, state = attention.last_queries(turn, WINDOW)
  seen = at.top.window(at, at_last)
  mass = prefill.column_mass(at, last, at_last, turn.staged, seen, state)  # [B, K, S]
  mass = mass / jnp.maximum((at_last >= 0).sum(-1), 1)[:, None, None]
  old, pos = cache.heads["mass"], turn.staged["pos"]
  return cache.put(heads={"mass": _add(jnp.zeros_like(old), pos, tile, mass)})


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
