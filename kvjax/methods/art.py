"""ART: stop walking the cache when the output has stopped moving (ART, §3, Alg. 1)."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core import settings, slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Prompt
from kvjax.core.fields import between, bound, expect, least, one_of
from kvjax.core.leaves import Leaf
from kvjax.core.plan import Attended, Plan, Span
from kvjax.core.traits import Traits
from kvjax.families import forms, sight
from kvjax.families.full import Full
from kvjax.families.method import Aux, Method
from kvjax.families.wrapper import Wrapper
from kvjax.methods.quest import Quest
from kvjax.ops import mass_bound, selection
from kvjax.ops.walk import Order, Stop, Walked, filling_splits, read_by, walk
from kvjax.primitives import ring

ROW_WALKS = 128  # of one row, over its KV heads, under splits = "auto": enough to fill a GPU


def usual_splits(kv_heads: int, tiles: int) -> int:
  """P of splits = "auto", for rows of so many KV heads and an order of so many tiles."""
  return max(1, min(ROW_WALKS // kv_heads, tiles))


def _fits_splits(splits: int | str) -> bool:
  return splits in ("auto", "fill") if isinstance(splits, str) else splits >= 1


def spares_half(tiles: int, splits: int, patience: float | int) -> bool:
  """Whether walks are long enough to leave out half of their tiles: each reads p + 1 at least."""
  return -(-tiles // splits) >= 2 * (patience + 1)


@dataclasses.dataclass(frozen=True)
class ART(Wrapper):
  """Walks what the base method would read tile by tile, and stops once the output is stable.

  After tile t the probe x(t), a fixed part of the normalised output so far, is compared with the
  last one. Stable means that it moved by less than τ and turned by less than φ; after p stable
  tiles in a row the walk ends (Eq. 3). A tile in which the query sees no key is no step.

  The base's selection and cache are left as they are; only the order matters. A plan with a table
  is walked as it is listed: first tokens, newest ones, then by score. Without one, slots that carry
  a priority (`order`) are walked by it, and others newest first (§3.3); first tokens that the base
  always attends to come before both, and the walk does not end before they are read.

  Caches that use their slots in turn (`kvjax.primitives.ring`) are walked by whole tiles too, as
  they lie: from the tile of the newest token down, and around; or, where slots carry a priority,
  from the last tile down, for which the slots are put in order once, after each prompt. Within a
  tile the order is not the priority's.

  The price is known: a needle far back in a cache that is walked from its end is missed (§4.3).

  One walk per KV head is few walks for a GPU: programs that it leaves idle read tiles ahead of the
  detector, and the walk is the same. Or there are several: with P splits, split s walks tiles s,
  s + P, … of the order and stops by itself, by the output of its own tiles; what all of them have
  read is joined. Each needs its own p stable tiles, so that together they read
  more than one walk would; and none of them knows how little its part weighs in the whole. Where
  splits = "auto" leaves a walk fewer than 2·(p + 1) tiles, so that it could not spare half of them,
  the base attends and everything is read.

  With certify = ε nothing is left to the detector. Tiles keep the least and the largest of their
  keys, channel by channel, as Quest's pages do. The newest tile and those of the first tokens come
  first, the others by the share of the mass that their bounds allow them; and the walk ends only
  once what it has not read cannot move the output by more than ε·max‖v‖ (`kvjax.ops.mass_bound`).
  The query is rounded to the cache's dtype first: bounds and output are those of the rounded query.
  The certificate is ours, not the paper's, and asks for a base that reads everything that it keeps
  in place.

  Attributes:
    base: the method whose plan is walked.
    tau: τ, largest movement of the probe that counts as stable.
    phi: φ, largest 1 − cosine of two probes that counts as stable.
    patience: p, stable tiles in a row that end the walk; infinity never ends it.
    tile: keys per step of the walk (128).
    probe: "strided32", every H/32-th dimension of the output, or "full", all of them.
    stop: "group", the query heads of a KV head go on until all of them are stable at once, as they
      share what is loaded; or "head", each stops by itself, as in the paper.
    splits: P; 1 is the paper's walk. "auto": 128 over the number of KV heads, so that results are
      the same on every device and at every batch size. "fill": as many as fill the device, fewer at
      larger batches, and 1 on a CPU.
    sinks: first tokens whose tiles come first over a cache that is walked from its end, whatever
      the base says of them. The paper has none (0), and pays: where attention rests on the first
      tokens, a walk that stops before them is far off (`scripts.studies.art_study`).
    certify: ε, below 2; None: the detector decides. τ, φ, p and the probe then mean nothing.
  """

  replaces: ClassVar[tuple[str, ...]] = ("attend",)

  base: Method = dataclasses.field(default_factory=Full)
  tau: float | int = least(0, 1e-5)
  phi: float | int = least(0, 1e-3)
  patience: float | int = least(1, 5)
  tile: int = least(1, 128)
  probe: str = one_of(("strided32", "full"), "strided32")
  stop: str = one_of(("group", "head"), "group")
  splits: int | str = bound(_fits_splits, "1 or more, 'auto' or 'fill'", "auto")
  sinks: int = least(0, 0)
  certify: float | None = between(0, 2, None, "[)")

  def __post_init__(self):
    super().__post_init__()
    if self.certify is None:
      return
    expect(self, "splits", self.splits in ("auto", 1), "1 with certify")
    chooses = any(forms.overrides(self.base, move) for move in ("plan", "order"))
    if chooses or not self.base.traits.positional:
      raise ValueError(
        f"{type(self).__name__}.certify: found base {self.base!r}, expected one that keeps every "
        "token in place and selects none"
      )

  @property
  def traits(self) -> Traits:
    """A decoded token may stop early; a prompt's never does."""
    return super().traits.but(order_independent=False)

  @property
  def _pages(self) -> Quest:
    """Keeps the bounds of every tile's keys for the certificate."""
    return Quest(budget=self.tile, page=self.tile)

  def _by_tiles(self, cache: Cache) -> bool:
    """Whether a cache that uses its slots in turn is walked by tiles, as it lies."""
    return "ring" in cache.heads and not self.base.traits.wants_logits and not self._chooses

  @property
  def _chooses(self) -> bool:
    """Whether the base says what is read."""
    return forms.overrides(self.base, "plan")

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    pages = {} if self.certify is None else self._pages.summaries(spec)
    return {**self.base.leaves(spec, layer), **pages}

  def settle(self, at: At, cache: Cache, prompt: Prompt) -> Cache:
    cache = self.base.settle(at, cache, prompt)
    if self._by_tiles(cache):
      return self._in_order(at, cache)
    if self.certify is None:
      return cache
    return self._pages.summarise(cache, cache.seen - prompt.valid, prompt.tokens)

  def _in_order(self, at: At, cache: Cache) -> Cache:
    """Slots after the first tokens by priority, the highest last; as they are without one."""
    if at.top.order(at, cache) is None:
      return cache
    span, slot = sight.visible(at, cache).span, jnp.arange(cache.size, dtype=jnp.int32)
    rank = jnp.where(slot < span.sinks, -jnp.inf, self._ranks(at, cache, span))
    index = jnp.argsort(jnp.where(span.holds(slot), rank, jnp.inf), -1, stable=True)
    moved = {name: slots.take(x, index) for name, x in cache.slots.items()}
    return dataclasses.replace(cache, slots=moved)

  def attend(self, at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Attended:
    """Algorithm 1 for all heads at once; those that have stopped keep their state."""
    if self._spares_nothing(at, cache, plan):
      return self._read_all(at, cache, plan, q)
    if self.certify is None:
      order = self._order(at, cache, plan)
    else:
      order = self._by_bound(at, cache, plan, q.astype(cache.slots["k"].dtype))
    splits = self._splits(at, cache, self._tiles(cache, order.plan))
    limits = self.tau, self.phi, self.patience
    stop = Stop(*limits, self.probe == "full", self.stop == "head", self.certify)
    return walk(at, cache, order, q, self.tile, splits, stop)

  # ---- how many walks

  def _splits(self, at: At, cache: Cache, tiles: int) -> int:
    """P, of an order of so many tiles."""
    if self.certify is not None:
      return 1
    batch, heads = cache.pos.shape[:2]
    if self.splits == "auto":
      return usual_splits(at.heads_in_all(heads), tiles)
    if self.splits == "fill":
      return filling_splits(batch * heads, tiles * self.tile, self.tile)
    return min(int(self.splits), tiles)

  def _tiles(self, cache: Cache, plan: Plan) -> int:
    """Tiles of the order."""
    slots = cache.size if plan.table is None else plan.table.shape[-1] * plan.unit
    return -(-slots // self.tile)

  def _spares_nothing(self, at: At, cache: Cache, plan: Plan) -> bool:
    """Whether the walks of "auto" are too short to end before half of their tiles."""
    if self.splits != "auto" or self.certify is not None:
      return False
    tiles = self._tiles(cache, plan)
    return not spares_half(tiles, self._splits(at, cache, tiles), self.patience)

  def _read_all(self, at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Attended:
    """The base's attention; every walk took all of its tiles."""
    attended = self.base.attend(at, cache, plan, q)
    listed = self._listed(at, cache, plan)
    every = jnp.full((*cache.pos.shape[:2], 1, q.shape[2]), self._tiles(cache, listed), jnp.int32)
    tiles, _ = read_by(listed, cache.size, every, self.tile)
    return dataclasses.replace(attended, memo=Walked(tiles))

  # ---- the order

  def _arithmetic(self, at: At, cache: Cache, plan: Plan) -> bool:
    """Whether the order is one of whole tiles that needs no table: newest first after the first."""
    if plan.table is not None:
      return False
    return self._by_tiles(cache) or (at.top.traits.positional and at.top.order(at, cache) is None)

  def _goes_round(self, at: At, cache: Cache) -> Int[Array, "B K 2"] | None:
    """The ring that a walk goes round; None: it begins at the end of what is cached."""
    around = self._by_tiles(cache) and at.top.order(at, cache) is None
    return cache.heads["ring"] if around else None

  def _order(self, at: At, cache: Cache, plan: Plan) -> Order:
    """That of a plan: as it is listed, whole tiles newest first, or single slots by priority."""
    listed, direct = self._listed(at, cache, plan), self._arithmetic(at, cache, plan)
    return Order(listed, direct=direct, ring=self._goes_round(at, cache) if direct else None)

  def _listed(self, at: At, cache: Cache, plan: Plan) -> Plan:
    """A plan with a table: of tiles, newest first, or of single slots by priority."""
    if plan.table is not None:
      return plan
    if self._arithmetic(at, cache, plan):
      return self._newest_first(at, cache, plan)
    span = plan.span
    count = jnp.broadcast_to(span.length(), cache.pos.shape[:2])
    table = self._by_rank(at, cache, span)
    return dataclasses.replace(plan, table=table, count=count, unit=1, pinned=span.sinks)

  def _newest_first(self, at: At, cache: Cache, plan: Plan) -> Plan:
    """First tiles, then from the newest one down (§3.3); around, where slots are used in turn."""
    span = plan.span
    pinned = -(-max(span.sinks, self.sinks) // self.tile)
    last = jnp.broadcast_to((span.stop + self.tile - 1) // self.tile - 1, cache.pos.shape[:2])
    oldest, newest = jnp.maximum(span.start // self.tile, pinned), last
    if (turning := self._goes_round(at, cache)) is not None:
      slot = ring.place(turning, (cache.seen - 1)[:, None], cache.size)
      newest = jnp.maximum(jnp.maximum(slot, 0) // self.tile, pinned - 1)
    count = jnp.minimum(pinned, last + 1) + jnp.maximum(last - oldest + 1, 0)
    t = jnp.arange(-(-cache.size // self.tile), dtype=jnp.int32)
    tile = (newest + pinned)[..., None] - t
    around = tile + (last - pinned + 1)[..., None]
    table = jnp.where(t < pinned, t, jnp.where(tile < pinned, around, tile))
    table = jnp.where(t < count[..., None], table, -1)
    return dataclasses.replace(plan, table=table, count=count, unit=self.tile, pinned=pinned)

  def _ranks(self, at: At, cache: Cache, span: Span) -> Float[Array, "B K S"]:
    """What slots are walked by, highest first: the first ones, then by priority or newest first."""
    priority = at.top.order(at, cache)
    rank = (cache.pos if priority is None else priority).astype(jnp.float32)
    return jnp.where(jnp.arange(cache.size) < span.sinks, jnp.inf, rank)

  def _by_rank(self, at: At, cache: Cache, span: Span) -> Int[Array, "B K S"]:
    """The slots of the span in the order of their ranks, equal ones by index; −1 after them."""
    slot = jnp.arange(cache.size, dtype=jnp.int32)
    key = jnp.where(span.holds(slot), -self._ranks(at, cache, span), jnp.inf)
    table = jnp.argsort(key, -1, stable=True).astype(jnp.int32)
    return jnp.where(slot < span.length()[..., None], table, -1)

  def _by_bound(self, at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Order:
    """All tiles, by what they may weigh.

    q is the query that is walked with, in the dtype of the keys: bounds of another prove nothing.
    The newest tile's bounds do not know the new token yet: it is one of those that are read first.
    """
    window = plan.window
    if window is not None and window.view is not None:
      raise NotImplementedError(
        f"{type(self).__name__}.certify: {at.name} turns its query for its sinks"
      )
    span, size = plan.span, -(-cache.size // self.tile)
    slot = jnp.arange(size * self.tile, dtype=jnp.int32)
    held = jnp.broadcast_to(span.holds(slot), (*cache.pos.shape[:2], slot.shape[0]))
    keys = held.reshape(*cache.pos.shape[:2], size, self.tile).sum(-1, dtype=jnp.int32)
    extremes = cache.heads["key_min"], cache.heads["key_max"]
    extremes = mass_bound.holding(*extremes, cache.slots["k"].dtype)
    bounds, errors = mass_bound.logit_bounds(q, *extremes, at.env.soft_cap)
    # The most that any head of the group may give a tile.
    share = jax.nn.softmax(mass_bound.tile_mass(bounds, keys), -1).max(2)
    t, pinned = jnp.arange(size, dtype=jnp.int32), -(-span.sinks // self.tile)
    newest = (span.stop - 1)[..., None] // self.tile
    rank = jnp.where(t < pinned, 3.0, jnp.where(t == newest, 2.0, share))
    _, table = selection.other_tiles(at, rank, span, unit=self.tile, sinks=0, local=0, k=size)

    def ordered(x: Array) -> Array:
      index = jnp.maximum(table, 0)
      return jnp.take_along_axis(x, index if x.ndim == 3 else index[:, :, None], -1)

    listed = jnp.where(table >= 0, ordered(keys), 0)
    unread = mass_bound.unread_mass(ordered(bounds), ordered(errors), listed)
    count = (table >= 0).sum(-1, dtype=jnp.int32)
    plan = dataclasses.replace(plan, table=table, count=count, unit=self.tile, pinned=pinned + 1)
    return Order(plan, unread=unread)

  def _form(self, move: str) -> Any:
    if move == "observe" and self.certify is None:  # reports, and keeps nothing of its own
      return forms.form(self.base, move)
    return super()._form(move)

  def observe(
    self, at: At, cache: Cache, q: Array, plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    """Reports `tiles` [B, K, G], the steps that every query head took."""
    tiles = attended.memo.tiles
    cache, aux = self.base.observe(at, cache, q, plan, dataclasses.replace(attended, memo=None))
    if self.certify is not None:
      cache = self._pages._renewed(at, cache)
    return cache, {**aux, "tiles": tiles}


def _example(cls: type[ART], budget: int) -> Method:
  return cls(tau=0.5, phi=0.1, patience=1, tile=max(1, budget // 6), splits=1)


def _usual(cls: type[ART], budget: int) -> Method:
  return cls(splits=1)


def _neutral(cls: type[ART], length: int) -> Method:
  return cls(patience=math.inf, splits=1)


settings.register(ART, example=_example, usual=_usual, neutral=_neutral)
