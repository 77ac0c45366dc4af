"""Ltri-LLM: spans of attention maps (§3.2, App. E), in three launches.

A block's map has U² numbers. Two bits of a threshold after another, a tree of sums and a choice
among spans are a hundred small launches of XLA's for a layer, most of them shorter than the gaps
between them. `between` takes one for the maps of all heads, `divide` two for their sum: the sums
of all triangles go to memory, as what is next compared lies along antidiagonals of them.

A block of which no token is real costs nothing but its launch: its spans are empty.

Bytes: 4 U² for each map of a head, three times as many for each of a block; bound by the latency of
one program.

Grid: one program per map.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.kernels.common import backend

WARPS = 8
FEW = 16  # rows or columns of a map that a loop takes at a time
_BITS = 31  # of a float that is not negative


def _between_kernel(
  map_ref: Any, length_ref: Any, place_ref: Any, next_ref: Any, low_ref: Any, high_ref: Any
) -> None:
  """maps [R, U, U], length, place, next [R] -> low, high [R]: two values of the map in order."""
  row, size = pl.program_id(0), map_ref.shape[1]
  length = length_ref[row]

  @pl.when(length == 0)
  def _():
    low_ref[row], high_ref[row] = jnp.float32(0.0), jnp.float32(0.0)

  @pl.when(length > 0)
  def _():
    place = place_ref[row]
    token = jnp.arange(pl.next_power_of_2(size))
    inside = (token[None, :] <= token[:, None]) & (token < length)[:, None]
    at = row, token[:, None], token[None, :]
    values = backend.load(map_ref, *at, mask=inside, other=jnp.inf)
    bits = lax.bitcast_convert_type(values, jnp.int32)  # in the same order
    none = jnp.int32(0x7F800000)  # +∞

    def below(bound: Array) -> Array:
      """Count of the smaller values, by the sign of a difference: none is negative."""
      return -lax.shift_right_arithmetic(bits - bound, 31).sum(axis=1).sum(axis=0)

    def narrow(i: Any, found: Array) -> Array:
      """The largest number below which lie no more than `place` values, bit by bit."""
      tried = found | (jnp.int32(1) << (_BITS - 1 - i))
      return jnp.where(below(tried) <= place, tried, found)

    found = lax.fori_loop(0, _BITS, narrow, jnp.int32(0))
    above = jnp.where(bits > found, bits, none).min(axis=1).min(axis=0)
    above = jnp.where(below(found + 1) > next_ref[row], found, above)
    low_ref[row] = lax.bitcast_convert_type(found, jnp.float32)
    high_ref[row] = lax.bitcast_convert_type(above, jnp.float32)


def between(
  maps: Float[Array, "R U U"],
  length: Int[Array, " R"],
  place: Int[Array, " R"],
  following: Int[Array, " R"],
  *,
  interpret: bool | None = None,
) -> tuple[Float[Array, " R"], Float[Array, " R"]]:
  """Two entries of each map's lower triangle in order, between which a quantile lies.

  Args:
    maps: none negative, U ≤ 128.
    length: tokens that are real; of a map without any the entries are 0.
    place, following: which entries, counted from 0; `following` is `place` or the next.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.
  """
  result = jax.ShapeDtypeStruct(length.shape, jnp.float32)
  low, high = backend.call(
    _between_kernel,
    *(maps, length, place, following),
    grid=(maps.shape[0],),
    out=[result, result],
    warps=WARPS,
    stages=1,
    name="ltri_between",
    interpret=interpret,
  )
  return low, high


def _triangles_kernel(map_ref: Any, theta_ref: Any, length_ref: Any, sums_ref: Any) -> None:
  """maps [R, U, U], θ, length [R] -> TA(x, y) of Eq. 5 at [y, x], for rows y below the length."""
  row, size = pl.program_id(0), map_ref.shape[1]

  @pl.when(length_ref[row] > 0)
  def _():
    i = jnp.arange(pl.next_power_of_2(size))
    j = jnp.where(i < size, size - 1 - i, i)  # from the last key: all sums go forwards
    inside = (j[None, :] <= i[:, None]) & (i < size)[:, None]
    at = row, i[:, None], j[None, :]
    excess = backend.load(map_ref, *at, mask=inside) - theta_ref[row]
    sums = jnp.cumsum(jnp.cumsum(jnp.where(inside, excess, 0), 0), 1)
    backend.store(sums_ref, *at, value=sums, mask=inside)


def _spans_kernel(
  sums_ref: Any,
  map_ref: Any,
  length_ref: Any,
  overlap_ref: Any,
  start_ref: Any,
  stop_ref: Any,
  ratio_ref: Any,
  *,
  mode: str,
) -> None:
  """sums, maps [R, U, U], length, φ [R] -> starts, stops, r_a [R, C], best first."""
  row, count = pl.program_id(0), start_ref.shape[1]

  @pl.when(length_ref[row] == 0)
  def _():
    for c in range(count):
      start_ref[row, c], stop_ref[row, c] = jnp.int32(0), jnp.int32(0)
      ratio_ref[row, c] = jnp.float32(1.0)

  @pl.when(length_ref[row] > 0)
  def _():
    middle, start, stop, score = _around(sums_ref, row, length_ref[row])
    area = (stop - start) * (stop - start)
    alive = jnp.where(score > 0, score, -jnp.inf)
    for c in range(count):
      most = alive.max(axis=0)
      best = jnp.where(alive == most, middle, middle.size).min(axis=0)
      some = (most > -jnp.inf).astype(jnp.int32)
      a = some * jnp.where(middle == best, start, 0).sum(axis=0)
      b = some * jnp.where(middle == best, stop, 0).sum(axis=0)
      common = jnp.maximum(jnp.minimum(stop, b) - jnp.maximum(start, a), 0)
      common = common * common
      union = area + (b - a) * (b - a) - common
      far = common.astype(jnp.float32) <= overlap_ref[row] * union.astype(jnp.float32)
      alive = jnp.where(far & (middle != best), alive, -jnp.inf)
      start_ref[row, c], stop_ref[row, c] = a, b
      ratio_ref[row, c] = _ratio(map_ref, row, a, b, mode)


def _around(sums_ref: Any, row: Array, length: Array) -> tuple[Array, Array, Array, Array]:
  """Of the best span around every midpoint x + y, of equal ones the first: midpoint, start, stop,
  score (App. E).
  """
  size = sums_ref.shape[1]
  middle = jnp.arange(pl.next_power_of_2(2 * size - 1))
  first = jnp.maximum(middle - size + 1, 0)

  def compare(i: Any, best: tuple[Array, Array]) -> tuple[Array, Array]:
    """Score and start of the best of the spans so far, and of a few that start later."""
    score, start = best
    x = first[:, None] + i * FEW + jnp.arange(FEW)[None, :]
    y = middle[:, None] - x
    real = (x <= y) & (y < length)
    around = backend.load(sums_ref, row, y, x, mask=real, other=-jnp.inf)
    here = around.max(axis=1)
    of_here = jnp.where(real & (around == here[:, None]), x, size).min(axis=1)
    return jnp.maximum(score, here), jnp.where(here > score, of_here, start)

  none = jnp.full(middle.shape, -jnp.inf), jnp.zeros(middle.shape, jnp.int32)
  # Of so many spans around a midpoint: ⌈U/2⌉, and no more than start at a real token.
  pieces = pl.cdiv(jnp.minimum(length, (size + 1) // 2), FEW)
  score, start = lax.fori_loop(0, pieces, compare, none)
  return middle, start, middle - start + 1, score


def _ratio(map_ref: Any, row: Any, start: Array, stop: Array, mode: str) -> Array:
  """r_a: a span's share of what it and its neighbours hold, as `vectors.ratios` says (§3.3.2)."""
  size = map_ref.shape[1]
  key = jnp.arange(pl.next_power_of_2(size))
  own_keys, earlier = (key >= start) & (key < stop), key < start

  def add(i: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
    """Adds some queries' attention: within the span, and what its neighbours hold besides."""
    own, other = sums
    query = i * FEW + jnp.arange(FEW)
    asks, later = (query >= start) & (query < stop), (query >= stop) & (query < size)
    within = asks[:, None] & own_keys[None, :]
    beside = jnp.zeros_like(within)
    if mode in ("row", "rowcol"):
      beside |= asks[:, None] & earlier[None, :]
    if mode in ("col", "rowcol"):
      beside |= later[:, None] & own_keys[None, :]
    maps = backend.load(map_ref, row, query[:, None], key[None, :], mask=within | beside)
    own += jnp.where(within, maps, 0).sum(axis=0)
    return own, other + jnp.where(beside, maps, 0).sum(axis=0)

  none = jnp.zeros(key.shape, jnp.float32)
  end = stop if mode == "row" else jnp.int32(size)
  own, other = lax.fori_loop(start // FEW, pl.cdiv(end, FEW), add, (none, none))
  own, other = own.sum(axis=0), other.sum(axis=0)
  every = own + other
  share = own / jnp.where(every > 0, every, 1.0)
  return jnp.where(every > 0, jnp.minimum(share, 1.0), 1.0)


def divide(
  maps: Float[Array, "R U U"],
  theta: Float[Array, " R"],
  length: Int[Array, " R"],
  overlap: Float[Array, " R"],
  count: int,
  mode: str,
  *,
  interpret: bool | None = None,
) -> tuple[Int[Array, "R C"], Int[Array, "R C"], Float[Array, "R C"]]:
  """Starts and stops of the `count` best spans of each map, best first, and their r_a.

  Args:
    maps: lower triangular, U ≤ 128.
    theta: θ of Eq. 5.
    length: tokens that are real; a map without any has empty spans.
    overlap: φ, largest intersection over union of two spans.
    count: C.
    mode: neighbours that r_a is taken over, as in `vectors.ratios`.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.
  """
  rows = maps.shape[0]
  launch: dict[str, Any] = {
    "grid": (rows,),
    "warps": WARPS,
    "stages": 1,
    "interpret": interpret,
  }
  (sums,) = backend.call(
    _triangles_kernel,
    *(maps, theta, length),
    out=[jax.ShapeDtypeStruct(maps.shape, jnp.float32)],
    name="ltri_triangles",
    **launch,
  )
  numbers = functools.partial(jax.ShapeDtypeStruct, (rows, count))
  start, stop, ratio = backend.call(
    functools.partial(_spans_kernel, mode=mode),
    *(sums, maps, length, overlap),
    out=[numbers(jnp.int32), numbers(jnp.int32), numbers(jnp.float32)],
    name="ltri_spans",
    **launch,
  )
  return start, stop, ratio
