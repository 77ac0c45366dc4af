"""ChunkKV against a NumPy float64 oracle: chunks of all heads, their order, later turns."""

import numpy as np
import pytest

from kvjax import ChunkKV, LagKV, SnapKV
from kvjax.testing.layer import Stream
from tests.oracles import ByValue, begun, further_turn, generation, in_turn, pooled, window_mass


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
    layer = begun(ChunkKV(ByValue(room + 1, window_size=1), chunk=4), stream, [9])
    assert layer.cache.pos[0, 0].tolist() == [*want, 8]


@pytest.mark.core(1)
@pytest.mark.parametrize("chunk", [4, 1, 7])
def test_prompt_and_long_decode(chunk):
  """All heads keep the same tokens; a short chunk before the window counts by its mean."""
  method = ChunkKV(SnapKV(15, window_size=3, pool=3), chunk=chunk)
  stream, stay = Stream.random(1, tokens=60), {}

  def prompt(b, h, n):
    scores = [pooled(window_mass(stream, b, h, range(n), n, 3), 3) for h in range(3)]
    stay[b, h] = selected(scores, list(range(n - 3)), chunk, 12)
    return [*stay[b, h], *range(n - 3, n)]

  generation(method, stream, [36, 17], 20, prompt, in_turn(15, stay))


def test_keeps_what_kvpress_keeps():
  """kvpress 0.5.5's ChunkKVPress over the same scores, where chunks divide window and budget."""
  stream = Stream.random(7, batch=1, kv_heads=3, groups=1, tokens=36)
  layer = begun(ChunkKV(ByValue(20, window_size=8), chunk=4), stream, [36])
  want = [*range(4, 8), *range(12, 16), *range(24, 36)]
  assert np.asarray(layer.cache.pos)[0].tolist() == [want] * 3


@pytest.mark.slow
def test_a_second_turn_chunks_what_is_held():
  method = ChunkKV(ByValue(14, window_size=3), chunk=3)
  stream = Stream.random(3, tokens=60)
  for b, _, text, n, found in further_turn(method, stream, [30, 8], 4, [8, 13]):
    past = [j for j in text if j < n - 3]
    want = selected(stream.v[b, :, past, 0].T, past, 3, 11)
    assert found == sorted([*want, *range(n - 3, n)])


def test_over_a_base_whose_window_is_longer_than_it_says():
  """LagKV's last partition and remainder stay beside the chunks."""
  stream = Stream.random(4, tokens=40)
  layer = begun(ChunkKV(LagKV(20, window_size=5, sinks=2), chunk=4), stream, [38, 33])
  for b, n in enumerate((38, 33)):
    tail = 5 + (n - 2) % 5
    pos = np.asarray(layer.cache.pos)[b]
    assert (pos[:, -tail:] == np.arange(n - tail, n)).all()
    assert (pos[:, :4] == np.arange(4)).all()  # the sinks' chunk
    assert (pos == pos[0]).all()
