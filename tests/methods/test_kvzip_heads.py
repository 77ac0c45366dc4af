"""KVzip where heads compete, of a layer or of all: against lists, and what is freed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import AdaKV, Env, Full, KVzip
from kvjax.core.leaves import Layout
from kvjax.families.entrance import landing
from kvjax.models.decode import caches as live
from kvjax.models.decode import reconstruct
from kvjax.models.decode.generate import generate, prefill
from kvjax.ops import shared_slots
from kvjax.testing.tiny import CLOSE, TOKENS
from tests import decoder_oracle
from tests.kvzip_oracle import ASK, LENGTHS, by_hand, model

CONTEXT, ROOM, SINKS = TOKENS[:, :30], 3, 2
LAYERS, HEADS = 2, 2
KEPT = 12  # of a context, on average over the heads
QUESTION, ASKED = TOKENS[:, 31:36], np.array([5, 2])
METHOD = AdaKV(KVzip(KEPT + ROOM, ROOM), safeguard=0)


@functools.cache
def scored():
  return reconstruct.scored(model(), CONTEXT, LENGTHS, ASK, chunk=12, sinks=SINKS)


@functools.cache
def scores_by_hand(row):
  return by_hand(TOKENS[row].tolist(), int(LENGTHS[row]), 12, SINKS)


def best_of(scores, count):
  """(layer, head, token) of the best, for scores [L, K, n]; ties to the first token. Lists."""
  every = [
    (-scores[i][h][j], i, j, h)
    for i in range(len(scores))
    for h in range(len(scores[i]))
    for j in range(len(scores[i][h]))
  ]
  return {(i, h, j) for _, i, j, h in sorted(every)[:count]}


by_head = jax.jit(shared_slots.by_head)


def held(cache, row):
  """Positions that each head of a row holds."""
  return [set(x[x >= 0].tolist()) for x in np.asarray(by_head(cache)["pos"])[row]]


def by_layer():
  """The method and the caches whose layer's heads compete."""
  logits, full, scores = scored()
  spec = model().spec(2, 64)
  return METHOD, logits, reconstruct.cut(model().env, full, scores, METHOD, spec)


def over_layers(tile=1):
  """And those where all layers' do."""
  logits, full, scores = scored()
  method = reconstruct.over_layers(METHOD, scores, LENGTHS, tile=tile)
  return method, logits, reconstruct.cut(model().env, full, scores, method, model().spec(2, 64))


def test_where_the_next_token_goes():
  """Heads of two and six slots, of which one each is free: after its own tokens."""
  slots = {"pos": jnp.zeros((1, 1, 8), jnp.int32)}
  place = jnp.array([[[0, 2], [2, 6]]])
  rows = {"seen": jnp.array([9]), "used": jnp.array([3])}
  cache = kvjax.Cache(slots, {"place": place, "ring": place}, rows, Layout.SHARED)
  assert shared_slots.lies(cache)[2].tolist() == [[1, 5]]
  at = METHOD.at(Env(1), 0)
  assert landing(at, cache, jnp.array([True])).tolist() == [[1, 7]]


@pytest.mark.slow
def test_heads_of_a_layer_compete():
  """The best K·9 of each layer; each head has three free slots after its own."""
  _, _, caches = by_layer()
  for row in range(2):
    for layer, cache in enumerate(caches):
      best = best_of(scores_by_hand(row)[layer : layer + 1], HEADS * KEPT)
      want = [{j for _, h, j in best if h == head} for head in range(HEADS)]
      assert held(cache, row) == want
      lengths = np.asarray(cache.heads["place"])[row, :, 1]
      np.testing.assert_array_equal(lengths, [len(x) + ROOM for x in want])
      assert int(cache.used[row]) == KEPT
  assert len({len(x) for cache in caches for x in held(cache, 0)}) > 1  # heads differ


@pytest.mark.slow
def test_read_has_all_heads_compete():
  """In one call; the caches say whose they are."""
  spread = AdaKV(KVzip(KEPT + ROOM, ROOM, over_layers=True), safeguard=0)
  asked = {"chunk": 12, "sinks": SINKS}
  logits, caches = reconstruct.read(model(), CONTEXT, LENGTHS, spread, ASK, **asked)
  method = reconstruct.over_layers(spread, scored()[2], LENGTHS)
  assert caches[0].origin.method == method and len(method.base.budgets) == LAYERS
  most = max(method.base.budgets)
  want = reconstruct.cut(model().env, scored()[1], scored()[2], method, model().spec(2, most))
  for a, b in zip(jax.tree.leaves(caches), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(a, b)
  generate(model(), logits, caches, method, steps=1)
  with pytest.raises(TypeError, match=r"expected kvjax.AdaKV over it"):
    reconstruct.read(model(), CONTEXT, LENGTHS, spread.base, ASK, **asked)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [4, 1])
def test_all_heads_compete(tile):
  """Of each row the best L·K·9; a layer's size is that of the row with most, in tiles."""
  method, _, caches = over_layers(tile)
  best = [best_of(scores_by_hand(row), LAYERS * HEADS * KEPT) for row in range(2)]
  for layer, cache in enumerate(caches):
    most = max(sum(i == layer for i, _, _ in row) for row in best)
    size = -(-most // (HEADS * tile)) * tile
    assert method.base.budgets[layer] == size + ROOM
    for row in range(2):
      found = held(cache, row)
      assert all(j in found[h] for i, h, j in best[row] if i == layer)
      assert sum(map(len, found)) == HEADS * min(size, LENGTHS[row])
  assert len(set(method.base.budgets)) > 1  # layers differ
  empty = jax.eval_shape(lambda: method.init_caches(model().spec(2, 64)))
  shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(c)] for c in (caches, empty)]
  assert shapes[0] == shapes[1]


@pytest.mark.slow
@pytest.mark.parametrize("cut", [by_layer, over_layers], ids=lambda x: x.__name__)
def test_questions_and_answers_against_the_decoder_in_loops(cut):
  """A question longer than the room, and an answer that goes round it: whole logits in float64."""
  method, _, caches = cut()
  kept = [[held(cache, row) for cache in caches] for row in range(2)]
  begun, mine = prefill(model(), QUESTION, ASKED, caches, method)
  said, mine = generate(model(), begun, mine, method, steps=6, return_logits=True)
  assert not any(x.is_deleted() for x in jax.tree.leaves(scored()[1]))  # full caches, left alone
  for row in range(2):
    n, asked = int(LENGTHS[row]), int(ASKED[row])
    sizes = method.base.budgets or (KEPT + ROOM,) * LAYERS
    rooms = [n - sum(map(len, x)) // HEADS for n, x in zip(sizes, kept[row], strict=True)]

    def sees(layer, head, t, q, k, row=row, n=n, asked=asked, rooms=rooms):
      if t <= n:
        return range(1, t + 1)
      first = n + 1 if t <= n + asked else max(n + 1, t - rooms[layer - 1] + 1)
      return [*(j + 1 for j in kept[row][layer - 1][head]), *range(first, t + 1)]

    tokens = [*TOKENS[row, :n], *QUESTION[row, :asked], *said.tokens[row]]
    want = decoder_oracle.logits(tokens, n + asked, sees=sees, decoder=model())[n + asked - 1 :]
    np.testing.assert_allclose(said.logits[row], want[:6], atol=CLOSE)
    np.testing.assert_allclose(said.last[row], want[6], atol=CLOSE)
    for cache, before in zip(mine, kept[row], strict=True):
      assert all(a <= b for a, b in zip(before, held(cache, row), strict=True))


@pytest.mark.slow
def test_the_kernel_reads_heads_that_are_not_full():
  """Interpreted: steps that fill the room, and some that go round it."""
  method, _, caches = by_layer()
  out = []
  for impl in ("reference", "pallas"):
    _, mine = live.fork(scored()[0], caches, 1)
    begun, mine = prefill(model(impl), QUESTION[:, :1], np.array([1, 1]), mine, method)
    said, _ = generate(model(impl), begun, mine, method, steps=5, return_logits=True)
    out.append(np.asarray(said.logits))
  np.testing.assert_allclose(*out, atol=CLOSE)


@pytest.mark.slow
def test_a_context_that_fits_is_the_full_cache():
  method, full = AdaKV(KVzip(60, 20), safeguard=0), Full()
  logits, caches, scores = scored()
  cut = reconstruct.cut(model().env, caches, scores, method, model().spec(2, 64))
  out = []
  for kind, mine in ((method, cut), (full, live.fork(logits, caches, 1)[1])):
    begun, mine = prefill(model(), QUESTION, ASKED, mine, kind)
    said, _ = generate(model(), begun, mine, kind, steps=6, return_logits=True)
    out.append(np.asarray(said.logits))
  np.testing.assert_allclose(*out, atol=CLOSE)


def test_refusals():
  scores = scored()[2]
  for method in (KVzip(12, 3), AdaKV(), Full()):
    with pytest.raises(TypeError, match=r"method: found .*, expected"):
      reconstruct.over_layers(method, scores, LENGTHS)
  with pytest.raises(ValueError, match="tile: found 0, expected at least 1"):
    reconstruct.over_layers(METHOD, scores, LENGTHS, tile=0)
  with pytest.raises(ValueError, match=r"KVzip\.budgets: found 3, expected one for each of the 2"):
    KVzip(12, 3, (12, 9, 12)).init_caches(model().spec(1, 64))
