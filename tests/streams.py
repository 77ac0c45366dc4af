"""Layers run one above the other, and the oracle of those that stream: NumPy float64, loops."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import Carry, Env, Prompt
from kvjax.testing.layer import Stream, capped, driver, rotate
from tests.oracles import softmax


class Stack:
  """Layers of one model, each fed with a stream of its own; the carry goes up through them.

  Layers that the method calls alike share a program, as in `models/decode/by_layer.py`.
  """

  def __init__(self, method, streams, capacity=96, impl="reference", cap=None):
    self.streams, self.method = streams, method
    self.spec = streams[0].spec(capacity, layers=len(streams))
    self.env = Env(len(streams), impl=impl, tile=4, soft_cap=cap)
    self.caches = method.init_caches(self.spec)
    stream, layers = method.traits.stream, range(len(streams))
    sites = [method.at(self.env, stream.alike(i) if stream else i) for i in layers]
    self._prefill = [driver(at, "prefill") for at in sites]
    self._decode = [driver(at, "decode_step") for at in sites]

  def prefill(self, count, start=None, width=None):
    """The next `count` tokens of every row, from its `start` on; outputs of all layers."""
    valid, width = jnp.asarray(count, jnp.int32), width or max(count)
    prompt = Prompt(valid, valid, None, width, 0 if start is None else None)
    start = [0] * len(count) if start is None else start
    carry, caches, outs = Carry(), [], []
    for run, stream, cache in zip(self._prefill, self.streams, self.caches, strict=True):
      cut = columns(stream, [range(n, n + width) for n in start])
      _, (out, cache, carry, _) = run(cache, *cut, prompt, carry)
      caches.append(cache)
      outs.append(np.asarray(out))
    self.caches = self.method.conclude(self.env, tuple(caches), valid)
    return outs

  def decode(self, at):
    """Outputs and reports of all layers."""
    carry, caches, found, live = Carry(), [], [], jnp.ones(len(at), bool)
    for run, stream, cache in zip(self._decode, self.streams, self.caches, strict=True):
      _, (out, cache, carry, aux) = run(cache, *columns(stream, at), live, carry)
      caches.append(cache)
      found.append((np.asarray(out), jax.tree.map(np.asarray, aux)))
    self.caches = tuple(caches)
    return found

  def retrieved(self, layer, row):
    """Blocks that a row has retrieved, best first."""
    rows = jax.tree.map(np.asarray, self.caches[layer].rows)
    kept = rows["kept"][row]
    return rows["held"][row][kept[kept >= 0]].tolist()


def columns(stream, tokens):
  """q, k and v of each row's tokens; after the end of the stream the last one."""
  return [
    np.stack([np.take(x[b], t, -2, mode="clip") for b, t in enumerate(tokens)])
    for x in (stream.q, stream.k, stream.v)
  ]


class Oracle:
  """One row of one layer: everything that was ever attended to is kept in dictionaries.

  Subclasses say what stands for a block (`vectors`), how a chunk ranks blocks (`wants`), and
  whether it is known which blocks the device has copies of (`copies`).
  """

  copies = False

  def __init__(self, stream, b, m, cap=None):
    self.m, self.n, self.cap = m, 0, cap
    self.q, self.k, self.v = (np.float64(x[b]) for x in (stream.q, stream.k, stream.v))
    self.heads, self.groups = self.q.shape[:2]
    self.gone: list = []  # what stands for each evicted block
    self.given: dict = {}  # (KV head, query head of its group, query, key) -> probability
    self.held: list = [(None, -1)] * m.held  # block, when it was last used
    self.kept: list = []

  def tokens(self, block):
    start = self.m.init_tokens + block * self.m.block
    return range(start, start + self.m.block)

  def first(self):
    return self.tokens(len(self.gone))[0] if self.gone else 0

  def attend(self, t, near, far):
    """Outputs [K, G, H] of the query at t; what it gives to near keys is remembered."""
    out = np.zeros(self.q.shape[:2] + self.q.shape[3:])
    for h in range(self.heads):
      for g in range(self.groups):
        q = self.q[h, g, t]
        here, there = rotate(q, t), rotate(q, self.m.local)
        x = [here @ rotate(self.k[h, j], j) for j in near]
        x += [there @ self.k[h, j] for j in far]
        p = softmax(capped(np.array(x) / np.sqrt(len(q)), self.cap))
        out[h, g] = p @ self.v[h, [*near, *far]]
        for j, share in zip(near, p, strict=False):
          self.given[h, g, t, j] = share
    return out

  def far(self):
    if not self.gone:
      return []
    return [*range(self.m.init_tokens), *(j for b in self.kept for j in self.tokens(b))]

  def read(self, count, votes=None):
    """A chunk; returns outputs [T, K, G, H]."""
    chunk = range(self.n, self.n + count)
    self.retrieve(chunk, votes, prompt=True)
    first, far = self.first(), self.far()
    outs = [self.attend(t, range(first, t + 1), far) for t in chunk]
    self.n += count
    self.leave()
    return np.array(outs)

  def step(self, votes=None):
    t = self.n
    self.retrieve([t], votes, prompt=False)
    out = self.attend(t, range(self.first(), t + 1), self.far())
    self.n += 1
    self.leave()
    return out

  def retrieve(self, chunk, votes, prompt):
    wanted = self.wants(chunk, votes, prompt)
    if wanted is None:
      return
    self.kept = wanted
    stamp = self.n + (not prompt)
    hits = {i for i, (block, _) in enumerate(self.held) if block in wanted}
    free = sorted(
      (i for i in range(len(self.held)) if i not in hits), key=lambda i: self.held[i][1]
    )
    for block in wanted:
      place = next((i for i in hits if self.held[i][0] == block), None)
      place = free.pop(0) if place is None else place
      self.held[place] = (block, stamp)

  def leave(self):
    while self.n - self.m.local - self.m.init_tokens >= (len(self.gone) + 1) * self.m.block:
      self.gone.append(self.vectors(len(self.gone)))

  def votes(self, h, j):
    """What all queries so far gave to a key (of one KV head, or of all)."""
    heads = [(i, g) for i in (range(self.heads) if h is None else [h]) for g in range(self.groups)]
    return sum(self.given.get((*i, t, j), 0.0) for i in heads for t in range(self.n))


def read(run, oracles, count, atol=2e-5):
  """A piece of each row's prompt, and outputs of every token beside those of oracles[b][layer]."""
  outs = run.prefill(count, [row[0].n for row in oracles], run.method.chunk)
  for b, row in enumerate(oracles):
    votes: dict = {}
    for oracle, out in zip(row, outs, strict=True) if count[b] else ():
      want = oracle.read(count[b], votes)
      np.testing.assert_allclose(np.moveaxis(out[b], 2, 0)[: count[b]], want, atol=atol)


def generation(run, oracles, lengths, steps, atol=2e-5):
  """Prompts in pieces, and steps: outputs, and which blocks each layer and row retrieves.

  Returns the layer and number of every block that a prompt retrieved.
  """
  m, retrieved = run.method, set()
  for count in itertools.zip_longest(*map(m.traits.pieces, lengths), fillvalue=0):
    read(run, oracles, count, atol)
    for b in np.flatnonzero(count):
      row = oracles[b]
      retrieved |= {(layer, block) for layer, oracle in enumerate(row) for block in oracle.kept}
      for layer, oracle in enumerate(row):
        if getattr(m, "from_top", False) and oracle.n == lengths[b]:
          oracle.kept = row[-1].kept
        assert run.retrieved(layer, b) == oracle.kept, (b, layer)
        if oracle.copies:
          held = run.caches[layer].rows["held"][b].tolist()
          assert held == [-1 if block is None else block for block, _ in oracle.held]
  for step in range(steps):
    found = run.decode([row[0].n for row in oracles])
    for b, row in enumerate(oracles):
      votes: dict = {}
      for oracle, (out, aux) in zip(row, found, strict=True):
        np.testing.assert_allclose(out[b], oracle.step(votes), atol=atol)
        blocks = aux["retrieved"][b]
        assert blocks[blocks >= 0].tolist() == oracle.kept, (b, step)
  return retrieved


def similar_streams(seed, layers, tokens):
  """Layers and heads that resemble one another in part, as those of a model do."""
  sizes = {"kv_heads": 4, "groups": 3, "tokens": tokens, "head_dim": 8}
  base = Stream.random(seed, **sizes)
  own = [Stream.random(seed + 1 + i, **sizes) for i in range(layers)]

  def mixed(a, b):
    common = a.mean(1, keepdims=True) * 2
    return (common + 0.6 * a + 0.6 * b).astype(np.float32)

  return [Stream(mixed(base.q, x.q), mixed(base.k, x.k), x.v) for x in own]
