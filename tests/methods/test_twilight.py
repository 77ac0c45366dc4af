"""Twilight against a NumPy float64 oracle: rounded keys, the set of a head, the group's union."""

import itertools

import numpy as np
import pytest

from kvjax import DoubleSparsity, Env, Quest, RocketKV, SnapKV, TopKOracle, Twilight
from kvjax.methods.twilight import _heaviest, _rounded
from kvjax.testing.layer import Layer, Stream, capped
from tests.compiled import compiled
from tests.oracles import attend, keys, queries, softmax
from tests.selection import Watched

ATTENDED = 5e-6  # float32 against NumPy's float64


def rounded(k, bits):
  """A key by codes of so many bits."""
  low, high = min(k), max(k)
  step = (high - low) / (2**bits - 1)
  return np.array([low + step * round((x - low) / step) if step else low for x in k])


def heaviest(weights, p):
  """Indices of the fewest weights, the largest first, that sum up to p."""
  order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
  for n in range(1, len(order) + 1):
    if sum(weights[i] for i in order[:n]) >= p:
      return set(order[:n])
  return set(order)


def pruned(stream, b, h, t, candidates, p, bits, cap):
  """What a KV head reads of the candidates, in their order."""
  kept, k = set(), [rounded(x, bits) for x in keys(stream, b, h, candidates)]
  for q in queries(stream, b, h, t):
    kept |= heaviest(softmax(capped(np.array(k) @ q / np.sqrt(len(q)), cap)), p)
  return [candidates[i] for i in sorted(kept)]


def test_worked_example():
  """w = .5 .3 .15 .05: p = .75 keeps two, .85 three; 0 1 2 3 survives two bits."""
  w = np.array([[0.15, 0.5, 0.05, 0.3]], np.float32)
  for p, want in ((0.75, [1, 3]), (0.85, [0, 1, 3]), (0.4, [1]), (1e-3, [1])):
    assert np.flatnonzero(compiled(_heaviest)(w, p)[0]).tolist() == want
    assert heaviest(w[0], p) == set(want)
  for given, want in (
    ([0, 1, 2, 3], [0, 1, 2, 3]),
    ([-1, 0, 1, 5], [-1, -1, 1, 5]),
    ([2, 2], [2, 2]),
  ):
    assert compiled(_rounded)(np.float32(given), 2).tolist() == want
    assert rounded(given, 2).tolist() == want


@pytest.mark.core(1)
@pytest.mark.parametrize(("p", "bits", "cap"), [(0.8, 4, None), (0.95, 3, 0.7), (0.5, 16, None)])
def test_a_generation(p, bits, cap):
  stream, lengths = Stream.random(1, tokens=70), [33, 12]
  base = Quest(12, 4, dense_layers=0)
  env = Env(4, impl="reference", soft_cap=cap)
  run = Layer(Watched(Twilight(base, p=p, bits=bits)), stream, capacity=70, env=env)
  alone = Layer(Watched(base), stream, capacity=70, env=env)
  for layer in (run, alone):
    layer.prefill(lengths)
  sizes = set()
  for step in range(25):
    at = [n + step for n in lengths]
    out, aux = run.decode(at)
    _, candidates = alone.decode(at)
    for b, h in np.ndindex(2, 3):
      given, found = (np.asarray(x["slots"][b, h]).tolist() for x in (candidates, aux))
      want = pruned(stream, b, h, at[b], [j for j in given if j >= 0], p, bits, cap)
      assert [j for j in found if j >= 0] == want, (step, b, h)
      assert aux["visited"][b, h] == len(want)
      np.testing.assert_allclose(out[b, h], attend(stream, b, h, at[b], want, cap), atol=ATTENDED)
      sizes.add(len(want))
  assert len(sizes) > 3  # heads of unlike needs


def test_all_candidates_and_exact_keys_hold_the_share_and_no_token_more():
  stream, p = Stream.random(2, groups=1, tokens=40), 0.9
  base = TopKOracle(40, dense_layers=0)
  run = Layer(Watched(Twilight(base, p=p, bits=16)), stream, capacity=40)
  run.prefill([30, 22])
  for step in range(5):
    at = [30 + step, 22 + step]
    _, aux = run.decode(at)
    for b, h in np.ndindex(2, 3):
      w = softmax(keys(stream, b, h, range(at[b] + 1)) @ queries(stream, b, h, at[b])[0] / 4)
      mine = w[[j for j in np.asarray(aux["slots"][b, h]).tolist() if j >= 0]]
      assert mine.sum() >= p - 1e-3 > mine.sum() - mine.min() - 2e-3


def test_a_larger_share_drops_no_token():
  stream, read = Stream.random(3, tokens=40), []
  for p in (0.3, 0.6, 1.0):
    run = Layer(Watched(Twilight(Quest(16, 4, dense_layers=0), p=p)), stream)
    run.prefill([36, 20])
    slots = np.asarray(run.decode([36, 20])[1]["slots"])
    read.append([set(row[row >= 0].tolist()) for row in slots.reshape(6, -1)])
  for fewer, more in itertools.pairwise(read):
    assert all(a <= b for a, b in zip(fewer, more, strict=True))
  assert all(a < b for a, b in zip(read[0], read[-1], strict=True))


def test_the_base_keeps_what_it_keeps_and_dense_layers_stay_dense():
  method = Twilight(Quest(8, 4, base=SnapKV(20, 3), dense_layers=2))
  stream = Stream.random(4, tokens=50)
  for layer, most in ((1, 20), (2, 8)):
    run, alone = (Layer(x, stream, layer=layer) for x in (method, method.base.base))
    for each in (run, alone):
      each.prefill([40, 25])
    _, aux = run.decode([40, 25])
    alone.decode([40, 25])
    np.testing.assert_array_equal(run.cache.pos, alone.cache.pos)
    visited = np.asarray(aux["visited"])
    assert (visited == 20).all() if most == 20 else (visited <= most).all() and visited.min() < most


@pytest.mark.parametrize("base", [RocketKV(8), DoubleSparsity(8), TopKOracle(8)])
def test_other_selectors_are_taken(base):
  assert Twilight(base).base == base
