"""The order of slots for a walk that may stop early, kept from step to step instead of sorted.

Where tokens keep their order among each other, a step takes one slot out of the list, the one that
the new token overwrites, and puts it in again at its rank; what lies between moves by one place.

Bytes: positions, order and ranks once, 12 per slot, and what moves.

Grid: one program per row.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import _backend

CHUNK = 4096  # entries that a program handles at once
WARPS = 8


def _kernel(*refs: Any, chunk: int, interpret: bool) -> None:
  """pos, rank [R, S], seen [B], order as it is -> order [R, S]."""
  pos_ref, rank_ref, seen_ref, _, order_ref = refs
  rows, slots = pos_ref.shape
  row, lane = pl.program_id(0), jnp.arange(chunk)
  newest = seen_ref[row // (rows // seen_ref.shape[0])] - 1

  def wait() -> None:
    if not interpret:
      _backend.barrier()  # threads read what others move

  def find(n: Any, found: Array) -> Array:
    slot = n * chunk + lane
    pos = _backend.load(pos_ref, row, slot, mask=slot < slots, other=-1)
    return jnp.maximum(found, jnp.where((pos == newest) & (pos >= 0), slot, -1).max())

  chunks = pl.cdiv(slots, chunk)
  slot = lax.fori_loop(0, chunks, find, jnp.int32(-1))

  @pl.when(slot >= 0)
  def _place() -> None:
    mine = rank_ref[row, slot]

    def place(n: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
      before, taken, held = carry
      at = n * chunk + lane
      entry = _backend.load(order_ref, row, at, mask=at < slots, other=-1)
      real = entry >= 0
      rank = _backend.load(rank_ref, row, jnp.maximum(entry, 0), mask=real, other=-jnp.inf)
      earlier = real & (entry != slot) & ((rank > mine) | ((rank == mine) & (entry < slot)))
      before += earlier.astype(jnp.int32).sum()
      taken = jnp.minimum(taken, jnp.where(entry == slot, at, slots).min())
      return before, taken, held + real.astype(jnp.int32).sum()

    carry = jnp.int32(0), jnp.int32(slots), jnp.int32(0)
    to, taken, held = lax.fori_loop(0, chunks, place, carry)
    hole = jnp.minimum(taken, held)  # where it stood, or the first empty place
    back = to <= hole  # what lies between moves towards the end
    low, high = jnp.minimum(to, hole), jnp.maximum(to, hole)
    first, last = low // chunk, high // chunk

    def move(n: Any, moved: Array) -> Array:
      at = jnp.where(back, last - n, first + n) * chunk + lane
      inside = (at >= low) & (at <= high) & (at != hole)
      entry = _backend.load(order_ref, row, at, mask=inside, other=-1)
      wait()  # all have read
      there = jnp.where(inside, jnp.where(back, at + 1, at - 1), slots)
      _backend.store(order_ref, row, there, value=entry, mask=inside)
      wait()
      return moved

    lax.fori_loop(0, last - first + 1, move, jnp.int32(0))
    order_ref[row, to] = slot


def renew_order(
  order: Int[Array, "B K S"],
  pos: Int[Array, "B K S"],
  rank: Float[Array, "B K S"],
  seen: Int[Array, " B"],
  *,
  chunk: int | None = None,
  interpret: bool | None = None,
) -> Int[Array, "B K S"]:
  """The occupied slots by rank, highest first, equal ones by index; −1 behind them.

  Args:
    order: the same before the newest token came, updated in place where donated.
    pos: positions of slots, −1 = empty; the newest token's is seen − 1.
    rank: float32, of every slot; those of all but the newest token are in the order that they were.
    seen: cached tokens of every row.
    chunk: entries handled at once, a power of two; `CHUNK` if None.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.
  """
  rows, slots = pos.shape[0] * pos.shape[1], pos.shape[2]
  interpret = _backend.interpreted(interpret)
  size = min(chunk or CHUNK, max(pl.next_power_of_2(slots), 32))

  def kernel(*refs: Any) -> None:
    _kernel(*refs, chunk=size, interpret=interpret)

  return _backend.call(
    kernel,
    *(x.reshape(rows, slots) for x in (pos, rank)),
    seen,
    order.reshape(rows, slots),
    grid=(rows,),
    out=[jax.ShapeDtypeStruct((rows, slots), jnp.int32)],
    warps=WARPS,
    stages=1,
    name="renew_order",
    interpret=interpret,
    aliases={3: 0},
  )[0].reshape(order.shape)
