"""The certificate: a walk ends once what it has not read can no longer move the output much.

Ours, not the paper's. Bounds on the keys of a tile bound the softmax mass that it can hold. A walk
that has read mass A and leaves at most M unread is off by (M / (A + M))·(u − o), where u is the
average of the values it has not seen. Averages of values are no longer than the longest value:

    ‖o(T) − o(t)‖ ≤ 2·M / (A + M)·max‖v‖ ≤ ε·max‖v‖    where    M ≤ A·ε / (2 − ε)

Nothing is assumed of the input. Bounds hold for logits in float32 arithmetic: to each is added what
rounding can take away, on either side.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Plan
from kvjax.methods.art.order import Order
from kvjax.ops import selection
from kvjax.primitives.softmax_state import capped

HALF_ULP = 2.0**-24
TANH_ERROR = 1e-5  # of tanh in float32: ten times what a test finds on each device


def by_bound(at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"], tile: int) -> Order:
  """All tiles, by what they may weigh; it proves what comes of numbers, not of codes.

  q is the query that is walked with, in the dtype of the keys: bounds of another prove nothing.
  Tiles of first tokens come first, then the newest, whose bounds do not know the new token yet.
  """
  span, size = plan.span, -(-cache.size // tile)
  slot = jnp.arange(size * tile, dtype=jnp.int32)
  held = jnp.broadcast_to(span.holds(slot), (*cache.pos.shape[:2], slot.shape[0]))
  keys = held.reshape(*cache.pos.shape[:2], size, tile).sum(-1, dtype=jnp.int32)
  extremes = cache.heads["key_min"], cache.heads["key_max"]
  extremes = holding(*extremes, cache.slots["k"].dtype)
  bounds, errors = logit_bounds(q, *extremes, at.env.soft_cap)
  # The most that any head of the group may give a tile.
  share = jax.nn.softmax(tile_mass(bounds, keys), -1).max(2)
  t, pinned = jnp.arange(size, dtype=jnp.int32), -(-span.sinks // tile)
  newest = (span.stop - 1)[..., None] // tile
  rank = jnp.where(t < pinned, 3.0, jnp.where(t == newest, 2.0, share))
  _, table = selection.other_tiles(at, rank, span, unit=tile, sinks=0, local=0, k=size)

  def ordered(x: Array) -> Array:
    index = jnp.maximum(table, 0)
    return jnp.take_along_axis(x, index if x.ndim == 3 else index[:, :, None], -1)

  listed = jnp.where(table >= 0, ordered(keys), 0)
  unread = unread_mass(ordered(bounds), ordered(errors), listed)
  count = (table >= 0).sum(-1, dtype=jnp.int32)
  where: dict[str, Any] = {"table": table, "count": count, "unit": tile, "pinned": pinned + 1}
  return Order(dataclasses.replace(plan, codes=None, **where), tile, unread)


def logit_bounds(
  q: Float[Array, "B K G H"],
  low: Float[Array, "B K P H"],
  high: Float[Array, "B K P H"],
  soft_cap: float | None = None,
) -> tuple[Float[Array, "B K G P"], Float[Array, "B K G P"]]:
  """At least the logit of every key of a tile, low ≤ k ≤ high by channel, and its rounding error.

  The logit is x = q·k/√H, or c·tanh(x/c) under a soft cap c. The error bounds that of the bound
  and that of the logits of the tile's keys; both are float32.
  """
  size = q.shape[-1]
  q = q.astype(jnp.float32) * size**-0.5
  low, high = (x.astype(jnp.float32) for x in (low, high))

  def of_head(q: Float[Array, "B K H"]) -> tuple[Array, Array]:
    a, b = q[:, :, None] * low, q[:, :, None] * high
    return jnp.maximum(a, b).sum(-1), jnp.maximum(abs(a), abs(b)).sum(-1)

  bound, length = (jnp.stack(x, 2) for x in zip(*map(of_head, jnp.moveaxis(q, 2, 0)), strict=True))
  error = 4 * (size + 4) * HALF_ULP * length
  if soft_cap is None:
    return bound + error, error
  # The cap is monotone and nowhere steeper than 1: bounds and errors pass through it.
  off = TANH_ERROR * soft_cap
  return capped(bound + error, soft_cap) + off, error + off


def holding(low: Array, high: Array, dtype: Any) -> tuple[Array, Array]:
  """Extremes that hold keys of this dtype, where they were rounded to one of fewer digits.

  Numbers that codes stand for are float32; their extremes are kept in the cache's dtype.
  """
  if low.dtype == dtype:
    return low, high
  limits = jnp.finfo(low.dtype)
  low, high = (x.astype(jnp.float32) for x in (low, high))
  most = (jnp.maximum(jnp.abs(x), float(limits.tiny)) * float(limits.eps) for x in (low, high))
  return low - next(most), high + next(most)


def tile_mass(
  bounds: Float[Array, "B K G W"], keys: Int[Array, "B K W"]
) -> Float[Array, "B K G W"]:
  """ln of the most mass that `keys` keys of a tile can have; −∞ for none."""
  some = (keys > 0)[:, :, None]
  return jnp.where(some, bounds + jnp.log(jnp.maximum(keys, 1))[:, :, None], -jnp.inf)


def unread_mass(
  bounds: Float[Array, "B K G W"], errors: Float[Array, "B K G W"], keys: Int[Array, "B K W"]
) -> Float[Array, "B K G W+1"]:
  """ln of the most mass of tiles t … W − 1, for t = 0 … W, tiles in visiting order.

  Rounding of the mass that is read, which this is compared with, is added too.

  Args:
    bounds, errors: of `logit_bounds`.
    keys: how many keys of each tile count; tiles of 0 hold no mass.
  """
  some = (keys > 0)[:, :, None]
  mass = jax.lax.cumlogsumexp(tile_mass(bounds, keys), axis=3, reverse=True)
  most = jnp.where(some, errors, 0).max(-1, keepdims=True)
  sums = jnp.log1p(2 * keys.sum(-1) * HALF_ULP)[:, :, None, None]
  mass = mass + most + sums + 1e-5 + 8 * HALF_ULP * abs(jnp.where(some, mass, 0))
  return jnp.concatenate([mass, jnp.full_like(mass[..., :1], -jnp.inf)], -1)


def log_ratio(eps: float) -> float:
  """ln of ε / (2 − ε): ln M − ln A is at most that where the output is within ε·max‖v‖."""
  return math.log(eps / (2 - eps)) if eps > 0 else -math.inf


def proven(unread: Float[Array, "B K G"], lse: Float[Array, "B K G"], eps: float) -> Array:
  """True where the output is within eps·max‖v‖ of what all keys give: M ≤ A·ε / (2 − ε)."""
  return unread <= lse + log_ratio(eps)
