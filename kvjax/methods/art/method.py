"""ART: stop walking the cache when the output has stopped moving (ART, §3, Alg. 1)."""

import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.core import settings, slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Prompt, Turn
from kvjax.core.fields import between, bound, expect, least, one_of
from kvjax.core.leaves import Layout, Leaf
from kvjax.core.plan import Attended, Plan
from kvjax.core.traits import Traits
from kvjax.families import forms, sight
from kvjax.families.full import Full
from kvjax.families.method import Aux, Method
from kvjax.families.wrapper import Wrapper, of_base
from kvjax.methods.art import certificate, kernel, known, mass
from kvjax.methods.art.order import Order, Traversal, tiles_of
from kvjax.methods.art.splits import Walked, read_by, spares_half, usual_splits
from kvjax.methods.art.walk import Stop
from kvjax.methods.quest import Quest
from kvjax.ops import attention


def _fits_splits(splits: int | str) -> bool:
  return splits in ("auto", "fill") if isinstance(splits, str) else splits >= 1


def _fits_turn(tokens: float | int) -> bool:
  return tokens >= 1 and (math.isinf(tokens) or tokens == int(tokens))


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

  Caches that use their slots in turn (`kvjax.primitives.ring`) are walked by whole tiles as they
  lie: from that of the newest token down, and around; or, where slots carry a priority, from the
  last one down, for which slots are put in order once, after each prompt, tile by tile.

  With a margin a walk first reads as many tiles as it took in the last step and the margin, by as
  many programs as fill a device, and all others where there is no stop among these
  (`kvjax.methods.art.known`). It stops no sooner than without. It is ours, and asks for a base
  that reads all that it keeps in place.

  With by_mass = s tiles are walked by the mass that earlier steps gave them, begun by a prompt's
  last queries, and every s-th token's walk reads all (`kvjax.methods.art.mass`). It is ours, too,
  and asks for the same. A finite s has no kernel yet; with infinity the prompt's order stays, which
  costs a step nothing and may be walked to known lengths.

  The price is known: a needle far back in a cache that is walked from its end is missed (§4.3).

  One walk per KV head is few walks for a GPU: programs that it leaves idle read tiles ahead of the
  detector, and the walk is the same. Or there are several: with P splits, split s walks tiles s,
  s + P, … of the order and stops by itself, by the output of its own tiles; what all have read is
  joined. Each needs its own p stable tiles, so that together they read more than one walk would;
  and none knows how little its part weighs in the whole. Where splits = "auto" leaves a walk fewer
  than 2·(p + 1) tiles, half of which it could not spare, the base attends and everything is read.

  With certify = ε nothing is left to the detector: the walk ends only once what it has not read
  cannot move the output by more than ε·max‖v‖ (`kvjax.methods.art.certificate`). Tiles keep bounds
  of their keys, as Quest's pages do, and are walked by the share of the mass that these allow. The
  query is rounded to the cache's dtype first: bounds and output are those of the rounded query. It
  is ours, not the paper's, and asks for a base that reads everything that it keeps in place.

  >>> import kvjax
  >>> method = kvjax.ART(kvjax.SnapKV(1024), tau=1e-4)
  >>> method.base.budget, method.tile
  (1024, 128)
  >>> kvjax.ART(kvjax.Full(), certify=2)  # an error that bounds cannot promise
  Traceback (most recent call last):
  ...
  ValueError: ART.certify: found 2, expected 0 or more, below 2

  Attributes:
    base: the method whose plan is walked.
    tau: τ, largest movement of the probe that counts as stable.
    relative: whether τ bounds ‖x(t) − x(t − 1)‖ / ‖x(t)‖ rather than ‖x(t) − x(t − 1)‖, as values
      may be a hundred times as large in a model's last layers as in its first. Ours; with τ below
      √(2φ) the test of the direction then follows from it.
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
    margin: tiles that are read at once beyond the last step's stop, a sixteenth of all, say; None:
      walks know nothing of each other.
    by_mass: s, tokens from one whole walk to the next in an order by mass (32, say); infinity: the
      order by the mass of a prompt's last queries; None: that of the paper.
    certify: ε, below 2; None: the detector decides. τ, φ, p and the probe then mean nothing.
  """

  replaces: ClassVar[tuple[str, ...]] = ("attend",)
  _covers: ClassVar[Any] = of_base("_covers")  # `keep` adds a statistic, and moves nothing

  base: Method = dataclasses.field(default_factory=Full)
  tau: float | int = least(0, 1e-5)
  phi: float | int = least(0, 1e-3)
  patience: float | int = least(1, 5)
  tile: int = least(1, 128)
  probe: str = one_of(("strided32", "full"), "strided32")
  stop: str = one_of(("group", "head"), "group")
  splits: int | str = bound(_fits_splits, "1 or more, 'auto' or 'fill'", "auto")
  sinks: int = least(0, 0)
  relative: bool = False
  margin: int | None = least(1, None)
  by_mass: float | int | None = bound(_fits_turn, "a whole number from 1 on, or infinity", None)
  certify: float | None = between(0, 2, None, "[)")

  def __post_init__(self):
    super().__post_init__()
    if self._alone is None:
      return
    expect(self, "splits", self.splits in ("auto", 1), f"1 with {self._alone}")
    moves: tuple[str, ...] = ("plan", "order")
    others = self.certify is None
    if self.margin is not None:
      expect(self, "margin", others, "None with certify")
      expect(self, "stop", self.stop == "group", "'group' with margin")
    if self.by_mass is not None:
      expect(self, "by_mass", others, "None with certify")
      expect(self, "by_mass", not (self._weighs and self.margin), "None or infinity with margin")
    if self.certify is None:
      moves = *moves, "window", "span"
    chooses = any(forms.overrides(self.base, move) for move in moves)
    if chooses or not self.base.traits.positional:
      raise ValueError(
        f"{type(self).__name__}.{self._alone}: found base {self.base!r}, expected one that keeps "
        "every token in place and selects none"
      )

  @property
  def _alone(self) -> str | None:
    """The setting that asks for one walk over all that a base keeps; None: neither is set."""
    asked = {"certify": self.certify, "margin": self.margin, "by_mass": self.by_mass}
    return next((name for name, value in asked.items() if value is not None), None)

  @property
  def _weighs(self) -> bool:
    """True if steps weigh the tiles that they read."""
    return self.by_mass is not None and math.isfinite(self.by_mass)

  @property
  def traits(self) -> Traits:
    """A decoded token may stop early; a prompt's never does. Its last queries begin an order."""
    base = super().traits
    return base.but(order_independent=False, chunkable=base.chunkable and self.by_mass is None)

  @property
  def _pages(self) -> Quest:
    """Keeps the bounds of every tile's keys for the certificate."""
    return Quest(budget=self.tile, page=self.tile)

  def _traversal(self, cache: Cache) -> Traversal:
    """The orders of §3.3; a ring is walked by tiles unless the base selects or asks for logits."""
    own = self.base.traits.wants_logits or forms.overrides(self.base, "plan")
    turns = cache.layout is Layout.RING
    return Traversal(self.tile, self.sinks, by_tiles=turns and not own)

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    own = {} if self.certify is None else self._pages.summaries(spec)
    if self.by_mass is not None:
      tiles = (-(-spec.capacity // self.tile),)
      moved = Leaf("heads", tiles, jnp.int32, along_slots=True)  # distances to what is there
      own = {"mass": Leaf("heads", tiles, along_slots=True)} if self._weighs else {"moved": moved}
    if self.margin is not None:
      own["walk"] = Leaf("heads", dtype=jnp.int32)  # tiles of the next one's first read; 0: all
    return {**self.base.leaves(spec, layer), **own}

  def settle(self, at: At, cache: Cache, prompt: Prompt) -> Cache:
    cache = self.base.settle(at, cache, prompt)
    if (traversal := self._traversal(cache)).by_tiles:
      return traversal.laid(at, cache)
    if self.certify is None:
      return cache
    return self._pages.summarise(cache, cache.seen - prompt.valid, prompt.tokens)

  def keep(self, at: At, cache: Cache, turn: Turn, new: slots.Slots) -> Cache:
    cache = self.base.keep(at, cache, turn, new)
    if self._weighs:
      return mass.begun(at, cache, turn, self.tile)
    if self.by_mass is not None:
      cache = mass.ranking(at, cache, turn, self.tile, self.sinks)
    return cache if self.margin is None else self._walked_once(at, cache, turn, self.margin)

  def _walked_once(self, at: At, cache: Cache, turn: Turn, margin: int) -> Cache:
    """With the length that a walk of the prompt's last query says."""
    last, pos, _ = attention.last_queries(turn, 1)
    order = self._order(at, cache, sight.visible(at, cache), last[:, :, :, 0])
    walked = kernel.walks(at, cache, order, last[:, :, :, 0], 1, self._stop).noted(Walked)
    assert walked is not None and order.plan.count is not None
    taken = walked.tiles[:, :, 0]
    length = jnp.where(taken < order.plan.count, taken + margin, 0)  # L after a walk by itself
    return cache.put(heads={"walk": jnp.where(pos >= 0, length, cache.heads["walk"])})

  def attend(self, at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Attended:
    """Algorithm 1 over the tiles of the plan in order (`order`, `walk`), in P splits (`splits`)."""
    if self.splits == "auto" and self._alone is None:
      tiles = tiles_of(plan, cache.size, self.tile)
      if not spares_half(tiles, self._splits(at, cache, tiles), self.patience):
        return self._read_all(at, cache, plan, q)
    order, stop = self._order(at, cache, plan, q), self._stop
    if self.margin is not None:
      return kernel.known_walks(at, cache, order, q, cache.heads["walk"], self.margin, stop)
    splits = self._splits(at, cache, tiles_of(order.plan, cache.size, self.tile))
    return kernel.walks(at, cache, order, q, splits, stop)

  @property
  def _stop(self) -> Stop:
    limits = self.tau, self.phi, self.patience, self.relative
    return Stop(*limits, self.probe == "full", self.stop == "head", self.certify)

  def _order(self, at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Order:
    """Order of §3.3; for a certificate, by the bounds of the rounded query."""
    if self.by_mass is not None and self._weighs:
      return mass.order(at, cache, plan, self.tile, self.sinks, int(self.by_mass))
    if self.by_mass is not None:
      return mass.ranked(cache, plan, self.tile, self.sinks)
    if self.certify is None:
      return self._traversal(cache).order(at, cache, plan)
    if plan.window is not None and plan.window.view is not None:
      raise NotImplementedError(
        f"{type(self).__name__}.certify: {at.name} turns its query for its sinks"
      )
    return certificate.by_bound(at, cache, plan, q.astype(cache.slots["k"].dtype), self.tile)

  def _splits(self, at: At, cache: Cache, tiles: int) -> int:
    """P, of an order of so many tiles."""
    if self._alone is not None:
      return 1
    batch, heads = cache.pos.shape[:2]
    if self.splits == "auto":
      return usual_splits(at.heads_in_all(heads), tiles)
    if self.splits == "fill":
      return kernel.filling_splits(batch * heads, tiles * self.tile, self.tile)
    return min(int(self.splits), tiles)

  def _read_all(self, at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Attended:
    """The base's attention; every walk took all of its tiles."""
    attended = self.base.attend(at, cache, plan, q)
    listed = self._traversal(cache).listed(at, cache, plan)
    every = tiles_of(listed, cache.size, self.tile)
    walked = jnp.full((*cache.pos.shape[:2], 1, q.shape[2]), every, jnp.int32)
    tiles = read_by(listed, cache.size, walked, self.tile)[0]
    return attended.noting(Walked(tiles))

  def _form(self, move: str) -> Any:
    own = self.certify is not None or self.margin is not None or self._weighs
    kept = {"observe": own or None, "keep": self.by_mass or self.margin}
    if move in kept and kept[move] is None:  # reports, and keeps nothing of its own
      return self.base._form(move)
    return super()._form(move)

  def observe(
    self, at: At, cache: Cache, q: Array, plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    """Reports `tiles` [B, K, G], the steps that every query head took."""
    cache, aux = self.base.observe(at, cache, q, plan, attended)
    if self.certify is not None:
      cache = self._pages._renewed(at, cache)
    if (found := attended.noted(known.Found)) is not None:
      cache = cache.put(heads={"walk": found.length})
    if (weights := attended.noted(mass.Weights)) is not None:
      cache = mass.renewed(cache, weights)
    walked = attended.noted(Walked)
    return cache, aux if walked is None else {**aux, "tiles": walked.tiles}


settings.register(
  ART,
  example=lambda cls, budget: cls(tau=0.5, phi=0.1, patience=1, tile=max(1, budget // 6), splits=1),
  usual=lambda cls, budget: cls(splits=1),
  neutral=lambda cls, length: cls(patience=math.inf, splits=1),
)
