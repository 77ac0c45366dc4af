"""The choice of tiles that selection methods share, against a loop, and the summaries' upkeep."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Cache, CacheSpec, Env, Quest, Span, TopKOracle, Window
from kvjax.core.leaves import Leaf
from kvjax.families import sight
from kvjax.families.selective import Selective, Tiles
from kvjax.ops import selection, tiles
from kvjax.testing.layer import Layer, Stream
from tests.compiled import compiled
from tests.oracles import begun
from tests.selection import Watched, choose


def listed(scores, stops, unit=1, start=None, span_sinks=0, **kwargs):
  """`tiles.best` of scores [K, P] on rows with spans of these stops: entries up to the count."""
  stops = np.asarray(stops, np.int32)
  scores = np.broadcast_to(np.float32(scores), (len(stops), *np.shape(scores)))
  start = np.zeros_like(stops) if start is None else np.asarray(start, np.int32)

  @jax.jit
  def best(scores, start, stop):
    span = Span(start[:, None], stop[:, None], span_sinks)
    return tiles.best(scores, span, unit=unit, **kwargs)

  table, count, ranked = map(np.asarray, best(scores, start, stops))
  for row, n, value in zip(table.reshape(-1, table.shape[-1]), count.flat, ranked, strict=False):
    assert (row[n:] == -1).all() and len(set(row[:n].tolist())) == n
    assert value.shape == table.shape[1:]
  assert ((ranked == -np.inf) == (table == -1)).all()
  return [
    [table[b, h, : count[b, h]].tolist() for h in range(table.shape[1])] for b in range(len(stops))
  ]


def test_worked_example():
  """Eight tiles of which seven hold tokens: a sink, the two newest, and the two best others."""
  scores = [[9, 1, 5, 5, 2, 9, 9, 9]]
  assert listed(scores, [7], sinks=1, local=2, k=2) == [[[0, 6, 5, 2, 3]]]
  assert listed(scores, [7], sinks=0, local=0, k=3) == [[[0, 5, 6]]]
  assert listed(scores, [7], unit=4, sinks=1, local=1, k=5) == [[[0, 1]]]


@pytest.mark.core(5)
@pytest.mark.parametrize("unit", [1, 3, 4])
@pytest.mark.parametrize(
  ("sinks", "local", "k"), [(0, 1, 3), (2, 3, 4), (1, 0, 2), (3, 2, 0), (0, 0, 99)]
)
def test_every_length_against_a_loop(unit, sinks, local, k):
  """Ties are common (scores are small integers), rows may be empty, short, or full."""
  rng = np.random.default_rng(unit)
  count = 11
  scores = rng.integers(0, 4, (2, count))
  stops = range(count * unit + 1)
  found = listed(scores, stops, unit, sinks=sinks, local=local, k=k)
  for stop, heads in zip(stops, found, strict=True):
    for h, entries in enumerate(heads):
      held = -(-stop // unit)
      assert entries == choose(scores[h, :held].tolist(), sinks, local, k), (stop, h)


def test_scores_below_every_float_are_chosen_when_there_is_room():
  scores = [[-np.inf, 3.0, -np.inf, 1.0]]
  assert listed(scores, [4, 3], sinks=0, local=1, k=3) == [[[3, 1, 0, 2]], [[2, 1, 0]]]


def test_limits_per_row():
  scores = [[1, 2, 3, 4, 5]]
  found = listed(scores, [5, 5], sinks=0, local=1, k=4, limit=jnp.array([4, 1]))
  assert found == [[[4, 3, 2, 1, 0]], [[4, 3]]]


def test_tiles_outside_the_window_are_left_out():
  """Slots 0, 1 and 9 … 12 are visible, in tiles of two; tile 4 holds slot 9."""
  scores = [[7, 9, 9, 9, 1, 2, 3]]
  found = listed(scores, [13], 2, start=[9], span_sinks=2, sinks=0, local=1, k=6)
  assert found == [[[6, 0, 5, 4]]]
  found = listed(scores, [13], 2, start=[9], span_sinks=2, sinks=2, local=4, k=6)
  assert found == [[[0, 6, 5, 4]]]


def test_windows_that_new_slots_touch():
  """Every window that holds one of them, for windows that abut and windows that overlap."""
  for width, stride in ((4, 4), (1, 1), (6, 3), (8, 2)):
    for start in range(20):
      for tokens in (1, 2, 5):
        found = np.asarray(tiles.touched(jnp.array([start]), tokens, width=width, stride=stride))[0]
        slots = set(range(start, start + tokens))
        want = [j for j in range(40) if slots & set(range(j * stride, j * stride + width))]
        assert set(want) <= set(found.tolist()) and len(found) <= len(want) + 1 + width // stride


@dataclasses.dataclass(frozen=True)
class FirstChannel(Selective):
  """Scores a tile by the sum of the first channel of its keys, whatever the query."""

  size: int = 4
  picks: int = 2
  sinks: int = 1
  below: int = 0
  hides: int = 0

  @property
  def tiles(self):
    return Tiles(self.size, self.picks, self.sinks, newest=1, dense_below=self.below)

  def window(self, at, qpos):
    return Window(0, jnp.full_like(qpos, self.hides)) if self.hides else None

  def summaries(self, spec):
    return {"sum": Leaf("heads", (-(-spec.capacity // self.size),))}

  def summarise(self, cache, start, tokens):
    near = {"width": self.size, "stride": self.size}
    at = tiles.touched(start, tokens, **near)
    k, filled = tiles.keys(cache, at, **near)
    new = jnp.where(filled, k, 0)[..., 0].sum(-1)
    ok = at * self.size < cache.used[:, None]
    return cache.put(heads={"sum": tiles.write(cache.heads["sum"], at, ok, new)})

  def score(self, at, cache, q, visible):
    return cache.heads["sum"]


def test_a_row_of_dense_below_slots_is_not_short():
  """It gets `limit` tiles beside the newest one, where a row with one slot less gets all."""
  scores = jnp.broadcast_to(jnp.arange(12.0), (3, 1, 12))
  stop = jnp.array([[7], [8], [9]], jnp.int32)
  at = TopKOracle(4).at(Env(1, impl="reference"), 0)

  @jax.jit
  def count(scores, stop):
    span = Span(jnp.zeros_like(stop), stop)
    how = {"unit": 1, "sinks": 0, "local": 1, "k": 8, "limit": 2, "dense_below": 8}
    return selection.best_tiles(at, scores, span, **how)[1]

  assert count(scores, stop).tolist() == [[7], [3], [3]]


@pytest.mark.slow
def test_dense_layers_and_short_rows_read_everything():
  stream = Stream.random(1, tokens=40)
  for method, everything in (
    (FirstChannel(dense_layers=2), [True, True]),
    (FirstChannel(picks=1, below=15), [False, True]),
    (FirstChannel(picks=1, below=14), [False, False]),
    (FirstChannel(picks=2), [False, True]),
  ):
    layer = Layer(Watched(method), stream, capacity=40)
    assert ("sum" in layer.cache.heads) == (method.dense_layers == 0)
    layer.prefill([30, 13])
    _, aux = layer.decode([30, 13])
    full = np.asarray(aux["visited"]) == [[31], [14]]
    assert (full.all(1) == everything).all(), method


@pytest.mark.slow
def test_ratio_widens_what_is_scored():
  stream = Stream.random(2, tokens=60)
  method = FirstChannel(picks=2)
  layer = begun(method, stream, [50, 13], capacity=60)
  scores = layer.cache.heads["sum"]
  visible = sight.visible(layer.at, layer.cache)
  select = compiled(functools.partial(method._select, layer.at))
  plans = [select(layer.cache, scores, visible, ratio) for ratio in (1.0, 1.4, 1.5, 2.0)]
  counts = [np.asarray(plan.count)[:, 0].tolist() for plan in plans]
  assert counts == [[4, 4], [4, 4], [5, 4], [6, 4]]
  narrow, wide = (np.asarray(plan.table) for plan in (plans[0], plans[-1]))
  np.testing.assert_array_equal(wide[0, :, :4], narrow[0])
  assert plans[0].pinned == 1 and np.isinf(plans[0].scores[..., :2]).all()


def test_a_window_bounds_the_choice():
  stream = Stream.random(3, tokens=40)
  layer = begun(Watched(FirstChannel(hides=18, picks=3)), stream, [36, 30], capacity=40)
  _, aux = layer.decode([36, 30])
  slots = np.asarray(aux["slots"])
  assert (slots[slots >= 0] >= 18).all() and (slots == 18).any()


def test_slots_of_a_window_that_are_not_occupied_are_not_its_keys():
  method, spec = Quest(16, page=4), CacheSpec(2, 12, 1, 1, 4, 4, jnp.float32)
  cache = Cache.empty(method, spec, 3).put(rows={"used": jnp.array([5, 8])})
  window = jnp.array([[0, 1, 2], [0, 1, 2]])
  _, filled = tiles.keys(cache, window, width=4, stride=4)
  for b, used in enumerate((5, 8)):
    want = [[4 * w + i < used for i in range(4)] for w in range(3)]
    assert np.asarray(filled)[b, 0, :, :, 0].tolist() == want


def test_a_table_is_as_wide_as_what_it_may_list():
  """Forced tiles and the k best, fewer where there are fewer tiles."""
  for method, wide in ((Quest(16, page=4), 4), (TopKOracle(12, sinks=2, local=3), 12)):
    assert [method._width(count) for count in (100, wide, 2)] == [wide, wide, 2]
  assert Quest(16, page=4)._width(100, 2.0) == 1 + 2 * 3


def test_equal_scores_of_any_sign_of_zero():
  """A score of 1 is above those of 0, of which the lowest index comes first."""
  found = listed([[-0.0, 0.0, 1.0, -1.0, 0.0, -2.0]], [6], sinks=0, local=1, k=3)
  assert found[0][0] == [5, 2, 0, 1]


def test_summaries_are_written_where_they_are_said_to_be():
  x, value = jnp.zeros((1, 1, 4, 2)), jnp.ones((1, 1, 2, 2))
  out = compiled(tiles.write)(x, jnp.array([[1, 2]]), jnp.array([[True, False]]), value)
  assert out[0, 0, :, 0].tolist() == [0, 1, 0, 0]
