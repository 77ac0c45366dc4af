"""Caches of layers with heads of both kinds: streaming heads lie apart (DuoAttention §2.3)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.leaves import Layout
from kvjax.families.method import Method


def empty(streaming: Method, spec: CacheSpec, kv_heads: int, layer: int) -> dict[str, Array]:
  """The slots of a layer's streaming heads."""
  cache = Cache.empty(streaming, dataclasses.replace(spec, kv_heads=kv_heads), layer)
  return {**cache.slots, **cache.heads}


def split(cache: Cache) -> tuple[Cache, Cache]:
  """The caches of retrieval heads and of streaming heads."""
  slots_of = dict(cache.heads["apart"])
  heads = {"ring": slots_of.pop("ring")}
  used = jnp.minimum(cache.used, slots_of["pos"].shape[2])
  rows = {**cache.rows, "used": used}
  streaming = Cache(slots_of, heads, rows, Layout.RING, kinds=cache.kinds)
  return dataclasses.replace(cache, heads={}, layout=Layout.DENSE), streaming


def joined(cache: Cache, full: Cache, streaming: Cache) -> Cache:
  """A layer's cache of its two parts, which have seen the same."""
  apart = {**streaming.slots, **streaming.heads}
  return cache.put(slots=full.slots, heads={"apart": apart}, rows=full.rows)
