"""Quest: how high the keys of every page could score for this query (§3.2, Alg. 1).

    score_j = Σ_d max(q_d·min_jd, q_d·max_jd)

Bytes: minimum and maximum of the pages that hold visible tokens, once: 4 H per page in bfloat16,
2 H + 1 as codes. That is the whole cost; there is nothing to multiply matrices for.

Grid: one program per row and `TILE` pages, many more than run at once: each has its bytes in flight
from its first instruction on.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Num

from kvjax.kernels.common import backend
from kvjax.kernels.common.split_k import columns_of
from kvjax.primitives import outward

TILE, WARPS = 32, 4


def _kernel(*refs: Any, tile: int, unit: int, span_sinks: int, group: str, scale: float) -> None:
  """q [R, G, H], low, high [R, P, H], start, stop [R] or one per batch row, (exponent [R, P]) ->
  scores [R, P].
  """
  q_ref, low_ref, high_ref, start_ref, stop_ref, *coded, scores_ref = refs
  rows, pages, head_dim = low_ref.shape
  groups = q_ref.shape[1]
  row, first = pl.program_id(0), pl.program_id(1) * tile
  shared = rows // start_ref.shape[0]
  start, stop = start_ref[row // shared], stop_ref[row // shared]
  page = first + jnp.arange(tile)
  seen = (page * unit < stop) & ((page * unit < span_sinks) | ((page + 1) * unit > start))
  seen &= page < pages
  column = jnp.arange(columns_of(head_dim))
  inside = column < head_dim

  @pl.when(seen.astype(jnp.int32).max() > 0)
  def _():
    mask = seen[:, None] & inside[None, :]
    low, high = (
      backend.load(ref, row, page[:, None], column[None, :], mask=mask, evict="evict_first")
      for ref in (low_ref, high_ref)
    )
    low, high = low.astype(jnp.float32), high.astype(jnp.float32)

    def bound(q: Array) -> Array:
      q = (q * scale)[None, :]
      return jnp.maximum(q * low, q * high).sum(axis=1)

    def query(g: int) -> Array:
      return backend.load(q_ref, row, g, column, mask=inside).astype(jnp.float32)

    if group == "mean":
      scores = bound(sum(query(g) for g in range(groups)) / groups)
    else:
      scores = functools.reduce(jnp.maximum, (bound(query(g)) for g in range(groups)))
    if coded:
      exponent = backend.load(coded[0], row, page, mask=seen, other=0).astype(jnp.int32)
      scores = jnp.where(exponent == outward.BAD, jnp.nan, scores * outward.power(exponent))
    backend.store(scores_ref, row, page, value=scores, mask=seen)


def page_bounds(
  q: Float[Array, "B K G H"],
  low: Num[Array, "B K P H"],
  high: Num[Array, "B K P H"],
  start: Int[Array, "B #K"],
  stop: Int[Array, "B #K"],
  exponent: Int[Array, "B K P"] | None = None,
  *,
  unit: int,
  span_sinks: int = 0,
  group: str = "mean",
  tile: int = TILE,
  warps: int = WARPS,
  interpret: bool | None = None,
) -> Float[Array, "B K P"]:
  """An upper bound of the logits of every page's keys, scaled as logits are.

  Args:
    q: queries of the newest token, rotated.
    low, high: minimum and maximum of the keys of every page, channel by channel.
    start, stop, span_sinks: the slots that may be seen, as in `sparse_decode`; pages without such
      are not read, and their scores mean nothing.
    exponent: int8, of the power of two that low and high count, where they are codes.
    unit: tokens per page.
    group: "mean", the group's mean query, or "max", the query of the largest bound.
    tile, warps: pages and warps per program.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.
  """
  batch, heads, pages, head_dim = low.shape
  rows = batch * heads
  return backend.call(
    functools.partial(
      _kernel, tile=tile, unit=unit, span_sinks=span_sinks, group=group, scale=head_dim**-0.5
    ),
    *(x.reshape(rows, *x.shape[2:]) for x in (q, low, high)),
    *(start.reshape(-1), stop.reshape(-1)),
    *(() if exponent is None else (exponent.reshape(rows, pages),)),
    grid=(rows, pl.cdiv(pages, tile)),
    out=[jax.ShapeDtypeStruct((rows, pages), jnp.float32)],
    warps=warps,
    stages=1,
    name="page_bounds",
    interpret=interpret,
  )[0].reshape(batch, heads, pages)
