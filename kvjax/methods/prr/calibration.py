"""The predictor's factors, calibrated on the last tokens of each prompt (PRR, §4.2).

Per row and layer: of all (α, β, γ) of the `grid`, ties to the first, those of the highest
score-weighted hit rate, the mean over tokens and KV heads of Eq. 4.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.core import slots
from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Span
from kvjax.families import sight
from kvjax.families.selective import Selective
from kvjax.methods.prr.forecast import Predictor, Smoothed, state_of
from kvjax.methods.prr.hit_rates import weights
from kvjax.ops import selection

# What is tried: α, how fast the level follows; β, how fast the trend does; γ, how far the trend is
# drawn out.
ALPHAS = tuple(i / 10 for i in range(1, 10))
BETAS = tuple(i / 10 for i in range(10))
GAMMAS = tuple(i / 4 for i in range(5))
# Counted tokens below which a chunk leaves the factors as they were.
LEAST = 8


def grid() -> Float[Array, "C 3"]:
  """All (α, β, γ), the last one varying fastest."""
  axes = jnp.meshgrid(*(jnp.array(x, jnp.float32) for x in (ALPHAS, BETAS, GAMMAS)), indexing="ij")
  return jnp.stack(axes, -1).reshape(-1, 3)


@dataclasses.dataclass(frozen=True)
class Calibration:
  """A predictor that follows a prompt, and the search for its factors.

  Attributes:
    predictor: of the scores.
    base: what scores and selects tiles.
    every: of how many tokens one counts.
    searches: whether factors are searched for at all.
  """

  predictor: Predictor
  base: Selective
  every: int
  searches: bool

  def follow(
    self,
    at: At,
    cache: Cache,
    last: Int[Array, " B"],
    q: Float[Array, "B K G T H"],
    qpos: Int[Array, "B T"],
    ratio: float,
  ) -> tuple[Smoothed, Float[Array, "B 3"]]:
    """The predictor after a prompt's last tokens, and its factors, calibrated on them (Eq. 5).

    All (α, β) are followed side by side, and with them the row's factors of before; γ only enters
    forecasts. Ŝ has ⌊ratio·k⌋ tiles.
    """
    own, old = cache.rows["factors"], state_of(cache)
    tried = own[None, :, :2]
    candidates = grid()
    if self.searches:
      pairs = candidates[:: len(GAMMAS), None, :2]
      pairs = jnp.broadcast_to(pairs, (pairs.shape[0], *own[:, :2].shape))
      tried = jnp.concatenate([pairs, tried])
    alpha, beta = (tried[..., i, None, None] for i in range(2))
    update = jax.vmap(self.predictor.updated, (0, None, 0, 0, None, None))

    def step(carry: tuple, token: tuple[Array, Array], compare: bool) -> tuple[tuple, None]:
      state, last, rates, tokens = carry
      q, t = token
      # The cache as token t found it, but for summaries of tiles that were not full then.
      pos = jnp.where(cache.pos <= t[:, None, None], cache.pos, -1)
      now = cache.put(slots={"pos": pos}, rows={"seen": t + 1, "used": t + 1})
      visible = sight.visible(at, now)
      scores = self.base._scores(at, now, q, visible)
      if compare:
        others = jax.tree.map(lambda x: x[:-1], state)
        found, counts = self.hit_rates(at, now, scores, visible.span, others, last, ratio)
        rates, tokens = rates + jnp.where(counts, found, 0), tokens + counts
      real, new = t >= 0, update(state, scores, alpha, beta, last, t)
      state = jax.tree.map(lambda n, o: jnp.where(real[:, None, None], n, o), new, state)
      return (state, jnp.where(real, t, last), rates, tokens), None

    def group(carry: tuple, tokens: tuple[Array, Array]) -> tuple[tuple, None]:
      before, counted = (jax.tree.map(lambda x, i=i: x[i], tokens) for i in (slice(-1), -1))
      # Unrolled, the states of all (α, β) pass through memory once for all these tokens.
      each = functools.partial(step, compare=False)
      carry, _ = jax.lax.scan(each, carry, before, unroll=True)
      return step(carry, counted, self.searches)

    shape = tried.shape[0], *old.level.shape
    start = jax.tree.map(lambda x: jnp.broadcast_to(x, shape), old)
    rates = jnp.zeros((candidates.shape[0], own.shape[0]), jnp.float32)
    carry: tuple = start, last, rates, jnp.zeros_like(last)
    q, qpos = (x.reshape(-1, self.every, *x.shape[1:]) for x in (jnp.moveaxis(q, 3, 0), qpos.T))
    (state, _, rates, tokens), _ = jax.lax.scan(group, carry, (q, qpos))
    best, enough = jnp.argmax(at.sum_heads(rates), 0), tokens >= LEAST
    row = jnp.arange(own.shape[0])
    pair = jnp.where(enough, best // len(GAMMAS), -1)
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
    ratio: float,
  ) -> tuple[Float[Array, "C B"], Bool[Array, " B"]]:
    """Score-weighted hit rate of every candidate of the grid, summed over KV heads.

        Σ_{j∈Ŝ∩S} w_j / Σ_{j∈S} w_j                                                    (Eq. 4)

    without the tiles that are read anyway. `state` holds those of all (α, β) [N, B, K, P] after
    token `last`. The second result says which rows have had a score before, and more than k tiles
    to choose from.
    """
    tiles, wide = self.base.tiles, self.base._widened(ratio)
    first, newest = tiles.forced
    forced: dict[str, Any] = {"unit": tiles.unit, "sinks": first, "local": newest}
    k = tiles.best
    top, index = selection.other_tiles(at, scores, span, **forced, k=k + 1)
    counts = (index[..., k:] >= 0).any(-1).all(-1) & (last >= 0)
    counts &= cache.seen >= tiles.dense_below
    top, index = top[..., :k], index[..., :k]
    weight = weights(top, index >= 0, tiles.positive)
    missing = scores.shape[-1]
    worth = slots.put(
      jnp.zeros_like(scores), jnp.where(index >= 0, index, missing), weight
    )  # w_j of S, 0 elsewhere
    total = weight.sum(-1)

    every = jax.tree.map(lambda x: x.reshape(-1, *scores.shape[1:]), state)  # [N·B, K, P]
    many = every.level.shape[0] // scores.shape[0]
    where, when = jax.tree.map(lambda x: jnp.tile(x, (many, *(1,) * (x.ndim - 1))), (span, last))

    def rate(gamma: Array) -> Float[Array, "N B"]:
      ahead = self.predictor.forecast(every, gamma, when)
      _, guess = selection.other_tiles(at, ahead, where, **forced, k=wide, ordered=False)
      guess = guess.reshape(many, *total.shape, -1)
      found = jax.vmap(slots.take, (None, 0))(worth, jnp.maximum(guess, 0))
      found = jnp.where(guess >= 0, found, 0).sum(-1)
      return jnp.where(total > 0, found / jnp.where(total > 0, total, 1), 1.0).sum(-1)

    gammas = jnp.array(GAMMAS, jnp.float32)[:, None, None, None]
    rates = jax.lax.map(rate, gammas)
    return jnp.moveaxis(rates, 0, 1).reshape(-1, rates.shape[-1]), counts
