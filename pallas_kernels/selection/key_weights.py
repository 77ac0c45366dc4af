"""Share of every key in the newest token's attention, for methods that select by it.

A key may be a token's, or stand for several tokens (InfLLM-v2's compressed keys). Each query head
has its own softmax over all keys that the query may see; what a KV head selects by is their sum.

Two launches, since a weight needs its head's whole denominator. The first streams the keys once and
leaves logits (base 2) with one partial denominator per program; the second joins the partials,
weighs, sums over the group and takes the largest of the keys that overlap a block; for PRR it
advances the predictor of the blocks as well (`forecasts`). Bytes: keys once; logits, 4 G per key,
out and in, which the L2 cache holds. Where long rows are searched by several programs, these may
weigh what they search instead of the second launch (`weigh_part`).

Grids: rows × pieces of `keys` keys; rows × pieces of `BLOCKS` blocks or tokens, or more of them
where that would be more programs than run at once: those of rows that are skipped cost their start.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.kernels.common import backend, config, devices, smoothing, tiling
from kvjax.kernels.common.split_k import columns_of, lanes_of

TILE, WARPS, STAGES = 64, 4, 3
BLOCKS, MOST = 128, 1024  # weighed by a program at once: no fewer, no more
PER_CORE = 4  # programs that a multiprocessor runs at once: a few more would wait for all of them


def _logits_kernel(
  inputs: Any, bounds: Any, active_ref: Any | None, *outs: Any, newest: int, **how: Any
) -> None:
  """(q [R, G, H], keys [R, M, H]), (start, stop, known [R] or one per batch row), (active [R]) ->
  logits [R, G, M], m, l [R, G, C].
  """
  row, piece = pl.program_id(0), pl.program_id(1)
  shared = inputs[1].shape[0] // bounds[0].shape[0]

  def score() -> None:
    start, stop, known = (ref[row // shared] for ref in bounds)
    score_keys(row, piece, inputs, outs, start, stop, known - newest, **how)

  backend.where_active(active_ref, row, score)


def score_keys(
  row: Array,
  piece: Array,
  inputs: Sequence[Any],
  outs: Sequence[Any],
  start: Array,
  stop: Array,
  known: Array,
  *,
  tile: int,
  steps: int,
  stride: int,
  width: int,
  span_sinks: int,
  scale: tiling.Scale,
) -> None:
  """Logits of one piece of a row's keys, and its part of the denominators; refs as above."""
  q_ref, k_ref = inputs
  logits_ref, m_ref, l_ref = outs
  _, keys, head_dim = k_ref.shape
  groups = q_ref.shape[1]
  lane, column = jnp.arange(lanes_of(groups)), jnp.arange(columns_of(head_dim))
  real, inside = lane < groups, column < head_dim
  mask = real[:, None] & inside[None, :]
  q = backend.load(q_ref, row, lane[:, None], column[None, :], mask=mask)

  def step(i: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    m, l = carry
    key = (piece * steps + i) * tile + jnp.arange(tile)
    first = key * stride
    ok = (key < keys) & (first + width <= known) & (first < stop)
    ok &= (first < span_sinks) | (first + width > start)
    mask = ok[:, None] & inside[None, :]
    k = backend.load(k_ref, row, key[:, None], column[None, :], mask=mask, evict="evict_first")
    x = scale.base2(backend.dot(q, k, trans_b=True))
    x = jnp.where(ok[None, :], x, -jnp.inf)
    mask = real[:, None] & (key < keys)[None, :]
    backend.store(logits_ref, row, lane[:, None], key[None, :], value=x, mask=mask)
    x = jnp.where(x == x, x, -jnp.inf)  # NaN stays where it is, out of the denominator
    top = jnp.maximum(m, x.max(axis=1))
    base = tiling.finite(top)
    return top, l * jnp.exp2(m - base) + jnp.exp2(x - base[:, None]).sum(axis=1)

  m, l = jnp.full(lane.shape, -jnp.inf, jnp.float32), jnp.zeros(lane.shape, jnp.float32)
  left = pl.cdiv(keys, tile) - piece * steps
  m, l = lax.fori_loop(0, jnp.minimum(left, steps), step, (m, l))
  backend.store(m_ref, row, lane, piece, value=m, mask=real)
  backend.store(l_ref, row, lane, piece, value=l, mask=real)


def _weights_kernel(
  partial: Any, active_ref: Any | None, weights_ref: Any, *, size: int, steps: int, **how: Any
) -> None:
  """(logits [R, G, M], m, l [R, G, C]), (active [R]) -> weights [R, P]."""
  blocks = weights_ref.shape[1]
  row, piece = pl.program_id(0), pl.program_id(1)

  def weigh() -> None:
    lse = _denominators(row, partial[1:])

    def step(i: Any, _: None) -> None:
      block = (piece * steps + i) * size + jnp.arange(size)
      best = _weigh(row, block, partial[0], lse, blocks=blocks, **how)
      backend.store(weights_ref, row, block, value=best, mask=block < blocks)

    left = pl.cdiv(blocks, size) - piece * steps
    lax.fori_loop(0, jnp.minimum(left, steps), step, None)

  backend.where_active(active_ref, row, weigh)


def weigh_part(row: Array, piece: Array, part: int, *refs: Any, interpret: bool) -> None:
  """Writes ln of the mean probabilities of a part of a row's tokens, for the program to read.

  refs: logits [R, G, M], m, l [R, G, C], weights [R, P].
  """
  logits_ref, *inputs, weights_ref = refs
  lse, tokens = _denominators(row, inputs), weights_ref.shape[1]
  size = min(MOST, pl.next_power_of_2(part))

  def step(i: Any, _: None) -> None:
    lane = i * size + jnp.arange(size)
    token = piece * part + lane
    mask = (lane < part) & (token < tokens)
    best = _weigh(row, token, logits_ref, lse, blocks=tokens, ahead=0, each=1, log=True)
    backend.store(weights_ref, row, token, value=best, mask=mask)

  lax.fori_loop(0, pl.cdiv(part, size), step, None)
  backend.barrier(interpret)  # threads read what others wrote


def _denominators(row: Array, inputs: Sequence[Any]) -> Array:
  """log₂ Σ 2^x over all keys of a row, by query head; m, l as above."""
  m_ref, l_ref = inputs
  _, groups, pieces = m_ref.shape
  lane, piece = jnp.arange(pl.next_power_of_2(groups)), jnp.arange(pl.next_power_of_2(pieces))
  real = lane < groups
  mask = real[:, None] & (piece < pieces)[None, :]
  index = row, lane[:, None], piece[None, :]
  m = backend.load(m_ref, *index, mask=mask, other=-jnp.inf)
  l = backend.load(l_ref, *index, mask=mask, other=0.0)
  top = m.max(axis=1)
  total = (l * jnp.exp2(m - tiling.finite(top)[:, None])).sum(axis=1)
  return jnp.where(total > 0, tiling.finite(top) + jnp.log2(tiling.nonzero(total)), 0.0)


def _weigh(
  row: Array,
  block: Array,
  logits_ref: Any,
  lse: Array,
  *,
  blocks: int,
  ahead: int,
  each: int,
  log: bool,
) -> Array:
  """The weights of some blocks of a row, whose denominators are given; logits as above."""
  _, groups, keys = logits_ref.shape
  lane = jnp.arange(pl.next_power_of_2(groups))
  real = lane < groups
  best = jnp.full(block.shape, -jnp.inf if log else 0.0, jnp.float32)
  for offset in range(-ahead, each):
    key = block * each + offset
    mask = real[:, None] & ((key >= 0) & (key < keys) & (block < blocks))[None, :]
    x = backend.load(logits_ref, row, lane[:, None], key[None, :], mask=mask, other=-jnp.inf)
    x -= lse[:, None]
    if log:
      top = x.max(axis=0)
      base = tiling.finite(jnp.where(top == top, top, 0.0))
      weight = base + jnp.log2(jnp.exp2(x - base[None, :]).sum(axis=0))
      weight = weight * tiling.LN2 - math.log(groups)
    else:
      weight = jnp.exp2(x).sum(axis=0)
    # NaN passes whatever else overlaps the block.
    best = jnp.where((weight > best) | (weight != weight), weight, best)
  return best


def _forecasts_kernel(*refs: Any, ahead: int, each: int, unit: int, predictor: str) -> None:
  """logits [R, G, M], m, l [R, G, C], stop [B], what `smoothing.loaded` lists -> what
  `smoothing.advance` lists.
  """
  stop_ref, both = refs[3], 7 if predictor != "last" else 4
  blocks = refs[both].shape[2]
  row, block = pl.program_id(0), pl.program_id(1) * BLOCKS + jnp.arange(BLOCKS)
  batch_row = row // (refs[0].shape[0] // stop_ref.shape[0])
  held = smoothing.loaded(row, batch_row, block, refs[4:both])
  lse = _denominators(row, refs[1:3])
  score = _weigh(row, block, refs[0], lse, blocks=blocks, ahead=ahead, each=each, log=False)
  how: dict[str, Any] = {"unit": unit, "predictor": predictor}
  smoothing.advance(row, block, score, held, refs[both:], stop_ref[batch_row], **how)


def key_logits(
  q: Float[Array, "B K G H"],
  keys: Float[Array, "B K M H"],
  start: Int[Array, "B #K"],
  stop: Int[Array, "B #K"],
  known: Int[Array, "B #K"],
  *,
  stride: int = 1,
  width: int = 1,
  span_sinks: int = 0,
  newest: int = 0,
  soft_cap: float | None = None,
  active: Int[Array, "B K"] | None = None,
  tile: int | None = None,
  programs: int | None = None,
  interpret: bool | None = None,
) -> tuple[Float[Array, "B K G M"], Float[Array, "B K G C"], Float[Array, "B K G C"]]:
  """Scaled logits of all keys, times log₂ e, −∞ for keys that take no part; m, l of C pieces.

  Key j stands for the slots [j·stride, j·stride + width). Those take part of which no slot lies
  after `known` − `newest` and any in the range.

  Args:
    q: queries of the newest token, rotated, in the dtype of the keys.
    keys: what they attend to.
    start, stop, span_sinks: the slots that may be seen, as in `sparse_decode`.
    known, newest: shaped as start, one past the last slot that a key may stand for but for so many.
    stride, width: see above; width is a multiple of stride.
    soft_cap: c of logits c·tanh(x/c); None: x itself.
    active: KV heads that are computed; the others read nothing, and hold anything.
    tile, programs: keys per step, and how many programs run at once; by shape and device if None.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.
  """
  batch, heads, count, head_dim = keys.shape
  groups, rows = q.shape[2], batch * heads
  tile, steps = cut(q, keys, tile, programs)
  pieces = pl.cdiv(count, tile * steps)
  results = backend.call(
    functools.partial(
      _logits_kernel,
      tile=tile,
      steps=steps,
      stride=stride,
      width=width,
      span_sinks=span_sinks,
      scale=tiling.Scale.of(head_dim, None, soft_cap),
      newest=newest,
    ),
    tuple(map(backend.by_row, (q, keys))),
    tuple(x.reshape(-1) for x in (start, stop, known)),
    None if active is None else active.reshape(-1),
    grid=(rows, pieces),
    out=[
      jax.ShapeDtypeStruct((rows, groups, count), jnp.float32),
      jax.ShapeDtypeStruct((rows, groups, pieces), jnp.float32),
      jax.ShapeDtypeStruct((rows, groups, pieces), jnp.float32),
    ],
    warps=WARPS,
    stages=STAGES,
    name="key_logits",
    interpret=interpret,
  )
  logits, m, l = (x.reshape(batch, heads, *x.shape[1:]) for x in results)
  return logits, m, l


def key_weights(
  q: Float[Array, "B K G H"],
  keys: Float[Array, "B K M H"],
  start: Int[Array, "B #K"],
  stop: Int[Array, "B #K"],
  known: Int[Array, "B #K"],
  *,
  blocks: int,
  stride: int = 1,
  width: int = 1,
  block: int = 1,
  span_sinks: int = 0,
  newest: int = 0,
  soft_cap: float | None = None,
  log: bool = False,
  active: Int[Array, "B K"] | None = None,
  tile: int | None = None,
  programs: int | None = None,
  interpret: bool | None = None,
) -> Float[Array, "B K P"]:
  """The largest attention weight among the keys that share a slot with each block.

  Args as in `key_logits`, and:
    blocks: P.
    block: slots per block, a multiple of stride.
    log: return ln of the mean probability over the group (−∞: none), which keeps the order of what
      float32 would round to 0; else the sum over the group.

  Returns:
    float32; NaN where a key that takes part gives NaN.
  """
  batch, heads = keys.shape[:2]
  partial = key_logits(
    *(q, keys, start, stop, known),
    stride=stride,
    width=width,
    span_sinks=span_sinks,
    newest=newest,
    soft_cap=soft_cap,
    active=active,
    tile=tile,
    programs=programs,
    interpret=interpret,
  )
  weights = weights_of(
    [*map(backend.by_row, partial)],
    None if active is None else active.reshape(-1),
    blocks=blocks,
    ahead=width // stride - 1,
    each=block // stride,
    log=log,
    programs=programs,
    interpret=interpret,
  )
  return weights.reshape(batch, heads, blocks)


def weights_of(
  partial: Sequence[Array],
  active: Int[Array, " R"] | None,
  *,
  blocks: int,
  ahead: int = 0,
  each: int = 1,
  log: bool = True,
  programs: int | None = None,
  interpret: bool | None = None,
) -> Float[Array, "R P"]:
  """`key_weights` from `key_logits`, of R rows: `each` keys of a block and `ahead` before them."""
  rows = partial[0].shape[0]
  size, steps = _cut_blocks(rows, blocks, programs)
  how: dict[str, Any] = {"ahead": ahead, "each": each, "log": log}
  return backend.call(
    functools.partial(_weights_kernel, size=size, steps=steps, **how),
    *(tuple(partial), active),
    grid=(rows, pl.cdiv(blocks, size * steps)),
    out=[jax.ShapeDtypeStruct((rows, blocks), jnp.float32)],
    warps=WARPS,
    stages=1,
    name="key_weights",
    interpret=interpret,
  )[0]


def forecasts(
  partial: Sequence[Array],
  stop: Int[Array, " B"],
  blocks: int,
  level: Float[Array, "B K P"] | None,
  trend: Float[Array, "B K P"] | None,
  factors: Float[Array, "B 3"] | None,
  *,
  stride: int,
  width: int,
  unit: int,
  predictor: str = "holt",
  interpret: bool | None = None,
) -> Sequence[Array]:
  """The weights of blocks of `unit` slots by `key_logits`, and what PRR foresees by them.

  Args:
    partial: logits, m and l of `key_logits`.
    stop: occupied slots of every row, the new token's included.
    blocks: how many there are.
    level, trend, factors, predictor: as in `speculate`.
    stride, width: as in `key_logits`.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    Scores and forecasts [B, K, 2, P], the `stop` that each is for [B, K, 2], level and trend if
    there are any.
  """
  batch, heads = partial[0].shape[:2]
  rows = batch * heads
  state = [x for x in (level, trend) if x is not None]
  own = [] if factors is None else [factors]
  kernel = functools.partial(
    _forecasts_kernel,
    ahead=width // stride - 1,
    each=unit // stride,
    unit=unit,
    predictor=predictor,
  )
  made = backend.call(
    kernel,
    *map(backend.by_row, partial),
    *(stop, *(x.reshape(rows, blocks) for x in state), *own),
    grid=(rows, pl.cdiv(blocks, BLOCKS)),
    out=smoothing.outputs(rows, blocks, state),
    warps=WARPS,
    stages=1,
    name="key_forecasts",
    interpret=interpret,
  )
  return [x.reshape(batch, heads, *x.shape[1:]) for x in made]


def _cut_blocks(rows: int, blocks: int, programs: int | None) -> tuple[int, int]:
  """Blocks that a program weighs at once, and how many times: two programs for each that runs."""
  programs = programs or PER_CORE * devices.this_device().cores
  share = pl.cdiv(rows * blocks, 2 * programs)
  size = min(max(BLOCKS, pl.next_power_of_2(share)), MOST)
  return size, max(1, share // size)


def cut(q: Array, keys: Array, tile: int | None, programs: int | None) -> tuple[int, int]:
  """Keys per step, and steps per program: not more programs than run at once."""
  batch, heads, count, head_dim = keys.shape
  if tile is None:
    shape = {"groups": q.shape[2], "head_dim": head_dim, "itemsize": keys.dtype.itemsize}
    tile = min(TILE, max(16, pl.next_power_of_2(count)))
    tile = config.fitted_tile(tile, STAGES, **shape, arrays=1)
  programs = programs or PER_CORE * devices.this_device().cores
  return tile, pl.cdiv(pl.cdiv(count, tile), max(1, programs // (batch * heads)))
