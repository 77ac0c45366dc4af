"""Tiles of slots: which of them a plan reads, and which summaries a new token changes.

For caches in which slot = position. A tile is `unit` slots from a multiple of `unit` on; a summary
may stand for windows that overlap.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.core import slots
from kvjax.core.cache import Cache
from kvjax.core.plan import Span
from kvjax.ops import extremes


def visible(span: Span, start: Int[Array, "*#BKP"], width: int) -> Bool[Array, "B K P"]:
  """True where any of the slots [start, start + width) is in the span; K = 1 for like heads."""
  first, stop = span.start[..., None], span.stop[..., None]
  return (start < stop) & ((start < span.sinks) | (start + width > first))


def others(
  scores: Float[Array, "B K P"], span: Span, *, unit: int, sinks: int, local: int, k: int
) -> tuple[Float[Array, "B K k"], Int[Array, "B K k"]]:
  """The best tiles that are neither among the first nor among the newest, and their scores.

  Exact; equal scores go to the lowest index; −∞ and −1 where there are no more. Arguments as in
  `best`.
  """
  tiles = scores.shape[-1]
  tile = jnp.arange(tiles, dtype=jnp.int32)
  newest = (span.stop - 1)[..., None] // unit  # [B, K, 1]
  rest = visible(span, tile * unit, unit) & (tile >= sinks) & (tile <= newest - local)
  # A tile that may be chosen stays apart from one that may not, however low its score.
  lowest = jnp.finfo(scores.dtype).min
  # NaN is chosen first, and heard of: sorted where a platform likes, it might choose nothing.
  scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
  scores = jnp.where(scores == 0, 0.0, scores)  # top_k would put −0 below 0
  candidates = jnp.where(rest, jnp.maximum(scores, lowest), -jnp.inf)
  top, index = jax.lax.top_k(candidates, min(k, tiles))
  return top, jnp.where(jnp.isneginf(top), -1, index)


def listed(
  span: Span, chosen: Int[Array, "B K k"], *, unit: int, sinks: int, local: int, tiles: int
) -> tuple[Int[Array, "B K W"], Int[Array, "B K"], Int[Array, "B K W"]]:
  """The table of a plan: first tiles, newest tiles from the newest on, then the chosen ones.

  Args:
    span: the slots that may be touched; tiles outside it are left out.
    chosen: other tiles, in visiting order, none of them twice (−1 = none).
    unit: slots per tile.
    sinks, local: numbers of first and of newest tiles.
    tiles: P, tiles of the cache.

  Returns:
    table (−1 after the end), the count of its entries, and where each comes from: an index into
    [first ‖ newest ‖ chosen].
  """
  sinks, local = min(sinks, tiles), min(local, tiles)
  newest = (span.stop - 1)[..., None] // unit
  first = jnp.arange(sinks, dtype=jnp.int32)
  last = newest - jnp.arange(local, dtype=jnp.int32)

  def joined(*parts: Array) -> Array:
    shape = chosen.shape[:2]
    return jnp.concatenate([jnp.broadcast_to(x, (*shape, x.shape[-1])) for x in parts], -1)

  ok = joined(
    visible(span, first * unit, unit),
    visible(span, last * unit, unit) & (last >= sinks),
    visible(span, chosen * unit, unit) & (chosen >= 0),
  )
  # Rows that are short, or see little of the past, leave gaps: close them in the same order.
  order = jnp.argsort(~ok, -1, stable=True)[..., :tiles].astype(jnp.int32)
  table, ok = (jnp.take_along_axis(x, order, -1) for x in (joined(first, last, chosen), ok))
  return jnp.where(ok, table, -1).astype(jnp.int32), ok.sum(-1, dtype=jnp.int32), order


def best(
  scores: Float[Array, "B K P"],
  span: Span,
  *,
  unit: int,
  sinks: int,
  local: int,
  k: int,
  limit: Int[Array, " B"] | Int[Array, "B #K"] | None = None,
) -> tuple[Int[Array, "B K W"], Int[Array, "B K"], Float[Array, "B K W"]]:
  """The table of a plan: first tiles, newest tiles from the newest on, then the best of the rest.

  A row with no more than `k` tiles beside the forced ones gets all of them.

  Args:
    scores: of every tile; those of forced tiles do not count.
    span: the slots that may be touched.
    unit: slots per tile.
    sinks, local: numbers of first and of newest tiles that are always listed.
    k: how many others are, at most.
    limit: how many others each row or KV head lists, up to k; None: k.

  Returns:
    table (−1 after the end), count of its entries, and their scores (∞ for forced ones, −∞ after
    the end).
  """
  tiles = scores.shape[-1]
  top, chosen = others(scores, span, unit=unit, sinks=sinks, local=local, k=k)
  if limit is not None:
    limit = limit.reshape(*limit.shape, *(1,) * (3 - limit.ndim))
    chosen = jnp.where(jnp.arange(chosen.shape[-1]) < limit, chosen, -1)
  table, count, order = listed(span, chosen, unit=unit, sinks=sinks, local=local, tiles=tiles)
  forced = jnp.full((*top.shape[:2], min(sinks, tiles) + min(local, tiles)), jnp.inf, top.dtype)
  ranked = jnp.take_along_axis(jnp.concatenate([forced, top], -1), order, -1)
  return table, count, jnp.where(table >= 0, ranked, -jnp.inf)


def touched(
  start: Int[Array, "B *K"], tokens: int, *, width: int, stride: int
) -> Int[Array, "B *K M"]:
  """Windows [j·stride, j·stride + width) that hold any of the slots [start, start + tokens)."""
  count = -(-(tokens - 1 + width) // stride)
  first = jnp.maximum((start - width) // stride + 1, 0)
  return first[..., None] + jnp.arange(count, dtype=jnp.int32)


def begun(cache: Cache, window: Int[Array, "B *K M"], stride: int) -> Bool[Array, "B *K M"]:
  """True where the first slot of a window, j·stride, is occupied."""
  return window * stride < jnp.expand_dims(cache.used, [*range(1, window.ndim)])


def keys(
  cache: Cache, window: Int[Array, "B *K M"], *, width: int, stride: int
) -> tuple[Shaped[Array, "B K M width H"], Bool[Array, "B _ M width 1"]]:
  """The keys of windows [j·stride, j·stride + width), and which of their slots are occupied.

  Windows are those of all heads, or of each.
  """
  alike = window.ndim == 2
  slot = window[..., None] * stride + jnp.arange(width, dtype=jnp.int32)
  filled = slot < jnp.expand_dims(cache.used, [*range(1, slot.ndim)])
  k = cache.slots["k"]
  flat = slot.reshape(slot.shape[0], 1 if alike else slot.shape[1], -1)
  flat = jnp.broadcast_to(flat, (*k.shape[:2], flat.shape[-1]))
  taken = slots.take(k, flat).reshape(*k.shape[:2], *slot.shape[-2:], k.shape[-1])
  return taken, jnp.expand_dims(filled, (1, -1) if alike else -1)


def write(
  x: Shaped[Array, "B K P *rest"],
  window: Int[Array, "B *K M"],
  ok: Bool[Array, "B *K M"],
  value: Shaped[Array, "B K M *rest"],
) -> Shaped[Array, "B K P *rest"]:
  """x with the summaries of some windows, of all heads or of each, replaced."""
  at = jnp.where(ok, window, x.shape[2])
  at = at[:, None] if at.ndim == 2 else at
  return slots.put(x, jnp.broadcast_to(at, (*x.shape[:2], at.shape[-1])), value)


def with_extremes(cache: Cache, start: Int[Array, "B *K"], tokens: int, *, page: int) -> Cache:
  """The cache with "key_min" and "key_max", by channel, of the pages that hold any of the slots
  [start, start + tokens); in 8 bits where it has "key_exponent" (`ops.extremes`).
  """
  touching = touched(start, tokens, width=page, stride=page)
  k, filled = keys(cache, touching, width=page, stride=page)
  ok = begun(cache, touching, page)
  found: tuple[Array, ...]
  found = jnp.where(filled, k, jnp.inf).min(3), jnp.where(filled, k, -jnp.inf).max(3)
  names = [name for name in ("key_min", "key_max", "key_exponent") if name in cache.heads]
  if len(names) == 3:
    found = extremes.coded(*found)
  made = zip(names, found, strict=True)
  return cache.put(heads={n: write(cache.heads[n], touching, ok, x) for n, x in made})
