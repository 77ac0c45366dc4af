"""ART against Algorithm 1 in plain NumPy float64: same stops, same outputs, in every order."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import ART, H2O, Env, Full, LongFlow, Method, Quest, SnapKV, Span, StreamingLLM
from kvjax.testing.layer import Layer, Stream
from tests.methods.art_walks import newest_tiles, walk
from tests.oracles import begun, keys, queries


def check(method, stream, lengths, steps, order, budget=64):
  """Decodes and compares every row, KV head and step; `order(cache, b, h)` gives tiles of slots."""
  layer = begun(method, stream, lengths, capacity=budget)
  stopped = close = 0
  for i in range(steps):
    at = [n + i for n in lengths]
    out, aux = layer.decode(at)
    pos, tiles = np.asarray(layer.cache.pos), np.asarray(aux["tiles"])
    for b, h in np.ndindex(*pos.shape[:2]):
      steps_of, pinned = order(layer.cache, b, h)
      held = pos[b, h, [s for tile in steps_of for s in tile]]
      k, q = keys(stream, b, h, held), queries(stream, b, h, at[b])
      sizes = [len(tile) for tile in steps_of]
      want, taken, margin = walk(q, k, np.float64(stream.v[b, h, held]), sizes, method, pinned)
      if margin < 1e-5:
        close += 1  # a threshold hit within rounding
        continue
      assert tiles[b, h].tolist() == taken.tolist()
      np.testing.assert_allclose(out[b, h], want, atol=2e-5)
      stopped += int(taken.min() < len(sizes))
  assert close <= 2
  return stopped


SETTINGS = [
  {"tau": 0.3, "phi": 0.1, "patience": 1},
  {"tau": 0.5, "phi": 0.3, "patience": 2},
  {"tau": 0.4, "phi": 0.2, "patience": 1, "stop": "head"},
  {"tau": 0.6, "phi": 0.2, "patience": 1, "probe": "full", "stop": "head"},
  {"tau": 0.5, "phi": 0.3, "patience": 1, "relative": True},
]


@pytest.mark.core(1)
@pytest.mark.parametrize("kwargs", SETTINGS, ids=str)
def test_full_cache_newest_first(kwargs):
  method = ART(Full(), tile=4, splits=1, **kwargs)
  stream = Stream.random(0, tokens=60, head_dim=48)
  assert check(method, stream, [37, 22], 12, newest_tiles(4)) >= 3


@pytest.mark.slow
def test_first_tokens_before_the_newest_where_asked():
  """Their tile is read first and never skipped."""
  method = ART(tau=0.5, phi=0.3, patience=1, tile=4, sinks=6, splits=1)

  def order(cache, b, h):
    tiles, _ = newest_tiles(4)(cache, b, h)
    return [*tiles[:-3:-1], *tiles[:-2]], 8

  stream = Stream.random(0, tokens=60, head_dim=48)
  assert check(method, stream, [37, 22], 6, order) >= 3


def cut(slots, tile):
  return [slots[i : i + tile] for i in range(0, len(slots), tile)]


@pytest.mark.slow
def test_snapkv_by_score():
  """Window and generated tokens first, then by score, in tiles as the cache was put in order."""
  method = ART(SnapKV(24, window_size=4), tau=0.4, phi=0.2, patience=1, tile=4, splits=1)

  def order(cache, b, h):
    used = int(cache.used[b])
    score, pos = (np.asarray(cache.slots[n])[b, h, :used] for n in ("score", "pos"))
    ranked = [s for s in range(used) if not math.isinf(score[s])]
    assert ranked == list(range(len(ranked)))
    assert all(score[s] <= score[s + 1] for s in ranked[:-1])
    assert len(ranked) == 20
    assert sorted(pos[20:]) == list(range(int(cache.seen[b]) - 4, int(cache.seen[b])))
    return cut(range(used), 4)[::-1], 0

  stream = Stream.random(1, tokens=60)
  assert check(method, stream, [40, 31], 12, order) > 5


@pytest.mark.slow
def test_h2o_reads_its_logits_of_the_tiles_read():
  """Mass grows only where the walk has been."""
  stream, lengths = Stream.random(2, tokens=60), [30, 26]
  layer = begun(
    ART(H2O(20), tau=0.8, phi=0.5, patience=1, tile=4, stop="head", splits=1), stream, lengths
  )
  stopped = 0
  for i in range(6):
    before = np.asarray(layer.cache.slots["mass"]), np.asarray(layer.cache.pos)
    _, aux = layer.decode([n + i for n in lengths])
    grown = np.asarray(layer.cache.slots["mass"]) > np.where(
      np.asarray(layer.cache.pos) == before[1], before[0], 0
    )
    tiles = np.asarray(aux["tiles"]).max(-1)
    assert (grown.sum(-1) <= np.asarray(aux["visited"])).all()
    assert (np.asarray(aux["visited"]) <= tiles * 4).all()
    stopped += (tiles < 5).sum()
  assert stopped > 0


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "steps"), [([33, 28], 20), ([9, 14], 8)], ids=str)
def test_streaming_llm_reads_its_sinks_first(lengths, steps):
  """Then tiles from the newest token's down and around: each is older than the one before."""
  method = ART(
    StreamingLLM(20, sinks=4, rope="original"), tau=9, phi=9, patience=1, tile=3, splits=1
  )
  stream = Stream.random(3, tokens=60)

  def order(cache, b, h):
    pos = np.asarray(cache.pos)[b, h, : int(cache.used[b])]
    first, second, *rest = cut(range(len(pos)), 3)  # the sinks are in two tiles
    newest = [tile for tile in rest if pos.argmax() in tile]
    if newest:
      at = rest.index(newest[0])
      rest = rest[at::-1] + rest[:at:-1]
    else:
      rest.reverse()
    tops = [pos[list(tile)].max() for tile in rest]
    assert tops == sorted(tops, reverse=True)
    return [first, second, *rest], 6

  assert check(method, stream, lengths, steps, order) > 10


@pytest.mark.core(1)
@pytest.mark.parametrize(
  "base",
  [
    *(Full(), SnapKV(24, window_size=4), StreamingLLM(20), LongFlow(24, window_size=4)),
    *(Quest(24, 4), Quest(8, 4, base=SnapKV(24, 4), dense_layers=0)),
  ],
  ids=repr,
)
def test_infinite_patience_equals_the_base(base):
  stream, lengths = Stream.random(4, tokens=60), [33, 28]
  ours, plain = (
    begun(ART(base, patience=math.inf, tile=5, splits=1), stream, lengths),
    begun(base, stream, lengths),
  )
  for i in range(8):
    at = [n + i for n in lengths]
    (out, aux), (want, other) = ours.decode(at), plain.decode(at)
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_array_equal(aux["visited"], other["visited"])
    np.testing.assert_array_equal(np.sort(ours.cache.pos), np.sort(plain.cache.pos))


EAGER = {"tau": 9, "phi": 9, "patience": 1, "tile": 4}  # stops as soon as it may


def reports(method, rows=slice(None), lengths=(37, 22)):
  """Outputs, tiles and slots read of a step, of some rows of a batch of two."""
  drawn, lengths = Stream.random(6, kv_heads=2, tokens=60), list(lengths)[rows]
  layer = begun(method, Stream(drawn.q[rows], drawn.k[rows], drawn.v[rows]), lengths, capacity=48)
  out, aux = layer.decode(lengths)
  return out, np.asarray(aux["tiles"]), np.asarray(aux["visited"])


@pytest.mark.slow
@pytest.mark.parametrize("base", [Full(), SnapKV(24, window_size=4), Quest(24, 4)], ids=repr)
def test_where_nothing_can_be_spared_the_base_attends(base):
  """By default; 64 walks a head over twelve tiles would read one each."""
  out, tiles, visited = reports(ART(base, **EAGER))
  walked, every, read = reports(ART(base, **EAGER | {"patience": math.inf}, splits=1))
  np.testing.assert_allclose(out, walked, atol=1e-5)
  np.testing.assert_array_equal(tiles, every)
  np.testing.assert_array_equal(visited, read)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["reference", "pallas"])
def test_a_base_is_told_what_its_own_attention_found(impl):
  """LongFlow names the next victim by the logits of its attention, where nothing can be spared."""
  stream, lengths = Stream.random(6, tokens=60), [37, 22]
  base = LongFlow(24, window_size=4)
  env = Env(4, impl=impl, tile=4)
  ours = Layer(ART(base, **EAGER), stream, capacity=48, env=env)
  in_turn = type("InTurn", (LongFlow,), {"plan_and_attend": Method.plan_and_attend})
  plain = Layer(in_turn(24, window_size=4), stream, capacity=48, env=env)
  one_launch = Layer(base, stream, capacity=48, env=env)
  prompt = Layer(base, stream, capacity=48)
  prompt.prefill(lengths)
  for layer in (ours, plain, one_launch):
    layer.cache = jax.tree.map(np.asarray, prompt.cache)
  for i in range(4):
    at = [n + i for n in lengths]
    np.testing.assert_array_equal(ours.decode(at)[0], plain.decode(at)[0])
    one_launch.decode(at)
    for other in (plain, one_launch):
      np.testing.assert_array_equal(ours.cache.pos, other.cache.pos)


@pytest.mark.slow
def test_the_usual_walks_are_those_of_one_row_on_any_device(monkeypatch):
  """As many as make 128 over all heads of a row, whatever the batch, or the heads of a shard."""
  monkeypatch.setattr("kvjax.methods.art.splits.ROW_WALKS", 6)
  both, three = reports(ART(**EAGER)), reports(ART(**EAGER, splits=3))
  first, alone = (reports(method, slice(1)) for method in (ART(**EAGER), ART(**EAGER, splits=3)))
  assert (both[1] < 10).any()
  for ours, explicit in (*zip(both, three, strict=True), *zip(first, alone, strict=True)):
    np.testing.assert_array_equal(ours, explicit)
  for ours, one in zip(both[1:], first[1:], strict=True):  # tiles and slots: a batch's sums vary
    np.testing.assert_array_equal(ours[:1], one)


def test_heads_of_all_shards_count():
  at = ART().at(Env(1, head_axis="heads"), 0)
  counted = jax.vmap(lambda _: at.heads_in_all(2) * jnp.ones(()), axis_name="heads")(jnp.ones(4))
  assert (counted == 8).all()


class Holes(Full):
  """Lists every other tile of four slots, and nothing between."""

  def plan(self, at, cache, q, visible, carry):
    tile = jnp.arange(16, dtype=jnp.int32)
    shape = *cache.pos.shape[:2], 16
    table = jnp.broadcast_to(jnp.where(tile % 2 == 0, tile, -1), shape)
    count = jnp.broadcast_to(-(-cache.used[:, None] // 4), shape[:2])
    stop = cache.used[:, None]
    visible = dataclasses.replace(visible, span=Span(jnp.zeros_like(stop), stop, 1))
    return visible.listed(table, count, unit=4), carry


@pytest.mark.core(1)
@pytest.mark.parametrize("impl", ["reference", "pallas"])
def test_a_hole_in_a_list_is_no_tile(impl):
  """It has no key: no step is counted for it, and no slot is read."""
  method = ART(Holes(), tau=0.0, phi=0.0, tile=4, splits=1)
  layer = begun(method, Stream.random(2, tokens=40), [37, 22], env=Env(4, impl=impl, tile=4))
  _, aux = layer.decode([37, 22])
  tiles, slots = np.array([5, 3]), np.array([20, 12])  # of 10 and 6, with 38 and 23 keys
  assert (np.asarray(aux["tiles"]) == tiles[:, None, None]).all()
  assert (np.asarray(aux["visited"]) == slots[:, None]).all()


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
  st.integers(0, 3),
  st.sampled_from([0.0, 1.0]),
  st.integers(1, 4),
  st.sampled_from(["group", "head"]),
)
def test_constant_values(seed, value, patience, stop):
  """Constant values are stable from the second tile on; zero values have no direction."""
  stream = Stream.random(seed, tokens=40)
  stream.v[:] = value
  layer = begun(
    ART(tau=1e-4, phi=1e-4, patience=patience, tile=4, stop=stop, splits=1), stream, [30, 23]
  )
  out, aux = layer.decode([30, 23])
  np.testing.assert_allclose(out, value, atol=1e-5)
  every = np.array([-(-31 // 4), -(-24 // 4)])
  want = every if value == 0 else np.minimum(patience + 1, every)
  np.testing.assert_array_equal(np.asarray(aux["tiles"]).min((1, 2)), want)
