"""Known lengths, which are ours: a walk first reads about as many tiles as the last step's took.

After a prompt the length L is what a walk of its last query took, and the margin. Tiles 0 … L − 1
of the order are read at once, as no test stands between them. The detector looks at the last of
them and counts stable tiles from there. Where it stops, it does so where Algorithm 1 would, or
later, and L tiles have been read; where it has not by tile L − 1, all of the others are read, at
once too, by all programs of the device. The output is that of what was read.

A stop s and a margin m give the next L = max(s + m, L − f), f = max(1, ⌊m/4⌋): it rises as far as
it must and falls slowly, so that few walks read everything. For that p + m + f tiles are looked at.
Without a stop L rises by max(2·m, ⌊L/2⌋).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Attended
from kvjax.methods.art.order import Order, tiles_of
from kvjax.methods.art.splits import Walked
from kvjax.methods.art.walk import NEVER, Stop, load
from kvjax.primitives import softmax_state
from kvjax.primitives.softmax_state import State

Carry = tuple[State, Array, Array, Array]  # of a walk: state, stable tiles in a row, stop, keys


class Found(NamedTuple):
  """Note of attention: the length of the next step, int32 [B, K]; 0: everything."""

  length: Array


def fall(margin: int) -> int:
  """f, tiles by which a length falls at most from step to step."""
  return max(1, margin // 4)


def tail(patience: float | int, margin: int) -> int:
  """Last tiles of a length that the detector looks at."""
  return int(min(patience, NEVER)) + margin + fall(margin)


def read(
  at: At,
  cache: Cache,
  order: Order,
  q: Float[Array, "B K G H"],
  length: Int[Array, "B K"],
  margin: int,
  stop: Stop,
) -> Attended:
  """Attention over the first `length` tiles of an order, else over all; notes `Found`.

  The query heads of a KV head are stable together.
  """
  assert order.plan.count is not None
  count, patience = order.plan.count, min(stop.patience, NEVER)
  known = jnp.where(length > 0, jnp.minimum(length, count), count)  # L
  first = known - tail(patience, margin)

  def step(carry: Carry, t: Array) -> tuple[Carry, None]:
    state, calm, end, keys = carry
    reads = (t < count) & ((t < known) | (end == 0))
    logits, v, _, ok = load(at, cache, order, q, t)
    new = softmax_state.merge(state, softmax_state.of_logits(logits, v))
    stable = stop.stable(new.o, state.o).all(-1) & (t >= first)
    calm = jnp.where(reads, jnp.where(stable, calm + 1, 0), calm)
    stops = (t < known) & (calm >= patience) & (t + 1 >= order.kept) & (end == 0)
    state = jax.tree.map(lambda a, b: jnp.where(_over(reads, a), a, b), new, state)
    keys = keys + jnp.where(reads, ok.sum(-1, dtype=jnp.int32), 0)
    return (state, calm, jnp.where(stops, t + 1, end), keys), None

  zero = jnp.zeros(count.shape, jnp.int32)
  start = softmax_state.empty(q.shape[:3], q.shape[-1]), zero, zero, zero
  tiles = jnp.arange(tiles_of(order.plan, cache.size, order.tile), dtype=jnp.int32)
  (state, _, end, keys), _ = jax.lax.scan(step, start, tiles)
  walked = jnp.where(end > 0, known, count)
  found = following(walked, known, end, margin)
  return reported(Attended(state, None, None, keys), walked, found)


def following(walked: Array, known: Array, end: Array, margin: int) -> Array:
  """L after a walk.

  Args:
    walked, known: tiles read, in all and at once.
    end: those after which the detector stopped; 0: it did not.
    margin: m.
  """
  stopped = jnp.maximum(end + margin, known - fall(margin))
  on = jnp.where(walked > known, known + jnp.maximum(2 * margin, known // 2), 0)
  return jnp.where(end > 0, stopped, on)


def reported(attended: Attended, walked: Int[Array, "B K"], length: Int[Array, "B K"]) -> Attended:
  """With notes: tiles read, and the next length."""
  groups = attended.state.m.shape[2:]
  tiles = jnp.broadcast_to(walked[..., None], walked.shape + groups)
  return attended.noting(Walked(tiles)).noting(Found(length))


def _over(x: Array, like: Array) -> Array:
  """x [B, K] with the axes of `like`."""
  return x.reshape(x.shape + (1,) * (like.ndim - x.ndim))
