"""A step's statistics of a cache, in the rows that count; the others keep what they had.

Bytes: the statistics once in and once out. They are few: launches are the cost, of which this is
one where choosing array by array is one each, and one more for whether a row's attention is finite.

Grid: batch rows × pieces of about `PIECE` entries of the longest array; a program copies its share
of every array. The old arrays are updated in place through input/output aliases.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from kvjax.kernels.common import backend

WARPS = 4
CHUNK, PIECE = 1024, 2048  # entries that a program copies at once, and in all


def _kernel(*refs: Any) -> None:
  """live [B], l [B, N], n new arrays [B, …], flat after B, and in place the n old ones."""
  live_ref, l_ref, *arrays = refs
  n = len(arrays) // 3
  row, piece, pieces = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
  count = l_ref.shape[1]
  lane = jnp.arange(pl.next_power_of_2(count))
  l = backend.load(l_ref, row, lane, mask=lane < count, other=1.0)
  finite = (jnp.abs(l) < jnp.inf).astype(jnp.int32).min()

  @pl.when(live_ref[row] & (finite > 0))
  def write() -> None:
    for new_ref, old_ref in zip(arrays[:n], arrays[2 * n :], strict=True):
      _copy(new_ref, old_ref, row, piece, pieces)


def _copy(source: Any, target: Any, row: Any, piece: Any, pieces: Any) -> None:
  """This program's chunks of a row: every `pieces`-th."""
  size = source.shape[1]
  chunk = min(CHUNK, pl.next_power_of_2(size))

  def step(i: Any, _: None) -> None:
    at = (piece + i * pieces) * chunk + jnp.arange(chunk)
    value = backend.load(source, row, at, mask=at < size, other=0)
    backend.store(target, row, at, value=value, mask=at < size)

  lax.fori_loop(0, (pl.cdiv(size, chunk) - piece + pieces - 1) // pieces, step, None)


def keep(
  live: Bool[Array, " B"],
  l: Float[Array, "B *heads"],
  new: Sequence[Array],
  old: Sequence[Array],
  *,
  interpret: bool | None = None,
) -> list[Array]:
  """`new` in rows that are live and whose denominators are finite, `old` in the others.

  Args:
    live: rows that take part.
    l: the softmax denominators of this step's attention.
    new, old: arrays [B, …] of equal shapes and dtypes; the old ones are updated in place where
      donated.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.
  """
  batch = live.shape[0]
  given, held = ([x.reshape(batch, -1) for x in each] for each in (new, old))
  longest = max(x.shape[1] for x in held)
  kept = backend.renew(
    _kernel,
    *(live, l.reshape(batch, -1), *given),
    held=held,
    grid=(batch, pl.cdiv(longest, PIECE)),
    warps=WARPS,
    stages=1,
    name="keep_rows",
    interpret=interpret,
  )
  return [x.reshape(y.shape) for x, y in zip(kept, old, strict=True)]
