"""Update of the summaries of tiles by the newest token: one page's extremes, or one mean.

In XLA a gather, reductions and a scatter for each array, every step; here one launch that reads the
page's keys, or those of the window that the token completes, and writes in place.

Grid: one program per row.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Int8

from kvjax.kernels.common import backend
from kvjax.kernels.common.split_k import columns_of
from kvjax.primitives import outward

WARPS = 4


class _Page(NamedTuple):
  """The newest token's page: its number, whether there is one, extremes of its keys by column."""

  row: Array
  page: Array
  real: Array
  column: Array
  inside: Array
  low: Array
  high: Array


def _page(k_ref: Any, used_ref: Any, unit: int) -> _Page:
  """Of keys k [R, S, H], where used [B] slots are occupied; NaN stays NaN."""
  rows, slots, head_dim = k_ref.shape
  row = pl.program_id(0)
  used = jnp.minimum(used_ref[row // (rows // used_ref.shape[0])], slots)
  page = jnp.maximum(used - 1, 0) // unit
  i, column = jnp.arange(pl.next_power_of_2(unit)), jnp.arange(columns_of(head_dim))
  slot, inside = page * unit + i, column < head_dim
  held = (i < unit) & (slot < used)
  mask = held[:, None] & inside[None, :]
  k = backend.load(k_ref, row, slot[:, None], column[None, :], mask=mask).astype(jnp.float32)
  bad = (k != k).astype(jnp.int32).max(axis=0) > 0
  found = []
  for least, reduce in ((jnp.inf, jnp.min), (-jnp.inf, jnp.max)):
    x = reduce(jnp.where(held[:, None] & (k == k), k, least), axis=0)
    found.append(jnp.where(bad, jnp.nan, x))
  return _Page(row, page, used > 0, column, inside, *found)


def _extremes_kernel(*refs: Any, unit: int) -> None:
  """k [R, S, H], used [B], low, high as they are -> low, high [R, P, H]."""
  k_ref, used_ref, low_ref, high_ref = *refs[:2], *refs[-2:]
  new = _page(k_ref, used_ref, unit)
  for ref, x in ((low_ref, new.low), (high_ref, new.high)):
    mask = new.inside & new.real
    backend.store(ref, new.row, new.page, new.column, value=x.astype(ref.dtype), mask=mask)


def _coded_kernel(*refs: Any, unit: int) -> None:
  """As `_extremes_kernel`, of codes int8 [R, P, H] and exponents int8 [R, P]."""
  (k_ref, used_ref), (low_ref, high_ref, exponent_ref) = refs[:2], refs[-3:]
  new = _page(k_ref, used_ref, unit)
  low, high = (jnp.where(new.inside, x, 0.0) for x in (new.low, new.high))
  each = jnp.maximum(jnp.abs(low), jnp.abs(high))
  bad = (1 - (each < jnp.inf).astype(jnp.int32)).max(axis=0) > 0
  largest = jnp.broadcast_to(jnp.where(each < jnp.inf, each, 0.0).max(axis=0), each.shape)
  exponent = outward.exponent_of(largest, bad)
  mask = new.inside & new.real
  for ref, codes in (
    (low_ref, outward.floor(low, exponent)),
    (high_ref, outward.ceil(high, exponent)),
  ):
    backend.store(ref, new.row, new.page, new.column, value=codes.astype(ref.dtype), mask=mask)
  one = mask & (new.column == 0)
  nowhere = jnp.where(one, new.page, exponent_ref.shape[1])
  backend.store(exponent_ref, new.row, nowhere, value=exponent.astype(jnp.int8), mask=one)


def renew_extremes(
  k: Float[Array, "B K S H"],
  used: Int[Array, " B"],
  low: Float[Array, "B K P H"],
  high: Float[Array, "B K P H"],
  *,
  unit: int,
  interpret: bool | None = None,
) -> tuple[Float[Array, "B K P H"], Float[Array, "B K P H"]]:
  """Minimum and maximum of the keys of the page that holds slot used − 1, anew.

  Args:
    k: cached keys.
    used: occupied slots of every row; 0 changes nothing.
    low, high: of every page, updated in place where donated.
    unit: slots per page.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.
  """
  kernel = functools.partial(_extremes_kernel, unit=unit)
  low, high = _renew(kernel, "renew_extremes", k, used, (low, high), interpret)
  return low, high


def renew_coded_extremes(
  k: Float[Array, "B K S H"],
  used: Int[Array, " B"],
  low: Int8[Array, "B K P H"],
  high: Int8[Array, "B K P H"],
  exponent: Int8[Array, "B K P"],
  *,
  unit: int,
  interpret: bool | None = None,
) -> tuple[Array, ...]:
  """`renew_extremes` in 8 bits, rounded outward: codes and exponents (`kvjax.ops.extremes`)."""
  kernel = functools.partial(_coded_kernel, unit=unit)
  return _renew(kernel, "renew_coded_extremes", k, used, (low, high, exponent), interpret)


def _mean_kernel(*refs: Any, width: int, stride: int) -> None:
  """k [R, S, H], used [B], mean as it is -> mean [R, M, H]."""
  k_ref, used_ref, mean_ref = *refs[:2], refs[-1]
  rows, slots, head_dim = k_ref.shape
  row = pl.program_id(0)
  used = jnp.minimum(used_ref[row // (rows // used_ref.shape[0])], slots)
  first = used - width  # of the window that ends with the newest slot
  window = jnp.maximum(first, 0) // stride

  @pl.when((first >= 0) & (window * stride == first) & (window < mean_ref.shape[1]))
  def _():
    i, column = jnp.arange(pl.next_power_of_2(width)), jnp.arange(columns_of(head_dim))
    inside = column < head_dim
    mask = (i < width)[:, None] & inside[None, :]
    k = backend.load(k_ref, row, (first + i)[:, None], column[None, :], mask=mask)
    mean = k.astype(jnp.float32).sum(axis=0) / width
    backend.store(mean_ref, row, window, column, value=mean.astype(mean_ref.dtype), mask=inside)


def renew_mean(
  k: Float[Array, "B K S H"],
  used: Int[Array, " B"],
  mean: Float[Array, "B K M H"],
  *,
  width: int,
  stride: int,
  interpret: bool | None = None,
) -> tuple[Float[Array, "B K M H"], ...]:
  """The mean of the keys of [j·stride, j·stride + width) where slot used − 1 is its last.

  Arguments as in `renew_extremes`; `mean` is that of every window.
  """
  kernel = functools.partial(_mean_kernel, width=width, stride=stride)
  return _renew(kernel, "renew_mean", k, used, (mean,), interpret)


def _renew(
  kernel: Any, name: str, k: Array, used: Array, held: tuple[Array, ...], interpret: bool | None
) -> tuple[Array, ...]:
  """Runs a kernel that writes into `held`."""
  flat = [*map(backend.by_row, held)]
  new = backend.renew(
    kernel,
    *(backend.by_row(k), used),
    held=flat,
    grid=(k.shape[0] * k.shape[1],),
    warps=WARPS,
    stages=1,
    name=name,
    interpret=interpret,
  )
  return tuple(x.reshape(old.shape) for x, old in zip(new, held, strict=True))
