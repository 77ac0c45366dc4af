"""ETF against a NumPy float64 decoder: frozen states, their keys and values, the saved work."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ETF, H2O, Carry, Full, Prompt, Quest, settings
from kvjax.models.decode.generate import join
from kvjax.testing.tiny import CAPACITY, CLOSE, CONFIG, LENGTHS, TOKENS, Run
from tests import decoder_oracle
from tests.decoder_oracle import frozen

STEPS = 5
both = pytest.mark.parametrize("kv", ["previous", "project"])


def active(method, layer, tokens, total):
  at = method.at(Run(method).model.env, layer)
  found = jax.jit(functools.partial(method.active, at, tokens))(np.array(total))
  return None if found is None else np.asarray(found.index)


def test_worked_example():
  """Top layer of four, half frozen, two sinks: of ten tokens 3, 4 and 5 (counted from 1)."""
  index = active(ETF(sinks=2), 3, 10, [10, 7, 3, 0])
  assert index.tolist() == [
    [0, 1, 5, 6, 7, 8, 9],
    [0, 1, 3, 4, 5, 6, 10],  # E = ⌊7/2⌋ = 3: only token 3 is frozen
    [0, 1, 2, 10, 10, 10, 10],  # E = 1: nothing is
    [10] * 7,
  ]
  assert active(ETF(sinks=2), 2, 10, [10]) is None  # ℓ_s itself freezes nothing
  assert active(ETF(sinks=5), 3, 10, [10]) is None  # all that would be frozen are sinks


@pytest.mark.core(4)
@pytest.mark.parametrize("tokens", [1, 2, 33, 64, 100])
@pytest.mark.parametrize("psi", [0.9, 0.5, 0.1])
@pytest.mark.parametrize("sinks", [0, 3])
def test_computed_tokens_of_every_length(tokens, psi, sinks):
  """The static width holds the computed tokens of any row, in order, padding after them."""
  total = np.arange(tokens + 1)
  index = active(ETF(sinks=sinks, psi=psi), 3, tokens, total)
  for n in total:
    want = [i - 1 for i in range(1, n + 1) if not frozen(4, i, n, sinks, psi)]
    if index is None:
      assert want == list(range(n))
      continue
    assert index[n].tolist() == want + [tokens] * (index.shape[1] - len(want))
    assert n == 0 or n - 1 in want  # the newest token is always computed


@pytest.mark.core(1)
@both
def test_frozen_tokens_keep_the_state_of_the_layer_below(kv):
  """To the bit, layer by layer; the others change."""
  method = ETF(sinks=2, psi=0.3, start=0.25, kv=kv)
  turn = Run(method)

  @jax.jit
  def states(leaves, caches):
    """Hidden states in front of every layer and after the last, [B, T, D] each."""
    decoder, carry = join(turn.graph, leaves), Carry()
    out = [decoder.embedding[...][TOKENS[:, :23]]]
    for i, layer in enumerate(decoder.layers):
      at, total = method.at(decoder.env, i), jnp.asarray(LENGTHS)
      prompt = Prompt.of(at, 23, total, total, 0)
      x, _, carry, _ = layer.prefill(at, out[-1], caches[i], prompt, carry)
      out.append(x)
    assert not carry.heads  # nothing is kept that no layer asks for
    return out

  x = [np.asarray(y) for y in states(turn.leaves, turn.caches)]
  for i in range(CONFIG.layers):
    for b, n in enumerate(LENGTHS):
      still = [frozen(i + 1, t + 1, n, 2, 0.3, start=0.25) for t in range(n)]
      same = (x[i][b, :n] == x[i + 1][b, :n]).all(-1)
      np.testing.assert_array_equal(same, still)


@pytest.mark.slow
@both
def test_a_whole_decoder(kv):
  """Prompt and decoded tokens of two rows, three layers that freeze ever more."""
  method = ETF(sinks=2, psi=0.3, gamma=1.2, start=0.25, kv=kv)
  still = functools.partial(frozen, sinks=2, psi=0.3, gamma=1.2, start=0.25)
  decoder_oracle.check(method, STEPS, frozen=still, kv=kv)


@pytest.mark.slow
def test_projected_top_layer_changes_nothing():
  """Keys and values come from the same states as ever, and no layer reads what is not computed."""
  full = Run(Full()).generate(STEPS)
  np.testing.assert_allclose(Run(ETF(sinks=1, kv="project")).generate(STEPS), full, atol=CLOSE)
  assert np.abs(Run(ETF(sinks=1, kv="previous")).generate(STEPS) - full).max() > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("neutral", [{"psi": 1.0}, {"gamma": 0.0}, {"start": 1.0}])
def test_neutral_settings(neutral):
  method = ETF(**neutral)
  assert method.traits.chunkable and method.traits.order_independent
  np.testing.assert_array_equal(Run(method).generate(STEPS), Run(Full()).generate(STEPS))
  assert not ETF().traits.chunkable and not ETF().traits.order_independent


@pytest.mark.slow
def test_over_other_bases():
  """Statistics of an eviction come from the computed queries; selection sees all keys."""
  out = Run(ETF(H2O(budget=99), sinks=2, psi=0.4, start=0.25)).generate(STEPS)
  want = Run(ETF(Full(), sinks=2, psi=0.4, start=0.25)).generate(STEPS)
  np.testing.assert_allclose(out, want, atol=CLOSE)
  out = Run(ETF(settings.neutral(Quest, CAPACITY), sinks=2, psi=0.4, start=0.25)).generate(STEPS)
  np.testing.assert_allclose(out, want, atol=CLOSE)


@pytest.mark.slow
@both
def test_a_further_turn_is_a_prompt_of_its_own(kv):
  """Its first tokens and its end are computed; an idle row stays as it is."""
  method = ETF(sinks=1, psi=0.5, start=0.25, kv=kv)
  turn = Run(method)
  turn.prefill(np.array([9, 5], np.int32))
  more = turn.prefill(np.array([8, 0], np.int32), np.array([9, 5]), width=8, past=None)[0]

  def still(layer, i):
    start, n = (0, 9) if i <= 9 else (9, 8)
    return frozen(layer, i - start, n, 1, 0.5, start=0.25)

  want = decoder_oracle.logits(TOKENS[0, :17], 17, frozen=still, kv=kv)[-1]
  np.testing.assert_allclose(more, want, atol=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(("kv", "projected"), [("previous", 0), ("project", 2)])
def test_frozen_tokens_cost_nothing(kv, projected):
  """Layers 3 and 4 of four: what a frozen token would cost really goes away."""

  def flops(method):
    turn = Run(method)
    tokens, lengths = jnp.zeros((2, 64), jnp.int32), jnp.array([64, 50], jnp.int32)

    def read(leaves, caches):
      return join(turn.graph, leaves).prefill(tokens, lengths, caches, method)

    return jax.jit(read).lower(turn.leaves, turn.caches).compile().cost_analysis()["flops"]

  c, method = CONFIG, ETF(sinks=2, psi=0.25, start=0.5, kv=kv)
  count = sum(64 - active(method, i, 64, [64]).shape[1] for i in (2, 3))
  assert count == (32 - 2) + (48 - 2)
  heads = 2 * c.heads + (2 - projected) * c.kv_heads
  per_token = 2 * c.dim * (heads * c.head_dim + 3 * c.ffn)
  assert flops(Full()) - flops(method) > 0.97 * 2 * count * per_token
