"""Blocks that leave the window of a method with a cache in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.core import slots
from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.ops import offload

if TYPE_CHECKING:
  from kvjax.families.streamed import Streamed


def evicted(
  method: Streamed,
  at: At,
  cache: Cache,
  near: slots.Slots,
  end: Int[Array, " B"],
  ok: Bool[Array, " B"],
  most: int,
  after: Array,
) -> tuple[Cache, Float[Array, "B K E U H"]]:
  """Stores and summarises the blocks after which `local` tokens have come by position `end`.

  Args:
    method: whose blocks they are.
    at: where this runs.
    cache: as it was before the new tokens.
    near: [slots ‖ new], whose votes are up to date.
    end: tokens seen, the new ones included.
    ok: rows that take part.
    most: blocks that can leave at once.
    after: see `offload.append`.

  Returns:
    The cache, and the values of the blocks, zeros in those that stay.
  """
  gone, count = cache.rows["gone"], _leaving(method, cache, end, ok, most)
  each = jnp.arange(most, dtype=jnp.int32)
  leaves = each < count[:, None]
  block = gone[:, None] + each
  token = jnp.arange(method.block, dtype=jnp.int32)
  pos = method.init_tokens + block[..., None] * method.block + token
  flat = pos.reshape(pos.shape[0], 1, -1)
  size, seen = cache.size, cache.seen[:, None, None]
  slot = jnp.where(flat < seen, method._slot_of(flat, size), size + flat - seen)
  slot = jnp.broadcast_to(slot, (*near["pos"].shape[:2], flat.shape[2]))

  def cut(name: str) -> Array:
    x = slots.take(near[name], slot)
    x = x.reshape(*x.shape[:2], most, method.block, *x.shape[3:])
    mask = leaves[:, None, :, None]
    return jnp.where(mask[..., None] if x.ndim > mask.ndim else mask, x, 0)

  k = at.env.rope.shift(cut("k"), -pos[:, None])
  new = {"k": k, "v": cut("v")}
  store = offload.append(cache.heads["store"], new, gone, count, at.env, after)
  cache = method.summarise(
    at, cache, k, cut("votes"), jnp.where(leaves, block, jnp.iinfo(jnp.int32).max)
  )
  return cache.put(heads={"store": store}, rows={"gone": gone + count}), new["v"]


def with_first(method: Streamed, at: At, cache: Cache, after: Array) -> Cache:
  """The cache that has the first tokens behind its copies of blocks; `after`: see `evicted`."""
  if not method.init_tokens:
    return cache
  k, v = (cache.slots[name][:, :, : method.init_tokens] for name in ("k", "v"))
  k = at.env.rope.shift(k, -jnp.arange(method.init_tokens, dtype=jnp.int32))
  place = slots.after(jnp.int32(cache.rows["held"].shape[1] * method.block), after)
  held = {
    name: jax.lax.dynamic_update_slice_in_dim(cache.heads[name], x, place, 2)
    for name, x in (("held_k", k), ("held_v", v))
  }
  return cache.put(heads=held)


def at_block_ends(
  method: Streamed,
  places: list[At],
  caches: Sequence[Cache],
  ok: Bool[Array, " B"],
  after: Array,
) -> tuple[Cache, ...]:
  """Caches of layers once the blocks that a token makes whole, or has leave, are seen to.

  That is once in `block` tokens of a row: it stands behind a condition, which on a GPU takes
  longer than what it spares a single layer.

  Args:
    method: whose they are.
    places: where the layers are.
    caches: theirs, after the step, all at the same tokens.
    ok: rows that take part.
    after: see `offload.append`.
  """

  def settle(shelves: list[Any]) -> list[Any]:
    done = []
    for at, cache, (heads, rows) in zip(places, caches, shelves, strict=True):
      cache = method._complete(at, cache.put(heads=heads, rows=rows), cache.seen, ok)
      cache, _ = evicted(method, at, cache, cache.slots, cache.seen, ok, 1, after)
      cache = with_first(method, at, cache, after)
      done.append((cache.heads, _without_count(cache)))
    return offload.loose(done)

  shelves = offload.loose([(cache.heads, _without_count(cache)) for cache in caches])
  if len(places) == 1 and offload.on_host():
    due, shelves = ok, settle(shelves)
  else:
    due = ok & _ends(method, caches[0])
    shelves = jax.lax.cond(due.any(), settle, lambda shelves: shelves, shelves)
    due = ok & due.any()
  done = []
  for cache, (heads, rows) in zip(caches, shelves, strict=True):
    # Beside the condition, which copies numbers that it hands through.
    gone = cache.rows["gone"] + _leaving(method, cache, cache.seen, due, 1)
    done.append(cache.put(heads=heads, rows={**rows, "gone": gone}))
  return tuple(done)


def _without_count(cache: Cache) -> dict[str, Any]:
  """The rows of a cache but for the number of blocks that have left."""
  return {name: x for name, x in cache.rows.items() if name != "gone"}


def _leaving(
  method: Streamed, cache: Cache, end: Int[Array, " B"], ok: Bool[Array, " B"], most: int
) -> Int[Array, " B"]:
  """Number of blocks that leave, see `evicted`."""
  target = slots.quotient(end - method.local - method.init_tokens, method.block)
  return jnp.where(ok, jnp.clip(target - cache.rows["gone"], 0, most), 0)


def _ends(method: Streamed, cache: Cache) -> Bool[Array, " B"]:
  """Rows whose newest token is the last one of a block, or has one leave the window."""
  beyond = cache.seen - method.init_tokens
  whole = (beyond > 0) & (slots.remainder(beyond, method.block) == 0)
  return whole | (slots.quotient(beyond - method.local, method.block) > cache.rows["gone"])
