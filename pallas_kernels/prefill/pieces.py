"""Prompt attention in pieces: what is dense goes to cuDNN, the rest to the kernel of `prefill`.

Queries that are neighbours are cut into blocks. All of a block sees the slots between its widest
window's edge and its first query (a rectangle), and its own slots causally (a triangle): two calls
of cuDNN, 1.7 times as fast as our kernel on an H200. Our kernel goes on from there in one call: it
adds the edges of the windows, the sinks, and queries that stand apart.

    slots   0 sinks   first(t)      edge      rectangle        triangle
            ■■■       ◢■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■◣

Where windows begin is known on the host for a whole prompt, and which blocks are worth their calls
is decided there. Rows may be shorter than that: their bounds are computed on the device, and blocks
of rows that do not fit the host's plan are left to our kernel. Nothing waits for the host: a branch
taken there cost 2.3 ms a layer of 32K tokens on an H200.

On an H200, PSAW's last layer takes 0.79 of a dense one's time for a prompt of 32K tokens, of which
its queries see 0.70, and ETF with PSAW 0.58, of 0.53 (`bench prefill`).
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.core import chunks
from kvjax.kernels.prefill import cudnn
from kvjax.kernels.prefill.dense import prefill_attention
from kvjax.primitives import softmax_state
from kvjax.primitives.softmax_state import State

MIN_BLOCK = 1024  # queries whose pieces are worth calls of their own
BLOCKS = 8  # in a prompt with windows: the edges grow with a block, the calls with their number


@dataclasses.dataclass(frozen=True)
class Block:
  """Queries [begin, end) of the computed ones, and a bound on the slots of their rectangle."""

  begin: int
  end: int
  width: int


def plan(
  queries: int, apart: int, before: int, first: np.ndarray | None = None, sinks: int = 0
) -> tuple[Block, ...]:
  """The blocks that cuDNN attends to; queries in none of them are our kernel's.

  Args:
    queries: A, computed queries.
    apart: the first of them that are not neighbours of the others.
    before: most slots that stand before the first neighbour's own.
    first: int [before + A − apart], where the window of the query at each position begins in the
      longest row; None: nothing is hidden.
    sinks: first slots that are visible whatever `first` is.
  """
  count = queries - apart
  if count < MIN_BLOCK:
    return ()
  if first is None:
    return (Block(apart, queries, before),)
  size = -(-(before + count) // BLOCKS)
  size = -(-size // MIN_BLOCK) * MIN_BLOCK
  blocks = []
  for begin in range(0, count, size):
    end = min(begin + size, count)
    start = before + begin
    edge = max(int(first[before + end - 1]), sinks)
    if end - begin >= MIN_BLOCK and edge <= start:
      width = -(-(start - edge) // MIN_BLOCK) * MIN_BLOCK  # few sizes: few compilations
      blocks.append(Block(apart + begin, apart + end, min(width, start)))
  return tuple(blocks)


def attend_in_pieces(
  q: Float[Array, "B K G A H"],
  k: Float[Array, "B K S H"],
  v: Float[Array, "B K S H"],
  qpos: Int[Array, "B A"],
  first: Int[Array, "B A"] | None = None,
  *,
  sinks: int = 0,
  blocks: Sequence[Block],
) -> tuple[State, Float[Array, "B K G A H"]]:
  """Arguments and results as of `prefill_attention`, where slots are positions.

  Args:
    q, k, v: bfloat16 or float16, H a multiple of 8, at most 128 (from Hopper on 256).
    qpos, first, sinks: as there; the queries of a block are neighbours, padding (−1) after them.
    blocks: of `plan`.
  """
  spans = [_span(block, k, qpos, first, sinks) for block in blocks]
  dense = [
    _dense(q[:, :, :, block.begin : block.end], k, v, block, span)
    for block, span in zip(blocks, spans, strict=True)
  ]
  # Our kernel's queries: those apart, or all, which have edges and sinks to see.
  end = blocks[0].begin if first is None else q.shape[3]
  upto, parts, done = qpos[:, :end], [], 0
  for block, span, state in zip(blocks, spans, dense, strict=True):
    parts += [_nothing(q, block.begin - done), state]
    done = block.end
    if first is not None:
      here = slice(block.begin, block.end)
      below = jnp.minimum(upto[:, here], span.low[:, None] - 1)
      upto = upto.at[:, here].set(jnp.where(span.queries[:, None] > 0, below, upto[:, here]))
  begun = _joined([*parts, _nothing(q, q.shape[3] - done)])
  if not end:
    return dataclasses.replace(begun, o=begun.o.astype(jnp.float32)), begun.o
  begins = None if first is None else first[:, :end]
  before = None if first is None else (begun.o, begun.lse)
  state, out = prefill_attention(q[:, :, :, :end], k, v, upto, begins, sinks=sinks, before=before)
  if first is None:
    apart = dataclasses.replace(state, o=out)
    state = _joined([apart, jax.tree.map(lambda x: x[:, :, :, end:], begun)])
    return dataclasses.replace(state, o=state.o.astype(jnp.float32)), state.o
  return state, out


class _Span(NamedTuple):
  """Of a block in each row: its first slot, its rectangle's, and its queries, all [B]."""

  start: Array
  low: Array
  queries: Array


def _span(block: Block, k: Array, qpos: Array, first: Array | None, sinks: int) -> _Span:
  """No queries, all are our kernel's, where a row's pieces do not lie where the plan has them."""
  here = qpos[:, block.begin : block.end]
  count = (here >= 0).sum(1, dtype=jnp.int32)
  start = jnp.maximum(here[:, 0], 0)
  if first is None:
    return _Span(start, jnp.zeros_like(start), count)
  widest = jnp.where(here >= 0, first[:, block.begin : block.end], 0).max(1)
  low = jnp.maximum(jnp.maximum(widest, sinks), start - block.width)
  count = jnp.where(_fits(block, k, start, low), count, 0)
  return _Span(start, jnp.where(count > 0, low, 0), count)


def _fits(block: Block, k: Array, start: Array, low: Array) -> Array:
  """Rows whose rectangle begins no later than the block, and ends before the slots do."""
  ends = jnp.maximum(low + block.width, start + block.end - block.begin)
  return (low <= start) & (ends <= k.shape[2])


def _dense(q: Array, k: Array, v: Array, block: Block, span: _Span) -> State:
  """The block's queries over its rectangle and its triangle; o in the dtype of q."""
  start, low, count = span
  own_k, own_v = (chunks.rows_from(x, start, q.shape[3], 2) for x in (k, v))
  state = cudnn.attend_causal(q, own_k, own_v, count)[0]
  if block.width:
    k, v = (chunks.rows_from(x, low, block.width, 2) for x in (k, v))
    state = softmax_state.merge(state, cudnn.attend_all(q, k, v, count, start - low)[0])
  return dataclasses.replace(state, o=state.o.astype(q.dtype))


def _nothing(q: Array, queries: int) -> State:
  """The states of so many queries that have seen nothing."""
  state = softmax_state.empty((*q.shape[:3], queries), q.shape[4])
  return dataclasses.replace(state, o=state.o.astype(q.dtype))


def _joined(parts: list[State]) -> State:
  """The states of all queries, one part after another."""
  return jax.tree.map(lambda *x: jnp.concatenate(x, 3), *(x for x in parts if x.m.shape[3]))
