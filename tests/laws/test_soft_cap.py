"""Attention's logits under a soft cap, c·tanh(x/c): every method, every implementation.

What a method's own scores become is in its own file, and attention by hand in `test_front.py`.
"""

import numpy as np
import pytest

import kvjax
from kvjax import ExpectedAttention
from kvjax.testing.layer import Layer
from kvjax.testing.layer_laws import one_layer, stream_of
from kvjax.testing.tiny import CAPACITY
from tests.law_cases import CASES

CAP = 1.5  # of logits with a deviation of 1.5
LENGTHS, STEPS = [22, 9], 3
CLOSE = {"rtol": 0, "atol": 2e-5}  # of a layer in float32, sums in another order
REFUSED = "expected_attention"  # has no closed form
METHODS = [name for name in kvjax.METHODS if name != REFUSED]
# What the core asks of kernels: tables; spans are tried by hand.
KERNELS = {"quest"}


def outputs(name, method=None, **how):
  """A layer's outputs of a ragged prompt, and of some steps; of a name's tight setting."""
  layer = one_layer(CASES[name], stream_of(4), **how)
  if method is not None:
    layer = Layer(method, stream_of(4), CAPACITY, layer.at.layer, layer.at.env)
  real = np.arange(22) < np.array(LENGTHS)[:, None]
  prompt = np.where(real[:, None, None, :, None], layer.prefill(LENGTHS), 0)
  return prompt, np.stack([layer.decode([n + i for n in LENGTHS])[0] for i in range(STEPS)])


# Their kernels are those of another method, which is asked in the rest.
ALIKE = {"snapkv", "tova", "h2o", "r_kv", "twilight", "rocketkv", "cpe"}


def slow_unless(names, swept=()):
  """Every method's case, those of other names in the rest, or in sweeps."""
  marks = {x: [pytest.mark.slow] * (x not in names) for x in METHODS}
  for name in swept:
    marks[name].append(pytest.mark.sweep)
  return [pytest.param(x, marks=marks[x]) for x in METHODS]


@pytest.mark.slow
@pytest.mark.kin
@pytest.mark.parametrize("name", METHODS)
def test_neutral_setting_equals_full(name):
  got = outputs(name, CASES[name].neutral, soft_cap=CAP)
  for out, want in zip(got, outputs("full", soft_cap=CAP), strict=True):
    np.testing.assert_allclose(out, want, **CLOSE)


@pytest.mark.slow
@pytest.mark.kin
@pytest.mark.parametrize("name", slow_unless(KERNELS, ALIKE))
def test_kernels_equal_the_reference(name):
  plain, kernels = (outputs(name, impl=impl, soft_cap=CAP) for impl in ("reference", "pallas"))
  for out, want in zip(kernels, plain, strict=True):
    np.testing.assert_allclose(out, want, **CLOSE)


@pytest.mark.kin
@pytest.mark.parametrize("name", slow_unless({"full"}))
def test_a_huge_cap_is_none(name):
  """And a tight one is not. `quantised` rounds keys less their mean, under a cap as they are."""
  none = outputs(name)
  for out, want in zip(outputs(name, soft_cap=1e4), none, strict=True):
    if name != "quantised":
      np.testing.assert_allclose(out, want, **CLOSE)
  for out, other in zip(outputs(name, soft_cap=CAP), none, strict=True):
    assert np.abs(out - other).max() > 0.1


@pytest.mark.parametrize(
  ("method", "impl", "message"),
  [
    (kvjax.Full(), "jax-triton", r"Full caps its logits .*; the 'jax-triton' kernel does not"),
    (
      ExpectedAttention(16, window_size=4),
      "auto",
      r"ExpectedAttention: found logits under a soft cap of 1\.5",
    ),
  ],
)
def test_what_has_no_cap_is_refused(method, impl, message):
  env = kvjax.Env(4, impl=impl, soft_cap=CAP)
  layer = Layer(method, stream_of(4), CAPACITY, env=env)
  with pytest.raises(NotImplementedError, match=message):
    layer.prefill(LENGTHS)
    layer.decode(LENGTHS)


@pytest.mark.parametrize("cap", [0.0, -50.0, float("inf"), float("nan")])
def test_bad_caps(cap):
  with pytest.raises(ValueError, match=rf"Env\.soft_cap: found {cap}, expected a finite number"):
    kvjax.Env(4, soft_cap=cap)
