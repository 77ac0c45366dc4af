"""StreamingLLM against a NumPy oracle: kept positions, slot positions, outputs over long runs."""

import numpy as np
import pytest

from kvjax import StreamingLLM
from kvjax.methods.streaming_llm import StreamingLLMByTurn
from kvjax.testing.layer import Layer, Stream
from tests.oracles import attend, follow, read_prompt


def positions(t, budget, sinks):
  """Those kept when token t attends."""
  return [j for j in range(t + 1) if j < sinks or j > t - (budget - sinks)]


# Where keys of a list are rotated to, of caches as lists.
PLACES = {"slot": lambda kept: list(range(len(kept))), "original": None}


@pytest.mark.core(1)
@pytest.mark.parametrize("rope", ["slot", "original"])
@pytest.mark.parametrize(("sinks", "budget"), [(2, 9), (0, 5), (4, 24)])
def test_prompt_then_long_decode(rope, sinks, budget):
  stream = Stream.random(1, tokens=90)
  layer, lengths = Layer(StreamingLLM(budget, sinks, rope), stream, capacity=90), [23, 6]
  how = {"atol": 3e-6, "places": PLACES[rope]}
  read_prompt(layer, lengths, lambda b, h, t: positions(t, budget, sinks), **how)
  follow(layer, lengths, 60, lambda b, h, t: positions(t, budget, sinks), **how)


@pytest.mark.parametrize("rope", ["slot", pytest.param("original", marks=pytest.mark.slow)])
def test_the_repository_evicts_between_turns(rope):
  """Lists again: room is made before a turn, and within it everything cached is seen."""
  method = StreamingLLMByTurn(20, sinks=2, rope=rope, reserve=4)
  stream = Stream.random(4, tokens=60)
  layer = Layer(method, stream, capacity=60)
  kept, at, more = [[], []], [0, 0], [0, 0]

  def expect(out, t, b):
    """Token t of row b attended to what is kept up to it."""
    seen = [j for j in kept[b] if j <= t]
    places = PLACES[rope] and PLACES[rope](seen)
    for h in range(3):
      np.testing.assert_allclose(out[h], attend(stream, b, h, t, seen, places=places), atol=3e-6)

  for turn in ([13, 3], [5, 6], [4, 0], [7, 12]):
    out = layer.prefill(turn, start=at, tokens=14, past=None, total=turn)
    for b, n in enumerate(turn):
      if n and len(kept[b]) + n + 4 > 20:
        kept[b] = kept[b][:2] + kept[b][2:][max(0, len(kept[b]) - 2 - (20 - 2 - n - 4)) :]
      kept[b] += range(at[b], at[b] + n)
      for i in range(n):
        expect(out[b, :, :, i], at[b] + i, b)
      at[b] += n
    for _ in range(3):
      out, _ = layer.decode(at)
      for b in range(2):
        kept[b].append(at[b])
        pos = np.asarray(layer.cache.pos)[b]
        assert all(sorted(row[row >= 0].tolist()) == kept[b] for row in pos)
        expect(out[b], at[b], b)
        at[b] += 1
    more = [max(a, len(row)) for a, row in zip(more, kept, strict=True)]
  assert min(more) >= 16 and at[1] > 20  # there was something to evict
