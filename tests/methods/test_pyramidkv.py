"""PyramidKV against a NumPy oracle: the authors' sizes of layers, and what each of them keeps."""

import numpy as np
import pytest

from kvjax import Env, PyramidKV, SnapKV, settings
from kvjax.testing.layer import Layer, Stream, rotate


def test_pyramid_gives_real_capacities():
  """Budget 48, window 8, β 20, four layers: 40 to select on average, from 78 down to 2."""
  method = PyramidKV(budget=48)
  spec = Stream.random(3).spec(capacity=400)
  sizes = [cache.size for cache in method.init_caches(spec)]
  assert sizes == [8 + 78, 8 + 53, 8 + 28, 8 + 3]  # 78 − ⌊76/3⌋·ℓ
  short = Stream.random(3).spec(capacity=79)
  assert {cache.size for cache in method.init_caches(short)} == {48}


def kept_by_the_authors(budget, window, beta, layers, length):
  """Tokens that each layer keeps of a prompt, by their conditions one after the other."""
  least = (budget - window) // beta
  most = (budget - window) * 2 - least
  if most >= length - window:
    most = length - window
    least = (budget - window) * 2 - most
  if length < budget:
    return [length] * layers
  if length < (budget - window) * 2:
    return [budget] * layers
  return [window + most - layer * ((most - least) // (layers - 1)) for layer in range(layers)]


def heaviest(stream, b, h, length, window, count):
  """The window, and the `count` tokens before it that its queries attend to, pooled by 5."""
  keys = np.array([rotate(stream.k[b, h, t], t) for t in range(length)])
  mass = np.zeros(length)
  for g in range(stream.q.shape[2]):
    for t in range(length - window, length):
      x = keys[: t + 1] @ rotate(stream.q[b, h, g, t], t) / np.sqrt(keys.shape[1])
      mass[: t + 1] += np.exp(x - x.max()) / np.exp(x - x.max()).sum()
  before = length - window
  pooled = np.convolve(mass[:before], np.ones(5), "same")
  best = np.argsort(-pooled, kind="stable")[:count]
  return sorted([*best.tolist(), *range(before, length)])


@pytest.mark.core(1)
@pytest.mark.parametrize(
  ("budget", "window", "beta", "layers", "length"),
  [
    (24, 4, 20, 4, 60),  # 39, 27, 15, 3 beside the window
    (24, 4, 20, 7, 60),  # the step is floored: 38/6
    (24, 4, 3, 3, 60),  # less steep
    (24, 4, 20, 4, 41),  # the lowest layer would select more than there is
    (24, 4, 20, 4, 40),  # likewise, as short as it goes
    (24, 4, 20, 4, 39),  # below twice what is selected: alike
    (24, 4, 20, 4, 24),
    (24, 4, 20, 4, 23),  # below the budget: whole
    (9, 8, 20, 5, 50),  # the top layers keep their windows only
  ],
)
def test_layers_keep_what_the_authors_keep(budget, window, beta, layers, length):
  """Of the longest prompt that the cache is made for."""
  method = PyramidKV(budget, window_size=window, beta=beta)
  stream = Stream.random(length, batch=1, kv_heads=2, groups=2, tokens=length, head_dim=8)
  sizes = kept_by_the_authors(budget, window, beta, layers, length)
  found = [cache.size for cache in method.init_caches(stream.spec(length, layers))]
  assert found == (sizes if length >= budget else [budget] * layers)
  for layer in (0, 1, layers - 1):
    run = Layer(method, stream, length, layer, Env(layers, impl="reference"))
    run.prefill([length])
    for h in range(2):
      want = heaviest(stream, 0, h, length, window, sizes[layer] - window)
      held = np.asarray(run.cache.pos[0, h])
      assert sorted(held[held >= 0].tolist()) == want


@pytest.mark.slow
def test_a_shorter_prompt_is_kept_whole_where_it_fits():
  """Layers of 43, 31, 19 and 7 slots, for prompts of 60 tokens; two of 30 and 12."""
  method, stream = PyramidKV(24, window_size=4), Stream.random(5, tokens=60)
  for layer, size in enumerate(kept_by_the_authors(24, 4, 20, 4, 60)):
    run = Layer(method, stream, 60, layer)
    run.prefill([30, 12])
    kept = (np.asarray(run.cache.pos) >= 0).sum(-1)
    np.testing.assert_array_equal(kept, [[min(30, size)] * 3, [min(12, size)] * 3])


@pytest.mark.slow
def test_a_layer_keeps_what_snapkv_would():
  """The top layer of four selects 78 − 3·25 = 3 tokens: SnapKV with a budget of 11."""
  stream, lengths = Stream.random(4, tokens=70), [60, 25]
  layers = [
    Layer(method, stream, capacity=400, layer=3)
    for method in (PyramidKV(budget=48), SnapKV(budget=11, window_size=8))
  ]
  for layer in layers:
    layer.prefill(lengths)
    for step in range(6):
      layer.decode([n + step for n in lengths])
  np.testing.assert_array_equal(layers[0].cache.pos, layers[1].cache.pos)


def test_repository_setting():
  assert settings.repo(PyramidKV, 100) == PyramidKV(100, window_size=8, pool=7, reduce="max")


def test_bad_beta():
  with pytest.raises(ValueError, match=r"PyramidKV.beta: found 0, expected 1 or more"):
    PyramidKV(beta=0)
  assert PyramidKV(beta=1).beta == 1
