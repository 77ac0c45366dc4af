"""CIS against a NumPy float64 oracle: decisions, sets and outputs of every step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CIS, CacheSpec, Env, Linear, Rope
from kvjax.methods.cis.retrieval import distinct
from kvjax.testing.layer import Stream
from tests.cis_oracle import Planned, follow, wandering
from tests.oracles import begun


def test_worked_example():
  """k = 3, one sink, two newest, blocks of 4. The same query shares, another one retrieves."""
  stream = Stream.random(0, batch=1, kv_heads=1, groups=1, tokens=16, head_dim=4)
  stream.k[:], stream.q[:] = 0, 0
  stream.q[..., 3] = 1  # a pair that hardly turns
  stream.q[:, :, :, 13] = [0, 0, 0, -1]
  stream.k[0, 0, 3, 3], stream.k[0, 0, 6, 3], stream.k[0, 0, 8, 3] = 3, 2, 1
  layer = Planned(CIS(k=3, sinks=1, local=2, block=4), stream)
  layer.prefill([11])
  seen = []
  for t in range(11, 16):
    table, count, _ = layer.plan([t])
    _, aux = layer.decode([t])
    seen.append((bool(aux["retrieved"][0, 0]), table[0, 0, : count[0, 0]].tolist()))
  assert seen == [
    (True, [0, 11, 10, 3, 6, 8]),  # the heaviest first
    (False, [0, 12, 11, 3, 6, 8, 2, 4]),  # m = ⌊3/3⌋: the neighbours of 3
    (True, [0, 13, 12, 1, 2, 4]),  # the other way round: 3, 6 and 8 are the lightest
    (False, [0, 14, 13, 3, 6, 8, 2, 4]),  # as the query at 11, not as the one before
    (True, [0, 15, 14, 3, 6, 8]),  # a new block
  ]


@pytest.mark.core(1)
@pytest.mark.parametrize(
  "method",
  [
    CIS(k=9, sinks=2, local=4, block=5),
    CIS(k=9, sinks=2, local=4, block=5, per="query_head"),
    CIS(k=7, sinks=0, local=1, block=16, tau=0.6, radius=3, m=7),
    CIS(k=4, sinks=3, local=6, block=8, tau=0.9, radius=0),
    CIS(k=30, sinks=1, local=2, block=3, m=0),
    CIS(k=9, sinks=2, local=4, block=5, agree="mean"),
    CIS(k=7, sinks=0, local=1, block=16, tau=0.6, radius=0, agree="mean"),
  ],
)
def test_sets_and_outputs_over_a_generation(method):
  """Ragged rows, groups of three; some steps share and some retrieve, in every head."""
  retrieved = follow(method, wandering(1, tokens=70), [29, 8], 40)
  ratio = retrieved.reshape(40, -1).mean(0)
  assert (ratio > 1 / method.block).all() and (ratio < 1).all()
  assert retrieved[:: method.block].all()  # the first of every block
  assert len(np.unique(retrieved.reshape(40, -1), axis=1).T) > 2  # heads decide on their own


def turned(agree, heads):
  """Who retrieves of two steps, between which the first `heads` of three query heads turn round.

  The queries lie in a pair of channels that hardly turns; norms differ by head.
  """
  stream = Stream.random(8, batch=1, kv_heads=1, groups=3, tokens=20)
  stream.q[:] = np.where(np.arange(16) == 7, 1.0, 0.0) * np.array([100.0, 1.0, 0.01])[:, None, None]
  stream.q[:, :, :heads, 16:] *= -1
  layer = begun(CIS(k=4, sinks=1, local=2, block=8, agree=agree), stream, [15])
  return [bool(layer.decode([15 + step])[1]["retrieved"][0, 0]) for step in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("heads, all_agree, mean_agrees", [(0, 1, 1), (1, 0, 1), (2, 0, 0)])
def test_the_mean_decides_for_a_group(heads, all_agree, mean_agrees):
  """Of ±1 the mean keeps its direction while one of three has turned, be it the largest."""
  assert turned("all", heads) == [True, not all_agree]
  assert turned("mean", heads) == [True, not mean_agrees]


@pytest.mark.slow
def test_the_mean_of_one_head_is_that_head():
  stream = wandering(1, tokens=50, groups=1)
  one, other = (
    follow(CIS(k=9, sinks=2, local=4, block=5, agree=agree), stream, [29, 8], 20)
    for agree in ("all", "mean")
  )
  np.testing.assert_array_equal(one, other)


def test_the_mean_of_a_group_takes_the_room_of_one_query():
  spec = CacheSpec(2, 30, 2, 3, 16, 1)
  held = {agree: CIS(agree=agree).leaves(spec, 0)["queries"].shape for agree in ("all", "mean")}
  assert held == {"all": (16, 3, 16), "mean": (16, 1, 16)}


@pytest.mark.slow
def test_a_generation_under_a_soft_cap():
  """Weights are those of capped logits; who shares with whom is not."""
  method = CIS(k=9, sinks=2, local=4, block=5)
  retrieved = follow(method, wandering(1, tokens=70), [29, 8], 40, cap=0.7)
  plain = follow(method, wandering(1, tokens=70), [29, 8], 40)
  np.testing.assert_array_equal(retrieved, plain)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_flat_and_peaked_weights(scale):
  """At 30 most weights are 0 in float32; their order still counts."""
  follow(CIS(k=9, sinks=2, local=4, block=5), wandering(2, tokens=60), [25, 3], 30, scale)


@pytest.mark.slow
@pytest.mark.parametrize(
  "never", [{"tau": 1.0}, {"tau": 2.0}, {"block": 1}, {"tau": 1.0, "per": "query_head"}]
)
def test_that_never_shares_is_exact_top_k(never):
  """The same query again and again, and every step takes the heaviest tokens of the middle."""
  stream = Stream.random(3, kv_heads=2, groups=1, tokens=50)
  stream.q[:] = stream.q[:, :, :, :1]
  method = CIS(k=5, sinks=2, local=3, **{"block": 8, **never})
  assert follow(method, stream, [20, 6], 20).all()


@pytest.mark.slow
def test_rounding_shares_nothing_at_tau_1():
  """The cosine of a query and itself may come out above 1."""
  stream = Stream.random(3, kv_heads=16, groups=1, tokens=30)
  stream.q[:] = stream.q[:, :, :, :1]
  still = Env(4, Rope(scaling=Linear(1e30)))
  layer = begun(CIS(k=5, sinks=2, local=3, block=8, tau=1.0), stream, [20, 6], env=still)
  for step in range(4):
    assert layer.decode([20 + step, 6 + step])[1]["retrieved"].all()


@pytest.mark.slow
def test_equal_weights_go_to_the_lowest_position():
  stream = Stream.random(4, batch=1, kv_heads=2, tokens=20)
  stream.k[:] = 0
  layer = Planned(CIS(k=4, sinks=1, local=2, block=1), stream)
  layer.prefill([15])
  table, count, _ = layer.plan([15])
  assert table[0, :, : count[0, 0]].tolist() == [[0, 15, 14, 1, 2, 3, 4]] * 2


def test_rows_count_their_own_steps():
  """A row that was idle goes on where it stood: a block is s steps of its own."""
  stream = Stream.random(6, kv_heads=1, groups=1, tokens=40)
  stream.q[:] = np.where(np.arange(16) % 8 > 4, 1.0, 0.0)
  layer = Planned(CIS(k=4, sinks=1, local=2, block=3), stream)
  layer.prefill([10, 12])
  at, retrieved = np.array([10, 12]), ([], [])
  for step in range(18):
    live = np.array([True, step % 3 == 0])
    _, aux = layer.decode(at, live)
    for b in range(2):
      if live[b]:
        retrieved[b].append(bool(aux["retrieved"][b, 0]))
    at += live
  assert retrieved == ([True, False, False] * 6, [True, False, False] * 2)


@pytest.mark.slow
def test_a_further_turn_begins_a_block():
  stream = Stream.random(7, kv_heads=1, groups=1, tokens=40)
  stream.q[:] = np.where(np.arange(16) % 8 > 4, 1.0, 0.0)
  layer = Planned(CIS(k=4, sinks=1, local=2, block=8), stream)
  layer.prefill([10, 12])
  assert layer.decode([10, 12])[1]["retrieved"].all()
  layer.prefill([5, 0], [11, 13], past=None)
  _, aux = layer.decode([16, 13])
  assert aux["retrieved"][:, 0].tolist() == [True, False]


def test_distinct():
  table = jnp.array([[[5, 3, -1, 5, 0, 3, 7, -1]]])
  out, count = jax.jit(distinct)(table)
  assert out[0, 0].tolist() == [5, 3, 0, 7, -1, -1, -1, -1] and int(count[0, 0]) == 4


def test_presets():
  """§V-B and §V-C; CIS* retrieves less."""
  small, large = CIS.preset(128, block=8), CIS.preset(512)
  assert (small.k, small.sinks, small.local, small.block) == (88, 8, 32, 8)
  assert small.k + small.sinks + small.local == 128
  assert large == CIS() and large.k + large.sinks + large.local == 512
  assert (large.tau, large.radius, large._dilated) == (0.8, 1, 144)
  assert CIS.preset(128, matched=True).k == 72 and CIS.preset(512, matched=True).k == 388
  with pytest.raises(ValueError, match=r"budget: found 100, expected one of \[128, 512\]"):
    CIS.preset(100)
