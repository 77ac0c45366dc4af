"""The online-softmax loop over tiles of keys, shared by every attention kernel.

A kernel says how tile i is fetched; the loop does the rest:

    carry = start(rows, columns)
    carry = walk(carry, q, fetch, 0, tiles, scale=scale)
    o, m, l = finish(carry)

`walk` may be called again on its own result, with another query or another fetch: sinks before a
window, or chunks of tiles between two tests for an early stop. Inside, logits are in base 2
(exp2 is one instruction); `finish` returns the natural-log state of
`kvjax.primitives.softmax_state`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from kvjax.kernels.common.backend import dot

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


class Scale(NamedTuple):
  """Map from products q·k to logits: x = factor·q·k, or c·tanh(x/c) under a soft cap c; static."""

  factor: float
  soft_cap: float | None = None

  @classmethod
  def of(cls, head_dim: int, factor: float | None, soft_cap: float | None) -> "Scale":
    """`factor` None: H^−½.

    Raises:
      ValueError: the soft cap is not above 0.
    """
    if soft_cap is not None and not 0 < soft_cap < math.inf:
      raise ValueError(f"soft_cap: found {soft_cap}, expected a finite number above 0, or None")
    return cls(head_dim**-0.5 if factor is None else factor, soft_cap)

  def base2(self, products: Array) -> Array:
    """Logits in base 2 of float32 products q·k."""
    if self.soft_cap is None:
      return products * (self.factor * LOG2E)
    return jnp.tanh(products * (self.factor / self.soft_cap)) * (self.soft_cap * LOG2E)


class Carry(NamedTuple):
  """Unfinished softmax over the keys seen so far, for R query rows of C lanes, all float32.

  acc [R, C] is Σ 2^(x − m) v, m [R] the largest base-2 logit (−inf: none yet), l [R] Σ 2^(x − m).
  """

  acc: Array
  m: Array
  l: Array


class Tile(NamedTuple):
  """One tile of T keys: k [T, C], v [T, C], keep bool [T], or [R, T] by query row.

  k and v must be finite everywhere.
  """

  k: Array
  v: Array
  keep: Array


def start(rows: int, columns: int) -> Carry:
  """The carry before any key."""
  return Carry(
    jnp.zeros((rows, columns), jnp.float32),
    jnp.full((rows,), -jnp.inf, jnp.float32),
    jnp.zeros((rows,), jnp.float32),
  )


def step(
  carry: Carry, q: Array, tile: Tile, *, scale: Scale, see: Callable[[Array], None] | None = None
) -> Carry:
  """Adds one tile: q [R, C] in the dtype of k. `see` is shown its base-2 logits [R, T]."""
  x = scale.base2(dot(q, tile.k, trans_b=True))
  x = jnp.where(tile.keep if tile.keep.ndim == 2 else tile.keep[None, :], x, -jnp.inf)
  if see is not None:
    see(x)
  m = jnp.maximum(carry.m, x.max(axis=1))
  base = finite(m)
  alpha = jnp.exp2(carry.m - base)
  p = jnp.exp2(x - base[:, None])
  acc = carry.acc * alpha[:, None] + dot(p.astype(tile.v.dtype), tile.v)
  return Carry(acc, m, carry.l * alpha + p.sum(axis=1))


def walk(
  carry: Carry,
  q: Array,
  fetch: Callable[[Any], Tile],
  first: Any,
  last: Any,
  *,
  scale: Scale,
  see: Callable[[Any, Array], None] | None = None,
) -> Carry:
  """Adds tiles [first, last), each given by `fetch(i)`; the bounds may be traced scalars.

  `see(i, logits)` is shown the base-2 logits [R, T] of every tile.
  """

  def body(i: Any, carry: Carry) -> Carry:
    shown = None if see is None else functools.partial(see, i)
    return step(carry, q, fetch(i), scale=scale, see=shown)

  return lax.fori_loop(first, last, body, carry)


def walk_lanes(
  q: Array,
  find: Callable[[Any], list[Array]],
  fetch: Callable[[Array], tuple[Array, Array]],
  first: Any,
  last: Any,
  *,
  scale: Scale,
) -> Carry:
  """Tiles [first, last) for a single query q [C], as `walk` from `start`: a carry of one row.

  Every lane of a tile has a softmax of its own until the end: no products for matrix units, of
  whose sixteen rows one would be in use, and no threads that wait for each other for a maximum.
  Tile i + 1 is on its way while tile i is added, and so are the slots of tile i + 2. Parts of a
  tile share the lanes of one part: the more there are, the fewer sums a thread holds.

  Args:
    find: the slots of a tile, [T] of each of its parts, −1 for none.
    fetch: k, v [T, C] of the slots of a part, finite everywhere.
  """
  q = q.astype(jnp.float32)
  if scale.soft_cap is None:  # a factor of the query alone
    q = scale.base2(q)

  def ahead(i: Any) -> list[Array]:
    there = i < last
    slots = find(jnp.minimum(i, jnp.maximum(last - 1, 0)))
    return [jnp.where(there, slot, -1) for slot in slots]

  def logits(slot: Array, k: Array) -> Array:
    x = (k.astype(jnp.float32) * q[None, :]).sum(axis=1)
    x = x if scale.soft_cap is None else scale.base2(x)
    return jnp.where(slot >= 0, x, -jnp.inf)

  def body(i: Any, carry: Any) -> Any:
    acc, m, l, slots, tiles, next_slots = carry
    later, next_tiles = ahead(i + 2), [fetch(slot) for slot in next_slots]
    parts = [logits(slot, k) for slot, (k, _) in zip(slots, tiles, strict=True)]
    top = functools.reduce(jnp.maximum, parts, m)
    base = finite(top)
    alpha, weights = jnp.exp2(m - base), [jnp.exp2(x - base) for x in parts]
    acc = acc * alpha[:, None]
    for p, (_, v) in zip(weights, tiles, strict=True):
      acc = acc + p[:, None] * v.astype(jnp.float32)
    return acc, top, sum(weights, l * alpha), next_slots, next_tiles, later

  slots = ahead(first)
  empty = start(slots[0].size, q.size)
  tiles = [fetch(slot) for slot in slots]
  acc, m, l, *_ = lax.fori_loop(first, last, body, (*empty, slots, tiles, ahead(first + 1)))
  top = m.max()
  weight = jnp.exp2(m - finite(top))
  return Carry((acc * weight[:, None]).sum(axis=0)[None], top[None], (l * weight).sum()[None])


def finish(carry: Carry) -> tuple[Array, Array, Array]:
  """The state (o [R, C] normalised, m [R] natural log, l [R]); (0, −inf, 0) if no key was seen."""
  return carry.acc / nonzero(carry.l)[:, None], carry.m * LN2, carry.l


def finite(m: Array) -> Array:
  """m with 0 for −inf, so that x − m is −inf and never NaN where no key was seen."""
  return jnp.where(m == -jnp.inf, 0.0, m)


def nonzero(l: Array) -> Array:
  """l with 1 for 0, for divisions."""
  return jnp.where(l == 0, 1.0, l)
