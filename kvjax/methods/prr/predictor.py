"""PRR's predictor: every tile's score, smoothed from token to token, and its factors (PRR, §4.2).

A cache holds its state: "level" and "trend" [B, K, P] of every tile, and on the rows shelf
"factors" [B, 3], α, β and γ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.core import slots
from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Span
from kvjax.families.selective import Tiles
from kvjax.ops import foresight, selection, smoothing
from kvjax.ops.smoothing import Smoothed

# Counted tokens below which a chunk leaves the factors as they were.
LEAST = 8

Score = Callable[[Cache, Array], tuple[Array, Span]]


def factors_of(cache: Cache) -> tuple[Float[Array, "B 1 1"], ...]:
  """α, β, γ of every row."""
  return tuple(cache.rows["factors"][:, i, None, None] for i in range(3))


def state_of(cache: Cache) -> Smoothed:
  """Level and trend of every tile."""
  return Smoothed(cache.heads["level"], cache.heads["trend"])


@dataclasses.dataclass(frozen=True)
class Predictor:
  """Forecasts of the next step's scores.

  Attributes:
    kind: "holt" or "ema".
    tiles: what a step reads.
    wide: ⌊ρ·k⌋, tiles that are predicted beside the forced ones.
  """

  kind: str
  tiles: Tiles
  wide: int

  @property
  def _forced(self) -> dict[str, Any]:
    """Which tiles are read whatever their scores."""
    first, newest = self.tiles.forced
    return {"unit": self.tiles.unit, "sinks": first, "local": newest}

  def scored(self, state: Smoothed, t: Int[Array, " B"]) -> Bool[Array, "B 1 P"]:
    """Tiles that have had a score once token t has attended: the full ones before its own."""
    tile = jnp.arange(state.level.shape[-1], dtype=jnp.int32)
    return tile < (t // self.tiles.unit)[:, None, None]

  def advanced(
    self, cache: Cache, scores: Float[Array, "B K P"]
  ) -> tuple[Smoothed, Float[Array, "B K P"]]:
    """The state after the newest token, whose scores these are, and ŝ of the next step."""
    t = cache.seen - 1
    alpha, beta, gamma = factors_of(cache)
    new = self.updated(state_of(cache), scores, alpha, beta, t - 1, t)
    return new, self.forecast(new, gamma, t)

  def updated(
    self,
    state: Smoothed,
    scores: Float[Array, "B K P"],
    alpha: Float[Array, "#B 1 1"],
    beta: Float[Array, "#B 1 1"],
    last: Int[Array, " B"],
    t: Int[Array, " B"],
  ) -> Smoothed:
    """The state after token t, given that after token `last` (−1: there was none)."""
    begun, there = self.scored(state, last), self.scored(state, t)
    return state.updated(scores, alpha, beta, begun, there, self.kind)

  def forecast(
    self, state: Smoothed, gamma: Float[Array, "#B 1 1"], last: Int[Array, " B"]
  ) -> Float[Array, "B K P"]:
    """ŝ of the step after token `last`; ∞ for tiles that have no score yet."""
    return jnp.where(self.scored(state, last), state.forecast(gamma), jnp.inf)

  def follow(
    self,
    at: At,
    cache: Cache,
    last: Int[Array, " B"],
    q: Float[Array, "B K G T H"],
    qpos: Int[Array, "B T"],
    score: Score,
    *,
    every: int,
    searches: bool,
  ) -> tuple[Smoothed, Float[Array, "B 3"]]:
    """The predictor after a prompt's last tokens, and its factors, calibrated on them.

    All (α, β) are followed side by side, and with them the row's factors of before; γ only enters
    forecasts. `score` says what a token's query makes of the tiles of the cache that it found, of
    which it may see a span; every `every`-th token counts, if it `searches` for factors at all.
    """
    own, old = cache.rows["factors"], state_of(cache)
    tried = own[None, :, :2]
    candidates = smoothing.grid()
    if searches:
      pairs = candidates[:: len(smoothing.GAMMAS), None, :2]
      pairs = jnp.broadcast_to(pairs, (pairs.shape[0], *own[:, :2].shape))
      tried = jnp.concatenate([pairs, tried])
    alpha, beta = (tried[..., i, None, None] for i in range(2))
    update = jax.vmap(self.updated, (0, None, 0, 0, None, None))

    def step(carry: tuple, token: tuple[Array, Array], compare: bool) -> tuple[tuple, None]:
      state, last, rates, tokens = carry
      q, t = token
      now = _as_of(cache, t)
      scores, span = score(now, q)
      if compare:
        others = jax.tree.map(lambda x: x[:-1], state)
        found, counts = self.hit_rates(at, now, scores, span, others, last)
        rates, tokens = rates + jnp.where(counts, found, 0), tokens + counts
      real, new = t >= 0, update(state, scores, alpha, beta, last, t)
      state = jax.tree.map(lambda n, o: jnp.where(real[:, None, None], n, o), new, state)
      return (state, jnp.where(real, t, last), rates, tokens), None

    def group(carry: tuple, tokens: tuple[Array, Array]) -> tuple[tuple, None]:
      before, counted = (jax.tree.map(lambda x, i=i: x[i], tokens) for i in (slice(-1), -1))
      # Unrolled, the states of all (α, β) pass through memory once for all these tokens.
      carry, _ = jax.lax.scan(
        lambda carry, token: step(carry, token, False), carry, before, unroll=True
      )
      return step(carry, counted, searches)

    shape = tried.shape[0], *old.level.shape
    start = jax.tree.map(lambda x: jnp.broadcast_to(x, shape), old)
    rates = jnp.zeros((candidates.shape[0], own.shape[0]), jnp.float32)
    carry: tuple = start, last, rates, jnp.zeros_like(last)
    q, qpos = (x.reshape(-1, every, *x.shape[1:]) for x in (jnp.moveaxis(q, 3, 0), qpos.T))
    (state, _, rates, tokens), _ = jax.lax.scan(group, carry, (q, qpos))
    best, enough = jnp.argmax(at.sum_heads(rates), 0), tokens >= LEAST
    row = jnp.arange(own.shape[0])
    pair = jnp.where(enough, best // len(smoothing.GAMMAS), -1)
    factors = jnp.where(enough[:, None], candidates[best], own)
    return jax.tree.map(lambda x: x[pair, row], state), factors

  def hit_rates(
    self,
    at: At,
    cache: Cache,
    scores: Float[Array, "B K P"],
    span: Span,
    state: Smoothed,
    last: Int[Array, " B"],
  ) -> tuple[Float[Array, "C B"], Bool[Array, " B"]]:
    """Score-weighted hit rate of every candidate of the grid (Eq. 4), summed over KV heads.

    `state` holds those of all (α, β) [N, B, K, P] after token `last`. The second result says which
    rows have had a score before, and more than k tiles to choose from.
    """
    k, forced = self.tiles.best, self._forced
    top, index = selection.other_tiles(at, scores, span, **forced, k=k + 1)
    counts = (index[..., k:] >= 0).any(-1).all(-1) & (last >= 0)
    counts &= cache.seen >= self.tiles.dense_below
    top, index = top[..., :k], index[..., :k]
    weight = foresight.weights(top, index >= 0, self.tiles.positive)
    missing = scores.shape[-1]
    worth = slots.put(
      jnp.zeros_like(scores), jnp.where(index >= 0, index, missing), weight
    )  # w_j of S, 0 elsewhere
    total = weight.sum(-1)

    every = jax.tree.map(lambda x: x.reshape(-1, *scores.shape[1:]), state)  # [N·B, K, P]
    many = every.level.shape[0] // scores.shape[0]
    where, when = jax.tree.map(lambda x: jnp.tile(x, (many, *(1,) * (x.ndim - 1))), (span, last))

    def rate(gamma: Array) -> Float[Array, "N B"]:
      ahead = self.forecast(every, gamma, when)
      _, guess = selection.other_tiles(at, ahead, where, **forced, k=self.wide, ordered=False)
      guess = guess.reshape(many, *total.shape, -1)
      found = jax.vmap(slots.take, (None, 0))(worth, jnp.maximum(guess, 0))
      found = jnp.where(guess >= 0, found, 0).sum(-1)
      return jnp.where(total > 0, found / jnp.where(total > 0, total, 1), 1.0).sum(-1)

    gammas = jnp.array(smoothing.GAMMAS, jnp.float32)[:, None, None, None]
    rates = jax.lax.map(rate, gammas)
    return jnp.moveaxis(rates, 0, 1).reshape(-1, rates.shape[-1]), counts


def _as_of(cache: Cache, t: Int[Array, " B"]) -> Cache:
  """The cache as token t found it, but for summaries of tiles that were not full then."""
  pos = jnp.where(cache.pos <= t[:, None, None], cache.pos, -1)
  return cache.put(slots={"pos": pos}, rows={"seen": t + 1, "used": t + 1})
