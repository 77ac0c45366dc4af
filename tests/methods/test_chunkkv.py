"""ChunkKV against a NumPy float64 oracle: chunks of all heads, their order, later turns."""

import dataclasses

import numpy as np
import pytest

from kvjax import H2O, ChunkKV, Full, LagKV, LongFlow, PromptScored, Quest, SnapKV
from kvjax.testing.layer import Layer, Stream
from tests.oracles import follow, held, pooled, window_mass


@dataclasses.dataclass(frozen=True)
class ByValue(PromptScored):
  """A token scores the first channel of its value."""

  def score(self, at, turn, past):
    return turn.staged["v"][..., 0]


def selected(scores, past, chunk, room):
  """The tokens of the best chunks, of heads' scores [K, n] of the tokens `past`."""
  starts = range(0, len(past), chunk)
  means = [sum(np.mean(row[i : i + chunk]) for row in np.asarray(scores)) for i in starts]
  best = sorted(range(len(means)), key=lambda i: (-means[i], i))
  tokens = [j for i in best for j in past[i * chunk : (i + 1) * chunk]]
  return tokens[:room]


def test_worked_example():
  """Means .3 and .4: the second of two chunks stays, though the best token is the first's."""
  stream = Stream.random(0, batch=1, kv_heads=1, groups=1, tokens=9)
  stream.v[0, 0, :, 0] = [0.1, 0.2, 0.9, 0, 0.4, 0.4, 0.4, 0.4, 5]
  for room, want in ((4, [4, 5, 6, 7]), (6, [0, 1, 4, 5, 6, 7])):
    layer = Layer(ChunkKV(ByValue(room + 1, window_size=1), chunk=4), stream)
    layer.prefill([9])
    assert layer.cache.pos[0, 0].tolist() == [*want, 8]


@pytest.mark.core(1)
@pytest.mark.parametrize("chunk", [4, 1, 7])
def test_prompt_and_long_decode(chunk):
  """All heads keep the same tokens; a short chunk before the window counts by its mean."""
  base = SnapKV(15, window_size=3, pool=3)
  stream, lengths = Stream.random(1, tokens=60), [36, 17]
  layer = Layer(ChunkKV(base, chunk=chunk), stream, capacity=60)
  layer.prefill(lengths)
  stay = []
  for b, n in enumerate(lengths):
    scores = [pooled(window_mass(stream, b, h, range(n), n, 3), 3) for h in range(3)]
    stay.append(selected(scores, list(range(n - 3)), chunk, 12))
    for h in range(3):
      assert held(layer.cache, b, h) == sorted([*stay[b], *range(n - 3, n)])
  follow(layer, lengths, 20, lambda b, h, t: [*stay[b], *range(t - 2, t + 1)])


def test_chunks_of_one_token_are_the_best_tokens_of_all_heads():
  stream = Stream.random(2, tokens=40)
  layer = Layer(ChunkKV(ByValue(11, window_size=2), chunk=1), stream)
  layer.prefill([40, 29])
  for b, n in enumerate((40, 29)):
    sums = np.float64(stream.v[b, :, : n - 2, 0]).sum(0)
    want = sorted(np.argsort(-sums)[:9].tolist()) + [n - 2, n - 1]
    assert (np.asarray(layer.cache.pos)[b] == want).all()


def test_keeps_what_kvpress_keeps():
  """kvpress 0.5.5's ChunkKVPress over the same scores, where chunks divide window and budget."""
  stream = Stream.random(7, batch=1, kv_heads=3, groups=1, tokens=36)
  layer = Layer(ChunkKV(ByValue(20, window_size=8), chunk=4), stream)
  layer.prefill([36])
  want = [*range(4, 8), *range(12, 16), *range(24, 36)]
  assert np.asarray(layer.cache.pos)[0].tolist() == [want] * 3


def test_a_second_turn_chunks_what_is_held():
  method = ChunkKV(ByValue(14, window_size=3), chunk=3)
  stream = Stream.random(3, tokens=60)
  layer = Layer(method, stream, capacity=60)
  layer.prefill([30, 8])
  for t in range(4):
    layer.decode([30 + t, 8 + t])
  before = [held(layer.cache, b, 0) for b in range(2)]
  layer.prefill([8, 13], start=[34, 12], past=None)
  for b, (start, n) in enumerate(((34, 42), (12, 25))):
    past = [j for j in [*before[b], *range(start, n)] if j < n - 3]
    want = selected(stream.v[b, :, past, 0].T, past, 3, 11)
    for h in range(3):
      assert held(layer.cache, b, h) == sorted([*want, *range(n - 3, n)])


def test_over_a_base_whose_window_is_longer_than_it_says():
  """LagKV's last partition and remainder stay beside the chunks."""
  stream = Stream.random(4, tokens=40)
  layer = Layer(ChunkKV(LagKV(20, window_size=5, sinks=2), chunk=4), stream)
  layer.prefill([38, 33])
  for b, n in enumerate((38, 33)):
    tail = 5 + (n - 2) % 5
    pos = np.asarray(layer.cache.pos)[b]
    assert (pos[:, -tail:] == np.arange(n - tail, n)).all()
    assert (pos[:, :4] == np.arange(4)).all()  # the sinks' chunk
    assert (pos == pos[0]).all()


@pytest.mark.parametrize("base", [Full(), H2O(64), Quest(base=SnapKV(64)), LongFlow(64)])
def test_other_bases_are_refused(base):
  with pytest.raises(ValueError, match=r"ChunkKV\.base: found .* a method that cuts a prompt by"):
    ChunkKV(base)
