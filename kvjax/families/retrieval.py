"""Blocks in host memory: tokens that stand for them, the ones most wanted, copies on the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.core import slots
from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.families import sliding
from kvjax.ops import offload
from kvjax.primitives.trees import pytree


@pytree()
@dataclasses.dataclass(frozen=True)
class Retrieved:
  """Note of a step that has retrieved.

  Attributes:
    cache: that which holds the blocks of the step.
  """

  cache: Cache


def elect(
  votes: Float[Array, "*batch U"], held: Bool[Array, "*batch C U"], counts: Int[Array, "*batch C"]
) -> Bool[Array, "*batch C U"]:
  """The `counts` tokens of each run that have most votes; of equal ones the first."""
  token = jnp.arange(votes.shape[-1])
  mine, other = votes[..., :, None], votes[..., None, :]
  ahead = (other > mine) | ((other == mine) & (token < token[:, None]))
  # Sums of ones in float32 are exact, and matrix units take them.
  rank = jnp.einsum("...ij,...cj->...ci", ahead.astype(jnp.float32), held.astype(jnp.float32))
  return held & (rank < counts[..., None])


def ranks(cache: Cache, keys: list[Array], forces: bool = True) -> Int[Array, "B N"]:
  """Numbers of stored blocks that go before each by `keys` [B, N] in turn, forced ones first.

  Ties go to the oldest. A block whose first key is −∞ does not take part (rank N), unless it is
  forced; without `forces` none is.
  """
  block = jnp.arange(keys[0].shape[1], dtype=jnp.int32)
  stored = block < cache.rows["gone"][:, None]
  able = stored & (keys[0] > -jnp.inf)
  order = [jnp.where(jnp.isnan(key), jnp.inf, -key) for key in keys]
  order[0] = jnp.where(able, jnp.maximum(order[0], jnp.finfo(jnp.float32).min), jnp.inf)
  if forces and "inject" in cache.rows:
    forced = (cache.rows["inject"][:, :, None] == block).any(1) & stored
    able |= forced
    order = [jnp.where(forced, -jnp.inf, key) for key in order]
  # Counted, not sorted: N² comparisons are one kernel, a sort is many.
  before = block < block[:, None]
  for key in reversed(order):
    mine, other = key[:, :, None], key[:, None, :]
    before = (other < mine) | ((other == mine) & before)
  return jnp.where(able, before.sum(-1, dtype=jnp.int32), block.shape[0])


def best(cache: Cache, keys: list[Array], count: int) -> Int[Array, "B R"]:
  """The best `count` stored blocks by `ranks`, best first; −1 where there are fewer."""
  rank = ranks(cache, keys)
  turn = jnp.arange(count, dtype=jnp.int32)[:, None]
  block = jnp.arange(rank.shape[1], dtype=jnp.int32)
  here = (rank[:, None] == turn) & (turn < block.shape[0])
  return jnp.where(here, block, -1).max(-1)


def beside(cache: Cache, blocks: Int[Array, "B R"], count: int) -> Int[Array, "B R"]:
  """The blocks, the first `count` of them each followed by its neighbours, without the last ones.

  Neighbours that are not stored are left out, and none is named twice.
  """
  first, rest = blocks[:, :count], blocks[:, count:]
  near = jnp.where(first >= 0, first, -2)[..., None] + jnp.array([0, -1, 1], jnp.int32)
  every = jnp.concatenate([near.reshape(near.shape[0], -1), rest], 1)
  named = (every >= 0) & (every < cache.rows["gone"][:, None])
  index = jnp.arange(every.shape[1], dtype=jnp.int32)
  again = (every[:, None] == every[..., None]) & (index < index[:, None])
  named &= ~again.any(-1)
  place = jnp.where(named, jnp.cumsum(named, -1, dtype=jnp.int32) - 1, -1)
  here = place[:, None] == jnp.arange(blocks.shape[1], dtype=jnp.int32)[:, None]
  return jnp.where(here, every[:, None], -1).max(-1)


def kept(cache: Cache) -> Int[Array, "B R"]:
  """The blocks that the cache has retrieved, best first; −1: none."""
  place = cache.rows["kept"]
  blocks = jnp.take_along_axis(cache.rows["held"], jnp.maximum(place, 0), 1, mode="clip")
  return jnp.where(place >= 0, blocks, -1)


def hold(at: At, cache: Cache, wanted: Int[Array, "B R"]) -> Cache:
  """The cache once the wanted blocks have copies on the device: "kept" says in which places.

  Blocks that have one are not read again; the others take the places of the least recently used.
  """
  held, used_at = cache.rows["held"], cache.rows["used_at"]
  match = (held[:, None] == wanted[..., None]) & (wanted >= 0)[..., None]  # [B, R, D]
  missing = ~match.any(-1) & (wanted >= 0)
  place = jnp.arange(held.shape[1], dtype=jnp.int32)
  stamp = jnp.where(match.any(1), jnp.iinfo(jnp.int32).max, used_at)
  mine, other = stamp[:, :, None], stamp[:, None, :]
  older = (other < mine) | ((other == mine) & (place < place[:, None]))
  turn = jnp.cumsum(missing, -1) - 1  # the first one that is missing takes the oldest place
  free = missing[..., None] & (turn[..., None] == older.sum(-1)[:, None])  # [B, R, D]
  kept = jnp.where(match | free, place, -1).max(-1)
  rows = {
    "held": slots.overlaid(held, jnp.where(missing, kept, held.shape[1]), wanted),
    "used_at": jnp.where((match | free).any(1), cache.seen[:, None], used_at),
    "kept": kept,
  }
  copies = {name: cache.heads[f"held_{name}"] for name in ("k", "v")}
  wanted = jnp.where(missing, wanted, -1)
  copies = offload.fetch(cache.heads["store"], wanted, copies, kept, at.env)
  return cache.put(heads={f"held_{name}": x for name, x in copies.items()}, rows=rows)


def injected(caches: tuple[Any, ...], blocks: Int[Array, "B I"]) -> tuple[Any, ...]:
  """Caches of all layers that retrieve these blocks in addition to their own (−1 = none).

  Mandatory evidence injection (Tang et al., 2025, Tab. 1). I is the method's `inject`; token t,
  after the first ones, is in block (t − init_tokens) // block.
  """

  def force(cache: Cache) -> Cache:
    room = cache.rows["inject"].shape if "inject" in cache.rows else (cache.seen.shape[0], 0)
    if room != blocks.shape:
      raise ValueError(
        f"blocks: found shape {blocks.shape}, expected {room}, from the method's inject"
      )
    if "inject" not in cache.rows:
      return cache
    # A copy for each layer: caches are donated, and no array can be twice.
    return cache.put(rows={"inject": jnp.array(blocks, jnp.int32)})

  return sliding.rejoined(caches, [force(cache) for cache in sliding.served(caches)])
