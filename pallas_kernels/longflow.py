"""LongFlow: attention and the token that contributes least to it (§3.2, Alg. 1).

    score_i = log Σ_r exp(x_ri − lse_r) · ‖v_i‖₁

over the queries r of a KV head, or of a layer; in logarithms nothing overflows, whatever the
logits. Each query's denominator is known only at the end, so one pass over K and V leaves the
logits of the G real queries, and a second over these finds the least score.
Bytes per slot of a KV head: 4 H for K and V in bfloat16, 4 G for logits, 8 for ‖v‖₁ and position.

`attend` does both passes in one launch: one program per batch row and KV head, which reads its own
logits again while they are in the L2 cache. `victim` is the second pass alone, for few rows, which
split the first one over programs, and for one victim per layer.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.softmax_state import State
from pallas_kernels import _backend, _tiles
from pallas_kernels.config import device
from pallas_kernels.decode import check, columns_of, decode_with_output, lanes_of, pick

WARPS = 4
ELEMENTS = 2048  # logits per step of a program
LAST = jnp.iinfo(jnp.int32).max


class Best(NamedTuple):
  """The least score of every lane so far, its token's position and slot."""

  score: Array
  pos: Array
  slot: Array


def _least(
  rows: tuple[Any, Any], lse: Array, count: int, refs: tuple[Any, Any, Any], b: Any, limits: Any
) -> Array:
  """The slot of least score among those that may leave; ties to the lowest position.

  `rows`: (KV head, query head) of every query, of which `count` are real; `lse` theirs in natural
  logarithms. `refs`: logits [B, K, G, S], norm and pos [B, K, S]. `limits`: (used, sinks, end):
  only tokens of the slots below used with position in [sinks, end) may leave.
  """
  logits_ref, norm_ref, pos_ref = refs
  (head, group), (used, sinks, end) = rows, limits
  slots, lanes = logits_ref.shape[-1], head.shape[0]
  tile = min(max(64, ELEMENTS // lanes), pl.next_power_of_2(slots))
  real = (jnp.arange(lanes) < count)[:, None]

  def step(i: Any, best: Best) -> Best:
    slot = i * tile + jnp.arange(tile)
    held = slot < used
    mask, lane = real & held[None, :], slot[None, :]
    x = _backend.load(logits_ref, b, head[:, None], group[:, None], lane, mask=mask, other=-jnp.inf)
    norm = _backend.load(norm_ref, b, head[:, None], lane, mask=mask, other=1.0)
    y = x - lse[:, None] + jnp.log(norm)
    top = y.max(axis=0)
    base = jnp.where(top == -jnp.inf, 0.0, top)
    score = base + jnp.log(jnp.exp(y - base[None, :]).sum(axis=0))
    score = jnp.where(score != score, -jnp.inf, score)  # NaN leaves first
    pos = _backend.load(pos_ref, b, head.min(), slot, mask=held, other=LAST)
    score = jnp.where(held & (pos >= sinks) & (pos < end), score, jnp.inf)
    better = (score < best.score) | ((score == best.score) & (pos < best.pos))
    pairs = zip((score, pos, slot), best, strict=True)
    return Best(*(jnp.where(better, new, old) for new, old in pairs))

  best = Best(
    jnp.full((tile,), jnp.inf, jnp.float32),
    jnp.full((tile,), LAST, jnp.int32),
    jnp.zeros((tile,), jnp.int32),
  )
  best = lax.fori_loop(0, pl.cdiv(jnp.minimum(used, slots), tile), step, best)
  oldest = jnp.where(best.score == best.score.min(), best.pos, LAST)
  return jnp.where(oldest == oldest.min(), best.slot, LAST).min()


def _attend_kernel(
  *refs: Any, tile: int, scale: float, sinks: int, recent: int, interpret: bool
) -> None:
  """q [B, K, G, H], k, v [B, K, S, H], norm, pos [B, K, S], used, seen [B] ->
  logits [B, K, G, S], o [B, K, G, H], m, l [B, K, G], o rounded, victim [B, K].
  """
  q_ref, k_ref, v_ref, norm_ref, pos_ref, used_ref, seen_ref = refs[:7]
  logits_ref, o_ref, m_ref, l_ref, rounded_ref, victim_ref = refs[7:]
  groups, head_dim = q_ref.shape[2:]
  b, h = pl.program_id(0), pl.program_id(1)
  used = jnp.minimum(used_ref[b], k_ref.shape[2])
  lanes, columns = jnp.arange(lanes_of(groups)), jnp.arange(columns_of(head_dim))
  of_query = b, h, lanes[:, None], columns[None, :]
  real = (lanes < groups)[:, None] & (columns < head_dim)[None, :]

  def fetch(i: Any) -> _tiles.Tile:
    slot = i * tile + jnp.arange(tile)
    index = b, h, slot[:, None], columns[None, :]
    mask = (slot < used)[:, None] & (columns < head_dim)[None, :]
    k, v = (_backend.load(ref, *index, mask=mask, evict="evict_first") for ref in (k_ref, v_ref))
    return _tiles.Tile(k, v, slot < used)

  def see(i: Any, x: Array) -> None:
    slot = i * tile + jnp.arange(tile)
    mask = (lanes < groups)[:, None] & (slot < used)[None, :]
    value = x * _tiles.LN2
    _backend.store(logits_ref, b, h, lanes[:, None], slot[None, :], value=value, mask=mask)

  q = _backend.load(q_ref, *of_query, mask=real)
  carry = _tiles.start(lanes.size, columns.size)
  carry = _tiles.walk(carry, q, fetch, 0, pl.cdiv(used, tile), scale=scale, see=see)
  o, m, l = _tiles.finish(carry)
  _backend.store(o_ref, *of_query, value=o, mask=real)
  _backend.store(rounded_ref, *of_query, value=o.astype(rounded_ref.dtype), mask=real)
  _backend.store(m_ref, b, h, lanes, value=m, mask=lanes < groups)
  _backend.store(l_ref, b, h, lanes, value=l, mask=lanes < groups)
  if not interpret:
    _backend.barrier()  # every warp has written its logits

  row = jnp.arange(pl.next_power_of_2(groups))
  m = _backend.load(m_ref, b, h, row, mask=row < groups)
  l = _backend.load(l_ref, b, h, row, mask=row < groups, other=1.0)
  rows = jnp.full(row.shape, h), row
  limits = used, sinks, seen_ref[b] - recent
  refs = logits_ref, norm_ref, pos_ref
  victim_ref[b, h] = _least(rows, _lse(m, l), groups, refs, b, limits)


def _victim_kernel(*refs: Any, sinks: int, recent: int, heads: int) -> None:
  """logits [B, K, G, S], m, l [B, K, G], norm, pos [B, K, S], used, seen [B] -> victim [B, K].

  A program has `heads` KV heads, which hold the same tokens in the same slots.
  """
  logits_ref, m_ref, l_ref, norm_ref, pos_ref, used_ref, seen_ref, victim_ref = refs
  groups = logits_ref.shape[2]
  b, first = pl.program_id(0), pl.program_id(1) * heads
  row = jnp.arange(pl.next_power_of_2(heads * groups))
  real = row < heads * groups
  rows = first + jnp.where(real, row // groups, 0), row % groups
  m = _backend.load(m_ref, b, *rows, mask=real)
  l = _backend.load(l_ref, b, *rows, mask=real, other=1.0)
  limits = used_ref[b], sinks, seen_ref[b] - recent
  refs = logits_ref, norm_ref, pos_ref
  victim = _least(rows, _lse(m, l), heads * groups, refs, b, limits)
  named = first + jnp.arange(pl.next_power_of_2(heads))
  value = jnp.full(named.shape, victim)
  _backend.store(victim_ref, b, named, value=value, mask=named < first + heads)


def _lse(m: Array, l: Array) -> Array:
  """m + log l; 0 where no key was seen."""
  return jnp.where(l > 0, m + jnp.log(l), 0.0)


def attend(
  q: Float[Array, "B K G H"],
  k: Float[Array, "B K S H"],
  v: Float[Array, "B K S H"],
  norm: Float[Array, "B K S"],
  pos: Int[Array, "B K S"],
  used: Int[Array, " B"],
  seen: Int[Array, " B"],
  *,
  sinks: int,
  recent: int,
  per_layer: bool = False,
  interpret: bool | None = None,
) -> tuple[State, Float[Array, "B K G H"], Int[Array, "B K"]]:
  """Attention over the slots [0, used), and the slot whose token contributes least to it.

  Args:
    q: queries, rotated, in the dtype of k; H ≤ 256, G ≤ 128.
    k, v: cached keys and values, bfloat16, float16 or float32.
    norm, pos, used, seen, sinks, recent, per_layer, interpret: as in `victim`.

  Returns:
    The softmax state, o once more in the dtype of q, and slots as `victim` names them.
  """
  emulated = _backend.interpreted(interpret)
  batch, kv_heads = q.shape[:2]
  # One program per row and KV head must keep the device busy: else rows are split.
  if not per_layer and (
    emulated or batch * kv_heads >= 2 * device(jax.devices()[0].device_kind).cores
  ):
    return _fused(q, k, v, norm, pos, used, seen, sinks, recent, interpret)
  stop = used[:, None]
  logits: Any
  state, rounded, logits = decode_with_output(
    q, k, v, jnp.zeros_like(stop), stop, logits=True, interpret=interpret
  )
  named = victim(
    logits,
    state.m,
    state.l,
    *(norm, pos, used, seen),
    sinks=sinks,
    recent=recent,
    per_layer=per_layer,
    interpret=interpret,
  )
  return state, rounded, named


def _fused(
  q: Array,
  k: Array,
  v: Array,
  norm: Array,
  pos: Array,
  used: Array,
  seen: Array,
  sinks: int,
  recent: int,
  interpret: bool | None,
) -> tuple[State, Array, Array]:
  """`attend` in one launch, per KV head."""
  stop = jnp.zeros((q.shape[0], 1), jnp.int32)
  check(q, k, v, stop, stop, 0, None)
  cut = pick(q, k, interpret=_backend.interpreted(interpret))
  of, head = jax.ShapeDtypeStruct, q.shape[:3]
  _, o, m, l, rounded, named = _backend.call(
    functools.partial(
      _attend_kernel,
      tile=cut.tile,
      scale=q.shape[3] ** -0.5,
      sinks=sinks,
      recent=recent,
      interpret=_backend.interpreted(interpret),
    ),
    *(q, k, v, norm, pos, used, seen),
    grid=q.shape[:2],
    out=[
      of((*head, k.shape[2]), jnp.float32),
      *(of(q.shape, jnp.float32), of(head, jnp.float32), of(head, jnp.float32)),
      *(of(q.shape, q.dtype), of(q.shape[:2], jnp.int32)),
    ],
    # float32 tiles and the logits beside them spill the registers of four warps.
    warps=max(cut.warps, 2 * k.dtype.itemsize),
    stages=cut.stages,
    name="longflow_attend",
    interpret=interpret,
  )
  return State(o, m, l), rounded, named


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
    functools.partial(_victim_kernel, sinks=sinks, recent=recent, heads=heads),
    *(logits, m, l, norm, pos, used, seen),
    grid=(batch, kv_heads // heads),
    out=[jax.ShapeDtypeStruct((batch, kv_heads), jnp.int32)],
    warps=WARPS,
    stages=1,
    name="longflow_victim",
    interpret=interpret,
  )[0]
