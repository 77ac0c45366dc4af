"""PyramidKV against a NumPy oracle: the sizes of layers, and what each of them keeps."""

import numpy as np
import pytest

from kvjax import Env, PyramidKV
from kvjax.testing.layer import Stream
from tests.oracles import begun, held, pooled, window_mass


def test_pyramid_gives_real_capacities():
  """Budget 48, window 8, β 20, four layers: 40 to select on average, from 78 down to 2."""
  method = PyramidKV(budget=48)
  for capacity in (86, 400):  # a prompt gives the same answer wherever it has room
    spec = Stream.random(3).spec(capacity)
    sizes = [cache.size for cache in method.init_caches(spec)]
    assert sizes == [8 + 78, 8 + 53, 8 + 28, 8 + 2]  # 78 − ⌊76·ℓ/3⌋
  short = Stream.random(3).spec(capacity=45)
  assert [cache.size for cache in method.init_caches(short)] == [45, 45, 8 + 28, 8 + 2]


@pytest.mark.parametrize("layers", [2, 16, 28, 30, 32, 61, 80])
def test_the_mean_is_the_budget(layers):
  """However small it is beside the number of layers, whose steps are fractions of a token then."""
  for budget in (9, 22, 48, 64, 100, 1024):
    for beta in (1, 3, 20, 50):
      spec = Stream.random(3).spec(8192, layers)
      sizes = [PyramidKV(budget, beta=beta).capacity(spec, layer) for layer in range(layers)]
      assert budget <= np.mean(sizes) <= budget + 0.5, (budget, beta)
      assert sizes == sorted(sizes, reverse=True) and sizes[-1] >= 8


def sizes_of_layers(budget, window, beta, layers):
  """The paper's arithmetic sequence, rounded up to whole tokens: sizes of all layers."""
  least = (budget - window) // beta
  most = 2 * (budget - window) - least
  places = np.arange(layers)
  return [window + most - int(x) for x in places * (most - least) // (layers - 1)]


def heaviest(stream, b, h, length, window, count):
  """The window, and the `count` tokens before it that its queries attend to, pooled by 5."""
  before = length - window
  pool = pooled(window_mass(stream, b, h, list(range(length)), length, window), 5)
  best = np.argsort(-np.array(pool), kind="stable")[:count]
  return sorted([*best.tolist(), *range(before, length)])


@pytest.mark.core(1)
@pytest.mark.parametrize(
  ("budget", "window", "beta", "layers", "length"),
  [
    (24, 4, 20, 4, 60),  # 39, 27, 14, 1 beside the window
    (24, 4, 20, 7, 60),  # a step of 38/6
    (24, 4, 3, 3, 60),  # less steep
    (24, 4, 20, 4, 41),  # the lowest layer has more slots than there are tokens
    (24, 4, 20, 4, 23),  # the upper ones cut it all the same
    (9, 8, 20, 5, 50),  # the top layers keep their windows only
  ],
)
def test_layers_keep_the_heaviest(budget, window, beta, layers, length):
  """Of a prompt as long as the capacity."""
  method = PyramidKV(budget, window_size=window, beta=beta)
  stream = Stream.random(length, batch=1, kv_heads=2, groups=2, tokens=length, head_dim=8)
  sizes = [min(length, n) for n in sizes_of_layers(budget, window, beta, layers)]
  found = [cache.size for cache in method.init_caches(stream.spec(length, layers))]
  assert found == sizes
  for layer in (0, 1, layers - 1):
    run = begun(
      method, stream, [length], capacity=length, layer=layer, env=Env(layers, impl="reference")
    )
    for h in range(2):
      want = heaviest(stream, 0, h, length, window, sizes[layer] - window)
      assert held(run.cache, 0, h) == want
