"""Search for where ART's output is stable in what many programs read: a program a few shares.

The state before a share joined with one inside of it is the walk's after that tile: its output is
looked at as Algorithm 1 does. How many tiles in a row are stable is counted from the beginning of
the share; `settle` knows what came before.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from kvjax.kernels.art import remaining
from kvjax.kernels.art.remaining import Left, Walks
from kvjax.kernels.art.stopping import PROBES, Detector
from kvjax.kernels.common import backend, tiling

VALUES = 16384  # in a program, of shares that it adds; half as many of tiles that it looks at


class Cut(NamedTuple):
  """Cut of the look at shares: by how many programs of each row, so many lanes each, and how many
  shares are added at once.
  """

  pieces: int
  lanes: int
  chunk: int


def cut_of(shares: int, share: int, groups: int, width: int, most: int) -> Cut:
  """`width`: columns of the probe; `most`: programs of a row."""
  columns, tiles = pl.next_power_of_2(width), pl.next_power_of_2(share)
  lanes = max(1, min(pl.next_power_of_2(groups), VALUES // (2 * tiles * columns)))
  chunk = max(1, min(pl.next_power_of_2(shares), VALUES // (lanes * columns)))
  return Cut(min(shares, most), lanes, chunk)


def kernel(
  left: Left,
  count_ref: Any,
  before: Walks | None,
  calm_ref: Any,
  *,
  rule: Detector,
  first: int,
  share: int,
  cut: Cut,
) -> None:
  """`Left`, tiles of each order [R], (`Walks`) -> stable tiles in a row [R, N, G].

  Tile t of a share has 2·c + 1 where c tiles are stable in a row up to it and the one before these
  is not, and lies in the share; 2·c where they may go on before it.
  """
  source = left.acc if left.probe is None else left.probe
  size, groups, width = source.shape[1:]
  head_dim = left.acc.shape[-1]
  row, piece = pl.program_id(0), pl.program_id(1)
  lane = pl.program_id(2) * cut.lanes + jnp.arange(cut.lanes)
  column, tile = jnp.arange(pl.next_power_of_2(width)), jnp.arange(pl.next_power_of_2(share))
  part = remaining.Part(row, lane, column, lane < groups, column < width)
  real, inside = part.real, part.inside
  count = jnp.clip(count_ref[row] - first, 0, size)
  if before is not None:
    every = jnp.arange(pl.next_power_of_2(groups))
    walked = backend.load(before.walked, row, every, mask=every < groups, other=remaining.NEVER)
    count = jnp.where(walked.min() == 0, count, 0)
  shares, each = pl.cdiv(count, share), -(-size // share // cut.pieces)
  begin, end = (jnp.minimum((piece + i) * each, shares) for i in (0, 1))

  def load(t: Array, ok: Array) -> tuple[Array, Array, Array]:
    """acc [T, G, C] at the probe's columns, m and l [T, G] after tiles t, where ok."""
    at, mask = (row, jnp.where(ok, t, 0)[:, None], lane[None, :]), ok[:, None] & real[None, :]
    index = row, at[1][:, :, None], lane[None, :, None], column[None, None, :]
    acc = backend.load(source, *index, mask=mask[:, :, None] & inside[None, None, :])
    m = backend.load(left.m, *at, mask=mask, other=-jnp.inf)
    return acc, m, backend.load(left.l, *at, mask=mask, other=0.0)

  def judge(q: Any, carry: tiling.Carry) -> None:
    t = q * share + tile
    ok = (tile < share) & (t < count)
    mask = ok[:, None] & real[None, :]
    top = backend.load(left.top, row, t[:, None], lane[None, :], mask=mask, other=-jnp.inf)
    new = _output(carry, *load(t, ok))
    old = _output(carry, *load(t - 1, ok & (tile > 0)))
    norm, norm_before = (jnp.sqrt((x * x).sum(axis=-1)) for x in (new, old))
    step = mask & (top > -jnp.inf)
    stable = step & rule.is_stable(new, old, norm, norm_before)
    broken, one = step & ~stable, stable.astype(jnp.int32)
    none = jnp.zeros(lane.shape, jnp.int32)
    calm = jnp.where(broken, 0, remaining.calm_before(one, broken, none) + one)
    since = jnp.cumsum(broken.astype(jnp.int32), axis=0) > 0
    code = 2 * calm + since.astype(jnp.int32)
    backend.store(calm_ref, row, t[:, None], lane[None, :], value=code, mask=mask)

  def add(carry: tiling.Carry, q: Any) -> tiling.Carry:
    """The state after share q."""
    last = jnp.minimum((q + 1) * share, count) - 1
    index, mask = (row, last, lane[:, None], column[None, :]), real[:, None] & inside[None, :]
    m = backend.load(left.m, row, last, lane, mask=real, other=-jnp.inf)
    l = backend.load(left.l, row, last, lane, mask=real, other=0.0)
    old, new, top, total = _weights(carry.m, carry.l, m, l)
    acc = carry.acc * old[:, None] + backend.load(source, *index, mask=mask) * new[:, None]
    return tiling.Carry(acc, top, total)

  def look(q: Any, carry: tiling.Carry) -> tiling.Carry:
    judge(q, carry)
    return carry if each == 1 else add(carry, q)

  @pl.when(begin < end)
  def _() -> None:
    probed = part
    if left.probe is not None:
      probed = part._replace(column=column * head_dim // PROBES)
    carry = remaining.begin(before, probed)
    limit = jnp.broadcast_to(begin * share, lane.shape)
    how = {"share": share, "chunk": cut.chunk}
    carry = remaining.add_shares(carry, left, source, part, limit, **how)
    lax.fori_loop(begin, end, look, carry)


def _weights(m: Array, l: Array, new_m: Array, new_l: Array) -> tuple[Array, Array, Array, Array]:
  """Weights of two softmax states in their sum, and its m and l."""
  top = jnp.maximum(m, new_m)
  base = tiling.finite(top)
  old, new = jnp.exp2(m - base), jnp.exp2(new_m - base)
  return old, new, top, l * old + new_l * new


def _output(carry: tiling.Carry, acc: Array, m: Array, l: Array) -> Array:
  """The probe [T, G, C] of what lies before a share and of its tiles [T, G(, C)]."""
  old, new, _, total = _weights(carry.m[None, :], carry.l[None, :], m, l)
  x = carry.acc[None, :, :] * old[:, :, None] + acc * new[:, :, None]
  return x / tiling.nonzero(total)[:, :, None]
