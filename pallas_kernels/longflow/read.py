"""LongFlow's step in one launch: attention, importance and the victim (LongFlow, §3.3, Alg. 1).

    score_i = log Σ_r exp(x_ri − lse_r) · ‖v_i‖₁

Every denominator is known only at the end of the pass over K and V. A row's logits wait for it in
the registers of the program that made them, G·S numbers, in the place of memory: nothing is written
but the output and the victim, and beside K and V only ‖v‖₁ and positions are read, 8 bytes a slot.

Grid: one program per batch row and KV head.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.kernels.common import backend, split_k, tiling
from kvjax.kernels.common.backend import by_row
from kvjax.kernels.common.config import Config
from kvjax.kernels.common.devices import this_device
from kvjax.kernels.decode import stored
from kvjax.kernels.longflow.victim import LAST, named
from kvjax.primitives.softmax_state import State

HELD = 16 << 10  # logits of a program, at most: 128 registers of each thread of four warps
STAGE = 64 << 10  # bytes of keys and values in a stage


class _Row(NamedTuple):
  """q [R, G, H], k, v [R, S, H], ‖v‖₁ and positions [R, S], the end of the occupied slots and the
  tokens seen [B].
  """

  q: Any
  k: Any
  v: Any
  norm: Any
  pos: Any
  stop: Any
  seen: Any


def _kernel(
  refs: _Row,
  outs: tuple[Any, ...],
  victim_ref: Any,
  *,
  sinks: int,
  recent: int,
  cut: Config,
  scale: tiling.Scale,
) -> None:
  """`_Row` -> o [R, G, H], m, l [R, G], o rounded; victim [R]."""
  rows, groups, _ = refs.q.shape
  slots, row = refs.k.shape[1], pl.program_id(0)
  batch_row = row // (rows // refs.stop.shape[0])
  stop, end = jnp.minimum(refs.stop[batch_row], slots), refs.seen[batch_row] - recent
  held = stored.Floats(stored.Sources(refs.q, refs.k, refs.v), row, scale, "evict_first")
  lanes = held.lanes
  few, real = pl.next_power_of_2(groups), lanes < groups
  index = jnp.arange(pl.next_power_of_2(pl.cdiv(slots, cut.tile)))

  def of_queries(x: Array) -> Array:
    """The rows of real queries, [few, …], of all that a product has."""
    x = jnp.where(real.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0)
    return x.reshape(lanes.size // few, few, *x.shape[1:]).sum(axis=0)

  def fetch(i: Any) -> tiling.Tile:
    slot = i * cut.tile + jnp.arange(cut.tile)
    return held.fetch(slot, slot < stop)

  def step(i: Any, state: tuple[tiling.Carry, Array]) -> tuple[tiling.Carry, Array]:
    carry, logits = state
    shown: list[Array] = []
    carry = held.step(carry, q, fetch(i), shown.append)
    x = of_queries(shown[0])[:, None, :]
    return carry, jnp.where(index[None, :, None] == i, x, logits)

  q = held.query()
  logits = jnp.full((few, index.size, cut.tile), -jnp.inf, jnp.float32)
  carry, logits = lax.fori_loop(0, pl.cdiv(stop, cut.tile), step, (held.start(), logits))
  held.store(split_k.whole(), carry, outs)

  lse = of_queries(tiling.finite(carry.m) + jnp.log2(tiling.nonzero(carry.l)))
  query = jnp.arange(few)[:, None, None] < groups
  share = jnp.where(query, logits - lse[:, None, None], -jnp.inf)  # log α
  slot = index[:, None] * cut.tile + jnp.arange(cut.tile)[None, :]
  there = slot < stop
  norm = backend.load(refs.norm, row, slot, mask=there, other=1.0)
  pos = backend.load(refs.pos, row, slot, mask=there, other=LAST)
  base = tiling.finite(share.max(axis=0))
  score = base + jnp.log2(jnp.exp2(share - base[None]).sum(axis=0) * norm)
  score = jnp.where(score != score, -jnp.inf, score)  # NaN leaves first
  score = jnp.where(there & (pos >= sinks) & (pos < end), score, jnp.inf)
  victim_ref[row] = named(score, pos, slot).slot


def fits(groups: int, slots: int) -> bool:
  """True if a row's logits fit a program's registers."""
  return pl.next_power_of_2(groups) * pl.next_power_of_2(slots) <= HELD


def takes(
  rows: int,
  groups: int,
  slots: int,
  itemsize: int,
  *,
  interpret: bool | None = None,
  kind: str | None = None,
) -> bool:
  """True if one launch is worth it: logits fit, and there are rows for the multiprocessors.

  Keys and values have 16 bits, and two programs fit the shared memory of a multiprocessor.
  """
  if backend.interpreted(interpret) or not fits(groups, slots):
    return fits(groups, slots)
  here = this_device(kind)
  return 3 * rows >= 2 * here.cores and itemsize == 2 and here.shared >= 2 * STAGE


def cut_of(rows: int, head_dim: int, itemsize: int) -> Config:
  """Two programs to a multiprocessor where there are rows for that; else one, with more stages."""
  tile = max(16, STAGE // (2 * split_k.columns_of(head_dim) * itemsize))
  return Config(tile, 1, 4, 2) if rows > this_device().cores else Config(tile, 1, 8, 3)


def read(
  q: Float[Array, "B K G H"],
  k: Float[Array, "B K S H"],
  v: Float[Array, "B K S H"],
  norm: Float[Array, "B K S"],
  pos: Int[Array, "B K S"],
  stop: Int[Array, " B"],
  seen: Int[Array, " B"],
  *,
  sinks: int,
  recent: int,
  soft_cap: float | None = None,
  config: Config | None = None,
  interpret: bool | None = None,
) -> tuple[State, Float[Array, "B K G H"], Int[Array, "B K"]]:
  """Attention over the slots [0, stop) of every row, and the slot that contributes least to it.

  Args:
    q: queries, rotated, in the dtype of k.
    k, v: cached keys and values.
    norm: ‖v‖₁ of every slot, float32.
    pos: position of every slot.
    stop, seen: occupied slots and tokens seen of every row; the newest has position seen − 1.
    sinks, recent: numbers of first and of newest tokens that may not leave.
    soft_cap: c of logits c·tanh(x/c); None: x itself.
    config: how a row is walked; by device and shape if None.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    The softmax state, o in the dtype of q, and slots, int32; ties go to the lowest position. A slot
    means nothing where no token may leave.

  Raises:
    NotImplementedError: a row's logits do not fit a program's registers.
  """
  batch, heads, groups, head_dim = q.shape
  rows, slots = batch * heads, k.shape[2]
  if not fits(groups, slots):
    raise NotImplementedError(
      f"k: found {slots} slots for {groups} query heads of a KV head, expected at most "
      f"{HELD // pl.next_power_of_2(groups)}: logits of a row are held in registers"
    )

  cut = config or cut_of(rows, head_dim, k.dtype.itemsize)
  how: dict[str, Any] = {"sinks": sinks, "recent": recent, "cut": cut}
  done, victim = backend.call(
    functools.partial(_kernel, **how, scale=tiling.Scale.of(head_dim, None, soft_cap)),
    _Row(by_row(q), by_row(k), by_row(v), by_row(norm), by_row(pos), stop, seen),
    grid=(rows,),
    out=[
      tuple(split_k.results(rows, groups, head_dim, 0, q.dtype)),
      jax.ShapeDtypeStruct((rows,), jnp.int32),
    ],
    warps=cut.warps,
    stages=cut.stages,
    name="longflow_read",
    interpret=interpret,
  )
  return *split_k.finished(done, q.shape[:2]), victim.reshape(batch, heads)
