"""What methods that keep the whole cache and read a part of it have in common."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import dispatch, entrance
from kvjax.fields import least
from kvjax.leaves import Leaf
from kvjax.method import Aux, Method
from kvjax.ops import attention, context
from kvjax.types import At, Attended, Cache, CacheSpec, Plan, Prompt


@dataclasses.dataclass(frozen=True)
class Selective(
  Method,
  moves=(
    *("unit", "forced", "best", "dense_below", "positive"),
    *("summaries", "summarise", "renew", "tile_scores"),
  ),
):
  """Keeps every token; each step reads, per KV head, the tiles that matter most to its query.

  A plan lists the first `forced[0]` tiles and the newest `forced[1]`, whatever their scores, and
  the `best` of the others. A subclass says what a tile is (`unit`), how many are read, and how
  they are scored (`tile_scores`) from summaries (`summaries`, `summarise`) that it keeps on the
  cache's heads shelf. Summaries follow the cache: they are built after a prompt and renewed after
  each step where the new token belongs, so that a step scores with summaries that do not know its
  own token yet. Its tile is therefore one of the forced ones wherever scores come from summaries.

  Prompts are attended to densely.

  Attributes:
    dense_layers: first layers that attend to everything.
  """

  _: dataclasses.KW_ONLY
  dense_layers: int = least(0, 0)

  # ---- what a subclass says

  @property
  def unit(self) -> int:
    """Slots per tile."""
    raise NotImplementedError

  @property
  def forced(self) -> tuple[int, int]:
    """Numbers of first and of newest tiles that every plan lists."""
    raise NotImplementedError

  @property
  def best(self) -> int:
    """k, tiles chosen by score beside the forced ones."""
    raise NotImplementedError

  @property
  def dense_below(self) -> int:
    """Rows of fewer tokens attend to everything."""
    return 0

  @property
  def positive(self) -> bool:
    """Whether scores are never negative (probabilities, say)."""
    return False

  def summaries(self, spec: CacheSpec) -> dict[str, Leaf]:
    """Summaries [B, K, ...], by name, and what else layers that select keep."""
    return {}

  def summarise(self, cache: Cache, start: Int[Array, " B"], tokens: int) -> Cache:
    """The cache with the summaries of all windows that slots [start, start + tokens) belong to."""
    return cache

  def renew(self, at: At, cache: Cache) -> Cache:
    """The cache with the summaries that the newest token belongs to."""
    return context.summarised(at, cache, self.summarise, cache.seen - 1, 1)

  def tile_scores(self, at: At, cache: Cache, q: Float[Array, "B K G H"]) -> Float[Array, "B K P"]:
    """Importance of every tile to the newest token's queries; whatever where there is no tile."""
    raise NotImplementedError

  # ---- what follows from it

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    summaries = {} if layer < self.dense_layers else self.summaries(spec)
    return {**super().leaves(spec, layer), **summaries}

  def score(self, at: At, cache: Cache, q: Float[Array, "B K G H"]) -> Float[Array, "B K P"] | None:
    if self._dense(at):
      return None
    scores = self.tile_scores(at, cache, q)
    entrance.check_shape(at, "tile_scores", scores, (*cache.pos.shape[:2], None))
    return scores

  def _dense(self, at: At) -> bool:
    """Whether the layer attends to everything."""
    return self.dense_layers > 0 and at.of_layer(lambda layer: layer < self.dense_layers)

  def _widened(self, ratio: float) -> int:
    """⌊ratio·k⌋."""
    return math.floor(ratio * self.best + 1e-9)  # 1.15 · 20 is 22.999… in floats

  def _most(self, ratio: float) -> int:
    """The most tiles that a row gets beside the forced ones: short rows get all."""
    return max(self._widened(ratio), -(-self.dense_below // self.unit) - sum(self.forced))

  def _width(self, count: int, ratio: float = 1.0) -> int:
    """W, entries of a plan's table where the cache has `count` tiles."""
    sinks, local = (min(n, count) for n in self.forced)
    return min(sinks + local + min(self._most(ratio), count), count)

  def select(self, at: At, cache: Cache, scores: Float[Array, "B K P"], ratio: float = 1.0) -> Plan:
    """Sinks (pinned), newest tiles from the newest on, then the ⌊ratio·k⌋ best by score."""
    window = at.top.window(at, (cache.seen - 1)[:, None])
    span = at.top.span(at, cache, window)
    sinks, local = self.forced
    forced = {"unit": self.unit, "sinks": sinks, "local": local}
    rows = {"limit": self._widened(ratio), "dense_below": self.dense_below}
    scores = context.candidates(at, scores, span, **forced, k=self._most(ratio))
    table, count, ranked = dispatch.best_tiles(
      at, scores, span, **forced, k=self._most(ratio), **rows
    )
    return Plan(span, table, count, ranked, unit=self.unit, pinned=min(sinks, table.shape[-1]))

  def _select_together(
    self,
    at: At,
    caches: Sequence[Cache],
    scores: Float[Array, "B K N P"],
    ratios: Sequence[float],
    stops: Int[Array, "B K N"] | None = None,
  ) -> list[Plan]:
    """What N calls of `select` give, by one search where a kernel does that.

    Args:
      at: where this runs; slots are not split.
      caches: as each call would find them.
      scores, ratios: of each call.
      stops: one past the last slot of each span, where somebody has them at hand.
    """
    windows = [at.top.window(at, (c.seen - 1)[:, None]) for c in caches]
    spans = [at.top.span(at, c, window) for c, window in zip(caches, windows, strict=True)]
    heads, tiles = scores.shape[1], scores.shape[3]

    def joined(each: Sequence[Array]) -> Int[Array, "B K N"]:
      return jnp.stack([jnp.broadcast_to(x, (x.shape[0], heads)) for x in each], 2)

    alike = windows[0] is None and not at.top.overrides("span")
    start = spans[0].start if alike else joined([s.start for s in spans])
    stops = joined([s.stop for s in spans]) if stops is None else stops
    sinks, local = self.forced
    found = dispatch.best_tiles_of_each(
      *(at, scores, start, stops),
      unit=self.unit,
      span_sinks=spans[0].sinks,
      sinks=sinks,
      local=local,
      k=[self._most(ratio) for ratio in ratios],
      limit=[self._widened(ratio) for ratio in ratios],
      dense_below=self.dense_below,
    )
    if found is None:
      each = zip(caches, jnp.moveaxis(scores, 2, 0), ratios, strict=True)
      return [self.select(at, cache, x, ratio) for cache, x, ratio in each]
    made = zip(spans, found, strict=True)
    return [Plan(span, *x, unit=self.unit, pinned=min(sinks, tiles)) for span, x in made]

  def settle(self, at: At, cache: Cache, prompt: Prompt) -> Cache:
    if self._dense(at):
      return cache
    start = cache.seen - prompt.valid
    return context.summarised(at, cache, self.summarise, start, prompt.tokens)

  def observe(
    self, at: At, cache: Cache, q: Array, plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    if self._dense(at):
      return cache, {}
    return self.renew(at, cache), {}


class SelectiveTokens(Selective):
  """Selects single tokens: `budget` of them, the first `sinks` and the newest `local` included.

  These are fields of the subclasses, in whose own order they are given.
  """

  budget: int
  sinks: int
  local: int

  @property
  def unit(self) -> int:
    return 1

  @property
  def forced(self) -> tuple[int, int]:
    return self.sinks, self.local

  @property
  def best(self) -> int:
    return self.budget - self.sinks - self.local


def token_weights(
  at: At, cache: Cache, q: Float[Array, "B K G H"], active: Bool[Array, "B K"] | None = None
) -> Float[Array, "B K S"]:
  """ln of every slot's exact softmax probability under the newest token's queries.

  The probability is the mean over the group. Logarithms keep the order of small ones that float32
  would round to 0. Slots that the query may not see get −∞. For heads that are not `active` the
  kernel reads no key, and gives anything.
  """
  qpos = (cache.seen - 1)[:, None]
  window = at.top.window(at, qpos)
  k = cache.slots["k"]
  # The kernel has one query for all keys, and sees those of the span.
  one = (window is None or window.view is None) and not dispatch.hides(at, window)
  if one and dispatch.choose_for(at, "key_weights", q, k) == "pallas":
    span = at.top.span(at, cache, window)
    seen: dict[str, Any] = {"span_sinks": span.sinks, "blocks": cache.size, "log": True}
    if active is not None:
      seen["active"] = active.astype(jnp.int32)
    where = span.start, span.stop, span.stop
    return dispatch.kernel("key_weights", "pallas")(q.astype(k.dtype), k, *where, **seen)
  span = context.span(at, cache, at.top.span(at, cache, window))
  ok = (cache.pos >= 0) & span.holds(jnp.arange(cache.size, dtype=jnp.int32))
  if window is not None:
    ok &= window.sees(cache.pos)[:, :, 0]
  logits = attention.windowed_logits(at, q[:, :, :, None], qpos, k, cache.pos, window)[:, :, :, 0]
  # A NaN stays where it is, to be chosen and heard of: in the denominator it would be everywhere.
  bad = jnp.isnan(logits)
  logits = jnp.where(ok[:, :, None] & ~bad, logits, -jnp.inf)
  weights = jax.nn.logsumexp(context.log_softmax(at, logits), 2) - math.log(q.shape[2])
  weights = jnp.where(bad.any(2), jnp.nan, weights)
  return jnp.where(ok, weights, -jnp.inf)
