"""Twilight against a NumPy float64 oracle: rounded keys, the set of a head, the group's union."""

import numpy as np
import pytest

from kvjax import Quest, SnapKV, Twilight
from kvjax.methods.twilight import _heaviest, _rounded
from kvjax.testing.layer import Stream, capped
from tests.coded import own_rounded
from tests.compiled import compiled
from tests.oracles import begun, keys, queries, softmax
from tests.selection import check, choose, page_bounds, tokens_of


def heaviest(weights, p):
  """Indices of the fewest weights, the largest first, that sum up to p."""
  order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
  for n in range(1, len(order) + 1):
    if sum(weights[i] for i in order[:n]) >= p:
      return set(order[:n])
  return set(order)


def pruned(stream, b, h, t, candidates, p, bits, cap):
  """What a KV head reads of the candidates, in their order."""
  kept, k = set(), own_rounded(keys(stream, b, h, candidates), bits)
  for q in queries(stream, b, h, t):
    kept |= heaviest(softmax(capped(k @ q / np.sqrt(len(q)), cap)), p)
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
    assert own_rounded(given, 2).tolist() == want


@pytest.mark.core(1)
@pytest.mark.parametrize(("p", "bits", "cap"), [(0.8, 4, None), (0.95, 3, 0.7), (0.5, 16, None)])
def test_a_generation(p, bits, cap):
  stream, base, sizes = Stream.random(1, tokens=70), Quest(12, 4, dense_layers=0), set()

  def oracle(b, h, t):
    pages = choose(page_bounds(stream, b, h, t, 4), 0, 1, 2)
    want = pruned(stream, b, h, t, tokens_of(pages, 4, t + 1), p, bits, cap)
    sizes.add(len(want))
    return want

  check(Twilight(base, p=p, bits=bits), stream, [33, 12], 25, oracle, cap=cap)
  assert len(sizes) > 3  # heads of unlike needs


@pytest.mark.slow
def test_the_base_keeps_what_it_keeps_and_dense_layers_stay_dense():
  method = Twilight(Quest(8, 4, base=SnapKV(20, 3), dense_layers=2))
  stream = Stream.random(4, tokens=50)
  for layer, most in ((1, 20), (2, 8)):
    run, alone = (begun(x, stream, [40, 25], layer=layer) for x in (method, method.base.base))
    _, aux = run.decode([40, 25])
    alone.decode([40, 25])
    np.testing.assert_array_equal(run.cache.pos, alone.cache.pos)
    visited = np.asarray(aux["visited"])
    assert (visited == 20).all() if most == 20 else (visited <= most).all() and visited.min() < most
