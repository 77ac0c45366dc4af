"""An exact top-k by the last program of a row to arrive, from scores that all of them leave.

Programs that score leave the scores of their tiles and the peaks of neighbouring ones: the best of
every `each`. The last to arrive (`_arrivals`) searches the peaks for a bound that at least k of
them reach, then the tiles of those groups alone. No other tile can be among the k best: k groups
have one each that is better, or as good and before it. So of n tiles about 2 √(k n) are looked at,
by one program and without another launch, and ties go to the lowest index as in `top_k`.

What may not be chosen is left as −∞; what may is finite, or ∞ where it was NaN.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from . import _arrivals, _backend
from ._bounds import Sight, Wanted
from ._chosen import Chosen, write
from ._cuts import lanes_of
from ._search import EACH, LEAST, best, keys

LANES = 4096  # the most values that are searched at once: 32 a thread of four warps


@dataclasses.dataclass(frozen=True)
class Sieve:
  """How a row of `tiles` is searched: groups of `each`, of which `room` are looked into."""

  tiles: int
  each: int
  room: int

  @property
  def groups(self) -> int:
    return pl.cdiv(self.tiles, self.each)

  @staticmethod
  @functools.cache
  def of(tiles: int, k: int, most: int) -> "Sieve | None":
    """For the k best; groups of at most `most`. None: there are too many to be looked at."""
    # Half as many again as are wanted: the bound need not be the exact one.
    room = pl.next_power_of_2(k + k // 2 + 1)
    sizes = [2**i for i in range(1, most.bit_length())]
    looked = [(lanes_of(pl.cdiv(tiles, n)) + lanes_of(room * n), n) for n in sizes]
    each = min(looked)[1]
    longest = max(lanes_of(pl.cdiv(tiles, each)), lanes_of(room * each))
    return Sieve(tiles, each, room) if longest <= LANES else None


class Left(NamedTuple):
  """Refs, or shapes, of what programs leave: scores [R, P], peaks [R, P/each], and the counters
  [R]; and the groups [R, room] that the last one finds.
  """

  scores: Any
  peaks: Any
  found: Any
  arrivals: Any

  @staticmethod
  def like(rows: int, sieve: Sieve) -> "Left":
    of, f32 = jax.ShapeDtypeStruct, jnp.float32
    return Left(
      of((rows, sieve.tiles), f32),
      of((rows, sieve.groups), f32),
      of((rows, sieve.room), jnp.int32),
      _arrivals.like(rows),
    )


def listed(rows: int, width: int) -> list[jax.ShapeDtypeStruct]:
  """The list that is written: table, scores [R, W] and count [R]."""
  of = jax.ShapeDtypeStruct
  return [of((rows, width), jnp.int32), of((rows, width), jnp.float32), of((rows,), jnp.int32)]


def leave(row: Array, piece: Array, score: Array, sight: Sight, left: Left, sieve: Sieve) -> None:
  """Writes the scores of piece number `piece`, [T], and their peaks."""
  size, sinks, local = score.shape[0], sight.bounds.sinks, sight.bounds.local
  tile = piece * size + jnp.arange(size)
  inside = tile < sieve.tiles
  free = inside & sight.visible(tile) & (tile >= sinks) & (tile <= sight.newest - local)
  score = jnp.where(score == score, score, jnp.inf)  # NaN is chosen first, and heard of
  score = jnp.maximum(score, jnp.finfo(jnp.float32).min)
  score = jnp.where(free, score, -jnp.inf)
  _backend.store(left.scores, row, tile, value=score, mask=inside)
  groups = size // sieve.each
  group = piece * groups + jnp.arange(groups)
  peak = score.reshape(groups, sieve.each).max(axis=1)
  _backend.store(left.peaks, row, group, value=peak, mask=group < sieve.groups)


def finish(
  row: Array,
  pieces: int,
  sight: Sight,
  wanted: Wanted,
  left: Left,
  tables: tuple[Any, Any, Any],
  sieve: Sieve,
  *,
  interpret: bool,
) -> None:
  """Counts a program in that has left its piece; the last of a row's `pieces` writes the list."""
  arrived = _arrivals.last(left.arrivals, row, pieces, interpret=interpret)

  @pl.when(arrived)
  def select() -> None:
    want = jnp.maximum(wanted.of(row, sight.stop), 0)
    total, bound = _find_groups(row, want, left, sieve)
    if not interpret:
      _backend.barrier()  # threads read what others wrote
    write(*tables, row, jnp.int32(0), _choose(row, total, bound, want, left, sieve), sight)


def _find_groups(row: Array, want: Array, left: Left, sieve: Sieve) -> tuple[Array, Array]:
  """Lists the groups that hold the `want` best tiles; how many they are, and a bound of these."""

  def load(lane: Array) -> Array:
    inside = lane < sieve.groups
    return _key(_backend.load(left.peaks, row, lane, mask=inside, other=-jnp.inf, fresh=True))

  lane = jnp.arange(lanes_of(sieve.groups))
  keep, place, total, bound = best(load(lane), load(_by_each(lane.size)), want, sieve.room)
  place = jnp.where(keep, place, sieve.room)
  _backend.store(left.found, row, place, value=lane, mask=keep)
  return total, bound


def _choose(
  row: Array, total: Array, bound: Array, want: Array, left: Left, sieve: Sieve
) -> Chosen:
  """The `want` best tiles of the groups that were found."""

  def load(lane: Array) -> tuple[Array, Array]:
    slot = lane // sieve.each
    group = _backend.load(left.found, row, slot, mask=slot < total, other=sieve.groups)
    tile = group * sieve.each + lane % sieve.each
    inside = tile < sieve.tiles
    return tile, _backend.load(left.scores, row, tile, mask=inside, other=-jnp.inf, fresh=True)

  lanes = lanes_of(sieve.room * sieve.each)
  tile, value = load(jnp.arange(lanes))
  grid = _key(load(_by_each(lanes))[1])
  keep, place, count, _ = best(_key(value), grid, want, want, near=bound)
  return Chosen(tile, value, keep, place, count)


def _key(score: Array) -> Array:
  """Keys in the order of scores; none of what may not be chosen."""
  return jnp.where(score == -jnp.inf, jnp.int32(LEAST), keys(score))


def _by_each(lanes: int) -> Array:
  """Lanes in the form that a search counts them in."""
  return jnp.arange(lanes // EACH)[:, None] * EACH + jnp.arange(EACH)[None, :]
