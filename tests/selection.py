"""What tests of selection methods share: which slots a step read, and a generation to check."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from kvjax import Env, Wrapper
from kvjax.testing.layer import Layer, capped
from tests.oracles import attend, keys, queries, softmax


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


def page_bounds(stream, b, h, t, page, group="mean", outward=lambda low, high: (low, high)):
  """Quest's bound Σ_d max(q_d·min_d, q_d·max_d) of every page of the tokens 0 … t."""
  heads = queries(stream, b, h, t)
  heads = heads.mean(0, keepdims=True) if group == "mean" else heads
  pages = [keys(stream, b, h, range(j, min(j + page, t + 1))) for j in range(0, t + 1, page)]
  found = [outward(k.min(0), k.max(0)) for k in pages]
  return [np.maximum(heads * low, heads * high).sum(-1).max() for low, high in found]


def block_scores(stream, b, h, t, m, cap=None):
  """InfLLM-v2's score of every block: the best of the compressed keys that overlap it."""
  scores, q = [0.0] * -(-(t + 1) // m.block), queries(stream, b, h, t)
  windows = [range(s, s + m.kernel) for s in range(0, t - m.kernel + 1, m.stride)]
  if windows:  # those before token t are known
    compressed = np.array([keys(stream, b, h, w).mean(0) for w in windows])
    p = softmax(capped(q @ compressed.T / np.sqrt(q.shape[1]), cap)).sum(0)
    for x, window in zip(p, windows, strict=True):
      for j in {i // m.block for i in window}:
        scores[j] = max(scores[j], x)
  return scores


def read(aux, b, h):
  """Slots that a head has read, in order, as `Watched` reports them."""
  slots = np.asarray(aux["slots"][b, h])
  return slots[slots >= 0].tolist()


def check(
  method, stream, lengths, steps, oracle, layer=2, prepare=None, cap=None, alone=None, ordered=True
):
  """A whole generation against `oracle(b, h, t)`, the slots read at token t, in order.

  Order, sets and outputs of every row, head and step; rows have prompts of different lengths.

  Args:
    alone: a layer of what keeps the tokens, for the oracle; it is a step ahead, and keeps the same.
    ordered: whether slots are read in the oracle's order.
  """
  env = Env(4, impl="reference", tile=4, soft_cap=cap)
  run = Layer(Watched(method), stream, capacity=max(lengths) + steps, layer=layer, env=env)
  if prepare:
    run.cache = prepare(run.cache)
  layers = [run] if alone is None else [alone, run]
  for each in layers:
    each.prefill(lengths)
  for step in range(steps):
    at = [n + step for n in lengths]
    out, aux = [each.decode(at) for each in layers][-1]
    pos = [np.asarray(each.cache.pos) for each in layers]
    np.testing.assert_array_equal(pos[0], pos[-1])
    for b, h in np.ndindex(pos[0].shape[:2]):
      want, found = oracle(b, h, at[b]), read(aux, b, h)
      assert (found if ordered else sorted(found)) == want, (b, h, step)
      assert aux["visited"][b, h] == len(want)
      exact = attend(stream, b, h, at[b], pos[0][b, h, want], cap)
      np.testing.assert_allclose(out[b, h], exact, atol=5e-6)
  return run
