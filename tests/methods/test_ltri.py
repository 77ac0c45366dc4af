"""Ltri-LLM against a NumPy float64 oracle: spans, vectors, votes of layers, blocks, outputs."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Carry, Env, InfLLM, Ltri, Prompt
from kvjax.families import leaving
from kvjax.families.retrieval import injected
from kvjax.methods.ltri.rates import calibrated_rate, measured_spans
from kvjax.ops import offload
from kvjax.programs.retrieval_heads import Asking
from kvjax.testing.layer import Stream, capped, rotate
from tests.oracles import softmax
from tests.slow_spans import slow_counts, slow_divide, slow_elect, slow_ratio
from tests.streams import Oracle, Stack, columns, generation, read


class LtriOracle(Oracle):
  def __init__(self, stream, b, m, layer, cap=None):
    super().__init__(stream, b, m, cap)
    self.layer = layer
    found = [(h, s) for at, h, s in m.heads or () if at == layer]
    self.head = found[0] if found else None
    self.inject: list = []

  @property
  def indexes(self):
    return self.m.heads is None or self.head is not None

  def of(self, values):
    return values[min(self.layer, len(values) - 1)]

  def spans(self, maps, votes):
    """Lists of tokens that stand for the spans of a block's maps, one map a query head."""
    m, a = self.m, np.sum(maps, 0)
    found = slow_divide(maps, self.of(m.quantile), self.of(m.overlap), m.spans)
    found = [(x, y) for x, y in found if y > x]
    lengths = [y - x for x, y in found]
    ratios = [slow_ratio(a, x, y, m.ratio) for x, y in found]
    counts = {
      "dynamic": slow_counts(lengths, ratios, self.of(m.rate), m.vectors),
      "static": [m.vectors // m.spans] * len(found),
      "mean": lengths,
    }[m.index]
    return [slow_elect(votes, x, y, n) for (x, y), n in zip(found, counts, strict=True)]

  def keys_of(self, j):
    """Per query head that counts the key of a token."""
    if self.head:
      return [self.k[self.head[0] // self.groups, j]]
    return [self.k[h, j] for h in range(self.heads) for _ in range(self.groups)]

  def queries_of(self, t):
    flat = [(h, g) for h in range(self.heads) for g in range(self.groups)]
    chosen = [flat[self.head[0]]] if self.head else flat
    return [rotate(self.q[h, g, t], self.m.local) for h, g in chosen]

  def vectors(self, block):
    """For every span the tokens that stand for it."""
    if not self.indexes:
      return []
    tokens = list(self.tokens(block))
    maps = np.zeros((self.heads, self.groups, len(tokens), len(tokens)))
    for h, g, i, j in np.ndindex(maps.shape):
      maps[h, g, i, j] = self.given.get((h, g, tokens[i], tokens[j]), 0.0)
    votes = [self.votes(None, j) for j in tokens]
    spans = self.spans(maps.reshape(-1, *maps.shape[2:]), votes)
    return [[tokens[i] for i in span] for span in spans]

  def asking(self, chunk):
    """The spans of a chunk's queries, each as the tokens that stand for it."""
    chunk, size, found = list(chunk), self.m.block, []
    p = np.zeros((self.heads * self.groups, len(chunk), len(chunk)))
    for h in range(self.heads):
      keys = [rotate(self.k[h, u], u) for u in chunk]
      for g in range(self.groups):
        for i, t in enumerate(chunk):
          q = rotate(self.q[h, g, t], t)
          x = [q @ key for key in keys[: i + 1]]
          x = capped(np.array(x) / np.sqrt(self.q.shape[-1]), self.cap)
          p[h * self.groups + g, i, : i + 1] = softmax(x)
    for start in range(0, len(chunk), size):
      part = slice(start, start + size)
      spans = self.spans(p[:, part, part], p.sum((0, 1))[part])
      found += [[chunk[start + i] for i in span] for span in spans]
    return found

  def by_head(self, ask, span):
    """Similarity of two spans under every head that counts."""
    pairs = [
      [q @ k for q, k in zip(self.queries_of(t), self.keys_of(j), strict=True)]
      for t in ask
      for j in span
    ]
    return np.mean(pairs, 0) if self.m.index == "mean" else np.sum(pairs, 0)

  def wants(self, chunk, votes, prompt):
    if not prompt and self.m.persistent:
      return None
    stored = range(len(self.gone))
    asking = (self.asking(chunk) if prompt else [list(chunk)]) if self.indexes else []

    def similarity(block):
      pairs = [sum(self.by_head(ask, span)) for span in self.gone[block] for ask in asking]
      return max(pairs, default=-np.inf)

    score = {b: similarity(b) for b in stored}
    able = [b for b in stored if score[b] > -np.inf]
    own = sorted(able, key=lambda b: (-score[b], b))[: self.m.retrieved]
    forced = [b for b in self.inject if b in stored]
    if not self.m.voting:
      chosen = own
    else:
      for rank, b in enumerate(own):
        part = 1 / (1 + rank) if self.m.ballot == "rank" else 1.0
        votes[b] = votes.get(b, 0.0) + part * (self.head[1] if self.head else 1.0)
      chosen = sorted(votes, key=lambda b: (-votes[b], -score[b], b))
    chosen = (sorted(forced) + [b for b in chosen if b not in forced])[: self.m.retrieved]
    near = [
      b for best in chosen[: self.m.beside] for b in (best, best - 1, best + 1) if b in stored
    ]
    return list(dict.fromkeys(near + chosen[self.m.beside :]))[: self.m.retrieved]


class Divided:
  """A module whose stores are on a host, or not."""

  def __init__(self, module, hosted):
    self.module, self.hosted = module, hosted

  def __getattr__(self, name):
    return (lambda: self.hosted) if name == "on_host" else getattr(self.module, name)


SMALL = {"init_tokens": 3, "local": 8, "block": 6, "retrieved": 2, "chunk": 12, "held": 3}
PIECES = {"spans": 2, "vectors": 4, "last": 5, "rate": (6.0, 2.0), "quantile": (0.7, 0.6)}
CASES = {
  "all heads": Ltri(**SMALL, **PIECES),
  "retrieval heads": Ltri(**SMALL, **PIECES, heads=((1, 4, 0.6), (2, 7, 0.3))),
  "no votes": Ltri(**SMALL, **PIECES, voting=False, ratio="col"),
  "not persistent": Ltri(**SMALL, **PIECES, persistent=False, ratio="rowcol"),
  "graded votes": Ltri(
    **SMALL,
    **PIECES,
    index="static",
    ballot="rank",
    heads=((0, 3, 0.53), (1, 8, 0.41), (2, 2, 0.7)),
  ),
  "blocks of the top layer": Ltri(
    **SMALL, **PIECES, index="mean", from_top=True, heads=((1, 4, 0.6), (2, 7, 0.3))
  ),
  "retrieval heads, not persistent": Ltri(
    **SMALL, **PIECES, persistent=False, heads=((0, 3, 0.5), (1, 8, 0.4))
  ),
  "neighbours": Ltri(
    **{**SMALL, "retrieved": 4, "held": 4}, **PIECES, beside=2, heads=((0, 4, 0.6), (1, 7, 0.3))
  ),
}


@pytest.mark.rest(3)
@pytest.mark.core(1)
@pytest.mark.parametrize(
  ("name", "impl", "cap"),
  [
    *((name, "reference", None) for name in CASES),
    *((name, "pallas", None) for name in ("retrieval heads", "blocks of the top layer")),
    ("all heads", "reference", 2.0),
    ("all heads", "pallas", 2.0),
  ],
)
def test_a_generation(name, impl, cap):
  """At every chunk and step the blocks of every layer and row, and outputs."""
  m, lengths = CASES[name], [50, 29]
  layers = max((layer for layer, *_ in m.heads or ()), default=1) + 1
  streams = [Stream.random(10 + i, tokens=80, head_dim=8) for i in range(layers)]
  run = Stack(m, streams, capacity=80, impl=impl, cap=cap)
  oracles = [[LtriOracle(s, b, m, i, cap) for i, s in enumerate(streams)] for b in range(2)]
  assert m.traits.pieces(50) == [12, 12, 12, 9, 5]
  retrieved = generation(run, oracles, lengths, 10)
  for b in range(2):
    for layer, oracle in enumerate(oracles[b]):
      if oracle.indexes and m.index != "mean":
        counts = run.caches[layer].rows["found"].of["spans"][b, :, 2].astype(int)
        want = [[len(span) for span in spans] for spans in oracle.gone]
        assert [[n for n in row if n] for row in counts[: len(want)].tolist()] == want
        length, ratio = measured_spans(run.caches[layer], b)
        assert ((length > 0) == (counts[: len(want)] > 0)).all() and (ratio <= 1).all()
  assert len(retrieved) > 4
  if m.heads and m.heads[0][0] > 0:
    assert not any(layer == 0 for layer, _ in retrieved)


@pytest.mark.slow
def test_how_similar_each_head_finds_a_chunks_blocks():
  """Of every layer, row and query head; a row without tokens keeps what it had."""
  m = Asking(**SMALL, **PIECES)
  streams = [Stream.random(10 + i, tokens=50, head_dim=8) for i in range(2)]
  run = Stack(m, streams, capacity=50)
  oracles = [[LtriOracle(s, b, m, i) for i, s in enumerate(streams)] for b in range(2)]
  for count in ([12, 12], [12, 12], [12, 9], [9, 0]):
    run.prefill(count, [layers[0].n for layers in oracles], m.chunk)
    for b in range(2):
      votes: dict = {}
      for layer, oracle in enumerate(oracles[b]):
        if not count[b]:
          continue
        asking = oracle.asking(range(oracle.n, oracle.n + count[b]))
        pairs = [
          [oracle.by_head(ask, span) for span in spans for ask in asking] for spans in oracle.gone
        ]
        want = np.array([np.max(block, 0) for block in pairs]).reshape(-1, oracle.q.shape[0] * 3)
        oracle.read(count[b], votes)
        found = np.asarray(run.caches[layer].heads["alone"])[b]
        found = found.reshape(-1, found.shape[-1])[:, : len(want)]
        np.testing.assert_allclose(found.T, want, atol=2e-5)
  assert len(want) > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all heads", "retrieval heads, not persistent"])
def test_prefetching_changes_no_result(name):
  """Chunks and steps give the same blocks and, bit for bit, the same outputs; copies may differ."""
  m = CASES[name]
  streams = [Stream.random(10 + i, tokens=70, head_dim=8) for i in range(3)]
  runs = [Stack(x, streams, capacity=70) for x in (m, dataclasses.replace(m, prefetch=True))]
  differs = False
  for start in range(0, 48, 12):
    plain, ahead = (run.prefill([12, 12], [start, start], 12) for run in runs)
    for layer in range(3):
      np.testing.assert_array_equal(plain[layer], ahead[layer])
      for b in range(2):
        assert runs[0].retrieved(layer, b) == runs[1].retrieved(layer, b)
      held = [np.sort(run.caches[layer].rows["held"]) for run in runs]
      differs |= (held[0] != held[1]).any()
  for t in range(48, 60):
    plain, ahead = (run.decode([t, t]) for run in runs)
    jax.tree.map(np.testing.assert_array_equal, plain, ahead)
  assert differs == (name == "all heads")  # elsewhere the votes of below are right


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [True, False])
def test_persistent_decode_moves_nothing(persistent):
  """Its step has no kernel that reads the store, and the device's copies stay bit for bit.

  Without persistence the kernel is there, and blocks change.
  """
  m = Ltri(**SMALL, **PIECES, persistent=persistent)
  stream = Stream.random(10, tokens=70, head_dim=8)
  run = Stack(m, [stream], capacity=70)
  for start in range(0, 48, 12):
    run.prefill([12, 12], [start, start], 12)
  step = functools.partial(m.decode_step, m.at(Env(1, impl="pallas", tile=4), 0))
  program = jax.make_jaxpr(step)(
    run.caches[0], *columns(stream, [48, 48]), jnp.ones(2, bool), Carry()
  )
  assert "append_blocks" in str(program)
  assert ("fetch_blocks" in str(program)) != persistent

  def copies():
    cache = run.caches[0]
    held = {name: cache.heads[name] for name in ("held_k", "held_v")}
    return jax.tree.map(np.asarray, {**held, **{n: cache.rows[n] for n in ("held", "kept")}})

  before, gone = copies(), int(run.caches[0].rows["gone"][0])
  for t in range(48, 66):
    run.decode([t, t])
  assert int(run.caches[0].rows["gone"][0]) == gone + 3
  same = [(a == b).all() for a, b in zip(*map(jax.tree.leaves, (before, copies())), strict=True)]
  assert all(same) == persistent


@pytest.mark.slow
@pytest.mark.parametrize("m", [CASES["retrieval heads"], CASES["not persistent"], InfLLM(**SMALL)])
def test_blocks_that_end_are_settled_alike(m, monkeypatch):
  """A layer at a time, behind a condition or in every step; or all layers together, after them."""
  streams = [Stream.random(i, tokens=60, head_dim=8) for i in range(2)]
  run = Stack(m, streams, capacity=60)
  run.prefill([12, 9], [0, 0], 12)

  def decoded(defers=False, hosted=False):
    # The name that a step asks; where stores lie stays as it is.
    monkeypatch.setattr(leaving, "offload", Divided(offload, hosted))
    env = Env(2, tile=4, defers=defers)

    def step(caches, columns, live):
      carry, done = Carry(), []
      for layer, (cache, given) in enumerate(zip(caches, columns, strict=True)):
        _, cache, carry, _ = m.decode_step(m.at(env, layer), cache, *given, live, carry)
        done.append(cache)
      caches = m._conclude_step(env, tuple(done), live) if defers else tuple(done)
      return offload.settled(caches)

    caches, step = run.caches, jax.jit(step)
    for t in range(12, 36):
      live = jnp.array([True, t % 5 > 0])  # a row that rests between blocks, and at their ends
      at = np.asarray(caches[0].seen)
      caches = step(caches, [columns(stream, at.tolist()) for stream in streams], live)
    return caches

  one, every, together = decoded(), decoded(hosted=True), decoded(defers=True)
  assert run.caches[0].rows["gone"].tolist() == [0, 0] and one[0].rows["gone"].tolist() == [4, 2]
  chex.assert_trees_all_equal(one, every)
  chex.assert_trees_all_equal(one, together)


@pytest.mark.slow
@pytest.mark.parametrize("m", [CASES["retrieval heads"], InfLLM(**SMALL)])
def test_nothing_is_copied_to_be_written(m):
  """Window and the device's copies of blocks, by a chunk positions too; the cache is donated."""
  streams = [Stream.random(i, tokens=12, head_dim=8) for i in range(2)]
  run, rows = Stack(m, streams), jnp.full(2, 12, jnp.int32)

  def chunk(at, cache, q, k, v, valid):
    out, cache, *_ = m.prefill(at, cache, q, k, v, Prompt(valid, valid, None, 12, None), Carry())
    return out, offload.settled(cache)

  def step(at, cache, q, k, v, valid):
    out, cache, *_ = m.decode_step(at, cache, q, k, v, valid > 0, Carry())
    return out, offload.settled(cache)

  for layer, cache in enumerate(run.caches):
    for driver, tokens in ((chunk, range(12)), (step, 0)):
      program = jax.jit(functools.partial(driver, m.at(run.env, layer)), donate_argnums=0)
      given = cache, *columns(streams[layer], [tokens] * 2), rows
      text = program.lower(*given).compile().as_text()
      arrays = cache.slots["k"], cache.heads["held_k"], *[cache.pos] * (driver is chunk)
      shapes = {",".join(map(str, x.shape)) for x in arrays}
      assert not shapes & set(re.findall(r"\[([\d,]+)\]\S* copy\(", text)), driver


@pytest.mark.slow
def test_injected_blocks_are_retrieved():
  """Forced blocks come first, whatever their similarity, once they have left the window."""
  m = Ltri(**SMALL, **PIECES, inject=2)
  stream = Stream.random(10, tokens=60, head_dim=8)
  for forced in ([[-1, -1], [-1, -1]], [[0, 3], [2, -1]]):
    run = Stack(m, [stream], capacity=60)
    run.caches = injected(run.caches, jnp.array(forced))
    oracles = [[LtriOracle(stream, b, m, 0)] for b in range(2)]
    for (oracle,), blocks in zip(oracles, forced, strict=True):
      oracle.inject = [b for b in blocks if b >= 0]
    for _ in range(4):
      read(run, oracles, [12, 12])
      assert all(run.retrieved(0, b) == oracle.kept for b, (oracle,) in enumerate(oracles))
    for b, blocks in enumerate(forced):
      assert {x for x in blocks if x >= 0} <= set(run.retrieved(0, b))
  with pytest.raises(ValueError, match=r"blocks: found shape \(2, 1\), expected \(2, 2\)"):
    injected(run.caches, jnp.zeros((2, 1), jnp.int32))


@pytest.mark.slow
def test_rate_from_a_target():
  """The smallest λ of the table that reaches the target; beyond one vector a span there is none."""
  rng = np.random.default_rng(0)
  samples = [(rng.integers(0, 40, (30, 4)), rng.uniform(0.2, 1, (30, 4))) for _ in range(2)]

  def vectors(rate):
    return sum(
      sum(slow_counts(n, r, rate, 12))
      for length, ratio in samples
      for n, r in zip(length.tolist(), ratio.tolist(), strict=True)
    )

  for target in (12.0, 16.0, 20.0):
    rate = calibrated_rate(samples, target)
    assert 60 * 128 / vectors(rate) >= target
    assert rate == 0 or 60 * 128 / vectors(rate - 0.25) < target
  with pytest.raises(ValueError, match="tokens_per_vector: found 99, expected at most"):
    calibrated_rate(samples, 99)


def test_a_head_that_the_model_does_not_have():
  with pytest.raises(ValueError, match="found query head 9 of layer 1, expected one of 9 heads"):
    Ltri(heads=((1, 9, 0.5),)).init_caches(Stream.random(0).spec(64))
