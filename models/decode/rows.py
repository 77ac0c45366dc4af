"""Rows of a live batch: caches that were filled elsewhere enter them, and rows are emptied."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Int
from numpy.typing import ArrayLike

from kvjax.core.cache import CacheSpec
from kvjax.core.leaves import Layout
from kvjax.families.method import Method
from kvjax.models.decode import checks
from kvjax.models.io import items
from kvjax.models.nn import flat
from kvjax.models.nn.transformer import Caches
from kvjax.ops import offload
from kvjax.runtime import sharding

APART = {Layout.BRANCHED: "rows share a context"}  # why rows of such caches are not exchanged


def insert(live: Caches, rows: ArrayLike, new: Caches) -> Caches:
  """Puts caches of other prompts in the place of some rows; the other rows stay, bit by bit.

  A row that entered goes on as it would have in a batch of its own size: with the same program its
  logits have the same bits whatever the other rows hold. One copy or scatter an array, in place.

  Args:
    live: caches of B rows; they are donated.
    rows: int [n], different rows of them.
    new: caches of n rows of the same method, model and capacity, as `prefill` fills them. The
      logits of those rows are the caller's to put in, `logits.at[rows].set(...)`.

  Returns:
    The caches of B rows.

  Raises:
    TypeError: `live` or `new` are no caches, or `rows` no integers.
    ValueError: rows are out of range, repeated, or not as many as those of `new`; caches were
      donated before; or `new` has another method, model or capacity.
    NotImplementedError: branches share a context.
  """
  chosen = _checked(live, rows)
  check_alike(live, new)
  if len(chosen) != (batch := new[0].seen.shape[0]):
    raise ValueError(f"rows: found {len(chosen)}, expected {batch}, one for each row of new")
  return put(live, chosen, new, np.arange(batch, dtype=np.int32))


def clear(live: Caches, rows: ArrayLike, method: Method, spec: CacheSpec) -> Caches:
  """Empties some rows: they are as `init_caches` makes them.

  Args:
    live: caches of B rows; they are donated.
    rows: int [n], different rows of them.
    method: whose caches they are.
    spec: their sizes, as `Transformer.spec` gives them; its batch does not count.

  Returns:
    The caches of B rows.

  Raises:
    TypeError, ValueError, NotImplementedError: as `insert`; the caches are not those of `method`
      for `spec`.
  """
  chosen = _checked(live, rows)
  checks.laid_out(live, method, spec)
  one, mesh = dataclasses.replace(spec, batch=1), _mesh_of(live)
  empty = method.init_caches(one) if mesh is None else sharding.init_caches(method, one, mesh)
  check_alike(live, empty)
  return put(live, chosen, empty, np.zeros_like(chosen))


def put(
  live: Caches, rows: Int[np.ndarray, " n"], new: Caches, source: Int[np.ndarray, " n"]
) -> Caches:
  """`insert` of the rows `source` of `new`, unchecked: every array leads with the rows."""
  return _written(_mesh_of(live), live, rows, new, source)


def _mesh_of(live: Caches) -> Mesh | None:
  """The mesh that caches are split over."""
  mesh: Mesh | None = getattr(live[0].seen.sharding, "mesh", None)
  return mesh


@flat.own
@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _written(
  mesh: Mesh | None,
  live: Caches,
  rows: Int[Array, " n"],
  new: Caches,
  source: Int[Array, " n"],
) -> Caches:
  move = offload.moved
  if mesh is not None:
    store, whole = sharding.spec_of(("batch", "kv_heads")), sharding.spec_of(())
    move = sharding.shard_map(move, mesh, (store, whole, store, whole), store)

  def one(x: Any, y: Any) -> Any:
    if offload.is_store(x):
      return move(x, rows, y, source)
    if len(rows) == 1:  # a copy: a scatter looks at every element's place
      row = lax.dynamic_slice_in_dim(y, source[0], 1)
      return lax.dynamic_update_slice_in_dim(x, row, rows[0], 0)
    return x.at[rows].set(y[source])

  return offload.settled(jax.tree.map(one, live, new, is_leaf=offload.is_store))


def _checked(live: Any, rows: Any) -> Int[np.ndarray, " n"]:
  """The rows; raises where they are none of these caches, or the caches not to be changed."""
  checks.listed(live)
  checks.there(live)
  for layer, cache in enumerate(live):
    if cache.layout in APART:
      raise NotImplementedError(
        f"live: layer {layer}: {APART[cache.layout]}, expected other caches"
      )
  chosen = checks.token_ids("rows", rows)
  batch = live[0].seen.shape[0]
  wrong = [row for row in chosen.tolist() if not 0 <= row < batch]
  if wrong or len(set(chosen.tolist())) < len(chosen) or not len(chosen):
    raise ValueError(f"rows: found {chosen.tolist()}, expected different rows of 0 to {batch - 1}")
  return chosen


def check_alike(live: Caches, new: Caches) -> None:
  """Compares two caches, which may differ in their rows.

  Raises:
    TypeError, ValueError: `new` are none, or were donated before, or laid out otherwise.
  """
  checks.listed(new)
  checks.there(new)
  if len(live) != len(new):
    raise ValueError(f"new: found {len(new)} layers, expected {len(live)} as in live")
  for layer, (mine, other) in enumerate(zip(live, new, strict=True)):
    if other.origin != mine.origin:
      raise ValueError(f"new: layer {layer}: found {other.origin}, expected {mine.origin}")
    found, expected = (_kinds(cache) for cache in (other, mine))
    for name in expected | found:
      if found.get(name) != expected.get(name):
        raise ValueError(
          f"new: layer {layer}: {name}: found {found.get(name, 'nothing')} a row, expected "
          f"{expected.get(name, 'nothing')} as in live"
        )


def _kinds(cache: Any) -> dict[str, tuple[Any, ...]]:
  """Dtype and shape of a row of each array, by name; a store's segments count as one."""
  return {
    name: offload.row_of(x) if offload.is_store(x) else (x.dtype.name, x.shape[1:])
    for name, x in items.named(cache, offload.is_store).items()
  }
