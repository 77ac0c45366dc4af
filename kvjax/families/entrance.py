"""Entry of a new token into a cache, and checks of the drivers while they are traced."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.experimental import checkify
from jaxtyping import Array, Bool, Float, Int

from kvjax.core.cache import Cache, CacheSpec, Origin
from kvjax.core.context import At, Carry, Prompt
from kvjax.core.leaves import Layout
from kvjax.core.slots import Slots
from kvjax.families import forms
from kvjax.families.shapes import check_shape
from kvjax.ops import insertion, offload, shared_slots, slot_shards
from kvjax.primitives.traced_layer import TracedLayer, different_layers

if TYPE_CHECKING:
  from kvjax.families.method import Method


def landing(at: At, cache: Cache, live: Bool[Array, " B"]) -> Int[Array, "B K"]:
  """The slot of the next token: the first empty one, or the victim's; S (none) in idle rows.

  Occupied slots are a prefix: as long as one is empty it is the first of them.
  """
  room = (cache.used < slot_shards.size(at, cache))[:, None]
  slot = slot_shards.own(at, cache, cache.used)[:, None]
  if cache.layout is Layout.SHARED:
    first, _, occupied = shared_slots.lies(cache)
    slot = first + occupied
  return jnp.where(live[:, None], jnp.where(room, slot, _victim(at, cache)), cache.size)


def enter_token(
  at: At,
  cache: Cache,
  q: Float[Array, "B K G H"],
  k: Float[Array, "B K H"],
  v: Float[Array, "B K H"],
  live: Bool[Array, " B"],
) -> tuple[Float[Array, "B K G H"], Cache]:
  """Rotates the new token's q and k and inserts it; returns rotated q and the cache.

  A kernel does both at once where `insert` is declared to be an operation (`entry`).
  """
  entry, placement = at.top.entry, at.top.placement
  if isinstance(entry, forms.Void) or not insertion.enters(at, cache, entry):
    rope = at.env.rope
    q = rope.rotate(q, cache.seen[:, None, None])
    k = rope.rotate(k, cache.seen[:, None])
    return q, at.top.insert(at, cache, k, v, live)
  slot = landing(at, cache, live)
  if cache.layout is Layout.SHARED:
    return insertion.enter_shared(at, cache, q, k, v, live, slot)
  ring = cache.heads["ring"] if placement is insertion.Placement.RING else None
  victim = None if placement else _victim(at, cache)
  given = {"victim": victim, "ring": ring, "renewal": at.top._entering(at, cache)}
  return insertion.enter_token(at, cache, q, k, v, live, slot, entry, **given)


def enter(
  at: At, cache: Cache, q: Array, k: Array, v: Array, prompt: Prompt, carry: Carry
) -> tuple[Array, Int[Array, "B A"], Slots, Carry]:
  """Rotates a chunk: queries, their positions (−1 = padding), and the new slots."""
  index, rope = prompt.query_index(), at.env.rope
  qpos = cache.seen[:, None] + index
  q = rope.rotate(q, qpos[:, None, None])
  k, v, carry = at.top.fill(at, k, v, prompt, carry)
  every = jnp.arange(prompt.tokens, dtype=jnp.int32)
  kpos = cache.seen[:, None] + every
  k = rope.rotate(k, kpos[:, None])
  pos = jnp.where(every < prompt.valid[:, None], kpos, -1)
  new = {"k": k, "v": v, "pos": jnp.broadcast_to(pos[:, None], k.shape[:3])}
  new |= cache.of_new(new)
  return q, jnp.where(index < prompt.valid[:, None], qpos, -1), new, carry


def _victim(at: At, cache: Cache) -> Int[Array, "B K"]:
  victim = at.top.victim(at, cache)
  check_shape(at, "victim", victim, (cache.pos.shape[0], cache.kv_heads))
  return victim


def check_step(at: At, cache: Cache, q: Any, k: Any, v: Any, live: Any) -> None:
  """Raises where a decode step's arguments do not fit the cache, or the layer the method."""
  _check_layer(at, cache)
  batch, heads, width = _sizes(cache)
  check_shape(at, "q", q, (batch, heads, None, width))
  for name, x in (("k", k), ("v", v)):
    check_shape(at, name, x, (batch, heads, width))
  check_shape(at, "live", live, (batch,))


def check_prompt(at: At, cache: Cache, q: Any, k: Any, v: Any, prompt: Prompt) -> None:
  """Raises where a prompt's arguments do not fit the cache, or the layer the method."""
  _check_layer(at, cache)
  batch, heads, width = _sizes(cache)
  computed = prompt.tokens if prompt.index is None else prompt.index.shape[1]
  check_shape(at, "q", q, (batch, heads, None, computed, width))
  filled = prompt.tokens if at.top.traits.projects_all else computed
  for name, x in (("k", k), ("v", v)):
    check_shape(at, name, x, (batch, heads, filled, width))
  for name, x in (("prompt.valid", prompt.valid), ("prompt.total", prompt.total)):
    check_shape(at, name, x, (batch,))


def room(method: Method, cache: Any) -> int | Int[Array, " B"] | None:
  """Number of tokens that a row of this cache can take in all; None: any number, something leaves.

  Nothing leaves before a layer holds what its method keeps: one that the capacity has left fewer
  slots takes as many tokens. Of branches (`kvjax.runtime.forked`) each row has its own number, with
  the tokens of its context.
  """
  if cache.layout is Layout.BRANCHED:
    return cache.size + cache.seen - cache.used
  if method.traits.positional:
    return None if cache.layout is Layout.RING else cache.size  # a ring gives up its oldest token
  if cache.layout is not Layout.HOSTED:
    if not isinstance(cache, Cache) or cache.origin is None:
      return None
    return None if cache.size in _asked(method, cache.origin) else shared_slots.tokens(cache)
  store = cache.heads["store"]  # first tokens, window and all that the store has room for
  return cache.size + offload.block_size(store) * (offload.blocks_of(store) - 2)


@functools.lru_cache
def _asked(method: Method, origin: Origin) -> set[int]:
  """Slots of a method's layers where the capacity is no limit."""
  sizes = origin.kv_heads, origin.groups, origin.head_dim, origin.layers
  spec = CacheSpec(1, 1 << 40, *sizes, windows=origin.windows)
  return {method.capacity(spec, layer) for layer in range(max(1, origin.layers))}


def with_room(
  at: At, cache: Any, rows: Bool[Array, " B"], new: Int[Array, " B"] | Bool[Array, " B"]
) -> Bool[Array, " B"]:
  """Those of `rows` whose cache has room for `new` more tokens; the others raise (checkify)."""
  most = room(at.top, cache)
  if most is None:
    return rows
  most = slot_shards.size(at, cache) if at.env.slot_axis else most
  most = jnp.broadcast_to(most, cache.seen.shape)
  full = rows & (cache.seen + new > most)
  row = jnp.argmax(full)
  checkify.check(
    ~full.any(),
    f"{at.name}, layer {at.layer}: found row {{row}} with {{seen}} cached tokens and "
    "{new} to come, expected at most the capacity of {most}; its cache stays as it was",
    row=row,
    most=most[row],
    seen=cache.seen[row],
    new=new[row].astype(jnp.int32),
  )
  return rows & ~full


def _sizes(cache: Cache) -> tuple[int, int, int]:
  """B, K and H."""
  return cache.slots["k"].shape[0], cache.kv_heads, cache.head_dim


def _check_layer(at: At, cache: Cache) -> None:
  """Raises TypeError where the layer is not known and the layers' caches differ in size."""
  # Not `at.layer`: asking for it means a program for each layer.
  if isinstance(vars(at)["layer"], TracedLayer):
    batch, heads, width = _sizes(cache)
    spec = CacheSpec(batch, 1 << 20, heads, 1, width, at.env.layers)
    if len({at.top.capacity(spec, layer) for layer in range(spec.layers)}) > 1:
      raise TypeError(different_layers(at.top))
