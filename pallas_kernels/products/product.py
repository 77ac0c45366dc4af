"""Matrix products of a decode step: few rows of activations against a weight read once.

Bytes: the weight; everything else is under 1 %. A step's products are streams of tens of
microseconds at most, so what is left to gain is at their edges: the work is cut so that all
multiprocessors read from the first moment on, and what follows a product rides along with it.

Grid: blocks of columns × splits of the contraction. Every program keeps its columns' sums in
registers while tiles of the weight stream by, and writes them as they are (`partial_products`:
the next reader adds the splits up), rounded (`product`) or through SwiGLU
(`gated_product`, whose programs read two blocks of columns side by side). The latter two do not
split: what keeps the memory busy there is how much each program has in flight.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from kvjax.kernels.common import backend
from kvjax.kernels.common.devices import this_device

MAX_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Blocking:
  """Cut of a product.

  Attributes:
    columns: columns of a program, a power of two, at least 16.
    depth: rows of the weight per step of its loop, a power of two, at least 16.
    splits: programs that share the contraction of one block of columns.
    warps, stages: warps per program; tiles in flight, and the one in use.
  """

  columns: int = 64
  depth: int = 64
  splits: int = 1
  warps: int = 4
  stages: int = 4


def blocking(columns: int, *, interpret: bool = False) -> Blocking:
  """Two programs per multiprocessor or more, by splitting the contraction.

  Measured on an H200 at 1 and 8 rows, the products of 1.7B to 70B decoders, whole and in parts:
  tiles of 64 × 64 were first or within 6 % of it everywhere.
  """
  if interpret:
    return Blocking(splits=2, stages=1)
  blocks = pl.cdiv(columns, Blocking.columns)
  return Blocking(splits=min(8, max(1, round(2 * _cores() / blocks))))


def whole_blocking(columns: int, *, gated: bool, interpret: bool = False) -> Blocking:
  """Without splits: the fewer blocks of 64 columns, the more each has in flight, and with too few
  for the multiprocessors they are cut in two.

  Measured on an H200 at 1, 8 and 16 rows, for decoders of 1.7B to 70B whole and in 2 and 4 parts.
  """
  if interpret:
    return Blocking(stages=1)
  blocks = pl.cdiv(columns, Blocking.columns)
  if blocks > _cores():
    return Blocking(depth=32, stages=6) if gated else Blocking()
  if blocks > 0.7 * _cores():
    return Blocking(stages=6 if gated else 8)
  return Blocking(columns=32, stages=8) if gated else Blocking(32, 128, warps=2, stages=6)


def fitted(cut: Blocking, x: Any, w: Any) -> Blocking:
  """`cut`, with fewer stages where the device has no room for as many tiles of x and w."""
  rows, halves = max(16, pl.next_power_of_2(x.shape[0])), w.ndim - 1
  tile = (rows + halves * cut.columns) * cut.depth * w.dtype.itemsize
  return dataclasses.replace(cut, stages=min(cut.stages, 1 + this_device().shared // tile))


def _cores() -> int:
  return this_device().cores


def _kernel(x_ref: Any, w_ref: Any, y_ref: Any, *, blocking: Blocking) -> None:
  """x [B, D], w [D, N] -> y [S, B, N], or of one split [B, N]; w [D, 2, N] -> y [B, N] through
  SwiGLU.
  """
  rows, depth = x_ref.shape
  gated = len(w_ref.shape) == 3
  block, split = pl.program_id(0), pl.program_id(1)
  row = jnp.arange(max(16, pl.next_power_of_2(rows)))[:, None]
  column = (block * blocking.columns + jnp.arange(blocking.columns))[None, :]
  real, inside = row < rows, column < w_ref.shape[-1]
  tiles = pl.cdiv(depth, blocking.depth)
  first, last = (s * tiles // blocking.splits for s in (split, split + 1))

  def step(i: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
    k = i * blocking.depth + jnp.arange(blocking.depth)
    x = backend.load(x_ref, row, k[None, :], mask=real & (k < depth)[None, :])
    mask = (k < depth)[:, None] & inside
    added = []
    for half, y in enumerate(sums):
      index = (k[:, None], half, column) if gated else (k[:, None], column)
      w = backend.load(w_ref, *index, mask=mask, evict="evict_first")
      added.append(y + backend.dot(x, w))
    return tuple(added)

  zero = jnp.zeros((row.shape[0], blocking.columns), jnp.float32)
  sums = lax.fori_loop(first, last, step, (zero, zero) if gated else (zero,))
  y = sums[0]
  if gated:
    gate, up = sums
    y = gate / (1 + jnp.exp(-gate)) * up  # silu(x·gate) · (x·up)
  index = (row, column) if len(y_ref.shape) == 2 else (split, row, column)
  backend.store(y_ref, *index, value=y.astype(y_ref.dtype), mask=real & inside)


def _run(x: Any, w: Any, cut: Blocking, out: jax.ShapeDtypeStruct, interpret: Any) -> Array:
  check(x, w)
  cut = fitted(cut, x, w)
  return backend.call(
    functools.partial(_kernel, blocking=cut),
    x,
    w,
    grid=(pl.cdiv(w.shape[-1], cut.columns), cut.splits),
    out=[out],
    warps=cut.warps,
    stages=cut.stages,
    name="product",
    interpret=interpret,
  )[0]


def partial_products(
  x: Float[Array, "B D"], w: Float[Array, "D N"], *, interpret: bool | None = None
) -> Float[Array, "S B N"]:
  """Float32 arrays whose sum over S is x @ w.

  Args:
    x: up to 64 rows.
    w: weight in the dtype of x.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.
  """
  cut = blocking(w.shape[1], interpret=backend.interpreted(interpret))
  shape = cut.splits, x.shape[0], w.shape[1]
  return _run(x, w, cut, jax.ShapeDtypeStruct(shape, jnp.float32), interpret)


def product(
  x: Float[Array, "B D"], w: Float[Array, "D N"], *, interpret: bool | None = None
) -> Float[Array, "B N"]:
  """x @ w in the dtype of x; arguments as in `partial_products`."""
  cut = whole_blocking(w.shape[1], gated=False, interpret=backend.interpreted(interpret))
  return _run(x, w, cut, jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype), interpret)


def gated_product(
  x: Float[Array, "B D"], w: Float[Array, "D 2 F"], *, interpret: bool | None = None
) -> Float[Array, "B F"]:
  """silu(x @ w[:, 0]) · (x @ w[:, 1]) in the dtype of x; arguments as in `partial_products`."""
  cut = whole_blocking(w.shape[2], gated=True, interpret=backend.interpreted(interpret))
  return _run(x, w, cut, jax.ShapeDtypeStruct((x.shape[0], w.shape[2]), x.dtype), interpret)


def check(x: Any, w: Any) -> None:
  """Raises on operands that the kernel does not take; the message names the argument."""
  if x.ndim != 2 or not 1 <= x.shape[0] <= MAX_ROWS:
    raise ValueError(f"x: found shape {x.shape}, expected [1 … {MAX_ROWS}, D]")
  if w.shape[0] != x.shape[1]:
    raise ValueError(f"w: found shape {w.shape}, expected {x.shape[1]} rows, as x has columns")
  if w.dtype != x.dtype:
    raise TypeError(f"w: found dtype {w.dtype.name}, expected {x.dtype.name}, as x")
