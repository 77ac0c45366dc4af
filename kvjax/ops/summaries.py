"""Summaries of tiles of keys, renewed where the newest token belongs.

What is renewed is what `summarise` makes of a cache's slots (`ops.slot_shards.summarised`).
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.core import slots
from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.leaves import Layout
from kvjax.ops import insertion, slot_shards
from kvjax.ops.table import choose, declare, pallas

declare("renew_extremes", pallas="kvjax.kernels.selection.summaries:renew_extremes")
declare("renew_coded_extremes", pallas="kvjax.kernels.selection.summaries:renew_coded_extremes")
declare("renew_mean", pallas="kvjax.kernels.selection.summaries:renew_mean")

Summarise = Callable[[Cache, Array, int], Cache]


@dataclasses.dataclass(frozen=True)
class Extremes:
  """Minimum and maximum of the keys of a page of `unit` tokens: "key_min" and "key_max"."""

  unit: int
  operation: ClassVar[str] = "renew_extremes"
  summaries: ClassVar[tuple[str, ...]] = ("key_min", "key_max")


@dataclasses.dataclass(frozen=True)
class CodedExtremes:
  """The same in 8 bits, with "key_exponent" (`ops.extremes`)."""

  unit: int
  operation: ClassVar[str] = "renew_coded_extremes"
  summaries: ClassVar[tuple[str, ...]] = ("key_min", "key_max", "key_exponent")


@dataclasses.dataclass(frozen=True)
class Means:
  """Means of `width` keys, one every `stride` tokens: "compressed"."""

  width: int
  stride: int
  operation: ClassVar[str] = "renew_mean"
  summaries: ClassVar[tuple[str, ...]] = ("compressed",)


Renewal = Extremes | CodedExtremes | Means


def renewed(
  at: At, cache: Cache, summarise: Summarise, renewal: Renewal | None, *after: Array
) -> Cache:
  """The cache with the newest token's summaries, by the operation that `summarise` is, if any.

  `after`: arrays that were made of the summaries as they were (`slots.after`).
  """
  if renewal is None or (run := _kernel(at, cache, renewal)) is None:
    newest = slots.after(cache.seen - 1, *after)
    return slot_shards.summarised(at, cache, summarise, newest, 1)
  held = [cache.heads[name] for name in renewal.summaries]
  made = run(cache.slots["k"], cache.used, *held, **dataclasses.asdict(renewal))
  return cache.put(heads=dict(zip(renewal.summaries, made, strict=True)))


def enters(at: At, cache: Cache, renewal: Renewal | None) -> bool:
  """True if the kernel that appends a token has this done as well (`ops.insertion`)."""
  if not isinstance(renewal, Extremes | CodedExtremes) or cache.layout is not Layout.DENSE:
    return False
  if at.env.slot_axis or _kernel(at, cache, renewal) is None:
    return False
  return choose(insertion.ENTER_PAGE, at.env.impl) == "pallas"


def _kernel(at: At, cache: Cache, renewal: Renewal) -> Callable | None:
  """The kernel, which reads keys that lie in memory: those made of codes do not.

  Their dtype is float32, and not their summary's.
  """
  keys, held = cache.slots["k"].dtype, cache.heads[renewal.summaries[0]].dtype
  made = keys == jnp.float32 if isinstance(renewal, CodedExtremes) else keys != held
  if made:
    return None
  return pallas(at, renewal.operation, whole=True)
