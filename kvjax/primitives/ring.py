"""Slots that are used in turn: arithmetic that methods and kernels share.

A ring is two numbers: `first`, the first slot that is used again, and `since`, the position whose
token takes it. Slots before `first` stay as they are. Behind a prompt tokens go into the slots
before the last of S one by one, and from position `since` on round [first, S).
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


def place(
  ring: Int[Array, "*shape 2"], position: Int[Array, "*#shape"], size: int
) -> Int[Array, "*shape"]:
  """The slot of the token of a position, if it came after the last prompt."""
  return place_of(ring[..., 0], ring[..., 1], position, size)


def victim(self: Any, at: Any, cache: Any) -> Int[Array, "B K"]:
  """The move `victim` of methods that use their slots in turn: kernels know it by itself."""
  return place(cache.heads["ring"], cache.seen[:, None], cache.size)


def place_of(first: Array, since: Array, position: Array, size: int | Array) -> Array:
  """`place` of a ring in two parts, of one shape; the sizes may differ, too."""
  beyond = position - since
  return jnp.where(beyond < 0, size + beyond, first + lax.rem(beyond, size - first))
