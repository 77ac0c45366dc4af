"""Heads that see apart, as DuoAttention's: some all, others the first tokens and a window.

A toy, one file: it shows that the protocol carries it. Nothing is freed, and the pattern is given.
The oracle is NumPy in float64 over the positions that each head sees.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CIS, PRR, Env, Quest, Window, Wrapper
from kvjax.testing.layer import Layer, Stream
from tests.kernels.listed import alike
from tests.oracles import follow, read_prompt


@dataclasses.dataclass(frozen=True)
class Apart(Wrapper):
  """Retrieval heads see everything, the others `sinks` first tokens and the newest `local`.

  Attributes:
    every: every so many-th head is one for retrieval.
  """

  sinks: int = 2
  local: int = 5
  every: int = 2

  def _retrieves(self, at, heads):
    return at.head_index(heads) % self.every == 0

  def window(self, at, qpos):
    first = qpos[:, None] - self.local + 1
    retrieves = self._retrieves(at, HEADS)[:, None]
    return Window(self.sinks, jnp.where(retrieves, 0, first))


HEADS = 3  # of the layers below; the laws' decoder has two
CLOSE = 5e-6  # float32 against NumPy's float64; kernels and chunks sum in another order
LENGTHS = [33, 9]


def seen(method, h, t):
  """Positions that a head sees from t."""
  every = range(t + 1)
  return [p for p in every if not h % 2 or p < method.sinks or p > t - method.local]


@pytest.mark.core(1)
@pytest.mark.parametrize("impl", ["reference", "pallas"])
@pytest.mark.parametrize("local", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_prompt_and_a_generation(impl, local):
  stream, method = Stream.random(3, tokens=60), Apart(sinks=2, local=local)
  layer = Layer(method, stream, env=Env(4, impl=impl, tile=4))

  def sees(b, h, t):
    return seen(method, h, t)

  read_prompt(layer, LENGTHS, sees, atol=CLOSE)
  follow(layer, LENGTHS, 20, lambda b, h, t: range(t + 1), sees, atol=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["reference", "pallas"])
def test_a_later_chunk(impl):
  """Chunks onto what is cached see as one prompt does."""
  stream, method = Stream.random(4, tokens=60), Apart()
  env = Env(4, impl=impl, tile=4)
  whole, cut = (Layer(method, stream, env=env) for _ in range(2))
  want = whole.prefill([30, 20])
  cut.prefill([16, 16])
  out = cut.prefill([14, 4], start=[16, 16], past=16)
  np.testing.assert_allclose(out[0, :, :, :14], want[0, :, :, 16:30], atol=CLOSE)
  np.testing.assert_allclose(out[1, :, :, :4], want[1, :, :, 16:20], atol=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(
  "base",
  [Quest(12, 4, dense_layers=0), PRR(Quest(12, 4, dense_layers=0), budget=1.5), CIS(3, 1, 2)],
  ids=lambda base: type(base).__name__,
)
def test_what_selects_selects_within_a_heads_window(base):
  """Kernels and the reference choose and attend alike, and nothing that a head does not see."""
  method, stream = Apart(base=base, local=9), Stream.random(5, tokens=60)
  (_, told, _), _ = alike(method, stream, 1, "visited", steps=8, lengths=LENGTHS)
  assert all((np.asarray(x["visited"])[:, 1] <= 2 + 9).all() for x in told)
