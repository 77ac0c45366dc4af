"""What drivers refuse while they are traced: nothing here runs on the device, but `with_room`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import checkify
from jaxtyping import Array, Bool, Int

from kvjax.ops import context
from kvjax.shapes import check_shape
from kvjax.traced_layer import TracedLayer, different_layers
from kvjax.types import At, Cache, CacheSpec, Prompt


def check_step(at: At, cache: Cache, q: Any, k: Any, v: Any, live: Any) -> None:
  """Raises where a decode step's arguments do not fit the cache, or the layer the method."""
  _check_layer(at, cache)
  batch, heads, width = _sizes(cache)
  check_shape(at, "q", q, (batch, heads, None, width))
  for name, x in (("k", k), ("v", v)):
    check_shape(at, name, x, (batch, heads, width))
  check_shape(at, "live", live, (batch,))


def check_prompt(at: At, cache: Cache, q: Any, k: Any, v: Any, prompt: Prompt) -> None:
  """Raises where a prompt's arguments do not fit the cache, or the layer the method."""
  _check_layer(at, cache)
  batch, heads, width = _sizes(cache)
  computed = prompt.tokens if prompt.index is None else prompt.index.shape[1]
  check_shape(at, "q", q, (batch, heads, None, computed, width))
  filled = prompt.tokens if at.top.projects_all else computed
  for name, x in (("k", k), ("v", v)):
    check_shape(at, name, x, (batch, heads, filled, width))
  for name, x in (("prompt.valid", prompt.valid), ("prompt.total", prompt.total)):
    check_shape(at, name, x, (batch,))


def with_room(
  at: At, cache: Any, rows: Bool[Array, " B"], new: Int[Array, " B"] | Bool[Array, " B"]
) -> Bool[Array, " B"]:
  """Those of `rows` whose cache has room for `new` more tokens; the others raise (checkify)."""
  room = at.top.room(cache)
  if room is None:
    return rows
  room = context.size(at, cache) if at.env.slot_axis else room
  full = rows & (cache.seen + new > room)
  row = jnp.argmax(full)
  checkify.check(
    ~full.any(),
    f"{type(at.top).__name__}, layer {at.layer}: found row {{row}} with {{seen}} cached tokens and "
    f"{{new}} to come, expected at most the capacity of {room}; its cache stays as it was",
    row=row,
    seen=cache.seen[row],
    new=new[row].astype(jnp.int32),
  )
  return rows & ~full


def _sizes(cache: Cache) -> tuple[int, int, int]:
  """B, K and H."""
  batch, heads, _, width = cache.slots["k"].shape
  return batch, heads, width


def _check_layer(at: At, cache: Cache) -> None:
  """Raises TypeError where the layer is not known and the layers' caches differ in size."""
  # Not `at.layer`: asking for it means a program for each layer.
  if isinstance(vars(at)["layer"], TracedLayer):
    batch, heads, width = _sizes(cache)
    spec = CacheSpec(batch, 1 << 20, heads, 1, width, at.env.layers)
    if len({at.top.capacity(spec, layer) for layer in range(spec.layers)}) > 1:
      raise TypeError(different_layers(type(at.top).__name__))
