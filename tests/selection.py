"""What tests of selection methods share: which slots a step read, and a generation to check."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from kvjax import Env, Wrapper
from kvjax.testing.layer import Layer
from tests.oracles import attend


@dataclasses.dataclass(frozen=True)
class Watched(Wrapper):
  """Reports the slots that each step attended to, in visiting order (−1 = none)."""

  def observe(self, at, cache, q, plan, attended):
    cache, aux = self.base.observe(at, cache, q, plan, attended)
    ok = ~jnp.isneginf(attended.logits[:, :, 0])
    return cache, {**aux, "slots": jnp.where(ok, attended.slot, -1)}


def choose(scores, sinks, local, k):
  """Tiles in the order of a plan: first ones, newest ones from the newest on, best of the rest.

  `scores` has one entry per tile that holds a token.
  """
  count = len(scores)
  first = list(range(min(sinks, count)))
  last = [j for j in range(count - 1, count - 1 - local, -1) if j >= sinks]
  rest = [j for j in range(count) if j not in first and j not in last]
  rest.sort(key=lambda j: (-scores[j], j))
  return first + last + rest[:k]


def tokens_of(tiles, unit, seen):
  """Positions of the tokens in tiles of `unit`, in order."""
  return [p for j in tiles for p in range(j * unit, min((j + 1) * unit, seen))]


def check(method, stream, lengths, steps, oracle, layer=2, prepare=None, cap=None):
  """A whole generation against `oracle(b, h, t)`, the positions read at token t, in order.

  Order, sets and outputs of every row, head and step; rows have prompts of different lengths.
  """
  env = Env(4, impl="reference", tile=4, soft_cap=cap)
  run = Layer(Watched(method), stream, capacity=max(lengths) + steps, layer=layer, env=env)
  if prepare:
    run.cache = prepare(run.cache)
  run.prefill(lengths)
  for step in range(steps):
    at = [n + step for n in lengths]
    out, aux = run.decode(at)
    for b, t in enumerate(at):
      for h in range(stream.k.shape[1]):
        want = oracle(b, h, t)
        slots = np.asarray(aux["slots"][b, h])
        assert slots[slots >= 0].tolist() == want, (b, h, t)
        assert aux["visited"][b, h] == len(want)
        exact = attend(stream, b, h, t, want, cap)
        np.testing.assert_allclose(out[b, h], exact, atol=5e-6)
  return run
