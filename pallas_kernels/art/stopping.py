"""End of ART's walk: its detector looks whether the output still moves (ART, Alg. 1), or a
certificate bounds what is unread.

A loop that tests for its end after every tile is not pipelined: it waits for the memory each time.
So tiles are walked in chunks by an inner loop of known length, which is pipelined; an outer loop
tests for the end where there may be one. Until then the detector hides the keys of the tiles after
the stop, which leaves the softmax state as it is, to the bit.

The inner loop takes tiles in parts, so that two parts fit in shared memory beside the one that is
multiplied, and those are on their way while the detector looks.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from kvjax.kernels.common import tiling

PROBES = 32  # dimensions of the output that a strided probe looks at
NEVER = 1 << 30  # a patience that no walk exhausts


class Heads(NamedTuple):
  """Lanes, of which the first `groups` hold a query head each."""

  lanes: Array
  groups: int

  @property
  def real(self) -> Array:
    # Worked out anew where it is asked for, so that no loop carries the mask.
    return self.lanes < self.groups


class Look(NamedTuple):
  """State of the detector after the last whole tile: the probe x, ‖x‖, stable tiles in a row."""

  probe: Array
  norm: Array
  calm: Array


# (i, carry, top, look) -> the look after tile i, and which rows may end there, int32.
Judge = Callable[[Any, tiling.Carry, Array, Look], tuple[Look, Array]]


class Walk(NamedTuple):
  """A walk: softmax state; after its last whole tile the detector's look, whether it goes on (1 or
  0) and tiles walked, both scalars where query heads stop together; and the largest logit of the
  tile that it is in.
  """

  carry: tiling.Carry
  look: Look
  going: Array
  walked: Array
  top: Array


@dataclasses.dataclass(frozen=True)
class Detector:
  """Ends a walk whose output is stable for `patience` tiles; fields as arguments of `art.walk`."""

  tau: float | int
  phi: float | int
  patience: int
  full: bool
  relative: bool

  def probed(self, columns: Array, head_dim: int) -> Array:
    """True in each column where the output is looked at: those of ⌊i·H/32⌋, i < 32, or all."""
    if self.full or head_dim <= PROBES:
      return columns < head_dim
    stride = head_dim // PROBES
    if head_dim == stride * PROBES and stride & (stride - 1) == 0:
      # In this form the compiler sees which registers are never looked at, and drops them.
      return (columns & (stride - 1) == 0) & (columns < head_dim)
    i = (columns * PROBES + head_dim - 1) // head_dim  # the first i with i·H/32 ≥ column
    return (i < PROBES) & (i * head_dim // PROBES == columns)

  def judge(self, columns: Array, head_dim: int) -> Judge:
    """Looks after every tile; one without a visible key, whose largest logit is −∞, is no step."""
    probed = self.probed(columns, head_dim)

    def judge(_: Any, carry: tiling.Carry, top: Array, old: Look) -> tuple[Look, Array]:
      new = jnp.where(probed[None, :], carry.acc * (1 / tiling.nonzero(carry.l))[:, None], 0.0)
      norm = jnp.sqrt((new * new).sum(axis=1))
      stable = self.is_stable(new, old.probe, norm, old.norm)
      calm = jnp.where(top == -jnp.inf, old.calm, jnp.where(stable, old.calm + 1, 0))
      return Look(new, norm, calm), (calm >= self.patience).astype(jnp.int32)

    return judge

  def is_stable(self, new: Array, old: Array, norm: Array, before: Array) -> Array:
    """True if the probe, on the last axis, neither moved nor turned; the norms are of both."""
    moved = jnp.sqrt(((new - old) * (new - old)).sum(axis=-1))  # d_scale
    return self.is_calm(moved, norm, before)

  def is_calm(self, moved: Array, norm: Array, before: Array) -> Array:
    """`is_stable`, of the norm of the probe's movement."""
    both = norm * before
    # 1 − cos(a, b) = (‖a − b‖² − (‖a‖ − ‖b‖)²) / 2‖a‖‖b‖, which cancels nothing near 0.
    apart = moved * moved - (norm - before) * (norm - before)
    turn = apart / (2 * jnp.where(both > 0, both, 1.0))
    limit = self.tau * norm if self.relative else self.tau
    return (both > 0) & (moved < limit) & (turn < self.phi)

  def until_test(self, walk: Walk, chunk: int, heads: Heads) -> Array:
    """Tiles until the next test for the end: no sooner than a walk can have ended.

    A head that has been calm for c tiles needs p − c more, the one that needs most decides. A walk
    of two tiles is the shortest, as each waits for the memory once; where a head is not calm at
    all, one of `chunk` tiles, since it will hardly end there.
    """
    patience = self.patience
    calm = jnp.where(heads.real & (walk.going > 0), walk.look.calm, NEVER).min()
    return jnp.where(calm == 0, max(chunk, patience), jnp.maximum(patience - calm, 2))


@dataclasses.dataclass(frozen=True)
class Certificate:
  """Ends a walk once what is unread weighs no more than exp(log_ratio) of what is read."""

  log_ratio: float

  def judge(self, unread: Callable[[Any], Array]) -> Judge:
    """`unread(i)`: ln of the most mass after tile i."""

    def judge(i: Any, carry: tiling.Carry, _: Array, look: Look) -> tuple[Look, Array]:
      # ln of the mass unread ≤ ln of the mass read + log_ratio.
      proven = unread(i) <= (carry.m + jnp.log2(carry.l)) * tiling.LN2 + self.log_ratio
      return look, proven.astype(jnp.int32)

    return judge

  def until_test(self, walk: Walk, chunk: int, heads: Heads) -> Array:
    """Tiles until the next test for the end."""
    return jnp.int32(chunk)


@dataclasses.dataclass(frozen=True)
class Stop:
  """End of a walk, for each query head or for all at once, and no sooner than `kept` tiles."""

  rule: Detector | Certificate
  per_head: bool
  kept: int

  def begin(self, carry: tiling.Carry) -> Walk:
    """A walk before its first tile."""
    lanes = carry.m.shape
    zero = jnp.zeros(lanes, jnp.int32)
    many = zero if self.per_head else jnp.int32(0)
    none = jnp.full(lanes, -jnp.inf, jnp.float32)
    empty = Look(jnp.zeros(carry.acc.shape, jnp.float32), jnp.zeros(lanes, jnp.float32), zero)
    return Walk(carry, empty, many + 1, many, none)


def walk(
  stop: Stop,
  advance: Callable[[Any, Any, tiling.Carry, Array], tuple[tiling.Carry, Array]],
  judge: Judge,
  carry: tiling.Carry,
  tiles: Array,
  *,
  split: Array,
  splits: int,
  parts: int,
  chunk: int,
  heads: Heads,
) -> tuple[Walk, Array]:
  """Walks the tiles of a program until `stop` ends that; returns the walk, and tiles fetched.

  Args:
    advance: (i, j, carry, going) adds part j of tile i, and gives its largest logits.
    judge: that of `stop.rule`.
    carry, tiles: the state before any tile, and how many tiles the program has.
    split, splits: tile i of this program is tile split + i·splits of the order.
    parts: of a tile.
    chunk: tiles between two tests for the end of a walk that is not calm.
    heads: the lanes that hold query heads.
  """
  begin = stop.begin(carry)

  def step(n: Any, walk: Walk) -> Walk:
    """A part of a tile, and the detector after the last one.

    One loop over all parts: a loop inside of a loop would wait for the memory in each turn.
    """
    i, j = divided(n, parts)
    carry, top = advance(i, j, walk.carry, walk.going)
    held = walk[1:-1]
    if parts == 1:
      return Walk(carry, *behind(i, carry, top, *held))
    top = jnp.maximum(walk.top, top)
    rest = lax.cond(j == parts - 1, lambda: behind(i, carry, top, *held), lambda: (*held, top))
    return Walk(carry, *rest)

  def behind(
    i: Any, carry: tiling.Carry, top: Array, look: Look, going: Array, walked: Array
  ) -> tuple[Look, Array, Array, Array]:
    """All of a walk but its state, after tile i."""
    look, done = judge(i, carry, top, look)
    enough = (split + (i + 1) * splits >= stop.kept).astype(jnp.int32)
    if not stop.per_head:
      done = jnp.where(heads.real, done, 1).min()
    return look, going * (1 - done * enough), walked + going, begin.top

  def unfinished(state: tuple[Array, Walk]) -> Array:
    first, walk = state
    going = walk.going.max() if stop.per_head else walk.going
    return (first < tiles) & (going > 0)

  def walk_chunk(state: tuple[Array, Walk]) -> tuple[Array, Walk]:
    first, walk = state
    last = first + jnp.minimum(stop.rule.until_test(walk, chunk, heads), tiles - first)
    return last, lax.fori_loop(first * parts, last * parts, step, walk)

  fetched, walked = lax.while_loop(unfinished, walk_chunk, (jnp.int32(0), begin))
  return walked, fetched


def divided(n: Any, parts: int) -> tuple[Any, Any]:
  """Tile and part of step n of a walk."""
  if parts == 1:
    return n, 0
  i = lax.div(n, jnp.int32(parts))
  return i, n - i * parts
