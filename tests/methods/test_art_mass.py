"""ART in the order of earlier steps' mass, against a loop in float64 that keeps masses itself."""

import dataclasses
import math

import numpy as np
import pytest

from kvjax import ART, Env
from kvjax.testing.layer import Stream
from tests.methods.art_walks import known_walk, walk
from tests.oracles import begun, keys, probabilities, queries, softmax

TILE, EVERY = 4, 5


def prompts_mass(stream, b, h, length, tiles):
  """Mean mass of the last 32 queries of a prompt and their heads, by tile."""
  mass, last = np.zeros(tiles), range(max(0, length - 32), length)
  for at in last:
    share = probabilities(stream, b, h, at, range(at + 1)).mean(0) / len(last)
    np.add.at(mass, np.arange(at + 1) // TILE, share)
  return mass


@pytest.mark.core(1)
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


RANKED = [
  {"sinks": 0},
  {"sinks": 6, "stop": "head", "relative": True},
  {"sinks": 3, "margin": 2},
  {"sinks": 0, "margin": 1, "relative": True},
]


def begins(order, sinks, prompt):
  """First tokens' tiles, those after a prompt of so many tokens, and its last one."""
  decoded = [t for t in order[::-1] if t > (prompt - 1) // TILE]
  first = [t for t in order if t < -(-sinks // TILE)]
  last = (prompt - 1) // TILE
  return [*first, *(t for t in [*decoded, last] if t not in first)]


@pytest.mark.core(1)
@pytest.mark.parametrize("impl", ["reference", "pallas"])
@pytest.mark.parametrize("kwargs", RANKED, ids=str)
def test_tiles_in_a_prompts_order_against_a_loop(kwargs, impl):
  """Ragged rows, three heads a group: the order of the prompt stays, newer tiles come before."""
  method = ART(tile=TILE, by_mass=math.inf, tau=0.5, phi=0.5, patience=1, **kwargs)
  stream, lengths = Stream.random(3, tokens=90, head_dim=48), [51, 22]
  layer = begun(method, stream, lengths, capacity=90, env=Env(4, impl=impl, tile=TILE))
  heads = layer.cache.pos.shape[1]
  masses = [
    [prompts_mass(stream, b, h, n, 23) for h in range(heads)] for b, n in enumerate(lengths)
  ]
  shorter = close = 0
  for i in range(10):
    at = [n + i for n in lengths]
    known = np.asarray(layer.cache.heads["walk"]) if method.margin else None
    out, aux = layer.decode(at)
    tiles = np.asarray(aux["tiles"])
    for b, h in np.ndindex(*tiles.shape[:2]):
      count = at[b] // TILE + 1
      first = begins(list(range(count)), method.sinks, lengths[b])
      rest = sorted(set(range(count)) - set(first), key=lambda t, b=b, h=h: -masses[b][h][t])
      places = [np.arange(t * TILE, min(t * TILE + TILE, at[b] + 1)) for t in [*first, *rest]]
      flat, sizes = np.concatenate(places), [len(x) for x in places]
      k, q, v = keys(stream, b, h, flat), queries(stream, b, h, at[b]), stream.v[b, h, flat]
      kept = -(-method.sinks // TILE) + 1
      if known is None:
        want, steps, near = walk(q, k, np.float64(v), sizes, method, sum(sizes[:kept]))
      else:
        one = dataclasses.replace(method, sinks=kept * TILE)
        want, read, _, near = known_walk(q, k, np.float64(v), sizes, one, known[b, h])
        steps = np.full(3, read)
      if near < 1e-5:
        close += 1
        continue
      assert tiles[b, h].tolist() == steps.tolist()
      np.testing.assert_allclose(out[b, h], want, atol=2e-5)
      shorter += steps.max() < count
  assert close <= 2 and shorter >= 5


def test_a_short_prompt_has_no_order():
  """A prompt within the first tokens' tile: what follows is walked newest first."""
  method = ART(tile=TILE, by_mass=math.inf, sinks=2 * TILE, margin=1)
  layer = begun(method, Stream.random(1, tokens=40), [3, 14], capacity=40)
  assert not np.asarray(layer.cache.heads["moved"])[0].any()
  out, _ = layer.decode([3, 14])
  assert np.isfinite(out).all()


def test_kernels_have_no_mass_of_tiles():
  layer = begun(ART(by_mass=4), Stream.random(0, tokens=30), [9, 5], env=Env(4, impl="pallas"))
  with pytest.raises(NotImplementedError, match=r"art: ART asks for the mass of tiles \(by_mass\)"):
    layer.decode([9, 5])


@pytest.mark.core(1)
@pytest.mark.parametrize("by_mass", [4, math.inf])
def test_rows_without_a_turn_keep_their_order(by_mass):
  """A prompt of some rows leaves what the others' last one began."""
  layer = begun(ART(tile=TILE, by_mass=by_mass), Stream.random(1, tokens=60), [31, 27], capacity=60)
  name = "mass" if by_mass == 4 else "moved"
  before = np.asarray(layer.cache.heads[name])
  layer.prefill([8, 0], start=[31, 27], past=31)
  after = np.asarray(layer.cache.heads[name])
  np.testing.assert_array_equal(after[1], before[1])
  assert before[1].any() and (after[0] != before[0]).any()
