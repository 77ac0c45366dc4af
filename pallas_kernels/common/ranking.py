"""A table put in the order of its entries' scores: for each, how many come before it is counted.

Grid: one program per row and `SOME` entries.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.kernels.common import backend

SOME = 64  # entries that a program puts in order, and by how many others at once


def _kernel(
  table_ref: Any, ranked_ref: Any, active_ref: Any | None, out_table_ref: Any, out_ranked_ref: Any
) -> None:
  """table, ranked [R, W], (active [R]) -> both in the order of ranked, equal ones as they stand."""
  width = table_ref.shape[1]
  row, own = pl.program_id(0), pl.program_id(1)

  def order() -> None:
    i = own * SOME + jnp.arange(SOME)
    mine = i < width
    tile = backend.load(table_ref, row, i, mask=mine, other=-1)
    value = backend.load(ranked_ref, row, i, mask=mine, other=-jnp.inf)

    def other(n: Any) -> Array:
      j = n * SOME + jnp.arange(SOME)
      return backend.load(ranked_ref, row, j, mask=j < width, other=-jnp.inf)[None, :]

    def ahead(n: Any, earlier: Array) -> Array:
      return earlier + (other(n) >= value[:, None]).astype(jnp.int32)

    def behind(n: Any, earlier: Array) -> Array:
      return earlier + (other(n) > value[:, None]).astype(jnp.int32)

    # What stands before an entry comes before its equals too.
    earlier = lax.fori_loop(0, own, ahead, jnp.zeros((SOME, SOME), jnp.int32))
    earlier = lax.fori_loop(own, pl.cdiv(width, SOME), behind, earlier)
    here = other(own)
    before = jnp.arange(SOME)[None, :] < jnp.arange(SOME)[:, None]
    earlier += ((here == value[:, None]) & before).astype(jnp.int32)
    place = jnp.where(mine, earlier.sum(axis=1), width)
    backend.store(out_table_ref, row, place, value=tile, mask=mine)
    backend.store(out_ranked_ref, row, place, value=value, mask=mine)

  backend.where_active(active_ref, row, order)


def by_score(
  table: Int[Array, "R W"],
  ranked: Float[Array, "R W"],
  active: Int[Array, " R"] | None,
  *,
  interpret: bool | None,
) -> Sequence[Array]:
  """Entries and scores of every row, the best first; rows whose `active` is 0 hold anything."""
  return backend.call(
    _kernel,
    *(table, ranked, active),
    grid=(table.shape[0], pl.cdiv(table.shape[1], SOME)),
    out=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (table, ranked)],
    warps=4,
    stages=1,
    name="top_k_order",
    interpret=interpret,
  )
