"""The slots that a plan's table lists, tile by tile of a walk, whatever the plan's unit is."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from kvjax.kernels.common import backend, split_k
from kvjax.kernels.common.config import Config


class Listed(NamedTuple):
  """A program's part of a row's list of `keys` slots.

  find: the slots [T] of a tile of the walk, or of a part of it, −1 for none.
  """

  piece: split_k.Piece
  keys: Array
  find: Callable[..., Array]


def of_program(
  table_ref: Any,
  count_ref: Any,
  start_ref: Any,
  stop_ref: Any,
  *,
  slots: int,
  unit: int,
  sinks: int,
  config: Config,
  whole: bool,
) -> Listed:
  """A part of a row of table [R, W], count [R], within start, stop [R] or one per batch row.

  A tile takes part of one entry of `unit` slots, or many of them. `whole`: a program per row.
  """
  rows, width = table_ref.shape

  def tiles_of(row: Array, real: Array) -> Array:
    count = backend.load(count_ref, row, mask=real, other=0)
    return pl.cdiv(jnp.minimum(count, width) * unit, config.tile)

  if whole:
    piece = split_k.whole()
  else:
    piece = split_k.piece(tiles_of, rows=rows, programs=config.programs)
  row = piece.row
  keys = jnp.minimum(count_ref[row], width) * unit
  # One range is that of all heads of a batch row, or of one.
  start, stop = (ref[row // (rows // ref.shape[0])] for ref in (start_ref, stop_ref))
  stop = jnp.minimum(stop, slots)

  def find(i: Any, part: int = 0, parts: int = 1) -> Array:
    if unit % config.tile:
      size = config.tile // parts
      key = i * config.tile + jnp.arange(size)
      key = key + part * size if part else key
      entry = backend.load(table_ref, row, key // unit, mask=key < keys, other=-1)
      slot = entry * unit + key % unit
    else:  # one entry for the whole tile
      key = i * config.tile
      entry = table_ref[row, key // unit]
      slot = entry * unit + key % unit + jnp.arange(config.tile)
    keep = (entry >= 0) & (slot < stop) & ((slot < sinks) | (slot >= start))
    return jnp.where(keep, slot, -1)

  return Listed(piece, keys, find)
