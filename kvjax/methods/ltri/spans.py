"""Semantic spans of a block, read from its attention map (Ltri-LLM §3.2, App. E).

A map A [U, U] holds what the U queries of a block (rows) give to its U keys (columns); it is lower
triangular. A span is a run of tokens [start, stop) of the block; where there are
fewer than asked for, start = stop = 0. Leading axes are arbitrary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.core.context import At
from kvjax.methods.ltri import kernel
from kvjax.primitives import softmax_state
from kvjax.primitives.softmax_state import State


def maps_of(
  at: At, k: Float[Array, "B K E U H"], asked: State, ok: Bool[Array, "B E Q U"]
) -> Float[Array, "B K G E Q U"]:
  """Probability that queries of a block give to those of its keys that are ok (Eqs. 1 to 3).

  Head by head. `asked` holds the queries [B, K, G, E, Q, H] in the place of o, and their m and l.
  """
  logits = jnp.einsum("bkgeuh,bkevh->bkgeuv", asked.o, k, preferred_element_type=jnp.float32)
  logits = softmax_state.capped(logits * k.shape[-1] ** -0.5, at.env.soft_cap)
  logits = jnp.where(ok[:, None, None], logits, -jnp.inf)
  return softmax_state.probabilities(asked, logits)


def threshold(
  at: At,
  maps: Float[Array, "*batch U U"],
  quantile: float | Float[Array, " *#batch"],
  length: Int[Array, " *batch"],
) -> Float[Array, " *batch"]:
  """θ: a quantile of the lower triangle (diagonal included) of each map's first `length` tokens.

  Between two values it is interpolated. Maps are not negative.
  """
  place = quantile * jnp.maximum(length * (length + 1) // 2 - 1, 0)
  below, above = (x.astype(jnp.int32) for x in (jnp.floor(place), jnp.ceil(place)))
  found = kernel.between(at, maps, length, below, above)
  low, high = found or _between(maps, length, below, above)
  return jnp.where(length > 0, low + (high - low) * (place - below), 0)


def _between(
  maps: Float[Array, "*batch U U"],
  length: Int[Array, " *batch"],
  place: Int[Array, " *batch"],
  following: Int[Array, " *batch"],
) -> tuple[Float[Array, " *batch"], Float[Array, " *batch"]]:
  """Entries `place` and `following`, the same or the next, of each map's triangle in order."""
  token = np.arange(maps.shape[-1])
  inside = (token <= token[:, None]) & (token[:, None] < length[..., None, None])
  values = jnp.where(inside, maps, jnp.inf).reshape(*maps.shape[:-2], -1)
  low = _ordered(values, place)
  more = (values <= low[..., None]).sum(-1) > following
  return low, jnp.where(more, low, jnp.where(values > low[..., None], values, jnp.inf).min(-1))


def _ordered(
  values: Float[Array, "*batch N"], index: Int[Array, " *batch"]
) -> Float[Array, " *batch"]:
  """Entry `index` of the values in order, none of them negative.

  A digit of its bits at a time: floats that are not negative are ordered as their bits are. Sorting
  would be as fast, and takes far longer to compile.
  """
  bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
  # Of two bits: for each that is tried there is an array as large as the values.
  digits = jnp.arange(1, 4, dtype=jnp.uint32)

  def narrow(i: Array, found: Array) -> Array:
    shift = (30 - 2 * i).astype(jnp.uint32)
    tried = found[..., None] + (digits << shift)
    smaller = (bits[..., None, :] < tried[..., None]).sum(-1)
    fits = (smaller <= index[..., None]).sum(-1, dtype=jnp.uint32)
    return found + (fits << shift)

  found = jax.lax.fori_loop(0, 16, narrow, jnp.zeros(index.shape, jnp.uint32))
  return jax.lax.bitcast_convert_type(found, jnp.float32)


def triangle_scores(
  maps: Float[Array, "*batch U U"], theta: Float[Array, " *batch"]
) -> Float[Array, "*batch U U"]:
  """TA(x, y) = Σ_{x ≤ j ≤ i ≤ y} (A_ij − θ) at [x, y], for x ≤ y; −∞ elsewhere (Eqs. 4, 5)."""
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


def summed(
  at: At,
  maps: Float[Array, "B K G E U U"],
  quantile: Float[Array, " B"],
  length: Int[Array, "B E"] | None,
) -> tuple[Float[Array, "B E U U"], Float[Array, "B E"]]:
  """Σ_h A_h and Σ_h θ_h, each head with a threshold of its own: Σ_h (A_h − θ_h) of Eq. 5."""
  length = jnp.full(maps.shape[3], maps.shape[-1], jnp.int32) if length is None else length
  length = jnp.broadcast_to(jnp.expand_dims(length, (-3, -2)), maps.shape[:4])
  theta = threshold(at, maps, quantile[:, None, None, None], length)
  return at.sum_heads(maps.sum((1, 2))), at.sum_heads(theta.sum((1, 2)))


def divide(
  maps: Float[Array, "*batch U U"],
  theta: Float[Array, " *batch"],
  overlap: float | Float[Array, " *#batch"],
  count: int,
  length: Int[Array, " *batch"] | None = None,
) -> tuple[Int[Array, "*batch C"], Int[Array, "*batch C"]]:
  """The `count` best spans of each map: starts and stops, best first (§3.2).

  `length` says how many tokens of the block are real; None: all.
  """
  scores = triangle_scores(maps, theta)
  if length is not None:
    scores = jnp.where(jnp.arange(maps.shape[-1]) < length[..., None, None], scores, -jnp.inf)
  return suppress(*candidates(scores), overlap, count)


def queries(x: Array, index: Int[Array, "B N"]) -> Array:
  """Entries of x [B, K, G, T, …] by their index within the chunk; out of range: any."""
  index = index.reshape(index.shape[0], 1, 1, -1, *(1,) * (x.ndim - 4))
  return jnp.take_along_axis(x, index, 3, mode="clip")


def cut(x: Array, axis: int, blocks: int) -> Array:
  """An axis of tokens as blocks and tokens."""
  axis %= x.ndim
  return x.reshape(*x.shape[:axis], blocks, -1, *x.shape[axis + 1 :])


def padded(x: Array, axis: int, size: int, fill: int = 0) -> Array:
  """x lengthened along an axis."""
  width = [(0, 0)] * x.ndim
  width[axis] = (0, size - x.shape[axis])
  return jnp.pad(x, width, constant_values=fill)
