"""VATP against a NumPy float64 oracle: probability times value norm, first tokens kept."""

import numpy as np

from kvjax import VATP
from kvjax.testing.layer import Stream
from tests.gathered import Gathered
from tests.oracles import begun, follow


class Weighted(Gathered):
  """H2O's lists, evicting by mass × ‖v‖₁ and sparing the first tokens."""

  sinks = 2

  def cut(self, newest):
    norm = np.abs(np.float64(self.stream.v[self.b, self.h])).sum(-1)
    while len(self.mass) > self.budget:
      old = [j for j in self.mass if self.sinks <= j <= newest - self.recent]
      del self.mass[min(old, key=lambda j: (self.mass[j] * norm[j], j))]


def test_worked_example():
  """Equal keys, one tiny value: its token leaves although it gathered more than the next."""
  stream = Stream.random(0, batch=1, kv_heads=1, groups=1, tokens=6)
  stream.k[:], stream.v[:] = 0, 1
  stream.v[0, 0, 1] = 0.01
  layer = begun(VATP(budget=4, recent=2, sinks=1), stream, [6])
  assert layer.cache.pos[0, 0].tolist() == [0, 2, 4, 5]


def test_kept_sets_over_a_generation():
  budget, recent, lengths = 12, 4, [21, 6]
  stream = Stream.random(1, kv_heads=2, tokens=90)
  layer = begun(VATP(budget, recent, sinks=2), stream, lengths, capacity=90)
  lists = Weighted.of(stream, lengths, budget, recent)

  def kept(b, h, t):
    lists[b, h].step(t)
    return lists[b, h].mass

  follow(layer, lengths, 60, kept)
