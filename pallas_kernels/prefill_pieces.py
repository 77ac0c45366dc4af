"""Prompt attention in pieces: what is dense goes to cuDNN, the rest to the kernel of `prefill`.

Queries that are neighbours are cut into blocks. All of a block sees the slots between its widest
window's edge and its first query (a rectangle), and its own slots causally (a triangle): two calls
of cuDNN, 1.7 times as fast as our kernel on an H200. One call of our kernel adds the edges of the
windows, the sinks, and queries that stand apart; softmax states merge exactly.

    slots   0 sinks   first(t)      edge      rectangle        triangle
            ■■■       ◢■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■◣

Where windows begin is known on the host for a whole prompt, and which blocks are worth their calls
is decided there. Rows may be shorter than that: their bounds are computed on the device, and if
they do not fit the plan of the host after all, our kernel does everything.

On an H200, PSAW's last layer takes 0.75 of the kernel's time for a prompt of 32K tokens, and ETF
with PSAW 0.68 (`bench prefill`).
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from .. import softmax_state
from ..ops import chunks, cudnn
from ..softmax_state import State
from .prefill import prefill_attention

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
  spans = [_span(block, qpos, first, sinks) for block in blocks]

  def pieces() -> State:
    # Our kernel's queries, and the newest slot that each of them sees there.
    end = q.shape[3] if first is not None else blocks[0].begin
    upto = qpos[:, :end]
    begins = None if first is None else first[:, :end]
    for block, (_, low, _) in zip(blocks if first is not None else (), spans, strict=False):
      here = slice(block.begin, block.end)
      upto = upto.at[:, here].set(jnp.where(upto[:, here] >= 0, low[:, None] - 1, -1))
    shape = *q.shape[:3], end
    rest = softmax_state.empty(shape, q.shape[4])
    if end:
      rest = prefill_attention(q[:, :, :, :end], k, v, upto, begins, sinks=sinks)[0]
    parts, done = [], 0
    for block, span in zip(blocks, spans, strict=True):
      state = _dense(q[:, :, :, block.begin : block.end], k, v, block, *span)
      if first is not None:
        state = softmax_state.merge(state, _cut(rest, block.begin, block.end))
      parts += [_cut(rest, done, block.begin), state]
      done = block.end
    parts.append(_cut(rest, done, end))
    rounded = [dataclasses.replace(x, o=x.o.astype(q.dtype)) for x in parts if x.m.shape[3]]
    return jax.tree.map(lambda *x: jnp.concatenate(x, 3), *rounded)

  def whole() -> State:
    state, out = prefill_attention(q, k, v, qpos, first, sinks=sinks)
    return dataclasses.replace(state, o=out)

  if first is None:
    state = pieces()
  else:
    checks = [_fits(block, k, *span) for block, span in zip(blocks, spans, strict=True)]
    state = lax.cond(jnp.stack(checks).all(), pieces, whole)
  return dataclasses.replace(state, o=state.o.astype(jnp.float32)), state.o


def _span(block: Block, qpos: Array, first: Array | None, sinks: int) -> tuple[Array, Array, Array]:
  """Of each row: the block's first slot, the first of its rectangle, and its queries, all [B]."""
  here = qpos[:, block.begin : block.end]
  count = (here >= 0).sum(1, dtype=jnp.int32)
  start = jnp.maximum(here[:, 0], 0)
  if first is None:
    return start, jnp.zeros_like(start), count
  widest = jnp.where(here >= 0, first[:, block.begin : block.end], 0).max(1)
  low = jnp.maximum(jnp.maximum(widest, sinks), start - block.width)
  return start, jnp.where(count > 0, low, 0), count


def _fits(block: Block, k: Array, start: Array, low: Array, count: Array) -> Array:
  """Whether every row's pieces lie where the plan has them."""
  ends = jnp.maximum(low + block.width, start + block.end - block.begin)
  return ((count == 0) | ((low <= start) & (ends <= k.shape[2]))).all()


def _dense(
  q: Array, k: Array, v: Array, block: Block, start: Array, low: Array, count: Array
) -> State:
  """The block's queries over its rectangle and its triangle."""
  own_k, own_v = (chunks.rows_from(x, start, q.shape[3], 2) for x in (k, v))
  state = cudnn.attend_causal(q, own_k, own_v, count)[0]
  if not block.width:
    return state
  k, v = (chunks.rows_from(x, low, block.width, 2) for x in (k, v))
  return softmax_state.merge(state, cudnn.attend_all(q, k, v, count, start - low)[0])


def _cut(state: State, begin: int, end: int) -> State:
  """The states of queries [begin, end)."""
  return jax.tree.map(lambda x: x[:, :, :, begin:end], state)
