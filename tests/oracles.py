"""Attention over a stream's tokens in NumPy float64, and generations beside lists of positions."""

import dataclasses

import numpy as np

from kvjax import Env, PromptScored
from kvjax.testing.layer import Layer, capped, rotate


@dataclasses.dataclass(frozen=True)
class ByValue(PromptScored):
  """A token scores the first channel of its value, which tests set."""

  def score(self, at, turn, past):
    return turn.staged["v"][..., 0]


def queries(stream, b, h, t, place=None):
  """Rotated queries of a group, float64 [G, H]; at another place than t if one is given."""
  return rotate(stream.q[b, h, :, t], t if place is None else place)


def keys(stream, b, h, positions, places=None):
  """Rotated keys, float64 [n, H]."""
  positions = np.asarray(positions, int)
  return rotate(stream.k[b, h, positions], positions if places is None else places)


def softmax(x):
  """Along the last axis."""
  w = np.exp(x - np.max(x, -1, keepdims=True))
  return w / w.sum(-1, keepdims=True)


def logits(stream, b, h, t, positions, cap=None, places=None):
  """Logits of token t over some positions, float64 [G, n]; it stands at the last of `places`."""
  q = queries(stream, b, h, t, None if places is None else places[-1])
  x = keys(stream, b, h, positions, places) @ q.T / np.sqrt(q.shape[1])
  return capped(x.T, cap)


def probabilities(stream, b, h, t, positions, cap=None):
  """Softmax of the logits, float64 [G, n]."""
  return softmax(logits(stream, b, h, t, positions, cap))


def attend(stream, b, h, t, positions, cap=None, places=None):
  """Exact attention of token t over some positions, under a soft cap, float64 [G, H]."""
  v = np.float64(stream.v[b, h, np.asarray(positions, int)])
  return softmax(logits(stream, b, h, t, positions, cap, places)) @ v


def window_mass(stream, b, h, held, n, window):
  """Probability that the last ones of n tokens give to each held before them, mean over a group."""
  past = [j for j in held if j < n - window]
  mass = np.zeros(len(past))
  for t in range(max(0, n - window), n):
    seen = [j for j in held if j <= t]
    mass += probabilities(stream, b, h, t, seen).mean(0)[: len(past)]
  return mass


def pooled(mass, width, reduce="avg"):
  """Mean or maximum over `width` neighbours; outside of the mass there is 0."""
  near = np.pad(mass, width // 2)
  reduce = np.mean if reduce == "avg" else np.max
  return [reduce(near[i : i + width]) for i in range(len(mass))]


def held(cache, b, h):
  """Positions in a head's slots, in order."""
  pos = np.asarray(cache.pos)[b, h]
  return sorted(pos[pos >= 0].tolist())


def begun(method, stream, lengths, **how):
  """A layer that has read a prompt of each row."""
  layer = Layer(method, stream, **how)
  layer.prefill(lengths)
  return layer


def read_prompt(layer, lengths, seen, atol=3e-6, places=None):
  """A prompt each of whose tokens t attends to seen(b, h, t), in every head."""
  out = layer.prefill(lengths)
  for b, n in enumerate(lengths):
    for h, t in np.ndindex(out.shape[1], n):
      at = seen(b, h, t)
      want = attend(layer.stream, b, h, t, at, places=places and places(at))
      np.testing.assert_allclose(out[b, h, :, t], want, atol=atol)


def generation(method, stream, lengths, steps, prompt, step, atol=5e-6, cap=None, holds=held):
  """A prompt of which each head keeps the list prompt(b, h, n), and steps that change the list.

  step(kept, b, h, t) puts token t into it, for which another one may have to leave.
  """
  env = Env(4, impl="reference", tile=4, soft_cap=cap)
  layer = begun(method, stream, lengths, capacity=stream.k.shape[2], env=env)
  heads = range(stream.k.shape[1])
  lists = {(b, h): prompt(b, h, n) for b, n in enumerate(lengths) for h in heads}
  for at, kept in lists.items():
    assert holds(layer.cache, *at) == sorted(kept)

  def changed(b, h, t):
    step(lists[b, h], b, h, t)
    return lists[b, h]

  follow(layer, lengths, steps, changed, atol=atol, cap=cap, holds=holds)


def in_turn(budget, stay):
  """Steps for which the oldest token leaves that is not in stay[b, h], once `budget` are held."""

  def step(kept, b, h, t):
    if len(kept) == budget:
      kept.remove(min(set(kept).difference(stay[b, h])))
    kept.append(t)

  return step


def further_turn(method, stream, lengths, steps, more):
  """A prompt, steps, and a turn of `more` tokens, which is cut with what was held.

  Yields row, head, the positions held and new, how many tokens were seen, and what is held then.
  """
  layer = begun(method, stream, lengths, capacity=stream.k.shape[2])
  for step in range(steps):
    layer.decode([n + step for n in lengths])
  start = [n + steps for n in lengths]
  before = {at: held(layer.cache, *at) for at in np.ndindex(stream.k.shape[:2])}
  layer.prefill(more, start=start, past=None)
  for (b, h), past in before.items():
    seen = start[b] + more[b]
    yield b, h, [*past, *range(start[b], seen)], seen, held(layer.cache, b, h)


def follow(layer, lengths, steps, kept, attends=None, atol=5e-6, cap=None, places=None, holds=held):
  """Steps after a prompt, each of which holds the positions kept(b, h, t) and attends to them.

  It is asked after a step, row by row and head by head; outputs are compared in every query head.

  Args:
    attends: (b, h, t) -> positions attended to, where these are not all that are kept.
    places: positions -> where keys are rotated to, the query where the last of them is.
    holds: (cache, b, h) -> positions that a head's slots hold, in order.
  """
  for step in range(steps):
    at = [n + step for n in lengths]
    out, aux = layer.decode(at)
    for b, h in np.ndindex(out.shape[:2]):
      want = sorted(kept(b, h, at[b]))
      assert holds(layer.cache, b, h) == want, (b, h, step)
      want = attends(b, h, at[b]) if attends else want
      assert aux["visited"][b, h] == len(want)
      exact = attend(layer.stream, b, h, at[b], want, cap, places and places(want))
      np.testing.assert_allclose(out[b, h], exact, atol=atol)
