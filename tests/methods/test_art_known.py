"""Known lengths of ART's walks, against a loop in float64 and Algorithm 1's own stops."""

import dataclasses

import numpy as np
import pytest

from kvjax import ART, Env, Full
from kvjax.testing import check
from kvjax.testing.layer import Layer, Stream
from tests.methods.art_walks import known_walk, newest_tiles, walk
from tests.oracles import begun, keys, queries


def first_tile_first(order):
  def ordered(cache, b, h):
    tiles, _ = order(cache, b, h)
    return [tiles[-1], *tiles[:-1]], None

  return ordered


SETTINGS = [
  {"tau": 0.8, "phi": 0.5, "patience": 2, "margin": 1},
  {"tau": 0.5, "phi": 0.5, "patience": 1, "margin": 2, "relative": True, "sinks": 3},
  {"tau": 0.9, "phi": 0.5, "patience": 2, "margin": 2, "probe": "full"},
  {"tau": 0.0, "phi": 0.5, "patience": 1, "margin": 1},
]


def first_lengths(layer, stream, at, method, order):
  """The next step's lengths are those of walks by the queries at these positions."""
  found = np.asarray(layer.cache.heads["walk"])
  for b, h in np.ndindex(*found.shape):
    if at[b] is not None:
      steps, _ = order(layer.cache, b, h)
      held = np.asarray(layer.cache.pos)[b, h, [s for tile in steps for s in tile]]
      k, q, v = keys(stream, b, h, held), queries(stream, b, h, at[b]), stream.v[b, h, held]
      sizes = [len(tile) for tile in steps]
      _, read, near = walk(q, k, np.float64(v), sizes, method, 4 * bool(method.sinks))
      wanted = read.max() + method.margin if read.max() < len(sizes) else 0
      assert near < 1e-5 or found[b, h] == wanted


@pytest.mark.core(1)
@pytest.mark.parametrize("impl", ["reference", "pallas"])
@pytest.mark.parametrize("kwargs", SETTINGS, ids=str)
def test_known_lengths_against_a_loop(kwargs, impl):
  """Ragged rows, three query heads a group: outputs, tiles, next lengths; no sooner than Alg. 1."""
  method = ART(Full(), tile=4, **kwargs)
  order = newest_tiles(4)
  order = first_tile_first(order) if method.sinks else order
  stream, lengths = Stream.random(0, tokens=90, head_dim=48), [57, 30]
  layer = begun(method, stream, lengths, capacity=90, env=Env(4, impl=impl, tile=4))
  first_lengths(layer, stream, [n - 1 for n in lengths], method, order)
  shorter = longer = close = 0
  for i in range(12):
    at, before = [n + i for n in lengths], np.asarray(layer.cache.heads["walk"])
    out, aux = layer.decode(at)
    pos, tiles = np.asarray(layer.cache.pos), np.asarray(aux["tiles"])
    after = np.asarray(layer.cache.heads["walk"])
    for b, h in np.ndindex(*pos.shape[:2]):
      steps, _ = order(layer.cache, b, h)
      held = pos[b, h, [s for tile in steps for s in tile]]
      k, q, v = keys(stream, b, h, held), queries(stream, b, h, at[b]), stream.v[b, h, held]
      sizes = [len(tile) for tile in steps]
      want, read, (length, _), near = known_walk(q, k, np.float64(v), sizes, method, before[b, h])
      if near < 1e-5:
        close += 1
        continue
      assert tiles[b, h].tolist() == [read] * 3 and after[b, h] == length
      np.testing.assert_allclose(out[b, h], want, atol=2e-5)
      assert read >= walk(q, k, np.float64(v), sizes, method, 4 * bool(method.sinks))[1].max()
      shorter += read < len(sizes)
      longer += 0 < before[b, h] < read
      assert int(aux["visited"][b, h]) == sum(sizes[:read])
  assert close <= 2
  if method.tau:
    assert shorter >= 5 and longer >= 2
  else:
    assert not shorter


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [[[40, 30]], [[16, 30], [24, 0]]], ids=str)
def test_a_new_prompt_begins_with_its_last_query(chunks):
  """Lengths are of one answer: a turn begins with the walk of its own last query."""
  method, order = ART(Full(), tau=0.8, phi=0.5, patience=2, tile=4, margin=1), newest_tiles(4)
  stream = Stream.random(1, tokens=90)
  layer = Layer(method, stream, capacity=90)
  read = np.zeros(2, int)
  for lengths in chunks:
    layer.prefill(lengths, start=read, past=int(read.max()))
    read += lengths
  first_lengths(layer, stream, [39, 29], method, order)
  for i in range(2):
    layer.decode([40 + i, 30 + i])
  before = np.asarray(layer.cache.heads["walk"])
  layer.prefill([8, 0], start=[42, 32], past=42)
  first_lengths(layer, stream, [49, None], method, order)
  np.testing.assert_array_equal(layer.cache.heads["walk"][1], before[1])


@dataclasses.dataclass(frozen=True)
class Known(ART):
  """ART whose walks know their lengths, unless told otherwise."""

  margin: int | None = 1


@pytest.mark.slow
@pytest.mark.sweep
def test_known_lengths_obey_the_laws():
  check(Known)
