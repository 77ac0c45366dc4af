"""ART's walk over codes, where it does not end, and whole steps; `test_art_kernel` has the others.

On a GPU the same tests run the compiled kernel.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ART, Quantised, Quest, SnapKV, StreamingLLM
from kvjax.kernels.art.walk import walk
from kvjax.kernels.common.config import Config
from kvjax.primitives.codes import rounded_query
from kvjax.testing.layer import Stream
from tests.kernels.art_oracle import LOOSE, inputs
from tests.kernels.decode_oracle import exact
from tests.kernels.listed import alike, coded


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_without_an_end_it_is_decode(bits):
  """bfloat16 queries, and a tile in parts: looking at the output leaves it alone."""
  q, k, v = inputs(3, 2, 3, 3, 300, 64)
  words, per_slot, numbers = coded(k, v, bits)
  q, bounds = jnp.asarray(q, jnp.bfloat16), (jnp.zeros((2, 1), int), jnp.array([[290], [77]]))
  run = functools.partial(walk, q, *words, None, None, *bounds, per_slot=per_slot, bits=bits)
  run = functools.partial(run, tile=48, splits=1, cut=Config(16, 1, 4, 1))
  plain, unending = run(patience=None), run(patience=math.inf)
  for a, b in zip(*map(jax.tree.leaves, (plain[0], unending[0])), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
  np.testing.assert_array_equal(plain[2], unending[2])
  want, *_ = exact(rounded_query(q), *numbers, lambda b, _: range(bounds[1][b, 0]))
  np.testing.assert_allclose(plain[0].o, want, atol=3e-3)


LAYERS = {
  "full": ART(**LOOSE, tile=2, splits=1),
  "two walks": ART(**LOOSE, tile=2, splits=2, stop="head"),
  "snapkv": ART(SnapKV(12, 4), **LOOSE, tile=2, splits=1),
  "streaming_llm": ART(StreamingLLM(14, rope="original"), **LOOSE, tile=2, splits=1),
  "quest": ART(Quest(12, page=2, dense_layers=0), **LOOSE, tile=2, splits=1),
  "certified": ART(certify=1.8, tile=2),
  "too short to stop": ART(tile=2),
}


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_walks_as_the_reference_does(name, bits):
  method, stream = Quantised(LAYERS[name], bits=bits), Stream.random(21)
  (_, told, _), _ = alike(method, stream, 1, "tiles", "visited")
  tiles = np.stack([x["tiles"] for x in told])
  whole = np.stack([(np.array([22, 9]) + step + 2) // 2 for step in range(len(told))])
  if name in ("full", "two walks", "certified"):
    assert (tiles <= whole[:, :, None, None]).all() and (tiles < whole[:, :, None, None]).any()
