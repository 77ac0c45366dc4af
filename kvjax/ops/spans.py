"""Semantic spans of a block, read from its attention map, and the vectors that stand for them.

Ltri-LLM's pieces as functions of arrays (Tang et al., 2025, §3.2, §3.3, App. E). A map A [U, U]
holds what the U queries of a block (rows) give to its U keys (columns), summed over heads; it is
lower triangular. A span is a run of tokens [start, stop) of the block; where there are fewer than
asked for, start = stop = 0. Leading axes are arbitrary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

MODES = ("row", "col", "rowcol")


def threshold(
  maps: Float[Array, "*batch U U"], quantile: float, length: Int[Array, " *batch"]
) -> Float[Array, " *batch"]:
  """θ: a quantile of the lower triangle (diagonal included) of each map's first `length` tokens.

  Between two values it is interpolated.
  """
  rows, columns = np.tril_indices(maps.shape[-1])
  values = jnp.where(rows < length[..., None], maps[..., rows, columns], jnp.inf)
  values = jnp.sort(values, -1)
  place = quantile * jnp.maximum(length * (length + 1) // 2 - 1, 0)
  below = jnp.floor(place).astype(jnp.int32)
  low = jnp.take_along_axis(values, below[..., None], -1)[..., 0]
  high = jnp.take_along_axis(values, jnp.ceil(place).astype(jnp.int32)[..., None], -1)[..., 0]
  return jnp.where(length > 0, low + (high - low) * (place - below), 0)


def triangle_scores(
  maps: Float[Array, "*batch U U"], theta: Float[Array, " *batch"]
) -> Float[Array, "*batch U U"]:
  """TA(x, y) = Σ_{x ≤ j ≤ i ≤ y} (A_ij − θ) at [x, y], for x ≤ y; −∞ elsewhere (Eq. 5)."""
  size = maps.shape[-1]
  excess = jnp.tril(maps - theta[..., None, None])
  # Above the diagonal is nothing: Σ_{i ≤ y} Σ_{j ≥ x} is the triangle's sum.
  down = jnp.cumsum(excess, -2)
  both = jax.lax.cumsum(down, down.ndim - 1, reverse=True)
  return jnp.where(np.triu(np.ones((size, size), bool)), jnp.swapaxes(both, -1, -2), -jnp.inf)


@functools.cache
def _antidiagonals(size: int) -> tuple[np.ndarray, np.ndarray]:
  """start x [2U − 1, ⌈U/2⌉] of the spans with x + y = 0, 1, …, in order, and which are real."""
  middle = np.arange(2 * size - 1)[:, None]
  first = np.maximum(middle - size + 1, 0)
  x = first + np.arange((size + 1) // 2)
  return np.minimum(x, middle // 2), 2 * x <= middle


def candidates(
  scores: Float[Array, "*batch U U"],
) -> tuple[Int[Array, "*batch D"], Int[Array, "*batch D"], Float[Array, "*batch D"]]:
  """The best span around every midpoint: D = 2U − 1 starts, stops and scores (App. E).

  Of equal ones the span that starts first.
  """
  size = scores.shape[-1]
  x, real = _antidiagonals(size)
  middle = np.arange(2 * size - 1)[:, None]
  around = jnp.where(real, scores[..., x, middle - x], -jnp.inf)
  best = jnp.argmax(around, -1)
  start = (jnp.asarray(x[:, 0]) + best).astype(jnp.int32)
  return start, jnp.asarray(middle[:, 0], jnp.int32) - start + 1, around.max(-1)


def suppress(
  start: Int[Array, "*batch D"],
  stop: Int[Array, "*batch D"],
  scores: Float[Array, "*batch D"],
  overlap: float,
  count: int,
) -> tuple[Int[Array, "*batch C"], Int[Array, "*batch C"]]:
  """Greedy non-maximum suppression of squares [start, stop)², down to the best `count` spans.

  Whatever overlaps a kept span by more than `overlap` (area of the intersection over that of the
  union) is dropped; spans without a positive score too. Best first, of equal ones the first.
  """
  alive = jnp.where(scores > 0, scores, -jnp.inf)
  kept = []
  for _ in range(count):
    best = jnp.argmax(alive, -1, keepdims=True)
    some = jnp.take_along_axis(alive, best, -1) > -jnp.inf
    a, b = (jnp.where(some, jnp.take_along_axis(x, best, -1), 0) for x in (start, stop))
    kept.append((a, b))
    common = jnp.maximum(jnp.minimum(stop, b) - jnp.maximum(start, a), 0)
    union = (stop - start) ** 2 + (b - a) ** 2 - common**2
    gone = (common**2 > overlap * union) | (jnp.arange(alive.shape[-1]) == best)
    alive = jnp.where(gone, -jnp.inf, alive)
  a, b = (jnp.concatenate(x, -1).astype(jnp.int32) for x in zip(*kept, strict=True))
  return a, b


def divide(
  maps: Float[Array, "*batch U U"],
  quantile: float,
  overlap: float,
  count: int,
  length: Int[Array, " *batch"] | None = None,
) -> tuple[Int[Array, "*batch C"], Int[Array, "*batch C"]]:
  """The `count` best spans of each map: starts and stops, best first (§3.2).

  `length` says how many tokens of the block are real; None: all.
  """
  size = maps.shape[-1]
  length = jnp.full(maps.shape[:-2], size, jnp.int32) if length is None else length
  scores = triangle_scores(maps, threshold(maps, quantile, length))
  scores = jnp.where(jnp.arange(size) < length[..., None, None], scores, -jnp.inf)
  return suppress(*candidates(scores), overlap, count)


def inside(
  start: Int[Array, "*batch C"], stop: Int[Array, "*batch C"], size: int
) -> Bool[Array, "*batch C U"]:
  """Which tokens each span holds."""
  token = jnp.arange(size)
  return (token >= start[..., None]) & (token < stop[..., None])


def ratios(
  maps: Float[Array, "*batch U U"],
  start: Int[Array, "*batch C"],
  stop: Int[Array, "*batch C"],
  mode: str,
) -> Float[Array, "*batch C"]:
  """r_a: a span's share of the attention that it and its neighbours hold (§3.3.2, Fig. 5).

  Neighbours are, for "row", the span's queries over earlier keys; for "col", later queries over the
  span's keys; for "rowcol" both. The paper gives no formula: this is the reading of its figure.
  Without any attention the share is 1.
  """
  size = maps.shape[-1]
  held = inside(start, stop, size).astype(maps.dtype)
  token = jnp.arange(size)
  earlier = (token < start[..., None]).astype(maps.dtype)
  later = (token >= stop[..., None]).astype(maps.dtype)

  def total(queries: Array, keys: Array) -> Array:
    return jnp.einsum("...ci,...ij,...cj->...c", queries, maps, keys)

  own = every = total(held, held)
  if mode in ("row", "rowcol"):
    every = every + total(held, earlier)
  if mode in ("col", "rowcol"):
    every = every + total(later, held)
  return jnp.where(every > 0, own / jnp.where(every > 0, every, 1), 1.0)


def vector_counts(
  length: Int[Array, "*batch C"], ratio: Float[Array, "*batch C"], rate: float, most: int
) -> Int[Array, "*batch C"]:
  """n = clip(⌈length · r_v⌉, 1, most), r_v = exp(−λ(1 − r_a)) (Eq. 7); 0 for spans of no token."""
  n = jnp.ceil(length * jnp.exp(-rate * (1 - ratio))).astype(jnp.int32)
  return jnp.where(length > 0, jnp.clip(n, 1, most), 0)


def elect(
  votes: Float[Array, "*batch U"], held: Bool[Array, "*batch C U"], counts: Int[Array, "*batch C"]
) -> Bool[Array, "*batch C U"]:
  """The `counts` tokens of each span that have most votes (Eq. 6); of equal ones the first."""
  token = jnp.arange(votes.shape[-1])
  mine, other = votes[..., :, None], votes[..., None, :]
  ahead = (other > mine) | ((other == mine) & (token < token[:, None]))
  rank = jnp.einsum("...ij,...cj->...ci", ahead.astype(jnp.int32), held.astype(jnp.int32))
  return held & (rank < counts[..., None])
