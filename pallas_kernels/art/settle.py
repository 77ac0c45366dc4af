"""Ends of ART's walks, and their softmax states, from what many programs have read of them.

A row has a program for each few columns. Each goes over the stable tiles that `judge` has
counted, many shares at once, and finds the tile at which Algorithm 1 ends; then it adds up the
columns of the tiles until there.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from kvjax.kernels.art import remaining
from kvjax.kernels.art.remaining import NEVER, Left, Walks
from kvjax.kernels.art.stopping import Detector, Stop
from kvjax.kernels.common import backend, tiling

COLUMNS = 32  # of a program
VALUES = 16384  # in a program, of one kind: they have to fit its registers


class Cut(NamedTuple):
  """Shares of which the stable tiles are counted at once, and shares that are added at once."""

  block: int
  chunk: int


def cut_of(shares: int, share: int, groups: int) -> Cut:
  """Counting compares all pairs of a block's shares."""
  lanes, tiles = pl.next_power_of_2(groups), pl.next_power_of_2(share)
  block = 1
  while block < shares and 2 * block * max(2 * block, tiles) * lanes <= VALUES:
    block *= 2
  return Cut(block, max(1, min(pl.next_power_of_2(shares), VALUES // (lanes * COLUMNS))))


def kernel(
  left: Left,
  count_ref: Any,
  calm_ref: Any | None,
  before: Walks | None,
  after: Walks,
  results: tuple[Any, ...],
  *,
  until: Stop | None,
  first: int,
  share: int,
  last: bool,
  cut: Cut,
) -> None:
  """`Left`, tiles of each order [R], (stable tiles, `Walks`) -> `Walks`, and `split_k.results`.

  `last`: there is no wave after this one.
  """
  _, size, groups, head_dim = left.acc.shape
  row = pl.program_id(0)
  lane = jnp.arange(pl.next_power_of_2(groups))
  column = pl.program_id(1) * COLUMNS + jnp.arange(COLUMNS)
  part = remaining.Part(row, lane, column, lane < groups, column < head_dim)
  count = jnp.clip(count_ref[row] - first, 0, size)
  calm, walked = _counted(before, part)
  hit = jnp.full(lane.shape, NEVER, jnp.int32)
  if until is not None:
    calm, hit = _find(until, calm_ref, part, calm, walked, count, first, share, cut.block)
  here = (walked == 0) & (hit < NEVER)
  limit = jnp.where(walked > 0, 0, jnp.where(here, hit + 1, count))
  walked = jnp.where(here, first + hit + 1, walked)
  carry = remaining.begin(before, part)
  carry = remaining.add_shares(carry, left, left.acc, part, limit, share=share, chunk=cut.chunk)
  if last:
    walked = jnp.where(walked == 0, count_ref[row], walked)
  _write(after, results, part, carry, calm, walked)


def _counted(before: Walks | None, part: remaining.Part) -> tuple[Array, Array]:
  """Stable tiles in a row, and tiles of walks that have ended, as the wave before left them."""
  if before is None:
    none = jnp.zeros(part.lane.shape, jnp.int32)
    return none, none
  refs = before.calm, before.walked
  calm, walked = (backend.load(x, part.row, part.lane, mask=part.real, other=0) for x in refs)
  return calm, walked


def _find(
  until: Stop,
  calm_ref: Any,
  part: remaining.Part,
  calm: Array,
  walked: Array,
  count: Array,
  first: int,
  share: int,
  block: int,
) -> tuple[Array, Array]:
  """Stable tiles in a row [G] after the wave, and the tiles of it at which walks end, or NEVER."""
  rule, (row, lane, _, real, _) = until.rule, part
  assert isinstance(rule, Detector)
  tile = jnp.arange(pl.next_power_of_2(share))

  def load(t: Array, ok: Array) -> Array:
    """Counts after tiles t [S(, T)], where ok, of all lanes."""
    t, ok = jnp.where(ok, t, 0)[..., None], ok[..., None]
    over = [x.reshape(*(1,) * (t.ndim - 1), -1) for x in (lane, real)]
    return backend.load(calm_ref, row, t, over[0], mask=ok & over[1], other=0)

  def body(state: tuple[Any, ...]) -> tuple[Any, ...]:
    n, calm, hit = state
    begun = (n * block + jnp.arange(block)) * share  # [S]
    end = load(jnp.minimum(begun + share, count) - 1, begun < count)
    t = begun[:, None] + tile[None, :]  # [S, T]
    ok = (tile < share)[None, :] & (t < count)
    code = load(t, ok)
    old = remaining.calm_before(end >> 1, end & 1 > 0, calm)
    after = (end >> 1) + jnp.where(end & 1 > 0, 0, old)
    in_a_row = (code >> 1) + jnp.where(code & 1 > 0, 0, old[:, None, :])
    done = (in_a_row >= rule.patience) & (ok & (first + t + 1 >= until.kept))[:, :, None]
    if not until.per_head:
      together = jnp.where(real[None, None, :], done, True).astype(jnp.int32).min(axis=2)
      done = jnp.broadcast_to(together[:, :, None] > 0, done.shape)
    ends = jnp.where(done, t[:, :, None], NEVER).min(axis=1).min(axis=0)
    is_last = (jnp.arange(block) == block - 1)[:, None]
    return n + 1, jnp.where(is_last, after, 0).sum(axis=0), jnp.minimum(hit, ends)

  def unfinished(state: tuple[Any, ...]) -> Array:
    n, _, hit = state
    on = real & (walked == 0) & (hit == NEVER)
    return (n * (block * share) < count) & (on.astype(jnp.int32).max() > 0)

  never = jnp.full(lane.shape, NEVER, jnp.int32)
  _, calm, hit = lax.while_loop(unfinished, body, (jnp.int32(0), calm, never))
  return calm, hit


def _write(
  after: Walks,
  results: tuple[Any, ...],
  part: remaining.Part,
  carry: tiling.Carry,
  calm: Array,
  walked: Array,
) -> None:
  """The walks' states, and their outputs; what has no columns by the first program of a row."""
  row, lane, column, real, inside = part
  o_ref, m_ref, l_ref, rounded_ref = results
  o, m, l = tiling.finish(carry)
  index, mask = (row, lane[:, None], column[None, :]), real[:, None] & inside[None, :]
  for ref, value in ((after.acc, carry.acc), (o_ref, o), (rounded_ref, o)):
    backend.store(ref, *index, value=value.astype(ref.dtype), mask=mask)
  mask = real & (pl.program_id(1) == 0)
  for ref, value in (
    *zip((after.m, after.l, m_ref, l_ref), (carry.m, carry.l, m, l), strict=True),
    *((after.calm, calm), (after.walked, walked)),
  ):
    backend.store(ref, row, lane, value=value, mask=mask)
