"""Every method over every other: it runs, or it is refused with the reason (kvjax/methods)."""

import re

import jax
import numpy as np
import pytest

from kvjax import METHODS
from kvjax.ops import shared_slots
from kvjax.testing.layer import Layer, Stream
from scripts.tools import house

OVER = {name: bases for name in METHODS if (bases := house.over(name)) is not None}
PAIRS = [(name, base) for name, bases in OVER.items() for base in bases]
REASONS = r"\.base: found .*, expected |replaces [\w, ]+, and so does its base "


@pytest.mark.parametrize("name", OVER)
def test_what_does_not_go_together_says_why(name):
  for other in METHODS.keys() - OVER[name]:
    with pytest.raises(ValueError, match=f"^{METHODS[name].__name__}") as error:
      house.takes(METHODS[name], METHODS[other])
    assert re.search(REASONS, str(error.value)), error.value


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.parametrize(("name", "base"), PAIRS)
def test_what_goes_together_runs(name, base):
  """A prompt of ragged rows, steps, and another prompt; the lower layer's streams are their own."""
  method = house.takes(METHODS[name], METHODS[base])
  if method.traits.stream is not None:
    pytest.skip("reads prompts piece by piece: in the laws")
  stream = Stream.random(1, tokens=96)
  layer = Layer(method, stream, capacity=96, layer=3)
  outs = [layer.prefill([80, 61])[0, ..., :, :]]
  outs += [layer.decode([80 + step, 61 + step])[0] for step in range(2)]
  assert all(np.isfinite(out).all() for out in outs)
  positions = np.asarray(jax.jit(shared_slots.by_head)(layer.cache)["pos"])
  for b, n in enumerate((82, 63)):
    held = [row[row >= 0] for row in positions[b]]
    assert all(len(set(row.tolist())) == len(row) and row.max() < n for row in held)
