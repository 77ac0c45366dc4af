"""LongFlow against a NumPy float64 oracle: victims and outputs over a long run, huge logits."""

import numpy as np
import pytest

from kvjax import LongFlow, SnapKV
from kvjax.testing.layer import Layer, Stream
from tests.oracles import begun, follow, logits


def contribution(stream, b, h, t, kept):
  """Σ_g α_g·‖v‖₁ of every kept token, in logarithms."""
  x = logits(stream, b, h, t, kept)
  most = x.max(-1, keepdims=True)
  share = x - most - np.log(np.exp(x - most).sum(-1, keepdims=True))
  return np.logaddexp.reduce(share) + np.log(np.abs(np.float64(stream.v[b, h, kept])).sum(-1))


def test_worked_example():
  """Equal keys: the victim is the token of the smallest value, not the newest one."""
  stream = Stream.random(0, batch=1, kv_heads=1, groups=1, tokens=5, head_dim=2)
  stream.k[:] = 0
  stream.v[0, 0] = [[4, 4], [1, 0], [3, 3], [0.1, 0], [9, 9]]
  layer = begun(LongFlow(budget=4, window_size=1), stream, [3])
  layer.decode([3])
  assert int(layer.cache.heads["victim"][0, 0]) == 1  # 3 is smaller, and the newest
  layer.decode([4])
  assert layer.cache.pos[0, 0].tolist() == [0, 4, 2, 3]


@pytest.mark.core(1)
@pytest.mark.parametrize("per", ["kv_head", "layer"])
def test_victims_and_outputs_over_a_run(per):
  budget, lengths = 12, [9, 4]
  stream = Stream.random(1, kv_heads=2, tokens=330)
  layer = begun(LongFlow(budget, window_size=2, per=per), stream, lengths, capacity=330)
  lists = {(b, h): list(range(n)) for b, n in enumerate(lengths) for h in range(2)}
  scores = {}

  def kept(b, h, t):
    mine = lists[b, h]
    if len(mine) == budget:
      score = np.logaddexp(scores[b, 0], scores[b, 1]) if per == "layer" else scores[b, h]
      del mine[int(np.argmin(score[:-1]))]  # the newest stands last
    mine.append(t)
    return mine

  for step in range(310):
    at = [n + step for n in lengths]
    follow(layer, at, 1, kept, atol=2e-5)  # float32 angles of 320 radians
    for b, h in lists:
      scores[b, h] = contribution(stream, b, h, at[b], lists[b, h])


@pytest.mark.slow
def test_a_long_prompt_is_cut_as_snapkv_does():
  """To budget − 1 tokens in effect: the one that was ranked last makes room for the first."""
  stream, lengths = Stream.random(2, tokens=60), [40, 22]
  layer, cut = (Layer(m(10, window_size=3), stream) for m in (LongFlow, SnapKV))
  layer.prefill(lengths)
  cut.prefill(lengths)
  score = np.asarray(cut.cache.slots["score"])
  before = np.asarray(layer.cache.pos)
  np.testing.assert_array_equal(before, cut.cache.pos)
  layer.decode(lengths)
  after = np.asarray(layer.cache.pos)
  for b in range(2):
    for h in range(3):
      gone = set(before[b, h].tolist()) - set(after[b, h].tolist())
      assert gone == {int(before[b, h, np.argmin(score[b, h])])}


@pytest.mark.parametrize("scale", [1e2, 1e4])
def test_huge_logits_stay_finite(scale):
  stream = Stream.random(3, tokens=60)
  stream.q[:] *= scale
  layer = begun(LongFlow(8, window_size=2), stream, [20, 7])
  for step in range(30):
    out, _ = layer.decode([20 + step, 7 + step])
    assert np.isfinite(out).all()
    victim = np.asarray(layer.cache.heads["victim"])
    newest = np.asarray(layer.cache.pos).max(-1)
    named = np.take_along_axis(np.asarray(layer.cache.pos), victim[..., None], 2)[..., 0]
    assert (named >= 0).all() and (named < newest).all()


def test_protected_tokens_stay():
  stream = Stream.random(4, tokens=70)
  layer = begun(LongFlow(10, window_size=2, sinks=2, recent=4), stream, [25, 6])
  for step in range(40):
    layer.decode([25 + step, 6 + step])
    for b, n in enumerate((25, 6)):
      for row in np.asarray(layer.cache.pos)[b]:
        t = n + step
        assert {0, 1} | set(range(max(0, t - 3), t + 1)) <= set(row.tolist())
