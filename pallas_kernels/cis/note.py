"""CIS: what the block's later queries look for is written down where they find it (§IV-A).

A step's queries, whose retrieval each unit uses, and a retrieval with the neighbours of its
heaviest tokens (Eq. 13), each token once. See `cis.anchors`.

Bytes: next to nothing.

Grid: one program per row.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.common import backend
from kvjax.kernels.common.backend import by_row
from kvjax.kernels.common.search import EACH, LEAST, keys, threshold
from kvjax.kernels.common.split_k import columns_of

MANY = 512  # tokens of a retrieval for which a program takes twice the warps


class _Made(NamedTuple):
  """A step's l [R, G], step [R], query [R, J, H], anchor, retrieves [R, U], and found, weight
  [R, U, f]: refs, or arrays.
  """

  l: Any
  step: Any
  query: Any
  anchor: Any
  retrieves: Any
  found: Any
  weight: Any


class _Block(NamedTuple):
  """A block's queries [R, s, J, H], anchors [R, s, U], retrieved [R, s, U, W], and step [B]: refs,
  or arrays.
  """

  queries: Any
  anchors: Any
  retrieved: Any
  step: Any


def _kernel(
  live_ref: Any, made: _Made, _: _Block, out: _Block, *, sinks: int, heaviest: int, radius: int
) -> None:
  """live [B], `_Made`, and in place `_Block`."""
  (rows, groups), (_, judged, head_dim) = made.l.shape, made.query.shape
  _, block, units, _ = out.retrieved.shape
  row = pl.program_id(0)
  heads = rows // live_ref.shape[0]
  batch_row = row // heads
  step = made.step[row]  # the one that counts is written by another program
  column = jnp.arange(columns_of(head_dim))
  head, group = jnp.arange(pl.next_power_of_2(heads)), jnp.arange(pl.next_power_of_2(groups))
  mask = (head < heads)[:, None] & (group < groups)[None, :]
  l = backend.load(made.l, batch_row * heads + head[:, None], group[None, :], mask=mask, other=1.0)
  finite = (jnp.abs(l) < jnp.inf).astype(jnp.int32).min(axis=1).min()

  @pl.when(live_ref[batch_row] & (finite > 0))
  def note() -> None:
    for j in range(judged):
      query = backend.load(made.query, row, j, column, mask=column < head_dim)
      backend.store(out.queries, row, step, j, column, value=query, mask=column < head_dim)
    for u in range(units):
      out.anchors[row, step, u] = made.anchor[row, u]

      @pl.when(made.retrieves[row, u] > 0)
      def dilated(u: int = u) -> None:
        where = {"sinks": sinks, "heaviest": heaviest, "radius": radius}
        _dilate(made.found, made.weight, (row, u), out.retrieved, (row, step, u), **where)

    @pl.when(row % heads == 0)
    def advance() -> None:
      out.step[batch_row] = jnp.where(step + 1 < block, step + 1, 0)


def _dilate(
  found_ref: Any,
  weight_ref: Any,
  source: tuple,
  out_ref: Any,
  target: tuple,
  *,
  sinks: int,
  heaviest: int,
  radius: int,
) -> None:
  """Writes found [f], by position, and the neighbours of its heaviest (Eq. 13), each once."""
  count, width = found_ref.shape[2], out_ref.shape[3]
  i = jnp.arange(pl.next_power_of_2(count))

  def at(i: Array) -> tuple[Array, Array]:
    """Tokens and the keys of their weights."""
    inside = (i >= 0) & (i < count)
    token = backend.load(found_ref, *source, i, mask=inside, other=-1)
    weight = backend.load(weight_ref, *source, i, mask=inside, other=-jnp.inf)
    weight = jnp.maximum(weight, jnp.finfo(jnp.float32).min)
    return token, jnp.where(token >= 0, keys(weight), jnp.int32(LEAST))

  token, key = at(i)
  held = (token >= 0).astype(jnp.int32).sum()
  backend.store(out_ref, *target, i, value=token, mask=token >= 0)

  end = held
  if heaviest and radius:
    each = min(EACH, i.shape[0])
    grid = at(jnp.arange(i.shape[0] // each)[:, None] * each + jnp.arange(each)[None, :])[1]
    lowest = jnp.where(grid > LEAST, grid, jnp.int32(2**31 - 1)).min()
    want = jnp.minimum(held, heaviest)
    low, _ = threshold(grid, lowest, held, want, want)
    # Of those that are equal to the bound the first ones belong.
    equal = (key == low) & (token >= 0)
    short = want - (key > low).astype(jnp.int32).sum()
    last = jnp.where(equal & (jnp.cumsum(equal.astype(jnp.int32)) <= short), i, -1).max()

    def heavy(i: Array, token: Array, key: Array) -> Array:
      return (token >= 0) & ((key > low) | ((key == low) & (i <= last)))

    # By position, a token within reach is within as many places.
    reach = [n for n in range(-2 * radius, 2 * radius + 1) if n]
    others = {n: at(i + n) for n in reach}
    mine = heavy(i, token, key)
    theirs = {n: heavy(i + n, *other) for n, other in others.items()}
    for distance in range(1, radius + 1):
      for away in (-distance, distance):  # the nearest first
        near = token + away
        new = mine & (near >= sinks)
        for n, (other, _) in others.items():
          its = near - other
          sooner = (jnp.abs(its) < distance) | ((its == -distance) & (away > 0))
          new &= ~((other >= 0) & ((its == 0) | (sooner & theirs[n])))
        new = new.astype(jnp.int32)
        place = jnp.where(new > 0, end + jnp.cumsum(new) - 1, width)
        backend.store(out_ref, *target, place, value=near, mask=new > 0)
        end += new.sum()
  i = jnp.arange(pl.next_power_of_2(width))
  tail = (i >= end) & (i < width)
  backend.store(out_ref, *target, i, value=jnp.full(i.shape, -1), mask=tail)


def note(
  live: Bool[Array, " B"],
  l: Float[Array, "B K G"],
  steps: Int[Array, "B K"],
  query: Float[Array, "B K J H"],
  anchor: Int[Array, "B K U"],
  retrieves: Int[Array, "B K U"],
  found: Int[Array, "B K U f"],
  weight: Float[Array, "B K U f"],
  queries: Float[Array, "B K s J H"],
  anchors: Int[Array, "B K s U"],
  retrieved: Int[Array, "B K s U W"],
  step: Int[Array, " B"],
  *,
  sinks: int,
  heaviest: int,
  radius: int,
  interpret: bool | None = None,
) -> tuple[Array, ...]:
  """The block's queries, anchors and retrievals with this step's, and the next step; in place.

  Rows that are not live stay as they are, and those with a denominator that is not finite.

  Args:
    live: rows that take part.
    l: the softmax denominators of this step's attention.
    steps: of the block, this one's.
    query, anchor: this step's.
    retrieves: 1 where a unit retrieved.
    found: what it retrieved, by position; −1 = none, at the end. Anything where it did not.
    weight: of what was found, on a scale that keeps their order.
    queries, anchors, retrieved, step: those of the block, updated in place where donated.
    sinks: first tokens, which are no neighbours.
    heaviest, radius: the first `heaviest` by weight (ties: the lowest) gain neighbours this far
      away.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.
  """
  rows = query.shape[0] * query.shape[1]

  made = _Made(*map(by_row, (l, steps, query, anchor, retrieves, found, weight)))
  block = _Block(by_row(queries), by_row(anchors), by_row(retrieved), step)
  (noted,) = backend.renew(
    functools.partial(_kernel, sinks=sinks, heaviest=heaviest, radius=radius),
    *(live, made),
    held=[block],
    grid=(rows,),
    warps=4 if found.shape[3] < MANY else 8,
    stages=1,
    name="cis_note",
    interpret=interpret,
  )
  held = queries, anchors, retrieved, step
  return tuple(x.reshape(y.shape) for x, y in zip(noted, held, strict=True))
