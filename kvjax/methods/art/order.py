"""The order in which tiles are visited (ART, §3.3)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core import slots
from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Plan, Span
from kvjax.families import sight
from kvjax.primitives import ring
from kvjax.primitives.trees import pytree


@pytree("tile", "direct")
@dataclasses.dataclass(frozen=True)
class Order:
  """In which order tiles are walked.

  Attributes:
    plan: what is walked, with a table; its pinned entries are never skipped.
    tile: keys of a tile (static).
    unread: for a certificate, the `unread_mass` after each tile of the order.
    direct: whether the table has whole tiles, newest first after the pinned ones, so that a kernel
      can do without it.
    ring: int32 [B, K, 2], the slots that such an order goes round; None: it begins at the end of
      what is cached.
    moved: int32 [B, K, P], of an order of whole tiles, first ones and then from the last one down,
      how far from its place the tile is that is walked there; the newest is never skipped. None:
      there is no such order.
    whole: bool [B], rows whose walks do not end, of an order by the mass of tiles, which is asked
      for then.
  """

  plan: Plan
  tile: int
  unread: Array | None = None
  direct: bool = False
  ring: Array | None = None
  whole: Array | None = None
  moved: Array | None = None

  @property
  def kept(self) -> int:
    """Tiles that a walk does not end before."""
    return -(-self.plan.pinned * self.plan.unit // self.tile)


def tiles_of(plan: Plan, size: int, tile: int) -> int:
  """Tiles of the order of a plan, in a cache of `size` slots."""
  listed = size if plan.table is None else plan.table.shape[-1] * plan.unit
  return -(-listed // tile)


@dataclasses.dataclass(frozen=True)
class Traversal:
  """The orders of §3.3: by recency, first tokens before all, or by the priority that slots carry.

  Attributes:
    tile, sinks: as in `ART`.
    by_tiles: whether the cache uses its slots in turn and is walked by tiles, as it lies.
  """

  tile: int
  sinks: int
  by_tiles: bool

  def order(self, at: At, cache: Cache, plan: Plan) -> Order:
    """Order of a plan: as it is listed, whole tiles newest first, or single slots by priority."""
    listed, direct = self.listed(at, cache, plan), self._is_direct(at, cache, plan)
    return Order(listed, self.tile, None, direct, self._ring(at, cache) if direct else None)

  def listed(self, at: At, cache: Cache, plan: Plan) -> Plan:
    """The plan with a table: its own, of tiles by recency, or of single slots by priority."""
    if plan.table is not None:
      return plan
    by_recency = self._is_direct(at, cache, plan)
    return self._newest_first(at, cache, plan) if by_recency else _by_priority(at, cache, plan)

  def laid(self, at: At, cache: Cache) -> Cache:
    """Slots after the first tokens by priority, the highest last; as they are without one."""
    if at.top.order(at, cache) is None:
      return cache
    span, slot = sight.visible(at, cache).span, jnp.arange(cache.size, dtype=jnp.int32)
    rank = jnp.where(slot < span.sinks, -jnp.inf, _ranks(at, cache, span))
    index = jnp.argsort(jnp.where(span.holds(slot), rank, jnp.inf), -1, stable=True)
    moved = {name: slots.take(x, index) for name, x in cache.slots.items()}
    return dataclasses.replace(cache, slots=moved)

  def _is_direct(self, at: At, cache: Cache, plan: Plan) -> bool:
    """True of an order of whole tiles that needs no table: newest first after the first."""
    if plan.table is not None:
      return False
    return self.by_tiles or (at.top.traits.positional and at.top.order(at, cache) is None)

  def _ring(self, at: At, cache: Cache) -> Int[Array, "B K 2"] | None:
    """The ring that a walk goes round; None: it begins at the end of what is cached."""
    around = self.by_tiles and at.top.order(at, cache) is None
    return cache.heads["ring"] if around else None

  def _newest_first(self, at: At, cache: Cache, plan: Plan) -> Plan:
    """First tiles, then from the newest one down; around, where slots are used in turn."""
    span = plan.span
    pinned = -(-max(span.sinks, self.sinks) // self.tile)
    last = jnp.broadcast_to((span.stop + self.tile - 1) // self.tile - 1, cache.pos.shape[:2])
    oldest, newest = jnp.maximum(span.start // self.tile, pinned), last
    if (turning := self._ring(at, cache)) is not None:
      slot = ring.place(turning, (cache.seen - 1)[:, None], cache.size)
      newest = jnp.maximum(jnp.maximum(slot, 0) // self.tile, pinned - 1)
    count = jnp.minimum(pinned, last + 1) + jnp.maximum(last - oldest + 1, 0)
    t = jnp.arange(-(-cache.size // self.tile), dtype=jnp.int32)
    tile = (newest + pinned)[..., None] - t
    around = tile + (last - pinned + 1)[..., None]
    table = jnp.where(t < pinned, t, jnp.where(tile < pinned, around, tile))
    table = jnp.where(t < count[..., None], table, -1)
    return dataclasses.replace(plan, table=table, count=count, unit=self.tile, pinned=pinned)


def _by_priority(at: At, cache: Cache, plan: Plan) -> Plan:
  """The slots of the span in the order of their ranks, equal ones by index; −1 after them."""
  span = plan.span
  count = jnp.broadcast_to(span.length(), cache.pos.shape[:2])
  slot = jnp.arange(cache.size, dtype=jnp.int32)
  key = jnp.where(span.holds(slot), -_ranks(at, cache, span), jnp.inf)
  table = jnp.argsort(key, -1, stable=True).astype(jnp.int32)
  table = jnp.where(slot < span.length()[..., None], table, -1)
  return dataclasses.replace(plan, table=table, count=count, unit=1, pinned=span.sinks)


def _ranks(at: At, cache: Cache, span: Span) -> Float[Array, "B K S"]:
  """Ranks of slots, walked from the highest: first tokens, then by priority or the newest."""
  priority = at.top.order(at, cache)
  rank = (cache.pos if priority is None else priority).astype(jnp.float32)
  return jnp.where(jnp.arange(cache.size) < span.sinks, jnp.inf, rank)
