"""What ART's theory says of a stop: against loops, and on real activations where they lie."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import ART
from kvjax.analysis import early_stops
from kvjax.testing.layer import Stream, softmax_average
from tests.methods.art_walks import newest_tiles
from tests.oracles import begun, logits


def random_walk(seed, batch=20, keys=96, head_dim=48, decay=0.0):
  rng = np.random.default_rng(seed)
  q, k, v = (rng.normal(size=s) for s in ((batch, head_dim), *[(batch, keys, head_dim)] * 2))
  q[:, 0], k[..., 0] = head_dim**0.5, -decay * np.arange(keys)
  return q, k, v


def test_a_walk_by_hand():
  """Two keys of equal weight a tile: means of means."""
  q, k = np.zeros(2), np.zeros((5, 2))
  v = np.array([[1.0, 0], [3, 0], [2, 6], [2, 0], [7, 4]])
  walk = early_stops.walk(q, k, v, 2)
  np.testing.assert_allclose(walk.u, [[2, 0], [2, 3], [7, 4]])
  np.testing.assert_allclose(walk.o, [[2, 0], [2, 1.5], [3, 2]])
  np.testing.assert_allclose(walk.mass, [2, 2, 1])
  scale, turn = early_stops.movements(walk.o)
  np.testing.assert_allclose(scale, [math.inf, 1.5, math.sqrt(1.25)])
  np.testing.assert_allclose(turn[1], 1 - 2 / 2.5)
  share, _ = early_stops.movements(walk.o, relative=True)
  np.testing.assert_allclose(share, [math.inf, 1.5 / 2.5, math.sqrt(1.25 / 13)])
  assert early_stops.stops(walk.o, 2, 1, 1) == 2
  assert early_stops.stops(walk.o, 1.2, 1, 1) == 3
  assert early_stops.stops(walk.o, 1.2, 1, 2) == early_stops.NEVER
  assert early_stops.stops(walk.o, math.inf, math.inf, 1) == 2


def test_a_movement_at_its_bound_is_none_below_it():
  """Alg. 1 says less than τ and less than φ."""
  moved = np.array([math.inf, 0.5])
  for tau, phi, tile in ((1, 1, 2), (0.5, 1, 0), (1, 0.5, 0)):
    assert early_stops.stops_of_movements(moved, moved, tau, phi, 1) == tile


def test_outputs_against_a_loop():
  q, k, v = random_walk(0, batch=3)
  walk = early_stops.walk(q, k, v, 10)
  for b in range(3):
    x = k[b] @ q[b] / math.sqrt(48)
    for t, end in enumerate([*range(10, 96, 10), 96]):
      np.testing.assert_allclose(walk.o[b, t], softmax_average(x[:end], v[b, :end]), atol=1e-12)
      start = t * 10
      np.testing.assert_allclose(
        walk.u[b, t], softmax_average(x[start:end], v[b, start:end]), atol=1e-12
      )


@pytest.mark.slow
@pytest.mark.parametrize("stop_by", ["head", "group"])
def test_stops_are_those_of_the_method(stop_by):
  """The same tile as ART's own walk, head by head or of a KV head's together."""
  method = ART(tau=0.4, phi=0.2, patience=1, tile=4, stop=stop_by, splits=1)
  stream = Stream.random(0, tokens=60, head_dim=48)
  layer = begun(method, stream, [37, 22])
  _, aux = layer.decode([37, 22])
  early, moved = 0, {}
  for b, h, g in np.ndindex(2, 3, 3):
    tiles, _ = newest_tiles(4)(layer.cache, b, h)  # the first may be short
    order = [p for tile in tiles for p in tile]
    x = logits(stream, b, h, [37, 22][b], order)[g]
    weight, starts = np.exp(x - x.max()), np.cumsum([0, *map(len, tiles[:-1])])
    mass = np.add.reduceat(weight, starts)
    part = np.add.reduceat(weight[:, None] * np.float64(stream.v[b, h, order]), starts)
    walk = early_stops.over_tiles(part, mass, np.zeros(()))
    moved.setdefault((b, h), []).append(early_stops.movements(early_stops.probe(walk.o)))
  for (b, h), heads in moved.items():
    of_heads = [np.stack(part) for part in zip(*heads, strict=True)]  # [G, T]
    if stop_by == "group":
      of_heads = early_stops.of_group(*of_heads)
    stop = early_stops.stops_of_movements(*of_heads, method.tau, method.phi, 1)
    tiles = early_stops.read(stop, of_heads[0].shape[-1])
    np.testing.assert_array_equal(aux["tiles"][b, h], np.broadcast_to(tiles, 3))
    early += int((stop != early_stops.NEVER).sum())
  assert early > (3 if stop_by == "head" else 1)  # of 18 heads, of 6 groups


@settings(max_examples=40)
@given(
  st.integers(0, 10_000),
  st.sampled_from([0.0, 0.01, 0.05, 0.2]),
  st.sampled_from([0.02, 0.1, 0.4]),
  st.integers(1, 4),
)
def test_the_bound_holds_where_mass_decays(seed, decay, tau, patience):
  """Theorems 1 and 2, wherever what their proof takes from Assumption 1 is so."""
  walk = early_stops.walk(*random_walk(seed, decay=decay), 4)
  stop = early_stops.stops(early_stops.probe(walk.o), tau, 1.0, patience)
  found = early_stops.truncation(walk, stop, tau, patience)
  ok = found.decays
  assert (found.actual[ok] <= found.bound[ok] * (1 + 1e-9) + 1e-12).all()
  on = stop == early_stops.NEVER  # who reads all has no error, and needs no bound
  assert (found.actual[on] == 0).all() and (found.bound[on] == 0).all()
  assert (~found.assumption | found.decays).all()  # Lemma 1


def test_the_bound_has_something_to_say():
  """It holds where it should on many walks that stop, and Assumption 1 fails on falling masses."""
  stopped = decays = assumed = broken = 0
  for decay in (0.0, 0.02, 0.1):
    walk = early_stops.walk(*random_walk(1, batch=300, decay=decay), 4)
    stop = early_stops.stops(early_stops.probe(walk.o), 0.1, 1.0, 1)
    found = early_stops.truncation(walk, stop, 0.1, 1)
    ended = stop != early_stops.NEVER
    stopped += ended.sum()
    decays += (found.decays & ended).sum()
    assumed += (found.assumption & ended).sum()
    broken += (found.actual > found.bound).sum()
  assert stopped > 300 and decays > 50 and assumed < decays
  equal = early_stops.walk(np.zeros((1, 8)), np.ones((1, 40, 8)), np.ones((1, 40, 8)), 4)
  found = early_stops.truncation(equal, np.array([5]), 0.1, 2)
  assert found.assumption.all() and found.actual.max() < 1e-12
  assert found.bound == 0  # nothing moves after the stop


def test_a_needle_behind_the_stop_breaks_the_assumption_not_the_check():
  """One heavy tile at the end: the error is large, and `decays` says that nothing was promised."""
  q, k, v = np.zeros((1, 4)), np.zeros((1, 40, 4)), np.ones((1, 40, 4))
  q[..., 0], k[:, -1, 0], v[:, -1] = 2, 10, -1
  walk = early_stops.walk(q, k, v, 4)
  stop = early_stops.stops(walk.o, 1e-3, 1e-3, 3)
  found = early_stops.truncation(walk, stop, 1e-3, 3)
  assert stop == 4 and found.actual > found.bound > 1
  assert not found.decays and not found.assumption


def test_agreement():
  """Same, both never, too early, probe alone, too late, oracle alone."""
  probed = np.array([5, 0, 3, 4, 9, 0])
  oracle = np.array([5, 0, 5, 0, 6, 7])
  found = early_stops.agreement(probed, oracle)
  assert found.walks == 6
  np.testing.assert_allclose(found[1:4], [1 / 3] * 3)
  assert found.offset == (2.5, 0.5)
  assert (found.ended, found.agree_of_ended) == (5, 1 / 5)
  assert math.isnan(early_stops.agreement(probed, probed).offset[0])
  never = early_stops.agreement(probed[1:2], oracle[1:2])
  assert never.agree == 1 and never.ended == 0 and math.isnan(never.agree_of_ended)


def test_a_group_is_stable_where_all_its_heads_are():
  """Head 0 is calm in tiles 2 to 4, head 1 in 4 to 6: each stops by itself, both never do."""
  calm = np.array([[0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1]], bool)
  moved = np.where(calm, 0.0, 1.0)
  assert early_stops.stops_of_movements(moved, moved, 0.5, 0.5, 3).tolist() == [4, 6]
  together = early_stops.of_group(moved, moved)
  assert early_stops.stops_of_movements(*together, 0.5, 0.5, 3).tolist() == [early_stops.NEVER]
  assert early_stops.stops_of_movements(*together, 0.5, 0.5, 1).tolist() == [4]


@pytest.mark.parametrize(
  "tokens, splits, able", [(768, 1, False), (769, 1, True), (2048, 3, False), (4096, 3, True)]
)
def test_what_can_stop(tokens, splits, able):
  """Tiles of 128, p = 5: the first tile and five calm ones, and one more to leave out."""
  assert early_stops.can_stop(tokens, 128, splits, 5) == able


def test_splits_join_to_what_they_read():
  q, k, v = random_walk(4, batch=6, decay=0.1)
  walk = early_stops.walk(q, k, v, 8)
  parts = early_stops.splits(walk, 5)
  whole, tiles = early_stops.joined(parts, [np.zeros(6, int)] * 5)
  np.testing.assert_allclose(whole, walk.o[:, -1], atol=1e-12)
  assert (tiles == 12).all()
  stops = [np.array([1, 2, 0, 1, 1, 0])] * 5
  out, tiles = early_stops.joined(parts, stops)
  for b, stop in enumerate(stops[0]):
    seen = [t for s in range(5) for t in list(range(s, 12, 5))[: stop or None]]
    assert tiles[b] == len(seen)
    keys = np.concatenate([np.arange(8 * t, 8 * t + 8) for t in seen])
    x = k[b, keys] @ q[b] / math.sqrt(48)
    np.testing.assert_allclose(out[b], softmax_average(x, v[b, keys]), atol=1e-12)


def test_error_of_a_stop():
  walk = early_stops.walk(
    np.zeros((1, 2)), np.zeros((1, 4, 2)), np.array([[[1.0, 0]] * 2 + [[3, 0]] * 2]), 2
  )
  np.testing.assert_allclose(early_stops.error(walk, np.array([1])), [0.5])
  np.testing.assert_allclose(early_stops.error(walk, np.array([early_stops.NEVER])), [0.0])


def test_probe_takes_spread_dimensions():
  o = np.arange(64.0)
  np.testing.assert_array_equal(early_stops.probe(o), o[::2])
  np.testing.assert_array_equal(early_stops.probe(o[:20]), o[:20])
  assert early_stops.probe(np.zeros(80)).shape == (32,)


pytestmark = pytest.mark.filterwarnings("error")
