"""`decode_attention` once more, in Triton through jax-triton: the way out of a deprecated lowering.

The same two kernels as `kvjax.kernels.decode.dense`, cut by the same rule, without the part of jax
that is to go. It needs the extra `jax-triton` and a GPU: there is no interpreter and no CPU
lowering.
"""

from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.kernels.common.config import Config
from kvjax.kernels.common.operands import check
from kvjax.kernels.common.split_k import JOINED, columns_of, lanes_of, state_shapes
from kvjax.kernels.decode.dense import pick
from kvjax.primitives.softmax_state import State

_EXTRA = "expected the extra jax-triton (pip install 'kvjax[jax-triton]') and a GPU build of jax"

try:
  import triton
  import triton.language as tl
except ImportError as error:
  raise ImportError(f"kvjax.kernels.decode.jax_triton: found {error}; {_EXTRA}") from error

_LOG2E = 1.4426950408889634
_LN2 = 0.6931471805599453


@triton.jit
@no_type_check
def _spans(start, stop, SLOTS: tl.constexpr, SINKS: tl.constexpr, JOINED_RANGES: tl.constexpr):
  stop = tl.minimum(tl.maximum(stop, 0), SLOTS)
  first = tl.maximum(start, SINKS)
  head = tl.minimum(stop, SINKS)
  if JOINED_RANGES:
    first = tl.where(start <= SINKS, 0, first)
    head = tl.where(start <= SINKS, 0, head)
  return head, first, stop


@triton.jit
@no_type_check
def _walk(
  acc, m, l, q, k_ptr, v_ptr, base, end, low, high, scale,
  TILE: tl.constexpr, HEAD: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
  column = tl.arange(0, COLUMNS)
  for i in range(low, high):
    slot = base + i * TILE + tl.arange(0, TILE)
    keep = slot < end
    at = slot[:, None] * HEAD + column[None, :]
    mask = keep[:, None] & (column < HEAD)[None, :]
    k = tl.load(k_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
    v = tl.load(v_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
    x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    x = tl.where(keep[None, :], x, float("-inf"))
    top = tl.maximum(m, tl.max(x, 1))
    finite = tl.where(top == float("-inf"), 0.0, top)
    alpha = tl.exp2(m - finite)
    p = tl.exp2(x - finite[:, None])
    acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    l = l * alpha + tl.sum(p, 1)
    m = top
  return acc, m, l


@triton.jit
@no_type_check
def attend_kernel(
  q_ptr, q_sinks_ptr, k_ptr, v_ptr, start_ptr, stop_ptr,
  o_ptr, m_ptr, l_ptr, part_acc_ptr, part_m_ptr, part_l_ptr, cut_ptr,
  ROWS: tl.constexpr, ROW_LANES: tl.constexpr, SLOTS: tl.constexpr, GROUPS: tl.constexpr,
  LANES: tl.constexpr, HEAD: tl.constexpr, COLUMNS: tl.constexpr, SINKS: tl.constexpr,
  JOINED_RANGES: tl.constexpr, SCALE: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr,
  PRECISION: tl.constexpr, LN2: tl.constexpr,
):  # fmt: skip
  """One program per piece; see `kvjax.kernels.decode.dense`, whose first kernel this repeats."""
  pid = tl.program_id(0)
  rows = tl.arange(0, ROW_LANES)
  real_row = rows < ROWS
  starts = tl.load(start_ptr + rows, mask=real_row, other=0)
  stops = tl.load(stop_ptr + rows, mask=real_row, other=0)
  _, firsts, stops = _spans(starts, stops, SLOTS, SINKS, JOINED_RANGES)
  tiles = tl.where(real_row, tl.maximum(stops - firsts + TILE - 1, 0) // TILE, 0)
  total = tl.maximum(tl.sum(tiles, 0), 1)
  ragged = tl.max(tiles, 0) * ROWS > total + total // 8
  cuts = (PROGRAMS * tiles + tl.where(ragged, total - 1, 0)) // total
  cuts = tl.where(real_row, tl.maximum(tl.minimum(cuts, tiles), 1), 0)
  row = tl.sum((tl.cumsum(cuts, 0) <= pid).to(tl.int32), 0)
  piece = pid - tl.sum(tl.where(rows < row, cuts, 0), 0)
  pieces = tl.sum(tl.where(rows == row, cuts, 0), 0)
  active = row < ROWS
  row = tl.minimum(row, ROWS - 1)
  row_start = tl.load(start_ptr + row)
  row_stop = tl.load(stop_ptr + row)
  head, first, stop = _spans(row_start, row_stop, SLOTS, SINKS, JOINED_RANGES)

  lane = tl.arange(0, LANES)
  column = tl.arange(0, COLUMNS)
  real = (lane < GROUPS)[:, None] & (column < HEAD)[None, :]
  of_query = lane[:, None] * HEAD + column[None, :]
  k_row = k_ptr + row.to(tl.int64) * SLOTS * HEAD
  v_row = v_ptr + row.to(tl.int64) * SLOTS * HEAD
  acc = tl.zeros([LANES, COLUMNS], tl.float32)
  m = tl.full([LANES], float("-inf"), tl.float32)
  l = tl.zeros([LANES], tl.float32)
  if SINKS > 0:
    q = tl.load(q_sinks_ptr + row * GROUPS * HEAD + of_query, mask=real, other=0.0)
    count = tl.where(active & (piece == 0), (head + TILE - 1) // TILE, 0)
    acc, m, l = _walk(
      acc, m, l, q, k_row, v_row, 0, head, 0, count, SCALE, TILE, HEAD, COLUMNS, PRECISION
    )
  q = tl.load(q_ptr + row * GROUPS * HEAD + of_query, mask=real, other=0.0)
  count = tl.where(active, tl.maximum(stop - first + TILE - 1, 0) // TILE, 0)
  low = piece * count // tl.maximum(pieces, 1)
  high = (piece + 1) * count // tl.maximum(pieces, 1)
  acc, m, l = _walk(
    acc, m, l, q, k_row, v_row, first, stop, low, high, SCALE, TILE, HEAD, COLUMNS, PRECISION
  )

  alone = active & (pieces == 1)
  shared = active & (pieces > 1)
  o = acc / tl.where(l == 0, 1.0, l)[:, None]
  tl.store(o_ptr + row * GROUPS * HEAD + of_query, o, mask=real & alone)
  tl.store(m_ptr + row * GROUPS + lane, m * LN2, mask=(lane < GROUPS) & alone)
  tl.store(l_ptr + row * GROUPS + lane, l, mask=(lane < GROUPS) & alone)
  tl.store(part_acc_ptr + pid * GROUPS * HEAD + of_query, acc, mask=real & shared)
  tl.store(part_m_ptr + pid * GROUPS + lane, m, mask=(lane < GROUPS) & shared)
  tl.store(part_l_ptr + pid * GROUPS + lane, l, mask=(lane < GROUPS) & shared)
  tl.store(cut_ptr + 2 * row, pid, mask=active & (piece == 0))
  tl.store(cut_ptr + 2 * row + 1, pieces, mask=active & (piece == 0))


@triton.jit
@no_type_check
def join_kernel(
  acc_ptr, part_m_ptr, part_l_ptr, cut_ptr, o_in_ptr, m_in_ptr, l_in_ptr, o_ptr, m_ptr, l_ptr,
  GROUPS: tl.constexpr, HEAD: tl.constexpr, COLUMNS: tl.constexpr, JOINED: tl.constexpr,
  LN2: tl.constexpr,
):  # fmt: skip
  """One program per query head: joins the partial states of a row of several pieces."""
  row = tl.program_id(0)
  group = tl.program_id(1)
  first = tl.load(cut_ptr + 2 * row)
  pieces = tl.load(cut_ptr + 2 * row + 1)
  column = tl.arange(0, COLUMNS)
  inside = column < HEAD
  if pieces > 1:
    acc = tl.zeros([COLUMNS], tl.float32)
    m = float("-inf")
    l = 0.0
    for i in range((pieces + JOINED - 1) // JOINED):
      part = i * JOINED + tl.arange(0, JOINED)
      keep = part < pieces
      at = (first + part) * GROUPS + group
      new_m = tl.load(part_m_ptr + at, mask=keep, other=float("-inf"))
      new_l = tl.load(part_l_ptr + at, mask=keep, other=0.0)
      mask = keep[:, None] & inside[None, :]
      new = tl.load(acc_ptr + at[:, None] * HEAD + column[None, :], mask=mask, other=0.0)
      top = tl.maximum(m, tl.max(new_m, 0))
      finite = tl.where(top == float("-inf"), 0.0, top)
      old = tl.exp2(m - finite)
      weight = tl.exp2(new_m - finite)
      acc = acc * old + tl.sum(new * weight[:, None], 0)
      l = l * old + tl.sum(new_l * weight, 0)
      m = top
    at = row * GROUPS + group
    tl.store(o_ptr + at * HEAD + column, acc / tl.where(l == 0, 1.0, l), mask=inside)
    tl.store(m_ptr + at, m * LN2)
    tl.store(l_ptr + at, l)


def decode_attention(
  q: Float[Array, "B K G H"],
  k: Float[Array, "B K S H"],
  v: Float[Array, "B K S H"],
  start: Int[Array, "B #K"],
  stop: Int[Array, "B #K"],
  *,
  sinks: int = 0,
  q_sinks: Float[Array, "B K G H"] | None = None,
  scale: float | None = None,
  config: Config | None = None,
) -> State:
  """As `kvjax.kernels.decode.dense.decode_attention`, arguments, result and errors; GPU only."""
  # Here and not above: it does not import without a GPU, and the kernels compile without one.
  try:
    import jax_triton
  except ImportError as error:
    raise ImportError(f"kvjax.kernels.decode.jax_triton: found {error}; {_EXTRA}") from error
  check(q, k, v, start, stop, sinks, q_sinks)
  batch, heads, groups, head_dim = q.shape
  rows, slots = batch * heads, k.shape[2]
  if slots * head_dim >= 1 << 31:
    raise NotImplementedError(
      f"k: found {slots} slots of {head_dim}, expected fewer than 2³¹ elements per KV head"
    )
  config = config or pick(q, k, interpret=False)
  joined = q_sinks is None or not sinks
  queries = (q, q if q_sinks is None else q_sinks)
  start, stop = (jnp.broadcast_to(x, q.shape[:2]) for x in (start, stop))
  flat = [x.reshape(rows, *x.shape[2:]) for x in (*queries, k, v, start, stop)]

  *state, acc, m, l, cut = jax_triton.triton_call(
    *flat,
    kernel=attend_kernel,
    out_shape=[
      *state_shapes(rows, groups, head_dim),
      *state_shapes(config.programs + rows, groups, head_dim),
      jax.ShapeDtypeStruct((rows, 2), jnp.int32),
    ],
    grid=(config.programs + rows,),
    num_warps=config.warps,
    num_stages=config.stages,
    **attend_constants(rows, slots, groups, head_dim, sinks, joined, scale, config, q.dtype.name),
  )
  if slots > config.tile:
    state = jax_triton.triton_call(
      *(acc, m, l, cut, *state),
      kernel=join_kernel,
      out_shape=state_shapes(rows, groups, head_dim),
      grid=(rows, groups),
      num_warps=4,
      num_stages=1,
      input_output_aliases={4: 0, 5: 1, 6: 2},
      **join_constants(groups, head_dim),
    )
  o, m, l = (x.reshape(batch, heads, *x.shape[1:]) for x in state)
  return State(o, m, l)


def decode_with_output(
  q: Array, *operands: Array, logits: bool = False, **options: Any
) -> tuple[State, Array, None]:
  """As `kvjax.kernels.decode.dense.decode_with_output`, without logits."""
  if logits:
    raise NotImplementedError("logits: found True, expected False; this kernel returns none")
  state = decode_attention(q, *operands, **options)
  return state, state.o.astype(q.dtype), None


def attend_constants(
  rows: int,
  slots: int,
  groups: int,
  head_dim: int,
  sinks: int,
  joined: bool,
  scale: float | None,
  config: Config,
  dtype: str,
) -> dict:
  """Compile-time arguments of `attend_kernel`."""
  return {
    "ROWS": rows,
    "ROW_LANES": triton.next_power_of_2(rows),
    "SLOTS": slots,
    "GROUPS": groups,
    "LANES": lanes_of(groups),
    "HEAD": head_dim,
    "COLUMNS": columns_of(head_dim),
    "SINKS": sinks,
    "JOINED_RANGES": joined,
    "SCALE": (head_dim**-0.5 if scale is None else scale) * _LOG2E,
    "TILE": config.tile,
    "PROGRAMS": config.programs,
    "PRECISION": "ieee" if dtype == "float32" else "tf32",
    "LN2": _LN2,
  }


def join_constants(groups: int, head_dim: int) -> dict:
  """Compile-time arguments of `join_kernel`."""
  return {
    "GROUPS": groups,
    "HEAD": head_dim,
    "COLUMNS": columns_of(head_dim),
    "JOINED": JOINED,
    "LN2": _LN2,
  }
