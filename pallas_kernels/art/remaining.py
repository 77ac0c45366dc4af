"""Results of programs that read ART's tiles ahead, and how shares of them are put together.

`share` consecutive tiles are one program's. It leaves the softmax state of its own tiles after each
of them. The walk's state after tile t is that of the shares before it and of t's own share up to t,
joined: one weighted sum, whose weights are known at once, so that nothing is added tile by tile.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from kvjax.kernels.common import backend, tiling

NEVER = 1 << 30  # more tiles than any order has


class Left(NamedTuple):
  """Results of the programs of a wave [R, N, G(, H)] after each of its N tiles, of their own ones.

  acc, m, l: softmax state, m in base 2, over the share's tiles up to this one.
  top: the largest logit of the tile; −∞: it has no visible key.
  probe: acc at the probe's columns [R, N, G, 32]; None: the detector looks at all of acc.
  """

  acc: Any
  m: Any
  l: Any
  top: Any
  probe: Any | None


class Walks(NamedTuple):
  """Walks between two waves [R, G(, H)].

  acc, m, l: softmax state, of a walk that has ended the final one.
  calm: stable tiles in a row.
  walked: tiles of a walk that has ended; 0: it goes on.
  """

  acc: Any
  m: Any
  l: Any
  calm: Any
  walked: Any


class Part(NamedTuple):
  """Lanes [G] and columns [C] of a row that a program works on, and which of them are there."""

  row: Any
  lane: Array
  column: Array
  real: Array
  inside: Array


def begin(before: Walks | None, part: Part) -> tiling.Carry:
  """The walks' states as the wave before left them."""
  if before is None:
    return tiling.start(part.lane.size, part.column.size)
  row, lane, column, real, inside = part
  mask = real[:, None] & inside[None, :]
  acc = backend.load(before.acc, row, lane[:, None], column[None, :], mask=mask)
  m = backend.load(before.m, row, lane, mask=real, other=-jnp.inf)
  return tiling.Carry(acc, m, backend.load(before.l, row, lane, mask=real, other=0.0))


def add_shares(
  carry: tiling.Carry, left: Left, acc: Any, part: Part, limit: Array, *, share: int, chunk: int
) -> tiling.Carry:
  """Joins the first `limit` [G] tiles of a wave to `carry`, `chunk` shares at a time.

  `acc` is `left.acc` or `left.probe`.
  """
  row, lane, column, real, inside = part

  def step(i: Any, carry: tiling.Carry) -> tiling.Carry:
    first = (i * chunk + jnp.arange(chunk)) * share
    last = jnp.minimum((first + share)[:, None], limit[None, :]) - 1  # [chunk, G]
    mask = (first[:, None] <= last) & real[None, :]
    last = jnp.where(mask, last, 0)
    index = row, last[:, :, None], lane[None, :, None], column[None, None, :]
    theirs = backend.load(acc, *index, mask=mask[:, :, None] & inside[None, None, :])
    m = backend.load(left.m, row, last, lane[None, :], mask=mask, other=-jnp.inf)
    l = backend.load(left.l, row, last, lane[None, :], mask=mask, other=0.0)
    top = jnp.maximum(carry.m, m.max(axis=0))
    base = tiling.finite(top)
    old, new = jnp.exp2(carry.m - base), jnp.exp2(m - base[None, :])
    total = carry.acc * old[:, None] + (theirs * new[:, :, None]).sum(axis=0)
    return tiling.Carry(total, top, carry.l * old + (l * new).sum(axis=0))

  most = jnp.where(real, limit, 0).max()
  return lax.fori_loop(0, pl.cdiv(most, share * chunk), step, carry)


def calm_before(count: Array, broken: Array, before: Array) -> Array:
  """Stable tiles in a row before each element of [T, G], the first of which has `before` [G].

  An element has `count` stable ones at its end, with which a row begins where it is `broken`.
  """
  t = jnp.arange(count.shape[0])
  past = (t[None, :] < t[:, None])[:, :, None]  # [t, j, 1]
  total = jnp.cumsum(count, axis=0) - count
  # Totals grow: the largest at a break is that of the last one.
  begun = jnp.where(broken, total, -before[None, :])
  begun = jnp.where(past, begun[None, :, :], -before[None, None, :]).max(axis=1)
  return total - begun
