"""HShare: whose heavy tokens every KV head reads in a step, and the list of all that it reads.

A head keeps its set between retrievals, and when one is due takes that of a head of its layer or of
its own head in a layer below. In XLA that is two gathers, a sort that closes the holes of short
rows, and a copy of all layers' sets; here one launch, which puts the set in its place among those.

Bytes: 4 per entry of the list and of the set; no key is read.

Grid: one program per row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from kvjax.kernels.common import backend, listing

WARPS = 4


def _kernel(
  *refs: Any, own: int, steps: int, budget: int, sinks: int, local: int, span_sinks: int
) -> None:
  """retrieved [B, N, k], kept [R, k], from_head [R], from_layer, seen [B], start [R] or one per
  batch row, sets as they are -> table [R, W], count [R], heavy [R, k], sets [R, L, k].
  """
  retrieved_ref, kept_ref, head_ref, layer_ref, seen_ref, start_ref = refs[:6]
  table_ref, count_ref, heavy_ref, sets_ref = refs[7:]
  rows, k = kept_ref.shape
  row = pl.program_id(0)
  batch_row = row // (rows // seen_ref.shape[0])
  seen, layer = seen_ref[batch_row], layer_ref[batch_row]
  start = start_ref[row // (rows // start_ref.shape[0])]

  due = (seen % steps == 0) | (seen <= budget)
  i = jnp.arange(pl.next_power_of_2(k))
  here, below = due & (layer == own), due & (layer != own)
  heavy = backend.load(kept_ref, row, i, mask=(i < k) & jnp.logical_not(due), other=-1)
  mine = batch_row, head_ref[row], i
  heavy = jnp.maximum(heavy, backend.load(retrieved_ref, *mine, mask=(i < k) & here, other=-1))
  theirs = row, layer, i
  heavy = jnp.maximum(heavy, backend.load(sets_ref, *theirs, mask=(i < k) & below, other=-1))
  backend.store(heavy_ref, row, i, value=heavy, mask=i < k)
  backend.store(sets_ref, row, own, i, value=heavy, mask=i < k)

  def visible(token: Array) -> Array:
    return (token >= 0) & (token < seen) & ((token < span_sinks) | (token >= start))

  token, ok = listing.always(sinks, local, seen)
  count = listing.append(table_ref, row, jnp.int32(0), token, ok & visible(token))
  count = listing.append(table_ref, row, count, heavy, visible(heavy))
  count_ref[row] = count
  listing.end(table_ref, row, count)


def listed(
  retrieved: Int[Array, "B N k"],
  kept: Int[Array, "B K k"],
  from_head: Int[Array, "B K"],
  from_layer: Int[Array, " B"],
  seen: Int[Array, " B"],
  start: Int[Array, "B #K"],
  sets: Int[Array, "B K L k"],
  *,
  own: int,
  slots: int,
  steps: int,
  budget: int,
  sinks: int,
  local: int,
  span_sinks: int = 0,
  interpret: bool | None = None,
) -> tuple[Int[Array, "B K W"], Int[Array, "B K"], Int[Array, "B K k"], Int[Array, "B K L k"]]:
  """The tokens that every KV head reads, none twice.

  Args:
    retrieved: this layer's retrievals, of the heads of all devices, −1 = none; anything where
      they are not used.
    kept: what every head used in the last step.
    from_head, from_layer: whose set is used when one is due.
    seen: cached tokens of every row.
    start, span_sinks: the tokens that may be read, as in `sparse_decode`.
    sets: those of all layers in this step, of which the lower ones are known; written in place.
    own: this layer's index among them.
    slots: S.
    steps, budget, sinks, local: as in `kvjax.HShare`.
    interpret: run under the Pallas interpreter; None: wherever the default backend is no GPU.

  Returns:
    table: first tokens, newest ones backwards, heavy ones; −1 after the end; its count; the heavy
    ones in use; and `sets` with them.
  """
  batch, heads, k = kept.shape
  rows, sinks, local = batch * heads, min(sinks, slots), min(local, slots)
  table, count, heavy, new = backend.call(
    functools.partial(
      _kernel,
      own=own,
      steps=steps,
      budget=budget,
      sinks=sinks,
      local=local,
      span_sinks=span_sinks,
    ),
    *(retrieved, kept.reshape(rows, k), from_head.reshape(rows), from_layer, seen),
    *(start.reshape(-1), sets.reshape(rows, *sets.shape[2:])),
    grid=(rows,),
    out=[
      jax.ShapeDtypeStruct((rows, min(sinks + local + k, slots)), jnp.int32),
      jax.ShapeDtypeStruct((rows,), jnp.int32),
      jax.ShapeDtypeStruct((rows, k), jnp.int32),
      jax.ShapeDtypeStruct((rows, *sets.shape[2:]), jnp.int32),
    ],
    warps=WARPS,
    stages=1,
    name="hshare_listed",
    interpret=interpret,
    aliases={6: 3},
  )
  shape = batch, heads
  return (
    table.reshape(*shape, -1),
    count.reshape(shape),
    heavy.reshape(*shape, k),
    new.reshape(sets.shape),
  )
