"""LongFlow's second pass: from a step's logits to the token that contributes least (§3.2, Alg. 1).

The attention kernel walks K and V once and leaves the logits of the G real queries of every KV
head; what a token contributes needs each query's final denominator, known only then:

    score_i = log Σ_r exp(x_ri − lse_r) · ‖v_i‖₁

over the queries r of a KV head, or of a layer. In logarithms nothing overflows, whatever the
logits. Bytes per slot: 4 G for logits, 8 for ‖v‖₁ and the position, beside 4 H for K and V.

Grid: one program per batch row and KV head, or per batch row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import _backend

WARPS = 4
ELEMENTS = 4096  # logits per step of a program
LAST = jnp.iinfo(jnp.int32).max


def _kernel(*refs: Any, sinks: int, recent: int, heads: int) -> None:
  """logits [B, K, G, S], m, l [B, K, G], norm, pos [B, K, S], used, seen [B] -> victim [B, K].

  A program has `heads` KV heads, which hold the same tokens in the same slots.
  """
  logits_ref, m_ref, l_ref, norm_ref, pos_ref, used_ref, seen_ref, victim_ref = refs
  groups, slots = logits_ref.shape[2:]
  b, first = pl.program_id(0), pl.program_id(1) * heads
  used, seen = used_ref[b], seen_ref[b]
  rows = pl.next_power_of_2(heads * groups)
  tile = min(max(64, ELEMENTS // rows), pl.next_power_of_2(slots))

  row = jnp.arange(rows)
  real = row < heads * groups
  head, group = first + row // groups, row % groups
  m = _backend.load(m_ref, b, head, group, mask=real)
  l = _backend.load(l_ref, b, head, group, mask=real, other=1.0)
  lse = jnp.where(l > 0, m + jnp.log(l), 0.0)[:, None]

  def step(i: Any, best: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    least, oldest, at = best
    slot = i * tile + jnp.arange(tile)
    held = slot < used
    index = (b, head[:, None], slot[None, :])
    mask = real[:, None] & held[None, :]
    x = _backend.load(
      logits_ref, b, head[:, None], group[:, None], slot[None, :], mask=mask, other=-jnp.inf
    )
    norm = _backend.load(norm_ref, *index, mask=mask, other=1.0)
    y = x - lse + jnp.log(norm)
    top = y.max(axis=0)
    base = jnp.where(top == -jnp.inf, 0.0, top)
    score = base + jnp.log(jnp.exp(y - base[None, :]).sum(axis=0))
    pos = _backend.load(pos_ref, b, first, slot, mask=held, other=LAST)
    may_leave = held & (pos >= sinks) & (pos < seen - recent)
    score = jnp.where(may_leave, score, jnp.inf)
    better = (score < least) | ((score == least) & (pos < oldest))
    return (
      jnp.where(better, score, least),
      jnp.where(better, pos, oldest),
      jnp.where(better, slot, at),
    )

  start = (
    jnp.full((tile,), jnp.inf, jnp.float32),
    jnp.full((tile,), LAST, jnp.int32),
    jnp.zeros((tile,), jnp.int32),
  )
  least, oldest, at = lax.fori_loop(0, pl.cdiv(jnp.minimum(used, slots), tile), step, start)
  # Ties go to the lowest position, and positions are unique.
  oldest = jnp.where(least == least.min(), oldest, LAST)
  victim = jnp.where(oldest == oldest.min(), at, LAST).min()
  named = first + jnp.arange(pl.next_power_of_2(heads))
  value = jnp.full(named.shape, victim)
  _backend.store(victim_ref, b, named, value=value, mask=named < first + heads)


def victim(
  logits: Float[Array, "B K G S"],
  m: Float[Array, "B K G"],
  l: Float[Array, "B K G"],
  norm: Float[Array, "B K S"],
  pos: Int[Array, "B K S"],
  used: Int[Array, " B"],
  seen: Int[Array, " B"],
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
    sinks: first tokens that may not leave.
    recent: newest tokens that may not leave.
    per_layer: one victim for all KV heads, by the sum of their scores; else one for each.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    Slots, int32; ties go to the lowest position. Means nothing where no token may leave.
  """
  batch, kv_heads = pos.shape[:2]
  heads = kv_heads if per_layer else 1
  return _backend.call(
    functools.partial(_kernel, sinks=sinks, recent=recent, heads=heads),
    *(logits, m, l, norm, pos, used, seen),
    grid=(batch, kv_heads // heads),
    out=[jax.ShapeDtypeStruct((batch, kv_heads), jnp.int32)],
    warps=WARPS,
    stages=1,
    name="longflow_victim",
    interpret=interpret,
  )[0]
