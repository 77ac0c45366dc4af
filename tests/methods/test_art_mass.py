"""ART in the order of earlier steps' mass, against a loop in float64 that keeps masses itself."""

import numpy as np
import pytest

from kvjax import ART, Env
from kvjax.testing.layer import Stream
from tests.methods.art_walks import walk
from tests.oracles import begun, keys, probabilities, queries, softmax

TILE, EVERY = 4, 5


def prompts_mass(stream, b, h, length, tiles):
  """Mean mass of the last 32 queries of a prompt and their heads, by tile."""
  mass, last = np.zeros(tiles), range(max(0, length - 32), length)
  for at in last:
    share = probabilities(stream, b, h, at, range(at + 1)).mean(0) / len(last)
    np.add.at(mass, np.arange(at + 1) // TILE, share)
  return mass


@pytest.mark.core
@pytest.mark.parametrize("stop", ["group", "head"])
@pytest.mark.parametrize("sinks", [0, 3])
def test_tiles_by_mass_against_a_loop(stop, sinks):
  """Outputs, tiles and masses of ragged rows, three heads a group, over two whole walks."""
  how = {"tau": 0.7, "phi": 0.5, "patience": 1, "stop": stop, "sinks": sinks}
  method = ART(tile=TILE, by_mass=EVERY, **how)
  stream, lengths = Stream.random(3, tokens=70, head_dim=48), [51, 22]
  layer = begun(method, stream, lengths, capacity=70)
  held = np.asarray(layer.cache.heads["mass"])
  mass = np.array(
    [
      [prompts_mass(stream, b, h, lengths[b], held.shape[2]) for h in range(held.shape[1])]
      for b in (0, 1)
    ]
  )
  np.testing.assert_allclose(held, mass, atol=1e-5)
  shorter = whole = close = 0
  for i in range(8):
    at = [n + i for n in lengths]
    before = np.asarray(layer.cache.heads["mass"])
    out, aux = layer.decode(at)
    after, tiles = np.asarray(layer.cache.heads["mass"]), np.asarray(aux["tiles"])
    for b, h in np.ndindex(*tiles.shape[:2]):
      used = at[b] + 1
      count = -(-used // TILE)
      first = list(range(-(-sinks // TILE)))
      rest = sorted(set(range(count - 1)) - set(first), key=lambda t, b=b, h=h: -before[b, h, t])
      order = [*first, count - 1, *rest]
      slots = [list(range(t * TILE, min((t + 1) * TILE, used))) for t in order]
      flat, sizes = [s for tile in slots for s in tile], [len(tile) for tile in slots]
      k, q = keys(stream, b, h, flat), queries(stream, b, h, at[b])
      full = used % EVERY == 0
      pinned = len(flat) if full else sum(sizes[: len(first) + 1])
      v = np.float64(stream.v[b, h, flat])
      want, steps, near = walk(q, k, v, sizes, method, pinned)
      if near < 1e-5:
        close += 1
        continue
      assert tiles[b, h].tolist() == steps.tolist()
      np.testing.assert_allclose(out[b, h], want, atol=2e-5)
      share, ends = np.zeros((3, held.shape[2])), np.cumsum(sizes)
      for g in range(3):
        seen = ends[steps[g] - 1]
        w = softmax(k[:seen] @ q[g] / np.sqrt(len(q[g])))
        np.add.at(share[g], np.array(flat[:seen]) // TILE, w)
      read = order[: steps.max()]
      expected = before[b, h].copy()
      expected[read] = (expected[read] + share.max(0)[read]) / 2
      np.testing.assert_allclose(after[b, h], expected, atol=1e-5)
      shorter += steps.max() < count
      whole += full and steps.min() == count
  assert close <= 2 and shorter >= 5 and whole >= 2


def test_kernels_have_no_mass_of_tiles():
  layer = begun(ART(by_mass=4), Stream.random(0, tokens=30), [9, 5], env=Env(4, impl="pallas"))
  with pytest.raises(NotImplementedError, match=r"art: ART asks for the mass of tiles \(by_mass\)"):
    layer.decode([9, 5])
