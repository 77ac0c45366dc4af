"""PyramidKV: real capacities per layer; what each layer keeps is SnapKV's, tested there."""

import numpy as np
import pytest

from kvjax import PyramidKV, SnapKV
from tests.layer import Layer, Stream


def test_pyramid_gives_real_capacities():
  """Budget 48, window 8, β 20, four layers: 40 to select on average, from 78 down to 2."""
  method = PyramidKV(budget=48)
  spec = Stream.random(3).spec(capacity=400)
  sizes = [cache.size for cache in method.init_caches(spec)]
  assert sizes == [8 + 78, 8 + 53, 8 + 28, 8 + 2]  # 78 − ⌊76·ℓ/3⌋
  assert abs(np.mean(sizes) - 48) <= 1
  short = Stream.random(3).spec(capacity=60)
  assert {cache.size for cache in method.init_caches(short)} == {48}


def test_a_layer_keeps_what_snapkv_would():
  """The top layer of four selects ⌊(48 − 8)/20⌋ = 2 tokens: SnapKV with a budget of 10."""
  stream, lengths = Stream.random(4, tokens=70), [60, 25]
  layers = [
    Layer(method, stream, capacity=400, layer=3)
    for method in (PyramidKV(budget=48), SnapKV(budget=10, window_size=8))
  ]
  for layer in layers:
    layer.prefill(lengths)
    for step in range(6):
      layer.decode([n + step for n in lengths])
  np.testing.assert_array_equal(layers[0].cache.pos, layers[1].cache.pos)


def test_repository_setting():
  assert PyramidKV.repo(100) == PyramidKV(100, window_size=8, pool=7, reduce="max")


def test_bad_beta():
  with pytest.raises(ValueError, match=r"PyramidKV.beta: found 0, expected 1 or more"):
    PyramidKV(beta=0)
