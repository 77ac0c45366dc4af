"""LongFlow: which token contributes least to a step's output (§3.2, Alg. 1).

    score_i = log Σ_r exp(x_ri − lse_r) · ‖v_i‖₁

over the queries r of a KV head, or of a layer; in logarithms nothing overflows, whatever the
logits. Each query's denominator is known only at the end of a pass over K and V, so that pass
(`decode`, with logits) leaves the logits of the G real queries of every KV head, and this one finds
the least score. Bytes per slot of a KV head: 4 G for logits and 8 for ‖v‖₁ and position, beside
4 H for K and V in bfloat16.

The second pass is as much arithmetic as it is bytes: vectors of 16 bytes, of which all that may be
read is, with one logarithm a slot, and all programs at once.

Where a row's logits fit registers, one launch does both (`longflow.read`).

Grid: one program per batch row and KV head, or per batch row.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.common import backend, tiling
from kvjax.kernels.common.devices import this_device

WARPS, TILE = 4, 512  # slots per step of a program, at most
# Of no more programs than multiprocessors: nothing else runs while one of them waits.
LONE_WARPS, LONE_TILE = 8, 1024
LAST = jnp.iinfo(jnp.int32).max


class Best(NamedTuple):
  """The least score, of every lane or of all, its token's position and slot."""

  score: Array
  pos: Array
  slot: Array


def better(a: Best, b: Best) -> Best:
  """The one of the lower score; ties go to the lower position."""
  first = (a.score < b.score) | ((a.score == b.score) & (a.pos < b.pos))
  return Best(*(jnp.where(first, x, y) for x, y in zip(a, b, strict=True)))


def named(score: Array, pos: Array, slot: Array) -> Best:
  """The best of all lanes; positions are unique."""
  least = score.min()
  oldest = jnp.where(score == least, pos, LAST)
  pos = oldest.min()
  return Best(least, pos, jnp.where(oldest == pos, slot, LAST).min())


def _kernel(*refs: Any, sinks: int, recent: int, heads: int, most: int) -> None:
  """logits [B, K, G, S], m, l [B, K, G], norm, pos [B, K, S], used, seen, live [B] and, in place,
  victim [B, K].

  A program has `heads` KV heads, which hold the same tokens in the same slots.
  """
  logits_ref, m_ref, l_ref, norm_ref, pos_ref, used_ref, seen_ref, live_ref = refs[:8]
  victim_ref = refs[-1]
  rows, kv_heads, groups, slots = logits_ref.shape
  # The last rows' logits were written last: they may still be in the L2 cache.
  b, first = rows - 1 - pl.program_id(0), pl.program_id(1) * heads
  used, end = jnp.minimum(used_ref[b], slots), seen_ref[b] - recent
  tile = min(most, max(64, pl.next_power_of_2(slots)))

  def denominators(head: Any) -> list[Array]:
    """lse of the queries of a KV head."""
    states = [(m_ref[b, head, group], l_ref[b, head, group]) for group in range(groups)]
    return [jnp.where(l > 0, m + jnp.log(jnp.where(l > 0, l, 1.0)), 0.0) for m, l in states]

  def of_head(head: Any, lses: list[Array], slot: Array) -> Array:
    """log Σ α · ‖v‖₁ over the queries of a KV head, per slot."""
    inside = slot < slots  # a bound that is known beforehand leaves the loads whole vectors
    rows = []
    for group, lse in enumerate(lses):  # slot by slot: no thread waits for another's
      x = backend.load(logits_ref, b, head, group, slot, mask=inside, other=-jnp.inf)
      rows.append(x - lse)
    norm = backend.load(norm_ref, b, head, slot, mask=inside, other=1.0)
    base = tiling.finite(functools.reduce(jnp.maximum, rows))
    total = functools.reduce(jnp.add, [jnp.exp(y - base) for y in rows])
    return base + jnp.log(total * norm)

  lses = denominators(first)

  def step(i: Any, best: Best) -> Best:
    slot = i * tile + jnp.arange(tile)
    held = slot < used
    score = of_head(first, lses, slot)
    if heads > 1:
      score = lax.fori_loop(
        *(first + 1, first + heads),
        lambda head, score: _log_add(score, of_head(head, denominators(head), slot)),
        score,
      )
    score = jnp.where(score != score, -jnp.inf, score)  # NaN leaves first
    pos = backend.load(pos_ref, b, first, slot, mask=slot < slots, other=LAST)
    score = jnp.where(held & (pos >= sinks) & (pos < end), score, jnp.inf)
    return better(Best(score, pos, slot), best)

  nothing = jnp.full((tile,), LAST, jnp.int32)
  best = Best(jnp.full((tile,), jnp.inf, jnp.float32), nothing, jnp.zeros_like(nothing))
  best = lax.fori_loop(0, pl.cdiv(used, tile), step, best)
  head = first + jnp.arange(pl.next_power_of_2(heads))
  counts = live_ref[b] & _finite(l_ref, b, kv_heads, groups)
  value = jnp.full(head.shape, named(*best).slot)
  backend.store(victim_ref, b, head, value=value, mask=(head < first + heads) & counts)


def _finite(l_ref: Any, row: Array, heads: int, groups: int) -> Array:
  """True if all denominators of a batch row are finite: a row with NaN keeps its statistics."""
  head, group = jnp.arange(pl.next_power_of_2(heads)), jnp.arange(pl.next_power_of_2(groups))
  mask = (head < heads)[:, None] & (group < groups)[None, :]
  l = backend.load(l_ref, row, head[:, None], group[None, :], mask=mask, other=1.0)
  return (jnp.abs(l) < jnp.inf).astype(jnp.int32).min(axis=1).min() > 0


def _log_add(a: Array, b: Array) -> Array:
  """log(eᵃ + eᵇ); −∞ of two −∞."""
  base = tiling.finite(jnp.maximum(a, b))
  return base + jnp.log(jnp.exp(a - base) + jnp.exp(b - base))


def victim(
  logits: Float[Array, "B K G S"],
  m: Float[Array, "B K G"],
  l: Float[Array, "B K G"],
  norm: Float[Array, "B K S"],
  pos: Int[Array, "B K S"],
  used: Int[Array, " B"],
  seen: Int[Array, " B"],
  live: Bool[Array, " B"],
  old: Int[Array, "B K"],
  *,
  sinks: int,
  recent: int,
  per_layer: bool = False,
  interpret: bool | None = None,
) -> Int[Array, "B K"]:
  """The slot whose token contributes least to this step's output.

  Args:
    logits: of this step, scaled, float32.
    m, l: its softmax state.
    norm: ‖v‖₁ of every slot, float32.
    pos: position of every slot.
    used: occupied slots of every row.
    seen: tokens seen; the newest has position seen − 1.
    live: rows that take part; others, and those whose l is not finite, keep `old`.
    old: the slots that were named before, updated in place where donated.
    sinks: first tokens that may not leave.
    recent: newest tokens that may not leave.
    per_layer: one victim for all KV heads, by the sum of their scores; else one for each.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    Slots, int32; ties go to the lowest position. Means nothing where no token may leave.
  """
  batch, kv_heads = pos.shape[:2]
  heads = kv_heads if per_layer else 1
  grid = batch, kv_heads // heads
  lone = grid[0] * grid[1] <= this_device().cores
  warps, tile = (LONE_WARPS, LONE_TILE) if lone else (WARPS, TILE)
  return backend.call(
    functools.partial(_kernel, sinks=sinks, recent=recent, heads=heads, most=tile),
    *(logits, m, l, norm, pos, used, seen, live, old),
    grid=grid,
    out=[jax.ShapeDtypeStruct((batch, kv_heads), jnp.int32)],
    warps=warps,
    stages=1,
    name="longflow_victim",
    interpret=interpret,
    aliases={8: 0},
  )[0]
