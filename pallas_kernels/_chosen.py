"""What a search has chosen of a row, and the list that is written of it."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from . import _backend
from ._bounds import Sight


class Chosen(NamedTuple):
  """Tiles and scores of a part's lanes [T]; which are chosen, their places, and how many are."""

  tile: Array
  value: Array
  keep: Array
  place: Array
  total: Array


def write(
  table_ref: Any,
  ranked_ref: Any,
  count_ref: Any,
  row: Array,
  piece: Array,
  chosen: Chosen,
  forcing: Sight | None,
) -> None:
  """A part's piece of row `row` of table and ranked [R, C W], and its count [R C].

  Forced tiles, if any are, then the chosen ones, then −1.
  """
  parts = count_ref.shape[0] // table_ref.shape[0]
  width, nowhere = table_ref.shape[1] // parts, table_ref.shape[1]
  base, head = piece * width, jnp.int32(0)

  def put(ok: Array, place: Array, tile: Array, value: Array) -> None:
    """Entries and their scores, or one for all, where they are ok."""
    place = jnp.where(ok, place, nowhere)
    for ref, x in ((table_ref, tile), (ranked_ref, value)):
      _backend.store(ref, row, place, value=jnp.broadcast_to(x, place.shape), mask=ok)

  if forcing is not None and forcing.bounds.sinks + forcing.bounds.local:
    tile, ok, place, head = forcing.forced()
    put(ok, base + place, tile, jnp.float32(jnp.inf))
  put(chosen.keep, base + head + chosen.place, chosen.tile, chosen.value)
  count_ref[row * parts + piece] = head + chosen.total

  i = jnp.arange(pl.next_power_of_2(width))
  tail = (i >= head + chosen.total) & (i < width)
  put(tail, base + i, jnp.int32(-1), jnp.float32(-jnp.inf))
