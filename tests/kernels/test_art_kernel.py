"""ART's kernel against Algorithm 1 in plain NumPy float64, and against the reference in a layer.

On a GPU the same tests run the compiled kernel.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ART, H2O, PSAW, Env, Full, Quest, Random, Rope, SnapKV, StreamingLLM
from kvjax.kernels.art.walk import choose_splits, helped, walk
from kvjax.kernels.common.config import Config
from kvjax.primitives.codes import rounded_query
from kvjax.testing.layer import Layer, Stream
from tests.cover import pairwise
from tests.kernels.art_oracle import LOOSE, compare, cut_into, inputs, listed_orders
from tests.kernels.decode_oracle import same_bits
from tests.kernels.listed import alike, coded, plan

UNITS, WALKS = (1, 3, 16, 256), ((1, 0), (3, 0), (1, 3))  # the latter: splits, share
HEADS = {"per_head": True, "full": True, "kept": 4, "patience": 2}
# Unit, splits and share, bits of codes (None: floats), H, options.
TABLES = [
  *itertools.product(UNITS, WALKS, (None,), (48,), ({}, HEADS, {"relative": True, "tau": 0.4})),
  *pairwise(UNITS, WALKS, (8, 4), (24, 48, 64), ({}, HEADS)),
]


@pytest.mark.rest(13)
@pytest.mark.core(1)
@pytest.mark.parametrize(("unit", "how", "bits", "head_dim", "kwargs"), TABLES, ids=str)
def test_a_table_against_algorithm_1(unit, how, bits, head_dim, kwargs):
  """Over ragged lists with holes, by tiles at once, and in parts, which straddle the table's
  entries or lie within one.
  """
  (splits, share), slots, sinks, tile = how, 700, 5, 32 if unit == 256 else 20
  cut = Config(16, 1, 4, 1) if splits == 3 else None
  width = {1: 190, 3: 90, 16: 20, 256: 3}[unit]
  q, k, v = inputs(unit, 2, 3, 3, slots, head_dim)
  where = plan(unit, 2, 3, slots, unit, width)
  detector = {**LOOSE, "full": False, "per_head": False, "kept": 0, **kwargs}
  orders, read = listed_orders(*where, unit, sinks, tile, slots)
  given, arrays = {}, [q, k, v]
  stored = [np.where(read[..., None], x, np.nan) for x in (k, v)]
  if bits is not None:
    stored, per_slot, numbers = coded(k, v, bits)
    given = {"per_slot": [np.where(read, x, np.nan) for x in per_slot]}
    arrays = [np.asarray(jax.jit(rounded_query)(q)), *numbers]
  run = functools.partial(walk, unit=unit, sinks=sinks, tile=tile, splits=splits, share=share)
  run = jax.jit(functools.partial(run, chunk=3, cut=cut, bits=bits or 8, **detector))
  operands = q, *stored, *where
  out, again = (run(*operands, **given) for _ in range(2))
  same_bits(out, again)
  stopped = compare(out, arrays, orders, splits, detector)
  assert stopped > 0 or splits > 1


def without_a_table(operands, start, stop, order, sinks, tile, how, detector, **ring):
  """Early stops of walks against Algorithm 1 in the order of the tiles order(b, h).

  Slots after a row's last one hold NaN.
  """
  q, k, v = operands
  slots, orders = k.shape[2], [[None] * k.shape[1] for _ in k]
  for b, h in np.ndindex(k.shape[:2]):
    flat = [s for t in order(b, h) for s in range(t * tile, (t + 1) * tile)]
    seen = [s < stop[b] and (s < sinks or s >= start[b]) for s in flat]
    orders[b][h] = cut_into([min(s, slots - 1) for s in flat], seen, tile)
  held = (np.arange(slots) < stop[:, None, None])[..., None]
  poisoned = (np.where(held, x, np.nan) for x in (k, v))
  run = functools.partial(walk, table=None, count=None, sinks=sinks, tile=tile, **how, **detector)
  bounds = {"start": jnp.asarray(start[:, None]), "stop": jnp.asarray(stop[:, None])}
  out = jax.jit(run)(*map(jnp.asarray, (q, *poisoned)), **bounds, **ring)
  return compare(out, operands, orders, how["splits"], detector)


@pytest.mark.rest(6)
@pytest.mark.core(1)
@pytest.mark.parametrize(("splits", "share"), [(1, 0), (4, 0), (1, 2), (1, 5)])
@pytest.mark.parametrize(("sinks", "first"), [(0, 0), (5, 0), (5, 130), (40, 130), (0, 77)])
def test_newest_first_needs_no_table(sinks, first, splits, share):
  """First tiles, then from the newest down: the arithmetic order, over ragged rows."""
  operands, tile = inputs(sinks + first, 4, 1, 2, 400, 24), 16
  start, stop = np.array([[first, 0, first, 0], [390, 177, 16, 0]], np.int32)
  pinned = -(-sinks // tile)

  def order(b, _):
    begin, end = np.arange(25) * tile, np.arange(1, 26) * tile
    shown = np.maximum(begin, start[b]) < np.minimum(end, stop[b])
    rest = [t for t in np.flatnonzero(shown) if t >= pinned]
    return [*(t for t in range(pinned) if t * tile < stop[b]), *rest[::-1]]

  # Which tiles come first does not hang on which a walk has to read.
  detector = {**LOOSE, "full": False, "per_head": False, "kept": pinned if first else 0}
  how = {"splits": splits, "share": share}
  assert without_a_table(operands, start, stop, order, sinks, tile, how, detector) > 0


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 3])
def test_tiles_on_their_way_behind_a_stop_are_counted_where_asked(splits):
  slots, tile, chunk, patience = 400, 16, 4, 2
  q, k, v = inputs(splits, 2, 2, 2, slots, 24)
  start, stop = np.zeros((2, 1), np.int32), np.array([[400], [70]], np.int32)
  bounds = jnp.asarray(start), jnp.asarray(stop)
  run = functools.partial(
    walk, *map(jnp.asarray, (q, k, v)), None, None, *bounds, tile=tile, splits=splits, share=0
  )
  how = {**LOOSE, "patience": patience, "chunk": chunk}
  (state, _, walked), (same, _, loaded) = (run(**how, loaded=each) for each in (False, True))
  np.testing.assert_array_equal(state.o, same.o)
  tiles = -(-stop // tile)[..., None, None]
  whole = (tiles - np.arange(splits)[:, None] + splits - 1) // splits
  assert (loaded >= walked).all() and (loaded <= np.minimum(walked + chunk - 1, whole)).all()
  assert (loaded > walked).any() and (walked < whole).any()


@pytest.mark.core(1)
@pytest.mark.parametrize(("splits", "share"), [(1, 0), (4, 0), (1, 2)])
@pytest.mark.parametrize(("sinks", "kept"), [(0, 0), (5, 1), (20, 3)])
def test_a_ring_is_walked_around(sinks, kept, splits, share):
  """From the tile of the newest token down, and from the last one on, over heads that differ."""
  slots, tile, heads = 390, 16, 2
  stop, seen = np.array([slots, slots, 177], np.int32), np.array([1000, 5000, 177], np.int32)
  ring = np.array([[[sinks, slots], [70, 800]], [[sinks, 4990], [200, 4700]], [[0, slots]] * 2])
  pinned = max(kept, -(-sinks // tile))

  def order(b, h):
    (first, since), newest = ring[b, h], seen[b] - 1
    for position in range(min(since, seen[b]), seen[b]):
      newest = first if position == since or newest == slots - 1 else newest + 1
    last = -(-stop[b] // tile) - 1
    behind = list(range(pinned, last + 1))
    begin = [t for t in behind[::-1] if t <= newest // tile]
    return [*range(min(pinned, last + 1)), *begin, *[t for t in behind[::-1] if t not in begin]]

  operands, how = inputs(1, 3, heads, 2, slots, 24), {"splits": splits, "share": share}
  detector = {**LOOSE, "full": False, "per_head": False, "kept": pinned}
  turns = {"ring": jnp.asarray(ring, jnp.int32), "seen": jnp.asarray(seen)}
  given = operands, np.zeros_like(stop), stop, order, sinks, tile, how, detector
  assert without_a_table(*given, **turns) > 0


@pytest.mark.rest(3)
@pytest.mark.core(1)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("splits", "share"), [(1, 0), (3, 0), (1, 3)])
def test_infinite_patience_changes_no_bit(splits, share, dtype):
  """Looking at the output leaves it alone; a second run is equal to the bit."""
  q, k, v = (jnp.asarray(x, dtype) for x in inputs(7, 2, 2, 3, 300, 64))
  bounds = jnp.zeros((2, 1), jnp.int32), jnp.asarray([[290], [77]], jnp.int32)
  how = {"tile": 32, "splits": splits, "share": share}
  run = functools.partial(walk, q, k, v, None, None, *bounds, **how)
  plain, unending, again = (run(patience=p) for p in (None, math.inf, math.inf))
  for other in (unending, again):
    same_bits(plain, other)


@pytest.mark.slow
def test_a_tile_may_be_read_in_parts():
  """Where a tile does not fit the shared memory; the detector looks at whole tiles all the same."""
  q, k, v = map(jnp.asarray, inputs(8, 2, 2, 3, 400, 64))
  bounds = jnp.zeros((2, 1), jnp.int32), jnp.asarray([[390], [277]], jnp.int32)
  how = {**LOOSE, "tile": 48, "splits": 1, "share": 0}
  run = functools.partial(walk, q, k, v, None, None, *bounds, **how)
  whole, parts = (run(cut=Config(tile, 1, 4, 1)) for tile in (64, 16))
  np.testing.assert_array_equal(whole[2], parts[2])
  np.testing.assert_allclose(whole[0].o, parts[0].o, atol=1e-5)
  assert whole[2].min() < 277 // 48
  rng = np.random.default_rng(0)
  table = jnp.asarray([[rng.permutation(9) for _ in range(2)] for _ in range(2)], jnp.int32)
  unread = jnp.broadcast_to(jnp.linspace(6.0, -2.0, 10), (2, 2, 3, 10))
  listed = functools.partial(walk, q, k, v, table, jnp.full((2, 2), 9, jnp.int32), *bounds)
  run = functools.partial(listed, unit=48, tile=48, patience=1, unread=unread, log_ratio=-3.0)
  whole, parts = (run(splits=1, cut=Config(tile, 1, 4, 1)) for tile in (64, 16))
  np.testing.assert_array_equal(whole[2], parts[2])
  np.testing.assert_allclose(whole[0].o, parts[0].o, atol=1e-5)
  assert whole[2].min() > 1 and whole[2].max() < 9


BASES = [
  Full(),
  PSAW(start=0.0, phi=0.6, sinks=5),
  SnapKV(24, window_size=4),
  StreamingLLM(20, rope="original"),
  Random(20),
  Quest(32, page=4, dense_layers=0),
]


@pytest.mark.slow
@pytest.mark.rest(5)
@pytest.mark.parametrize("base", BASES, ids=lambda base: type(base).__name__)
@pytest.mark.parametrize(
  "kwargs",
  [
    {"sinks": 6, "splits": 1},
    {"splits": 2, "stop": "head", "probe": "full"},
    {"tau": 0.9, "relative": True, "splits": 1},
  ],
  ids=str,
)
def test_a_layer_equals_the_reference(base, kwargs):
  """Same outputs, same steps, same keys read, at every token, ragged rows, three heads a group."""
  method = ART(base, **{"tau": 1.2, "phi": 0.8, "patience": 1, "tile": 4, **kwargs})
  stream = Stream.random(9, tokens=60, head_dim=48)
  (_, told, _), _ = alike(method, stream, 1, "tiles", "visited", steps=4, lengths=[37, 22])
  tiles = np.stack([x["tiles"] for x in told])
  assert (tiles < tiles.max((2, 3), keepdims=True)).any()


@pytest.mark.core(1)
@pytest.mark.parametrize(
  ("method", "message"),
  [
    (ART(tile=300, splits=1), "art: ART walks tiles of 300; the 'pallas' kernel takes up to 256"),
    (
      ART(H2O(20), splits=1),
      r"art: ART reads logits \(wants_logits\); the 'pallas' kernel returns none",
    ),
    (
      ART(StreamingLLM(20), splits=1),
      r"art: ART turns the query for its sinks \(window\); the 'pallas' kernel has one query",
    ),
  ],
)
def test_what_the_kernel_does_not_do_is_said(method, message):
  stream = Stream.random(0, tokens=30)
  layer = Layer(method, stream, env=Env(4, Rope(), impl="pallas"))
  layer.prefill([9, 5])
  with pytest.raises(NotImplementedError, match=message):
    layer.decode([9, 5])


def test_splits_follow_the_shape():
  assert choose_splits(8, 1 << 17, 128, kind="NVIDIA H200") == 33
  assert choose_splits(64, 1 << 15, 128, kind="NVIDIA H200") == 4
  assert choose_splits(256, 1 << 13, 128, kind="NVIDIA H200") == 1
  assert choose_splits(8, 512, 128, kind="NVIDIA H200") == 4


def test_walks_are_shared_where_rows_leave_programs_idle():
  assert helped(132, kind="NVIDIA H200") and not helped(133, kind="NVIDIA H200")
  assert not helped(1, interpret=True)


def test_bad_arguments():
  q, k, v = map(jnp.asarray, inputs(0, 1, 1, 1, 20, 16))
  bounds = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), jnp.int32)
  with pytest.raises(NotImplementedError, match="tile: found 512, expected 1 to 256"):
    walk(q, k, v, None, None, *bounds, tile=512, patience=1)
  with pytest.raises(ValueError, match="ring: expected with seen and without a table"):
    walk(q, k, v, None, None, *bounds, ring=jnp.zeros((1, 1, 2), jnp.int32), patience=1)
  with pytest.raises(ValueError, match="splits: found 0, expected 1 or more"):
    walk(q, k, v, None, None, *bounds, splits=0, patience=1)


@pytest.mark.slow
@pytest.mark.parametrize(("calm", "patience", "chunk", "ends"), [(True, 4, 4, 5), (False, 2, 6, 3)])
def test_a_walk_that_is_calm_is_tested_sooner(calm, patience, chunk, ends):
  """All heads are calm from the second tile on: after 4 tiles they need one more, and get two.

  The newest tile has all their weight. Lanes without a head have a query of 0, and are not asked.
  Values that never change are stopped by the third tile, after the whole first chunk of six.
  """
  q, k = (jnp.ones((1, 1, n, 16)) for n in (3, 400))
  k = k.at[:, :, :384].set(0) * 50
  v = 100 * jax.random.normal(jax.random.key(0), k.shape)
  if not calm:
    q, k, v = (jnp.asarray(x) for x in inputs(1, 1, 1, 1, 400, 24))
    v = v * 0 + 1
  stop = jnp.array([[400]], jnp.int32)
  run = functools.partial(walk, q, k, v, None, None, stop * 0, stop, tile=16, splits=1, share=0)
  how = {"tau": 0.7, "phi": 0.4, "patience": patience, "chunk": chunk}
  walked, loaded = (run(**how, loaded=each)[2] for each in (False, True))
  assert (walked == ends).all() and (loaded == 6).all()
