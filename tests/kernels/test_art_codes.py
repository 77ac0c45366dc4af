"""ART's walk over codes: Algorithm 1 in NumPy float64 over what they stand for, then whole steps.

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
from kvjax.primitives.codes import WORDS, quantise, rounded_query
from kvjax.testing.layer import Stream
from tests.cover import pairwise
from tests.kernels.art_oracle import LOOSE, compare, inputs, listed_orders
from tests.kernels.listed import codes, plan, taken

SINKS, SLOTS = 5, 700


def coded(k, v, bits, read):
  """Words, scales and zero points (NaN where nothing is read), and the numbers, by NumPy."""
  both = zip((k, v), WORDS.values(), strict=True)
  held, numbers = [quantise(jnp.asarray(x), bits, word) for x, word in both], []
  for x in held:
    zero = 0 if x.zero is None else np.float64(x.zero)[..., None]
    numbers.append(codes(x.words, bits) * np.float64(x.scale)[..., None] + zero)
  per_slot = [x.scale for x in held] + [x.zero for x in held if x.zero is not None]
  return [x.words for x in held], [jnp.where(read, x, jnp.nan) for x in per_slot], numbers


SWEEP = pairwise(
  (1, 3, 16, 256),  # unit
  ((1, 0), (3, 0), (1, 3)),  # splits, share
  (8, 4),
  (24, 48, 64),  # H
  ({}, {"per_head": True, "full": True, "kept": 4, "patience": 2}),
)


@pytest.mark.rest(5)
@pytest.mark.slow
@pytest.mark.parametrize(("unit", "how", "bits", "head_dim", "kwargs"), SWEEP, ids=str)
def test_a_table_against_algorithm_1(unit, how, bits, head_dim, kwargs):
  """Stops tile by tile, K = 3 and G = 3, over ragged lists with holes."""
  (splits, share), tile = how, 32 if unit == 256 else 20
  width = {1: 190, 3: 90, 16: 20, 256: 3}[unit]
  q, k, v = inputs(unit, 2, 3, 3, SLOTS, head_dim)
  where = plan(unit, 2, 3, SLOTS, unit, width)
  orders, read = listed_orders(*where, unit, SINKS, tile, SLOTS)
  words, per_slot, numbers = coded(k, v, bits, read)
  detector = {**LOOSE, "full": False, "per_head": False, "kept": 0, **kwargs}
  run = functools.partial(walk, unit=unit, sinks=SINKS, tile=tile, splits=splits, share=share)
  cut = Config(16, 1, 4, 1) if splits == 3 else None
  run = jax.jit(functools.partial(run, chunk=3, cut=cut, bits=bits, **detector))
  operands = [jnp.asarray(q), *words, *map(jnp.asarray, where)]
  out, again = (run(*operands, per_slot=per_slot) for _ in range(2))
  for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(again), strict=True):
    np.testing.assert_array_equal(a, b)
  arrays = [np.asarray(rounded_query(jnp.asarray(q))), *numbers]
  stopped = compare(lambda *_: out, arrays, orders, tile, splits, detector)
  assert stopped > 0 or splits > 1


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_without_an_end_it_is_decode(bits):
  """bfloat16 queries, and a tile in parts: looking at the output leaves it alone."""
  q, k, v = inputs(3, 2, 3, 3, 300, 64)
  words, per_slot, numbers = coded(k, v, bits, np.ones(k.shape[:3], bool))
  q, bounds = (
    jnp.asarray(q, jnp.bfloat16),
    (jnp.zeros((2, 1), jnp.int32), jnp.asarray([[290], [77]])),
  )
  run = functools.partial(walk, q, *words, None, None, *bounds, per_slot=per_slot, bits=bits)
  run = functools.partial(run, tile=48, splits=1, cut=Config(16, 1, 4, 1))
  plain, unending = run(patience=None), run(patience=math.inf)
  for a, b in zip(*map(jax.tree.leaves, (plain[0], unending[0])), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
  np.testing.assert_array_equal(plain[2], unending[2])
  x = np.einsum("bkgh,bksh->bkgs", np.float64(rounded_query(q)), numbers[0]) / 8
  x = np.where(np.arange(300) < np.asarray(bounds[1])[:, :, None, None], x, -np.inf)
  p = np.exp(x - x.max(-1, keepdims=True))
  want = np.einsum("bkgs,bksh->bkgh", p / p.sum(-1, keepdims=True), numbers[1])
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


@pytest.mark.core(1)
@pytest.mark.rest
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_walks_as_the_reference_does(name, bits):
  method, stream = Quantised(LAYERS[name], bits=bits), Stream.random(21)
  outs, told, _ = taken(method, stream, "pallas", layer=1)
  wanted, expected, _ = taken(method, stream, "reference", layer=1)
  for out, want, by, of in zip(outs, wanted, told, expected, strict=True):
    np.testing.assert_array_equal(by["tiles"], of["tiles"])
    np.testing.assert_array_equal(by["visited"], of["visited"])
    np.testing.assert_allclose(out, want, atol=2e-5)
  tiles = np.stack([x["tiles"] for x in told])
  whole = np.stack([(np.array([22, 9]) + step + 2) // 2 for step in range(len(told))])
  if name in ("full", "two walks", "certified"):
    assert (tiles <= whole[:, :, None, None]).all() and (tiles < whole[:, :, None, None]).any()
