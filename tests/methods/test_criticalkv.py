"""CriticalKV against a NumPy float64 oracle: both halves, later turns, whole decoders."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CriticalKV, Full, PromptScored, SharedPrefill, SnapKV
from kvjax.methods.criticalkv import norms_of_outputs
from kvjax.runtime.shared_prefill import take
from kvjax.testing import tiny
from kvjax.testing.layer import Layer, Stream
from tests.oracles import (
  ByValue,
  further_turn,
  generation,
  held,
  in_turn,
  keys,
  pooled,
  window_mass,
)


@dataclasses.dataclass(frozen=True)
class ByKey(PromptScored):
  """A token scores the L1 norm of its rotated key."""

  def score(self, at, turn, past):
    return jnp.abs(turn.staged["k"]).sum(-1)


def norms(v, wo):
  """‖v · W_O‖₁ of one token's value, mean over the group's query heads: wo [G, H, D]."""
  return np.mean([np.abs(v.astype(np.float64) @ one.astype(np.float64)).sum() for one in wo])


def kept(scores, weights, window, n, share, epsilon):
  """Tokens that stay, of scores and weights of those before the window, in order of position."""
  count = len(scores)
  forced = list(range(count, count + window))
  best = sorted(range(count), key=lambda i: (-scores[i], i))
  first = best[: max(0, int(share * n) - window)]
  rest = [i for i in range(count) if i not in first]
  rest.sort(key=lambda i: (-(scores[i] + epsilon) * weights[i], i))
  return sorted([*first, *rest[: n - window - len(first)], *forced])


def test_worked_example():
  """s = .5 .3 .15 .05 and w = 1 1 2 10: position 0 by its score, 3 by .501."""
  stream = Stream.random(0, batch=1, kv_heads=1, groups=1, tokens=5, head_dim=4)
  stream.v[0, 0, :4, 0] = [0.5, 0.3, 0.15, 0.05]
  stream.v[0, 0, :4, 1] = [1, 1, 2, 10]
  for share, want in ((0.7, [0, 3]), (1, [0, 1]), (0, [0, 3])):
    layer = Layer(CriticalKV(ByValue(3, window_size=1), share=share, epsilon=1e-4), stream)
    layer.wo = np.zeros((1, 1, 4, 2), np.float32)
    layer.wo[0, 0, 1] = [0.5, -0.5]  # |v₁| in all
    layer.prefill([5])
    assert layer.cache.pos[0, 0].tolist() == [*want, 4], share


def test_norms_in_blocks(monkeypatch):
  """Values of more tokens than a block holds, several query heads a group."""
  monkeypatch.setattr("kvjax.methods.criticalkv.TOKENS", 5)
  rng = np.random.default_rng(1)
  v, wo = rng.normal(size=(2, 3, 13, 8)), rng.normal(size=(3, 2, 8, 11))
  got = norms_of_outputs(jnp.float32(v), jnp.float32(wo))
  want = [[[norms(v[b, k, t], wo[k]) for t in range(13)] for k in range(3)] for b in range(2)]
  np.testing.assert_allclose(got, want, rtol=2e-6)
  low = jnp.bfloat16(v), jnp.bfloat16(wo)  # of 8 bits, which the tolerance is
  np.testing.assert_allclose(norms_of_outputs(*low), want, rtol=0.01)


@pytest.mark.core(1)
@pytest.mark.parametrize(("share", "window"), [(0.5, 3), (0.25, 3), (0.4, 7), (0, 2), (1, 3)])
def test_prompt_and_long_decode(share, window):
  """SnapKV's scores, which alone decide where `share` is 1; a long window stays whole."""
  method = CriticalKV(SnapKV(15, window_size=window, pool=3), share=share)
  stream, stay = Stream.random(1, tokens=60), {}
  wo = Layer(method, stream).wo

  def prompt(b, h, n):
    scores = pooled(window_mass(stream, b, h, range(n), n, window), 3)
    weights = [norms(stream.v[b, h, t], wo[h]) for t in range(n - window)]
    found = kept(scores, weights, window, 15, share, method.epsilon)
    stay[b, h] = [j for j in found if j < n - window]
    return found

  generation(method, stream, [36, 17], 20, prompt, in_turn(15, stay))


@pytest.mark.slow
def test_a_second_turn_weighs_what_is_held():
  """Generated tokens too, whose values nobody had weighed."""
  method = CriticalKV(ByKey(14, window_size=3), share=0.5)
  stream = Stream.random(3, tokens=60)
  wo = Layer(method, stream).wo
  for b, h, text, n, found in further_turn(method, stream, [30, 8], 4, [8, 13]):
    past = np.array([j for j in text if j < n - 3])
    scores = np.abs(keys(stream, b, h, past)).sum(-1)
    weights = [norms(stream.v[b, h, j], wo[h]) for j in past]
    chosen = kept(scores, weights, 3, 14, 0.5, method.epsilon)
    assert found == [*past[[i for i in chosen if i < len(past)]], *range(n - 3, n)]


@pytest.mark.slow
def test_a_decoder_hands_each_layer_its_own_projection():
  """Alone, and beside the full cache in a shared pass, whose keys and values the oracle takes."""
  method = CriticalKV(ByKey(9, window_size=2), share=0.5)
  alone, both = tiny.Run(method, layers=2), tiny.Run(SharedPrefill((Full(), method)), layers=2)
  alone.prefill()
  both.prefill()
  full, beside = take(both.caches, 0), take(both.caches, 1)
  for layer, (every, *others) in enumerate(zip(full, alone.caches, beside, strict=True)):
    wo = np.asarray(both.model.layers[layer].attention.wo[...])
    k, v = np.float64(every.slots["k"]), np.asarray(every.slots["v"])
    for b, n in enumerate(tiny.LENGTHS):
      for h in range(2):
        scores = np.abs(k[b, h, : n - 2]).sum(-1)
        weights = [norms(v[b, h, j], wo[h]) for j in range(n - 2)]
        want = kept(scores, weights, 2, 9, 0.5, method.epsilon)
        for cache in others:
          assert held(cache, b, h) == want


def test_what_is_missing_is_named():
  caches = kvjax.empty_caches(
    CriticalKV(SnapKV(8, 2)), batch=1, capacity=16, heads=4, kv_heads=2, head_dim=8
  )
  q, k = jnp.zeros((1, 9, 4, 8)), jnp.zeros((1, 9, 2, 8))
  with pytest.raises(TypeError, match=r"wo: found None, expected the layer's output projection"):
    kvjax.prefill(caches[0], q, k, k)
  with pytest.raises(ValueError, match=r"wo: found shape \(2, 8, 5\), expected \(4, 8, 5\)"):
    kvjax.prefill(caches[0], q, k, k, wo=jnp.zeros((2, 8, 5)))
