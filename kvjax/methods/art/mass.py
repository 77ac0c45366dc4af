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
from jaxtyping import Array, Bool, Float, Int

from kvjax.core.cache import Cache
from kvjax.core.context import At, Turn
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
  """With the mean mass that the last queries of a prompt give each tile, in rows that have one."""
  old = cache.heads["mass"]
  mass, some = _of_prompt(at, turn, tile, old.shape[2])
  return cache.put(heads={"mass": jnp.where(some, mass, old)})


def ranking(at: At, cache: Cache, turn: Turn, tile: int, sinks: int) -> Cache:
  """With a prompt's tiles after those of first tokens in their places: the last one stays, before
  it comes that of the largest mass, and so on down. Rows without a prompt keep what they had.
  """
  old, pinned = cache.heads["moved"], -(-sinks // tile)
  mass, some = _of_prompt(at, turn, tile, old.shape[2])
  t, last = jnp.arange(old.shape[2], dtype=jnp.int32), turn.staged["pos"].max(-1) // tile
  last = last[..., None]
  rank = jnp.where(t == last, jnp.inf, mass)
  rank = jnp.where((t >= pinned) & (t <= last), rank, -1.0)
  best = jnp.argsort(-rank, -1, stable=True)  # a prompt's tiles, and then the others
  here = jnp.take_along_axis(best, jnp.maximum(last - t, 0), 2)
  moved = jnp.where((t >= pinned) & (t <= last), here - t, 0).astype(jnp.int32)
  return cache.put(heads={"moved": jnp.where(some, moved, old)})


def ranked(cache: Cache, plan: Plan, tile: int, sinks: int) -> Order:
  """Tiles of first tokens, those after the prompt from the newest down, and the prompt's."""
  moved, pinned = cache.heads["moved"], -(-sinks // tile)
  last = jnp.broadcast_to((plan.span.stop - 1) // tile, moved.shape[:2])[..., None]
  t = jnp.arange(moved.shape[2], dtype=jnp.int32)
  place = jnp.where(t < pinned, t, last + pinned - t)
  table = place + jnp.take_along_axis(moved, jnp.maximum(place, 0), 2)
  where: dict[str, Any] = {"table": jnp.where(t <= last, table, -1), "count": last[..., 0] + 1}
  plan = dataclasses.replace(plan, **where, unit=tile, pinned=pinned + 1)
  return Order(plan, tile, moved=moved)


def _of_prompt(
  at: At, turn: Turn, tile: int, tiles: int
) -> tuple[Float[Array, "B K P"], Bool[Array, "B 1 1"]]:
  """Mean mass that the last queries of a prompt give each tile, and which rows have such."""
  last, at_last, state = attention.last_queries(turn, WINDOW)
  seen = at.top.window(at, at_last)
  mass = prefill.column_mass(at, last, at_last, turn.staged, seen, state)  # [B, K, S]
  count = (at_last >= 0).sum(-1)[:, None, None]
  mass = mass / jnp.maximum(count, 1)
  zero = jnp.zeros((*mass.shape[:2], tiles), jnp.float32)
  return _add(zero, turn.staged["pos"], tile, mass), count > 0


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
