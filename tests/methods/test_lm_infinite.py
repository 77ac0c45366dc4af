"""LM-Infinite against a NumPy float64 oracle: the Λ-shaped mask and the bounded distance."""

import pytest

from kvjax import LMInfinite
from kvjax.testing.layer import Layer, Stream
from tests.oracles import follow, read_prompt


@pytest.mark.core(1)
@pytest.mark.parametrize("limit", [None, 12, 30])
def test_prompt_then_decode(limit):
  def seen(b, h, t):
    return [j for j in range(t + 1) if j < 3 or j > t - 9]

  def places(positions):
    """First tokens are as far away as from `limit`."""
    beyond = 0 if limit is None else max(0, positions[-1] - limit)
    return [j + beyond if j < 3 else j for j in positions]

  layer = Layer(LMInfinite(12, sinks=3, limit=limit), Stream.random(1, tokens=80), capacity=80)
  read_prompt(layer, [23, 6], seen, places=places)
  follow(layer, [23, 6], 50, seen, places=places)
