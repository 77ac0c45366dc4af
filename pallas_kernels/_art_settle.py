"""Where ART's walks end, and their softmax states, from what many programs have read of them.

One program per row goes over the shares of tiles in order. The state before a share joined with
one inside of it is the walk's after that tile: its output is looked at as Algorithm 1 does. While
one share is looked at, the next one is on its way.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from . import _backend, _split, _tiles
from ._art_stop import PROBES, Detector, Stop

NEVER = 1 << 30  # more tiles than any order has


class Left(NamedTuple):
  """What the programs of a wave leave [R, N, G(, H)] after each of its N tiles, of their own ones.

  acc, m, l: softmax state, m in base 2, over the share's tiles up to this one.
  top: the largest logit of the tile; −∞: it has no visible key.
  """

  acc: Any
  m: Any
  l: Any
  top: Any


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


class _Share(NamedTuple):
  """What a program has left of a share, at the probe's columns, of its tiles and those before.

  acc [T, G, C], m, l, top [T, G]; old_acc, old_m, old_l of t − 1; whole [G, H], of all columns
  after its last tile.
  """

  acc: Array
  m: Array
  l: Array
  top: Array
  old_acc: Array
  old_m: Array
  old_l: Array
  whole: Array


def kernel(
  left: Left,
  count_ref: Any,
  before: Walks | None,
  after: Walks,
  results: tuple[Any, ...],
  *,
  until: Stop | None,
  first: int,
  share: int,
  last: bool,
) -> None:
  """`Left`, tiles of each order [R], (`Walks`) -> `Walks`, and what `_split.results` lists.

  Goes over the tiles from `first` on, share by share, until no walk goes on. `last`: there is no
  wave after this one.
  """
  rule = until.rule if until is not None else None
  _, size, groups, head_dim = left.acc.shape
  row = pl.program_id(0)
  lane, tile = jnp.arange(pl.next_power_of_2(groups)), jnp.arange(pl.next_power_of_2(share))
  column = jnp.arange(_split.columns_of(head_dim))
  full = not isinstance(rule, Detector) or rule.full
  if full or head_dim <= PROBES:
    probe = column
  else:
    probe = jnp.arange(PROBES) * head_dim // PROBES
  real, inside = lane < groups, column < head_dim
  count = jnp.clip(count_ref[row] - first, 0, size)

  def states(t: Array, ok: Array) -> tuple[Array, Array, Array, Array]:
    """acc [T, G, C] at the probe's columns, m, l and top [T, G] after tiles t, where ok."""
    at, mask = (row, t[:, None], lane[None, :]), ok[:, None] & real[None, :]
    index = row, t[:, None, None], lane[None, :, None], probe[None, None, :]
    seen = mask[:, :, None] & (probe < head_dim)[None, None, :]
    acc = _backend.load(left.acc, *index, mask=seen, other=0.0)
    m = _backend.load(left.m, *at, mask=mask, other=-jnp.inf)
    l = _backend.load(left.l, *at, mask=mask, other=0.0)
    return acc, m, l, _backend.load(left.top, *at, mask=mask, other=-jnp.inf)

  def load(q: Array) -> _Share:
    """Share q of the wave; none where there is none."""
    t = q * share + tile
    ok = (tile < share) & (t < count)
    acc, m, l, top = states(t, ok)
    old_acc, old_m, old_l, _ = states(t - 1, ok & (tile > 0))
    last = jnp.minimum((q + 1) * share, count) - 1
    index = row, last, lane[:, None], column[None, :]
    mask = real[:, None] & inside[None, :] & (last >= q * share)
    whole = _backend.load(left.acc, *index, mask=mask, other=0.0)
    return _Share(acc, m, l, top, old_acc, old_m, old_l, whole)

  def judge(t: Array, ok: Array, ours: _Share, walks: Walks, probed: Array) -> tuple[Array, Array]:
    """Which walks [T, G] may end after tiles t, and stable tiles in a row there."""
    assert until is not None and isinstance(rule, Detector)
    before = walks.m, walks.l, probed
    new = _output(before, ours.m, ours.l, ours.acc)
    old = _output(before, ours.old_m, ours.old_l, ours.old_acc)
    norm, norm_before = (jnp.sqrt((x * x).sum(axis=-1)) for x in (new, old))
    stable = rule.is_stable(new, old, norm, norm_before)
    calm = _calm(stable, ok[:, None] & (ours.top > -jnp.inf), walks.calm)
    done = (calm >= rule.patience) & (ok & (first + t + 1 >= until.kept))[:, None]
    if not until.per_head:
      together = jnp.where(real[None, :], done, True).astype(jnp.int32).min(axis=1)
      done = jnp.broadcast_to(together[:, None] > 0, done.shape)
    return done, calm

  def body(state: tuple[Any, ...]) -> tuple[Any, ...]:
    q, ours, walks, probed = state
    ahead = load(q + 1)
    t = q * share + tile
    ok = (tile < share) & (t < count)
    walked, calm = walks.walked, jnp.zeros((t.size, lane.size), jnp.int32)
    if until is not None:
      done, calm = judge(t, ok, ours, walks, probed)
      hit = jnp.where(done, t[:, None], NEVER).min(axis=0)
      walked = jnp.where((walked == 0) & (hit < NEVER), first + hit + 1, walked)
    # Those that go on take all of the share.
    on = walked == 0
    is_last = ok & (t == jnp.minimum((q + 1) * share, count) - 1)

    def at_last(x: Array) -> Array:
      mask = is_last.reshape(-1, *(1,) * (x.ndim - 1))
      return jnp.where(mask, x, 0).sum(axis=0)

    m = jnp.where(is_last[:, None], ours.m, -jnp.inf).max(axis=0)
    mine, theirs, top, l = _weights(walks.m, walks.l, m, at_last(ours.l))

    def joined(x: Array, y: Array) -> Array:
      return jnp.where(on[:, None], x * mine[:, None] + y * theirs[:, None], x)

    acc, probed = joined(walks.acc, ours.whole), joined(probed, at_last(ours.acc))
    top, l = jnp.where(on, top, walks.m), jnp.where(on, l, walks.l)
    calm = jnp.where(on, at_last(calm), walks.calm)
    return q + 1, ahead, Walks(acc, top, l, calm, walked), probed

  def unfinished(state: tuple[Any, ...]) -> Array:
    q, _, walks, _ = state
    return (q * share < count) & (jnp.where(real, walks.walked, NEVER).min() == 0)

  walks = _begin(before, row, lane, column, groups, head_dim)
  probed = _probed(before, row, lane, probe, groups, head_dim)
  begun = walks.walked
  *_, walks, _ = lax.while_loop(unfinished, body, (jnp.int32(0), load(jnp.int32(0)), walks, probed))
  # Walks that ended here take their share up to the last tile.
  here = real & (begun == 0) & (walks.walked > 0)
  end = jnp.where(here, walks.walked - 1 - first, 0)
  mask = here[:, None] & inside[None, :]
  acc = _backend.load(left.acc, row, end[:, None], lane[:, None], column[None, :], mask=mask)
  m = _backend.load(left.m, row, end, lane, mask=here, other=-jnp.inf)
  l = _backend.load(left.l, row, end, lane, mask=here, other=0.0)
  mine, theirs, top, l = _weights(walks.m, walks.l, m, l)
  acc = walks.acc * mine[:, None] + acc * theirs[:, None]
  walked = walks.walked
  if last:
    walked = jnp.where(walked == 0, count_ref[row], walked)
  _write(after, row, Walks(acc, top, l, walks.calm, walked), lane, column)
  _finish(results, row, _tiles.Carry(acc, top, l), lane, column)


def _write(refs: Walks, row: Array, walks: Walks, lane: Array, column: Array) -> None:
  _, groups, head_dim = refs.acc.shape
  mask = (lane < groups)[:, None] & (column < head_dim)[None, :]
  _backend.store(refs.acc, row, lane[:, None], column[None, :], value=walks.acc, mask=mask)
  for ref, value in zip(refs[1:], walks[1:], strict=True):
    _backend.store(ref, row, lane, value=value, mask=lane < groups)


def _finish(
  refs: tuple[Any, ...], row: Array, carry: _tiles.Carry, lane: Array, column: Array
) -> None:
  o_ref, m_ref, l_ref, rounded_ref = refs
  _, groups, head_dim = o_ref.shape
  mask = (lane < groups)[:, None] & (column < head_dim)[None, :]
  o, m, l = _tiles.finish(carry)
  for ref, value in ((o_ref, o), (rounded_ref, o.astype(rounded_ref.dtype))):
    _backend.store(ref, row, lane[:, None], column[None, :], value=value, mask=mask)
  for ref, value in ((m_ref, m), (l_ref, l)):
    _backend.store(ref, row, lane, value=value, mask=lane < groups)


def _begin(
  before: Walks | None, row: Array, lane: Array, column: Array, groups: int, head_dim: int
) -> Walks:
  """Walks as the wave before left them."""
  if before is None:
    none = jnp.zeros(lane.shape, jnp.int32)
    start = _tiles.start(lane.size, column.size)
    return Walks(*start, none, none)
  real = lane < groups
  index, mask = (row, lane[:, None], column[None, :]), real[:, None] & (column < head_dim)[None, :]
  acc = _backend.load(before.acc, *index, mask=mask)
  m, l = (
    _backend.load(ref, row, lane, mask=real, other=x)
    for ref, x in ((before.m, -jnp.inf), (before.l, 0.0))
  )
  calm, walked = (
    _backend.load(ref, row, lane, mask=real, other=0) for ref in (before.calm, before.walked)
  )
  return Walks(acc, m, l, calm, walked)


def _probed(
  before: Walks | None, row: Array, lane: Array, probe: Array, groups: int, head_dim: int
) -> Array:
  """acc [G, C] of the walks at the probe's columns."""
  if before is None:
    return jnp.zeros((lane.size, probe.size), jnp.float32)
  mask = (lane < groups)[:, None] & (probe < head_dim)[None, :]
  return _backend.load(before.acc, row, lane[:, None], probe[None, :], mask=mask)


def _weights(m: Array, l: Array, new_m: Array, new_l: Array) -> tuple[Array, Array, Array, Array]:
  """What two softmax states weigh in their sum, and its m and l."""
  top = jnp.maximum(m, new_m)
  base = _tiles.finite(top)
  old, new = jnp.exp2(m - base), jnp.exp2(new_m - base)
  return old, new, top, l * old + new_l * new


def _output(before: tuple[Array, Array, Array], m: Array, l: Array, acc: Array) -> Array:
  """The probe [T, G, C] of what lies before a share (m, l [G], acc [G, C]) and of its tiles."""
  old, new, _, total = _weights(before[0][None, :], before[1][None, :], m, l)
  x = before[2][None, :, :] * old[:, :, None] + acc * new[:, :, None]
  return x / _tiles.nonzero(total)[:, :, None]


def _calm(stable: Array, step: Array, before: Array) -> Array:
  """Stable tiles in a row after each tile [T, G]; tiles that are no step leave the number alone."""
  t = jnp.arange(stable.shape[0])
  past = (t[None, :] <= t[:, None])[:, :, None]  # [t, j, 1]
  broken = jnp.where(step & ~stable, t[:, None] + 1, 0)
  since = jnp.where(past, broken[None, :, :], 0).max(axis=1)  # one past the last unstable tile
  counted = past & (t[None, :, None] >= since[:, None, :]) & (step & stable)[None, :, :]
  return counted.astype(jnp.int32).sum(axis=1) + jnp.where(since == 0, before[None, :], 0)
