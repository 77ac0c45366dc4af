"""InfLLM against a NumPy float64 oracle: blocks retrieved, device copies, outputs."""

import pytest

from kvjax import InfLLM
from kvjax.testing.layer import Stream, rotate
from tests.streams import Oracle, Stack, generation, read


class InfOracle(Oracle):
  copies = True

  def vectors(self, block):
    """Per KV head the keys that most was given to."""
    return [
      [self.k[h, j] for j in sorted(self.tokens(block), key=lambda j: (-self.votes(h, j), j))][
        : self.m.representatives
      ]
      for h in range(self.heads)
    ]

  def wants(self, chunk, votes, prompt):
    def score(block):
      return sum(
        rotate(self.q[h, g, t], self.m.local) @ key
        for h in range(self.heads)
        for g in range(self.groups)
        for t in chunk
        for key in self.gone[block][h]
      )

    return sorted(range(len(self.gone)), key=lambda b: (-score(b), b))[: self.m.retrieved]


@pytest.mark.core(1)
@pytest.mark.parametrize("impl", ["reference", "pallas"])
@pytest.mark.parametrize(
  ("m", "lengths", "cap"),
  [
    (InfLLM(3, 6, 4, 2, chunk=8, held=3, representatives=2), [30, 13], None),
    (InfLLM(3, 6, 4, 2, chunk=8, held=3, representatives=2), [30, 13], 2.0),
    (InfLLM(0, 5, 2, 3, chunk=5, held=3, representatives=1), [21, 17], None),
  ],
)
def test_a_generation(m, lengths, cap, impl):
  """Prompts in chunks, then steps beyond several evictions; ragged rows, three query heads each."""
  stream = Stream.random(1, tokens=60, head_dim=8)
  run = Stack(m, [stream], impl=impl, cap=cap)
  oracles = [[InfOracle(stream, b, m, cap)] for b in range(2)]
  generation(run, oracles, lengths, 12, atol=1e-5)
  assert all(len(oracle.gone) > m.retrieved for (oracle,) in oracles)


@pytest.mark.slow
def test_a_turn_that_is_longer_than_all_before():
  """Its last queries ask as its first ones do, from twice as far."""
  m, start = InfLLM(3, 6, 4, 2, chunk=40, held=3, representatives=2), [30, 37]
  stream = Stream.random(1, tokens=80, head_dim=8)
  run = Stack(m, [stream])
  oracles = [[InfOracle(stream, b, m)] for b in range(2)]
  for count in (start, [40, 38]):
    read(run, oracles, count)
    assert all(run.retrieved(0, b) == oracle.kept for b, (oracle,) in enumerate(oracles))
  assert all(oracle.kept for (oracle,) in oracles)


def test_kernels_that_do_not_do_it_say_so():
  m, stream = InfLLM(2, 4, 2, 2, chunk=6, held=2), Stream.random(2, tokens=30)
  with pytest.raises(NotImplementedError, match="InfLLM attends to slots in no order; 'cudnn'"):
    Stack(m, [stream], impl="cudnn").prefill([6, 6], [0, 0], 6)
