"""What slots split over devices do to each operation, against NumPy and the whole cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import kvjax
from kvjax import CacheSpec, Env, Full, Plan, Quest, Span
from kvjax.ops import slot_shards
from kvjax.runtime import sharding
from tests.meshes import mesh_of

B, K = 2, 3


def spread(parts, run, inputs, outputs, method=None):
  """`run(at, ...)` jitted over so many devices; P("slots") where a device gets or gives a part."""
  mesh = mesh_of(slots=parts)
  method = Full() if method is None else method
  at = method.at(sharding.on_mesh(Env(4, impl="reference"), mesh), 0)
  return jax.jit(sharding.shard_map(functools.partial(run, at), mesh, inputs, outputs))


SLOTS = P(None, None, "slots")


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize(("sinks", "local", "k"), [(2, 2, 3), (0, 1, 5), (5, 0, 99)])
def test_candidates(parts, sinks, local, k):
  """Every device tells its k best tiles; first, newest, and those outside of the span are −∞."""
  rng, unit, tiles = np.random.default_rng(k), 4, 24
  scores = rng.normal(size=(B, K, tiles)).astype(np.float32)
  scores[0, 0, 7], scores[1, 2, 3] = np.nan, -np.inf
  start, stop = np.array([[0], [13]], np.int32), np.array([[95], [70]], np.int32)

  def run(at, scores):
    span = Span(jnp.asarray(start), jnp.asarray(stop), 6)
    return slot_shards.candidates(at, scores, span, unit=unit, sinks=sinks, local=local, k=k)

  got = spread(parts, run, (SLOTS,), P())(scores)
  want = np.full(scores.shape, -np.inf)
  for b, h in np.ndindex(B, K):
    for device in np.split(np.arange(tiles), parts):
      held = [
        t for t in device if t * unit < stop[b] and (t * unit < 6 or (t + 1) * unit > start[b])
      ]
      own = [t for t in held if sinks <= t <= (stop[b, 0] - 1) // unit - local]
      value = np.nan_to_num(scores[b, h], nan=np.inf, posinf=np.inf, neginf=-3.4028235e38)
      best = sorted(own, key=lambda t: (-value[t], t))[:k]
      want[b, h, best] = value[best]
  np.testing.assert_array_equal(got, want.astype(np.float32))


@pytest.mark.parametrize(("entries", "count"), [(9, 7), (3, 3)])
def test_a_device_reads_its_part_of_a_table(entries, count):
  """In the table's order, and no wider than what the device can hold."""
  rng, unit, tiles, parts = np.random.default_rng(0), 4, 10, 2
  spec = CacheSpec(B, tiles * unit, K, 1, 8, 4, jnp.float32)
  cache = kvjax.Cache.empty(Full(), spec, 0)
  table = np.stack([rng.permutation(tiles)[:entries] for _ in range(B * K)]).reshape(B, K, -1)
  counts = np.full((B, K), count, np.int32)
  counts[0, 0] -= 1
  stop = np.array([[40], [17]], np.int32)

  def run(at, slots, rows):
    cache = kvjax.Cache(slots, {}, rows)
    span = Span(jnp.zeros((B, 1), jnp.int32), jnp.asarray(stop))
    plan = Plan(span, jnp.asarray(table, jnp.int32), jnp.asarray(counts), unit=unit)
    mine = slot_shards.part(at, cache, plan)
    return mine.table[None], mine.count[None], mine.span.start[None], mine.span.stop[None]

  inputs = (dict.fromkeys(cache.slots, SLOTS), P())
  got = spread(parts, run, inputs, P("slots"))(cache.slots, cache.rows)
  found, counted, starts, stops = map(np.asarray, got)
  assert found.shape == (parts, B, K, min(entries, tiles // parts))
  for d, b, h in np.ndindex(parts, B, K):
    listed = table[b, h, : counts[b, h]]
    want = [t - d * 5 for t in listed if d * 5 <= t < d * 5 + 5]
    assert found[d, b, h].tolist() == want + [-1] * (found.shape[-1] - len(want))
    assert counted[d, b, h] == len(want)
    assert starts[d, b] == 0 and stops[d, b] == np.clip(stop[b] - d * 20, 0, 20)


@pytest.mark.parametrize("parts", [2, 4])
def test_log_softmax_over_all_slots(parts):
  rng = np.random.default_rng(1)
  x = rng.normal(size=(B, K, 2, 16)).astype(np.float32) * 20
  x[0, 0, 0, :9] = x[1, 1] = -np.inf
  x[0, 2] = np.where(np.arange(16) == 5, 100, 0)  # more than exp can take
  last = P(None, None, None, "slots")
  got = np.asarray(spread(parts, slot_shards.log_softmax, (last,), last)(x))
  some = np.isfinite(x).any(-1)  # where nothing is seen there is no softmax
  seen = x[some].astype(np.float64)
  top = seen.max(-1, keepdims=True)
  want = seen - top - np.log(np.exp(seen - top).sum(-1, keepdims=True))
  np.testing.assert_allclose(got[some], want, atol=1e-5)


@pytest.mark.parametrize("start", [[0, 7], [15, 16], [16, 3]])
def test_summaries_of_a_turn_are_those_of_the_whole_cache(start):
  """From its first token on, on whichever device it lies, to the last that is occupied."""
  method, tokens, page = Quest(16, page=4, dense_layers=0), 6, 4
  cache = kvjax.Cache.empty(method, CacheSpec(B, 32, K, 1, 8, 4, jnp.float32), 0)
  k = np.random.default_rng(2).normal(size=cache.slots["k"].shape).astype(np.float32)
  used = np.array(start, np.int32) + np.array([tokens, tokens - 2], np.int32)
  cache = cache.put(slots={"k": jnp.asarray(k)}, rows={"used": used, "seen": used})

  def run(at, cache):
    return slot_shards.summarised(
      at, cache, method.summarise, jnp.asarray(start, jnp.int32), tokens
    )

  specs = sharding.cache_specs(cache, method)
  got = spread(2, run, (specs,), specs, method)(cache)
  for b, p in np.ndindex(B, 32 // page):
    first, last = p * page, min((p + 1) * page, used[b])
    if last > start[b] and first < used[b]:
      np.testing.assert_array_equal(got.heads["key_max"][b, :, p], k[b, :, first:last].max(1))
      np.testing.assert_array_equal(got.heads["key_min"][b, :, p], k[b, :, first:last].min(1))
  np.testing.assert_array_equal(got.used, used)


@pytest.mark.parametrize("parts", [2, 4])
def test_the_best_of_all_devices(parts):
  """Of every query head by itself, and of equal ones the first."""
  x = np.random.default_rng(2).integers(0, 9, (B, K, 2, 16)).astype(np.float32)
  run = functools.partial(slot_shards.top_k, k=5)
  best, index = spread(parts, run, (P(None, None, None, "slots"),), P())(x)
  want = np.argsort(-x, -1, kind="stable")[..., :5]
  np.testing.assert_array_equal(index, want)
  np.testing.assert_array_equal(best, np.take_along_axis(x, want, -1))
