"""HShare against a NumPy float64 oracle: who shares with whom, the sets of every step, outputs."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Env, HShare
from kvjax.methods.hshare import sharing
from kvjax.runtime import sharding
from kvjax.testing.layer import Stream
from tests.oracles import attend, probabilities
from tests.selection import Watched, choose
from tests.streams import Stack, similar_streams


class Oracle:
  """One row through all layers: who shares, and the set that every layer and head has in use."""

  def __init__(self, streams, b, m):
    self.streams, self.b, self.m = streams, b, m
    self.at = [(l, h) for l in range(len(streams)) for h in range(streams[0].k.shape[1])]

  def retrieve(self, l, h, t):
    """The heaviest tokens of the middle, by their mean probability over the group."""
    m, p = self.m, probabilities(self.streams[l], self.b, h, t, range(t + 1)).mean(0)
    forced = len(choose(p, m.sinks, m.local, 0))
    return choose(p, m.sinks, m.local, m.budget - m.sinks - m.local)[forced:]

  def prompt(self, n):
    layers, heads = len(self.streams), self.streams[0].k.shape[1]
    self.used = {at: self.retrieve(*at, n - 1) for at in self.at}
    self.from_head = [
      greedy([[set(self.used[l, h])] for h in range(heads)], self.m.heads) for l in range(layers)
    ]
    self.from_layer = greedy(
      [[set(self.used[l, h]) for h in range(heads)] for l in range(layers)], self.m.layers
    )

  def step(self, t):
    """Positions read by every (layer, head), in order, and which of them retrieved."""
    due = (t + 1) % self.m.steps == 0 or t + 1 <= self.m.budget
    if due:
      for l, h in self.at:
        if self.from_layer[l] == l:
          self.used[l, h] = self.retrieve(l, self.from_head[l][h], t)
        else:
          self.used[l, h] = self.used[self.from_layer[l], h]
    forced = choose([0.0] * (t + 1), self.m.sinks, self.m.local, 0)
    read = {at: forced + self.used[at] for at in self.at}
    retrieved = {
      (l, h): due and self.from_layer[l] == l and self.from_head[l][h] == h for l, h in self.at
    }
    return read, retrieved


def greedy(members, share):
  """Members are lists of sets; returns whose sets each of them uses."""
  alike = {
    (i, j): sum(len(a & b) for a, b in zip(members[i], members[j], strict=True))
    for i in range(len(members))
    for j in range(i)
  }
  source = list(range(len(members)))
  for _ in range(len(members) - math.ceil(share * len(members))):
    best = max(alike, key=lambda pair: (alike[pair], -pair[0], -pair[1]), default=None)
    if best is None or alike[best] == 0:
      break
    source = [best[1] if s == best[0] else s for s in source]
    alike = {pair: n for pair, n in alike.items() if best[0] not in pair}
  return source


def test_worked_example():
  """3 is most like 1 and joins it; 2 and 3 would be next, but 3 has given up its own; 2 joins 0."""
  alike = jnp.array([[[9, 0, 0, 0], [1, 9, 0, 0], [3, 2, 9, 0], [0, 8, 7, 9]]])
  sources = [sharing.shared_sources(alike, share)[0].tolist() for share in (1.0, 0.75, 0.5, 0.25)]
  assert sources == [[0, 1, 2, 3], [0, 1, 2, 1], [0, 1, 0, 1], [0, 0, 0, 0]]


def test_overlaps_by_hand():
  sets = jnp.array([[[3, 5, 1], [1, 3, -1], [9, -1, -1], [-1, -1, -1]]])
  want = [[3, 2, 0, 0], [2, 2, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
  np.testing.assert_array_equal(sharing.overlaps(sets)[0], want)


@pytest.mark.parametrize("seed", range(3))
def test_greedy_against_a_loop(seed):
  rng = np.random.default_rng(seed)
  sets = np.array([[rng.permutation(12)[:5] for _ in range(7)] for _ in range(3)])
  found = sharing.shared_sources(sharing.overlaps(jnp.asarray(sets, jnp.int32)), 0.4)
  for row, members in zip(found, sets, strict=True):
    assert row.tolist() == greedy([[set(x.tolist())] for x in members], 0.4)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("m", "lengths"),
  [
    (HShare(14, 2, 4, 0.5, 0.5, 2), [30, 21]),
    (HShare(10, 1, 3, 0.75, 0.75, 3), [25, 6]),
    (HShare(9, 0, 2, 0.25, 1.0, 1), [19, 12]),
    (HShare(12, 2, 4, 1.0, 1.0, 1), [30, 5]),  # nobody shares
  ],
)
def test_a_generation(m, lengths):
  """Four layers of four heads; sets, sharing, outputs, at every step of both rows."""
  streams, steps = similar_streams(1, 4, 70), 16
  run = Stack(Watched(m), streams, capacity=64)
  run.prefill(lengths)
  oracles = [Oracle(streams, b, m) for b in range(2)]
  for oracle, n in zip(oracles, lengths, strict=True):
    oracle.prompt(n)
    found = [int(cache.rows["from_layer"][oracle.b]) for cache in run.caches]
    assert found == oracle.from_layer
    heads = [cache.heads["from_head"][oracle.b].tolist() for cache in run.caches]
    assert heads == oracle.from_head
  shared = 0
  for step in range(steps):
    at = [n + step for n in lengths]
    reports = run.decode(at)
    for b, t in enumerate(at):
      read, retrieved = oracles[b].step(t)
      for (l, h), want in read.items():
        out, aux = reports[l]
        slots = aux["slots"][b, h]
        assert slots[slots >= 0].tolist() == want, (l, b, h, t)
        assert aux["retrieved"][b, h] == retrieved[l, h]
        np.testing.assert_allclose(out[b, h], attend(streams[l], b, h, t, want), atol=5e-6)
        shared += not retrieved[l, h]
  assert (shared > 0) == (m.layers < 1)


@pytest.mark.slow
def test_a_second_turn_decides_anew():
  streams = similar_streams(3, 4, 70)
  m = HShare(12, 1, 3)
  run = Stack(Watched(m), streams, capacity=64)
  run.prefill([20, 16])
  for step in range(5):
    run.decode([20 + step, 16 + step])
  run.prefill([9, 0], start=[25, 21])
  oracle = Oracle(streams, 0, m)
  oracle.prompt(34)
  assert [int(cache.rows["from_layer"][0]) for cache in run.caches] == oracle.from_layer
  assert [cache.heads["from_head"][0].tolist() for cache in run.caches] == oracle.from_head


@pytest.mark.slow
def test_layers_decide_alike_on_all_shards():
  """Four heads on two devices: the overlaps of all of them count; an idle row decides nothing."""
  m, stream = HShare(12, 1, 3), Stream.random(0, kv_heads=4)
  rng = np.random.default_rng(0)
  caches = tuple(
    cache.put(heads={"heavy": jnp.asarray(rng.integers(0, 9, (2, 4, 8)) * 8 + np.arange(8))})
    for cache in m.init_caches(stream.spec(80, layers=5))
  )

  def decide(axis, caches, valid=(7, 7)):
    return m.conclude(Env(5, head_axis=axis), caches, jnp.array(valid))

  want = [cache.rows["from_layer"].tolist() for cache in decide(None, caches)]
  idle = [cache.rows["from_layer"].tolist() for cache in decide(None, caches, (7, 0))]
  assert idle == [[first, i] for i, (first, _) in enumerate(want)] != want
  specs = sharding.cache_specs(caches, m)
  sharded = sharding.shard_map(
    functools.partial(decide, "heads"), sharding.make_mesh(2), (specs,), specs
  )
  assert [cache.rows["from_layer"].tolist() for cache in jax.jit(sharded)(caches)] == want
  assert want != [[i, i] for i in range(5)]


@pytest.mark.slow
def test_dense_layers_are_left_out():
  """Layer 0 reads everything; the others share among themselves."""
  streams = similar_streams(9, 3, 50)
  run = Stack(Watched(HShare(10, 1, 3, dense_layers=1)), streams, capacity=64)
  assert not run.caches[0].heads and run.caches[1].rows["from_layer"].tolist() == [0, 0]
  run.prefill([30, 22])
  reports = run.decode([30, 22])
  assert reports[0][1]["visited"].tolist() == [[31] * 4, [23] * 4]
  assert reports[1][1]["visited"].tolist() == [[10] * 4] * 2
