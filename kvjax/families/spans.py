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
  maps: Float[Array, "*batch U U"],
  quantile: float | Float[Array, " *#batch"],
  length: Int[Array, " *batch"],
) -> Float[Array, " *batch"]:
  """θ: a quantile of the lower triangle (diagonal included) of each map's first `length` tokens.

  Between two values it is interpolated. Maps are not negative.
  """
  token = np.arange(maps.shape[-1])
  inside = (token <= token[:, None]) & (token[:, None] < length[..., None, None])
  values = jnp.where(inside, maps, jnp.inf).reshape(*maps.shape[:-2], -1)
  place = quantile * jnp.maximum(length * (length + 1) // 2 - 1, 0)
  below = jnp.floor(place).astype(jnp.int32)
  low = _ordered(values, below)
  more = (values <= low[..., None]).sum(-1) > jnp.ceil(place).astype(jnp.int32)
  high = jnp.where(more, low, jnp.where(values > low[..., None], values, jnp.inf).min(-1))
  return jnp.where(length > 0, low + (high - low) * (place - below), 0)


def _ordered(
  values: Float[Array, "*batch N"], index: Int[Array, " *batch"]
) -> Float[Array, " *batch"]:
  """Entry `index` of the values in order, none of them negative.

  A digit of its bits at a time: floats that are not negative are ordered as their bits are. Sorting
  would be as fast, and takes far longer to compile.
  """
  bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
  digits = jnp.arange(1, 16, dtype=jnp.uint32)

  def narrow(i: Array, found: Array) -> Array:
    shift = (28 - 4 * i).astype(jnp.uint32)
    tried = found[..., None] + (digits << shift)
    smaller = (bits[..., None, :] < tried[..., None]).sum(-1)
    fits = (smaller <= index[..., None]).sum(-1, dtype=jnp.uint32)
    return found + (fits << shift)

  found = jax.lax.fori_loop(0, 8, narrow, jnp.zeros(index.shape, jnp.uint32))
  return jax.lax.bitcast_convert_type(found, jnp.float32)


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
  flat = scores.reshape(*scores.shape[:-2], -1)
  around = jnp.take(flat, x * size + middle - x, -1, mode="clip")
  around = jnp.where(real, around, -jnp.inf)
  best = jnp.argmax(around, -1)
  start = (jnp.asarray(x[:, 0]) + best).astype(jnp.int32)
  return start, jnp.asarray(middle[:, 0], jnp.int32) - start + 1, around.max(-1)


def suppress(
  start: Int[Array, "*batch D"],
  stop: Int[Array, "*batch D"],
  scores: Float[Array, "*batch D"],
  overlap: float | Float[Array, " *#batch"],
  count: int,
) -> tuple[Int[Array, "*batch C"], Int[Array, "*batch C"]]:
  """Greedy non-maximum suppression of squares [start, stop)², down to the best `count` spans.

  Whatever overlaps a kept span by more than `overlap` (area of the intersection over that of the
  union) is dropped; spans without a positive score too. Best first, of equal ones the first.
  """
  index = jnp.broadcast_to(jnp.arange(scores.shape[-1], dtype=jnp.int32), scores.shape)
  start, stop = (jnp.broadcast_to(x, scores.shape) for x in (start, stop))
  area = (stop - start) ** 2
  overlap = jnp.asarray(overlap)[..., None]
  alive = jnp.where(scores > 0, scores, -jnp.inf)
  none = jnp.float32(-jnp.inf), jnp.int32(2**31 - 1), jnp.int32(0), jnp.int32(0)
  kept = []
  for _ in range(count):
    of_all = alive, index, start, stop
    score, best, *span = jax.lax.reduce(of_all, none, _better, (scores.ndim - 1,))
    a, b = (jnp.where(score > -jnp.inf, x, 0) for x in span)
    kept += [a, b]
    best, a, b = best[..., None], a[..., None], b[..., None]
    common = jnp.maximum(jnp.minimum(stop, b) - jnp.maximum(start, a), 0) ** 2
    union = area + (b - a) ** 2 - common
    alive = jnp.where((common > overlap * union) | (index == best), -jnp.inf, alive)
  return jnp.stack(kept[::2], -1), jnp.stack(kept[1::2], -1)


def _better(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
  """Of two (score, index, …) the one of higher score, of equal ones the first."""
  first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
  return tuple(jax.lax.select(first, x, y) for x, y in zip(a, b, strict=True))


def divide(
  maps: Float[Array, "*batch U U"],
  quantile: float | Float[Array, " *#batch"],
  overlap: float | Float[Array, " *#batch"],
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
  length: Int[Array, "*batch C"],
  ratio: Float[Array, "*batch C"],
  rate: float | Float[Array, " *#batch"],
  most: int,
) -> Int[Array, "*batch C"]:
  """n = clip(⌈length · r_v⌉, 1, most), r_v = exp(−λ(1 − r_a)) (Eq. 7); 0 for spans of no token."""
  n = jnp.ceil(length * jnp.exp(-jnp.asarray(rate)[..., None] * (1 - ratio))).astype(jnp.int32)
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


def packed(start: Array, stop: Array, count: Array, ratio: Array) -> Float[Array, "*batch 4 C"]:
  """What is known of the spans of blocks as one array; the integers are small enough for it."""
  return jnp.stack([x.astype(jnp.float32) for x in (start, stop, count, ratio)], -2)


def unpacked(spans: Float[Array, "*batch 4 C"]) -> tuple[Array, Array, Array, Array]:
  """Starts, stops, numbers of vectors, int32, and r_a."""
  start, stop, count = (spans[..., i, :].astype(jnp.int32) for i in range(3))
  return start, stop, count, spans[..., 3, :]
