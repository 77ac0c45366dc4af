"""Layouts of a cache: declared by its leaves, and kept by all that rebuilds it."""

import jax
import jax.numpy as jnp
import pytest

from kvjax import METHODS, Cache, CacheSpec, DuoAttention, Forked, Full, settings
from kvjax.core.leaves import Layout, Leaf
from kvjax.methods.duo_attention import apart

SPEC = CacheSpec(2, 32, 2, 2, 8, 3, jnp.float32)
# Which arrays a cache of each layout has, and no other has.
MARKS = {
  Layout.SHARED: ("heads", "place"),
  Layout.SPLIT: ("heads", "apart"),
  Layout.HOSTED: ("heads", "store"),
  Layout.BRANCHED: ("rows", "context"),
}


@pytest.mark.parametrize("method", [*METHODS, Forked()], ids=str)
def test_a_layout_is_that_of_the_arrays(method):
  if isinstance(method, str):
    method = settings.example(METHODS[method], 16)
  for cache in jax.eval_shape(lambda: method.init_caches(SPEC)):
    for layout, (shelf, name) in MARKS.items():
      assert (name in getattr(cache, shelf)) == (cache.layout is layout)
    shared = cache.layout is Layout.SHARED
    assert ("ring" in cache.heads and not shared) == (cache.layout is Layout.RING)


def test_layers_of_one_kind_of_heads_are_not_split():
  """A layer of streaming heads alone is a ring, one of retrieval heads dense."""
  method = DuoAttention(((True, True), (False, False), (True, False)), 2, 6)
  caches = method.init_caches(SPEC)
  assert [x.layout for x in caches] == [Layout.DENSE, Layout.RING, Layout.SPLIT]
  full, streaming = apart.split(caches[2])
  assert (full.layout, streaming.layout) == (Layout.DENSE, Layout.RING)
  again = apart.joined(caches[2], full, streaming)
  assert jax.tree.structure(again) == jax.tree.structure(caches[2])


def test_a_name_alone_says_nothing():
  """Own arrays may have any name."""

  class Own(Full):
    def leaves(self, spec, layer):
      held = super().leaves(spec, layer)
      names = dict.fromkeys(("ring", "place", "apart", "store"), Leaf("heads", (2,)))
      return {**held, **names, "context": Leaf("rows")}

  cache = Cache.empty(Own(), SPEC, 0)
  assert cache.layout is Layout.DENSE and cache.kv_heads == 2
