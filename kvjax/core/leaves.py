"""Description of a cache's arrays: given once, for all that make, write or split them."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

New = dict[str, Array]
# Bytes of an array that is filled by NumPy, at most: on a device each new shape is a program.
_SMALL = 1 << 20


def traced() -> bool:
  """True if what is laid out is laid out abstractly."""
  return isinstance(jnp.zeros(()), jax.core.Tracer)


class Layout(enum.Enum):
  """Arrangement of the slots of a layer's heads."""

  DENSE = "each head has S of its own, filled from the first on"
  RING = "each head has S of its own, used in turn (`kvjax.primitives.ring`)"
  SHARED = "heads lie one after the other in one array (`kvjax.ops.shared_slots`)"
  SPLIT = "heads with another number of slots lie in a tree of their own"
  HOSTED = "old tokens are in a store in the host's memory (`kvjax.ops.offload`)"
  BRANCHED = "a row's own slots follow those of a context that it shares (`kvjax.Forked`)"


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One array of a layer's cache.

  Attributes:
    shelf: "slots" [B, K, S, *shape], "heads" [B, K, *shape] or "rows" [B, *shape] (`kvjax.Cache`).
    shape: the axes after those of its shelf.
    dtype: of its elements.
    fill: what an empty cache holds: a number, or numbers that broadcast over the whole.
    new: slots: what the slots of new tokens get, from their "k", "v" and "pos" [B, K, T, ...];
      None: the fill.
    standing: slots: whether the slot of a decoded token has its statistic already, so that
      `insert` leaves it alone.
    in_place: whether `observe` leaves it alone in rows that do not count. It
      writes what it would find there anyway, or minds `Attended.counted`. All others are chosen
      row by row after each step, which moves the whole of them.
    heads: slots: how many of the layer's heads have slots here; None: all.
    along_slots: heads: whether its first own axis follows the slots: summaries of tiles.
    bits: slots: its words hold codes of so many bits (`kvjax.primitives.codes`); None: plain
      numbers.
    layout: how slots lie in a cache that has this leaf; of several leaves that say so, the last
      one's holds, and DENSE if none does.
    made: an empty one, where `shape`, `dtype` and `fill` do not say it; a tree leading with B.
  """

  shelf: str
  shape: tuple[int, ...] = ()
  dtype: Any = jnp.float32
  fill: Any = 0
  _: dataclasses.KW_ONLY
  new: Callable[[New], Array] | None = None
  standing: bool = False
  in_place: bool = False
  heads: int | None = None
  along_slots: bool = False
  bits: int | None = None
  layout: Layout | None = None
  made: Callable[[], Any] | None = None

  def empty(self, leading: tuple[int, ...], abstract: bool | None = None) -> Any:
    """Content of an empty cache: an array [*leading, *shape], or the tree that is made.

    `abstract`: what `traced` says, where it was asked before.
    """
    if self.made is not None:
      return self.made()
    shape = *leading, *self.shape
    abstract = traced() if abstract is None else abstract
    if math.prod(shape) * jnp.dtype(self.dtype).itemsize <= _SMALL and not abstract:
      return jax.device_put(np.full(shape, self.fill, self.dtype), may_alias=False)
    fill = np.asarray(self.fill, self.dtype)
    apart = len(shape) - fill.ndim
    return lax.broadcast(np.broadcast_to(fill, shape[apart:]), shape[:apart])

  def of_new(self, new: New, like: Array) -> Array:
    """Values of new tokens, with the dtype and the trailing axes of `like`."""
    if self.new is not None:
      return self.new(new)
    return jnp.full((*new["pos"].shape, *like.shape[3:]), self.fill, like.dtype)

  def kind(self) -> Leaf:
    """The part of it that moves ask for, the same in all layers and at all sizes."""
    fill = self.fill if self.shelf == "slots" else 0
    sizes: dict[str, Any] = {"shape": (), "dtype": jnp.float32, "heads": None, "made": None}
    return dataclasses.replace(self, **sizes, fill=fill, layout=None)


# "norm", wherever a method keeps it: ‖v‖₁ of each new token, float32 [B, K, T].
NORM = Leaf("slots", new=lambda new: jnp.abs(new["v"].astype(jnp.float32)).sum(-1))
