"""Lists that a program writes part by part, with no holes between: the table of a plan."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from kvjax.kernels.common import backend


def append(table_ref: Any, row: Any, count: Array, entry: Array, ok: Array) -> Array:
  """Writes those entries that are ok after the first `count`; returns the new count."""
  place = jnp.cumsum(ok.astype(jnp.int32)) - 1 + count
  place = jnp.where(ok, place, table_ref.shape[1])
  backend.store(table_ref, row, place, value=entry, mask=ok)
  return count + ok.astype(jnp.int32).sum()


def always(sinks: int, local: int, seen: Array) -> tuple[Array, Array]:
  """First tokens, then newest ones backwards, and which of them stand there for the first time."""
  i = jnp.arange(pl.next_power_of_2(sinks + local))
  token = jnp.where(i < sinks, i, seen - 1 - (i - sinks))
  return token, (i < sinks + local) & ((i < sinks) | (token >= sinks))


def end(table_ref: Any, row: Any, count: Array) -> None:
  """−1 in all places from `count` on."""
  width = table_ref.shape[1]
  i = jnp.arange(pl.next_power_of_2(width))
  tail = (i >= count) & (i < width)
  place = jnp.where(tail, i, width)
  backend.store(table_ref, row, place, value=jnp.full(i.shape, -1), mask=tail)
