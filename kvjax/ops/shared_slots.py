"""Slots that heads share: the heads of a pool lie one after the other in one array.

By "place" int32 [B, K, 2] on the heads shelf of such a cache, head h has the slots [first, first +
length) of row h // P of its arrays [B, K/P, S, ...]; P heads share a row.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.core import slots as slots_of
from kvjax.core.cache import Cache
from kvjax.core.leaves import Layout
from kvjax.core.slots import Slots


def sharers(cache: Cache) -> int:
  """P, the heads of a row of slots; 1 where each has its own."""
  if cache.layout is not Layout.SHARED:
    return 1
  return cache.heads["place"].shape[1] // cache.slots["pos"].shape[1]


def tokens(cache: Cache) -> int:
  """n, the tokens of each head on average; all the slots of a head that has its own."""
  return cache.size // sharers(cache)


def lies(cache: Cache) -> tuple[Int[Array, "B K"], Int[Array, "B K"], Int[Array, "B K"]]:
  """First slot, slots and occupied slots of each head.

  All heads of a row have as many free slots, those that `used` has left of n.
  """
  first, length = jnp.moveaxis(cache.heads["place"], -1, 0)
  return first, length, length - (tokens(cache) - cache.used)[:, None]


def pooled(x: Array, heads: int) -> Array:
  """[B, K, S, ...] as [B, K/P, P·S, ...]: the slots of P `heads` one after the other."""
  return x.reshape(x.shape[0], x.shape[1] // heads, heads * x.shape[2], *x.shape[3:])


def by_head(cache: Cache) -> Slots:
  """The slots [B, K, S, ...] of each head from the first on; position −1 where it has no more.

  A copy where heads share slots, P times their size: for prompts, not for steps.
  """
  if cache.layout is not Layout.SHARED:
    return cache.slots
  first, length = jnp.moveaxis(cache.heads["place"], -1, 0)
  each = jnp.arange(cache.size, dtype=jnp.int32)
  heads = sharers(cache)
  index = pooled(first[..., None] + each, heads)

  def taken(x: Array) -> Array:
    found = slots_of.take(x, index)
    return found.reshape(*first.shape, cache.size, *x.shape[3:])

  held = {name: taken(x) for name, x in cache.slots.items()}
  return {**held, "pos": jnp.where(each < length[..., None], held["pos"], -1)}


def packed(
  staged: Slots, order: Int[Array, "B K W"], count: Int[Array, "B K"], place: Array, size: int
) -> Slots:
  """Slots [B, K/P, size, ...] of the first `count` of `order` of each head, from its place on.

  Args:
    staged: slots [B, K, W, ...], head by head.
    order: which of them each head keeps, in order.
    count: how many.
    place: int32 [B, R, P, 2], first slot and number of slots of each head in its row.
    size: slots of a row.
  """
  batch, rows, heads, _ = place.shape
  width = order.shape[-1]
  slot = jnp.arange(size, dtype=jnp.int32)
  first = place[..., 0]
  head = (slot[:, None] >= first[:, :, None]).sum(-1, dtype=jnp.int32) - 1  # [B, R, S]
  own = jnp.take_along_axis(first, head, 2)
  within = slot - own
  ok = within < jnp.take_along_axis(count.reshape(batch, rows, heads), head, 2)
  entry = head * width + jnp.minimum(within, width - 1)
  source = head * width + jnp.take_along_axis(pooled(order, heads), entry, 2)
  kept = {name: slots_of.take(pooled(x, heads), source) for name, x in staged.items()}
  return {**kept, "pos": jnp.where(ok, kept["pos"], -1)}


def put(x: Array, slot: Int[Array, "B K"], value: Array, heads: int) -> Array:
  """x [B, K/P, S, ...] with one value [B, K, 1, ...] of each head written at its slot."""
  slot = slot[..., None]
  if heads == 1:
    return slots_of.put(x, slot, value)
  return slots_of.put(x, pooled(slot, heads), pooled(value, heads))


def of_head(cache: Cache, marks: Bool[Array, "B R S"]) -> Bool[Array, "B K S"]:
  """Marks of slots, for each head those of its own."""
  first, length = jnp.moveaxis(cache.heads["place"][:, :, None], -1, 0)
  slot = jnp.arange(cache.size, dtype=jnp.int32)
  return jnp.repeat(marks, sharers(cache), 1) & (slot >= first) & (slot < first + length)
