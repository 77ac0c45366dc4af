"""PSAW against a NumPy float64 oracle: what every layer and query sees, whole generations."""

import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import PSAW, Env, Full, Quest, settings
from kvjax.methods import depth
from kvjax.testing.layer import Layer, Stream
from kvjax.testing.tiny import CAPACITY, CLOSE, CONFIG, Run
from tests import decoder_oracle
from tests.decoder_oracle import visible
from tests.oracles import begun, follow, read_prompt


def test_worked_example():
  """Top layer of four, φ = 1/2, two sinks: query 12 has P = 6 and does not see 3, 4 and 5."""
  stream = Stream.random(0, batch=1, kv_heads=1, groups=1, tokens=12)
  stream.k[:] = 0
  stream.v[0, 0] = np.eye(12, 16)
  layer = begun(PSAW(sinks=2, phi=0.5), stream, [11], layer=3)
  out, aux = layer.decode([11])
  seen = [i + 1 for i in range(12) if out[0, 0, 0, i] > 0]
  assert seen == [1, 2, 6, 7, 8, 9, 10, 11, 12] == visible(12, 4, 4, 2, 0.5, 1)
  assert int(aux["visited"][0, 0]) == 9


@pytest.mark.parametrize("phi", [0.9, 0.7, 0.5, 0.3, 0.1])
def test_the_window_is_exact_where_it_jumps(phi):
  """P = ⌊(1 − φ)·t⌋ of every t: 1 − 0.9 times 10 is one, though float64 says less."""
  method = PSAW(sinks=1, phi=phi)
  at = method.at(Env(4), 3)
  t = np.concatenate([np.arange(2000), 2**24 - 1 - np.arange(2000), 10 ** np.arange(1, 8)])
  first = jax.jit(lambda pos: method.window(at, pos).first)(jnp.asarray(t[None] - 1, jnp.int32))
  share = 1 - fractions.Fraction(str(phi))
  want = [math.floor(share * int(n)) - 1 for n in t]
  np.testing.assert_array_equal(first[0], want)


@pytest.mark.parametrize(
  ("base", "power", "start", "layers"),
  [(0.7, 1.5, 0.75, 30), (0.5, 1.0, 0.5, 12), (0.9, 1.0, 0.7, 10)],
)
def test_the_schedule(base, power, start, layers):
  """Nothing up to ℓ_s, more in every deeper layer, 1 − x^p in the last."""
  shares = [depth.share(base, power, start, i, layers) / 2**48 for i in range(layers)]
  first = math.floor(fractions.Fraction(str(start)) * layers)
  assert not any(shares[:first])  # layers 1 … ℓ_s
  assert all(a < b for a, b in zip(shares[first - 1 :], shares[first:], strict=False))
  np.testing.assert_allclose(shares[-1], 1 - base**power, rtol=1e-12)
  middle = (first + layers) // 2
  power *= (middle - first) / (layers - first)
  np.testing.assert_allclose(shares[middle - 1], 1 - base**power, rtol=1e-12, atol=2**-48)


def test_a_single_layer_and_a_late_start():
  assert depth.share(0.5, 1.0, 0.75, 0, 1) == 2**47  # ℓ_s = 0: layer 1 is the top layer
  assert depth.share(0.5, 1.0, 1.0, 3, 4) == 0
  assert depth.share(1.0, 1.0, 0.75, 3, 4) == 0
  assert depth.share(0.5, 0.0, 0.75, 3, 4) == 0


def test_prompt_and_steps_of_one_layer():
  """Two rows of different lengths: prompt and 20 steps, outputs of every query and head."""
  lengths, sinks, phi, alpha = [17, 5], 2, 0.6, 1.3
  stream = Stream.random(1, tokens=40)
  layer = Layer(PSAW(sinks=sinks, phi=phi, alpha=alpha, start=0.25), stream, layer=2)

  def seen(b, h, t):
    return [i - 1 for i in visible(t + 1, 3, 4, sinks, phi, alpha, start=0.25)]

  read_prompt(layer, lengths, seen, atol=1e-5)
  follow(layer, lengths, 20, lambda b, h, t: range(t + 1), attends=seen, atol=1e-5)


@pytest.mark.slow
def test_a_whole_decoder():
  """Prompt and decoded tokens of both rows, layers 3 and 4 narrowed by different shares."""

  def sees(layer, head, t, q, k):
    return visible(t, layer, CONFIG.layers, 2, 0.3, 1.0, start=0.5)

  decoder_oracle.check(PSAW(sinks=2, phi=0.3, start=0.5), 6, sees=sees)


@pytest.mark.slow
def test_over_other_bases():
  """All pages under the window give what Full under the window gives; few pages see still less."""
  narrow = {"sinks": 2, "phi": 0.4, "start": 0.5}
  want = Run(PSAW(Full(), **narrow)).generate(4)
  out = Run(PSAW(settings.neutral(Quest, CAPACITY), **narrow)).generate(4)
  np.testing.assert_allclose(out, want, atol=CLOSE)
  assert np.abs(Run(PSAW(settings.example(Quest, 8), **narrow)).generate(4) - want).max() > 0.05
