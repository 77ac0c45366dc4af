"""Summaries of tiles of keys, renewed where the newest token belongs.

What is renewed is what `summarise` makes of a cache's slots (`ops.context.summarised`).
"""

from collections.abc import Callable

from jaxtyping import Array

from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.ops import slot_shards
from kvjax.ops.table import declare, pallas

declare("renew_extremes", pallas="kvjax.kernels.selection.summaries:renew_extremes")
declare("renew_mean", pallas="kvjax.kernels.selection.summaries:renew_mean")

Summarise = Callable[[Cache, Array, int], Cache]


def renew_extremes(at: At, cache: Cache, summarise: Summarise, *, unit: int) -> Cache:
  """Minimum and maximum of the keys of a page of `unit` tokens: "key_min" and "key_max"."""
  run = _kernel(at, cache, "renew_extremes", "key_min")
  if run is None:
    return slot_shards.summarised(at, cache, summarise, cache.seen - 1, 1)
  held = cache.heads["key_min"], cache.heads["key_max"]
  low, high = run(cache.slots["k"], cache.used, *held, unit=unit)
  return cache.put(heads={"key_min": low, "key_max": high})


def renew_mean(at: At, cache: Cache, summarise: Summarise, *, width: int, stride: int) -> Cache:
  """Means of `width` keys, one every `stride` tokens: "compressed"."""
  run = _kernel(at, cache, "renew_mean", "compressed")
  if run is None:
    return slot_shards.summarised(at, cache, summarise, cache.seen - 1, 1)
  held = cache.slots["k"], cache.used, cache.heads["compressed"]
  return cache.put(heads={"compressed": run(*held, width=width, stride=stride)})


def _kernel(at: At, cache: Cache, operation: str, summary: str) -> Callable | None:
  """The kernel, which reads keys that lie in memory: those made of codes do not.

  Their dtype is float32, and not their summary's.
  """
  if cache.slots["k"].dtype != cache.heads[summary].dtype:
    return None
  return pallas(at, operation, whole=True)
