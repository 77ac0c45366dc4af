"""Base of methods that read a part of a cache, of any kind."""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core import slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Carry, Prompt
from kvjax.core.fields import expect, least
from kvjax.core.leaves import Leaf
from kvjax.core.plan import Attended, Plan
from kvjax.core.traits import Traits
from kvjax.families import forms
from kvjax.families.full import Full
from kvjax.families.method import Aux, Method
from kvjax.families.shapes import check_shape
from kvjax.families.wrapper import Wrapper
from kvjax.ops import selection, slot_shards
from kvjax.ops import summaries as summaries_ops
from kvjax.ops.scores import Scored


@dataclasses.dataclass(frozen=True)
class Tiles:
  """The tiles that a step reads.

  Attributes:
    unit: slots per tile.
    best: k, tiles chosen by score in addition to the forced ones.
    first, newest: numbers of first and of newest tiles that every plan lists.
    dense_below: rows of fewer tokens attend to everything.
    positive: whether scores are never negative (probabilities, say).
  """

  unit: int
  best: int
  first: int = 0
  newest: int = 0
  dense_below: int = 0
  positive: bool = False

  @property
  def forced(self) -> tuple[int, int]:
    """Numbers of first and of newest tiles."""
    return self.first, self.newest


@dataclasses.dataclass(frozen=True)
class Selective(Wrapper, moves=("tiles", "summaries", "summarise", "score")):
  """Each step reads, per KV head, the tiles of a cache that matter most to its query.

  What the cache keeps is the base's: every token, unless another base is given. `Quest(256,
  base=SnapKV(1024))` reads 256 of the 1,024 tokens that SnapKV keeps.

  A plan lists the first tiles and the newest, for any scores, and the best of the others. A
  subclass says what a tile is and how many are read (`tiles`), and how they are scored (`score`)
  from summaries (`summaries`, `summarise`) that it keeps on the cache's heads shelf. Summaries
  follow the cache: they are built after a prompt and renewed after each step where the new token
  belongs, so that a step scores with summaries that do not know its own token yet. Its tile is
  therefore one of the forced ones wherever scores come from summaries.

  Prompts are attended to densely.

  Attributes:
    base: what the cache keeps. Of methods that evict, those that attend as the full cache does and
      write one slot a step; and only where tiles may hold tokens in any order (`anywhere`).
    dense_layers: first layers that attend to everything.
  """

  replaces: ClassVar[tuple[str, ...]] = ("plan",)
  anywhere: ClassVar[bool] = False
  minds_depth: ClassVar[bool] = False  # whether its layers differ without dense ones, too

  _: dataclasses.KW_ONLY
  base: Method = dataclasses.field(default_factory=Full)
  dense_layers: int = least(0, 0)

  def __post_init__(self):
    super().__post_init__()
    expected = "Full(): its tiles are neighbours in the text"
    expect(self, "base", self.anywhere or self.base.traits.positional, expected)
    own = [move for move in _UNREADABLE if forms.overrides(self.base, move)]
    own += ["wants_logits"] * self.base.traits.wants_logits
    expect(self, "base", not own, f"a method without {', '.join(own)} of its own")

  @property
  def traits(self) -> Traits:
    """A prompt's tokens see all that is cached, a decoded one what is selected."""
    return super().traits.but(order_independent=False)

  # ---- what a subclass says

  @property
  def tiles(self) -> Tiles:
    """Size of a tile, and how many tiles are read."""
    raise NotImplementedError

  def summaries(self, spec: CacheSpec) -> dict[str, Leaf]:
    """Summaries [B, K, ...], by name, and what else layers that select keep."""
    return {}

  def summarise(self, cache: Cache, start: Int[Array, "B *K"], tokens: int) -> Cache:
    """The cache with the summaries of all windows that slots [start, start + tokens) belong to."""
    return cache

  def score(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan
  ) -> Float[Array, "B K P"]:
    """Importance of every tile to the newest token's queries; undefined where there is no tile.

    Layers that attend to everything are not asked.
    """
    raise NotImplementedError

  @property
  def _scored(self) -> Scored | None:
    """The operation that `score` is, for what does more in one go; None: any."""
    return None

  @property
  def _renewal(self) -> summaries_ops.Renewal | None:
    """The operation that `summarise` is where the newest token belongs; None: any."""
    return None

  def _renewed(self, at: At, cache: Cache, *after: Array) -> Cache:
    """`summarise` where the newest token belongs, once these arrays are known (`slots.after`)."""
    if not at.top.traits.positional:  # the newest token may be in any slot
      newest = jnp.argmax(cache.pos, -1).astype(jnp.int32)
      return self.summarise(cache, slots.after(newest, *after), 1)
    return summaries_ops.renewed(at, cache, self.summarise, self._renewal or None, *after)

  def _entering(self, at: At, cache: Cache) -> summaries_ops.Renewal | None:
    """The renewal, where the newest page is read whatever its score, and a kernel enters tokens."""
    own = all(at.top._form(x) is self._form(x) for x in ("plan", "plan_and_attend", "observe"))
    if not own or forms.overrides(self, "observe", Selective):
      return None
    if self._dense(at) or not self.tiles.newest:
      return None
    if at.top.entry != "enter_token" or not at.top.traits.positional:
      return None
    return self._renewal if summaries_ops.enters(at, cache, self._renewal or None) else None

  # ---- what follows from it

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    held = self.base.leaves(spec, layer)
    if layer < self.dense_layers:
      return held
    slots = dataclasses.replace(spec, capacity=self.capacity(spec, layer))
    return {**held, **self.summaries(slots)}

  def plan(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan, carry: Carry
  ) -> tuple[Plan, Carry]:
    if self._dense(at):
      return visible, carry
    return self._select(at, cache, self._scores(at, cache, q, visible), visible), carry

  def _scores(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan
  ) -> Float[Array, "B K P"]:
    """Result of `score`, its shape checked, in float32."""
    scores = self.score(at, cache, q, visible)
    check_shape(at, "score", scores, (*cache.pos.shape[:2], None))
    return scores.astype(jnp.float32)

  def _dense(self, at: At) -> bool:
    """True if the layer attends to everything."""
    return self.dense_layers > 0 and at.of_layer(lambda layer: layer < self.dense_layers)

  def _widened(self, ratio: float) -> int:
    """⌊ratio·k⌋."""
    return math.floor(ratio * self.tiles.best + 1e-9)  # 1.15 · 20 is 22.999… in floats

  def _most(self, ratio: float) -> int:
    """The most tiles that a row gets in addition to the forced ones: short rows get all."""
    return max(
      self._widened(ratio), -(-self.tiles.dense_below // self.tiles.unit) - sum(self.tiles.forced)
    )

  def _width(self, count: int, ratio: float = 1.0) -> int:
    """W, entries of a plan's table where the cache has `count` tiles."""
    sinks, local = (min(n, count) for n in self.tiles.forced)
    return min(sinks + local + min(self._most(ratio), count), count)

  def _select(
    self,
    at: At,
    cache: Cache,
    scores: Float[Array, "B K P"],
    visible: Plan,
    ratio: float = 1.0,
  ) -> Plan:
    """Sinks (pinned), newest tiles from the newest on, then the ⌊ratio·k⌋ best by score."""
    span = visible.span
    sinks, local = self.tiles.forced
    most, limit = self._most(ratio), self._widened(ratio)
    if not at.top.traits.positional:  # the newest tokens stand anywhere: their tiles score highest
      scores = _newest_first(cache, scores, self.tiles.unit, local)
      most, limit, local = most + local, limit + local, 0
    scores = slot_shards.candidates(
      at, scores, span, k=most, unit=self.tiles.unit, sinks=sinks, local=local
    )
    found = selection.best_tiles(
      at,
      scores,
      span,
      k=most,
      limit=limit,
      dense_below=self.tiles.dense_below,
      ordered=visible.needs.order,
      unit=self.tiles.unit,
      sinks=sinks,
      local=local,
    )
    return self._listed(visible, found, sinks)

  def _listed(self, visible: Plan, found: selection.Table, sinks: int) -> Plan:
    """The plan of the tiles that a search found, of which the sinks come first."""
    table, count, scores = found
    pinned = min(sinks, table.shape[-1])
    return visible.listed(table, count, unit=self.tiles.unit, pinned=pinned, scores=scores)

  def _select_together(
    self,
    at: At,
    scores: Float[Array, "B K N P"],
    visible: Sequence[Plan],
    ratios: Sequence[float],
    stops: Int[Array, "B K N"] | None = None,
  ) -> list[Plan]:
    """The results of N calls of `_select`, by one search where a kernel does that.

    Args:
      at: where this runs; slots are not split.
      scores, visible, ratios: of each call.
      stops: one past the last slot of each span, where the caller has them.
    """
    spans = [plan.span for plan in visible]
    sinks, local = self.tiles.forced
    found = selection.best_tiles_of_each(
      *(at, scores, spans),
      stops=stops,
      alike=visible[0].window is None and not visible[0].needs.own_span,
      k=[self._most(ratio) for ratio in ratios],
      limit=[self._widened(ratio) for ratio in ratios],
      dense_below=self.tiles.dense_below,
      ordered=visible[0].needs.order,
      unit=self.tiles.unit,
      sinks=sinks,
      local=local,
    )
    pinned = min(sinks, scores.shape[3])
    return [self._listed(plan, x, pinned) for plan, x in zip(visible, found, strict=True)]

  def settle(self, at: At, cache: Cache, prompt: Prompt) -> Cache:
    cache = self.base.settle(at, cache, prompt)
    if self._dense(at):
      return cache
    if not at.top.traits.positional:  # a cut moves all of them
      return self.summarise(cache, jnp.zeros_like(cache.seen), cache.size)
    start = cache.seen - prompt.valid
    return slot_shards.summarised(at, cache, self.summarise, start, prompt.tokens)

  def observe(
    self, at: At, cache: Cache, q: Array, plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    cache, aux = self.base.observe(at, cache, q, plan, attended)
    if self._dense(at) or self._entering(at, cache):
      return cache, aux
    return self._renewed(at, cache, attended.state.l), aux  # what has been read of them


# What a base may not have of its own: a step would read otherwise, or write more than a slot.
_UNREADABLE = ("window", "insert", "attend", "stage", "fill", "active")


def _newest_first(
  cache: Cache, scores: Float[Array, "B K P"], unit: int, local: int
) -> Float[Array, "B K P"]:
  """Scores in which the tiles of the newest tokens are ∞, `local` of them at least."""
  if not local:
    return scores
  tiles = scores.shape[-1]
  missing = tiles * unit - cache.size
  pos = jnp.pad(cache.pos, ((0, 0), (0, 0), (0, missing)), constant_values=-1)
  newest = pos.reshape(*scores.shape, unit).max(-1)
  least_new = jax.lax.top_k(newest, min(local, tiles))[0][..., -1:]
  return jnp.where((newest >= least_new) & (newest >= 0), jnp.inf, scores)


class SelectiveTokens(Selective):
  """Selects single tokens: `budget` of them, the first `sinks` and the newest `local` included.

  These are fields of the subclasses, in whose own order they are given.
  """

  budget: int
  sinks: int
  local: int

  @property
  def tiles(self) -> Tiles:
    best = self.budget - self.sinks - self.local
    return Tiles(unit=1, best=best, first=self.sinks, newest=self.local)
