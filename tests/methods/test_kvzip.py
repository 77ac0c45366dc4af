"""KVzip: scores against a softmax by hand over the repetition, and a context for many questions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Full, KVzip, Quantised, SnapKV
from kvjax.models.decode import caches as live
from kvjax.models.decode import reconstruct
from kvjax.models.decode.generate import generate, prefill
from kvjax.models.decode.reconstruct import Instructions, looked_at, read
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.testing import tiny
from kvjax.testing.layer import Stream
from kvjax.testing.tiny import TOKENS
from tests.coded import own_rounded
from tests.kvzip_oracle import ASK, LENGTHS, by_hand, model
from tests.oracles import begun


@pytest.mark.parametrize("cap", [None, 2.0])
def test_worked_example(cap):
  """Two held keys, two queries: each key is worth the largest share that any query gives it."""
  ln = np.log
  q = jnp.asarray([[1.0, 0], [0, 1]])[None, None, None]  # [1, 1, 1, 2, 2]
  # Query 0 gives weights 3 : 1 and 1 to itself; query 1 gives 1 : 2 and 1 to each of the two.
  x = np.array([[ln(3), ln(1)], [ln(1), ln(2)]])
  k = np.sqrt(2) * (x if cap is None else cap * np.arctanh(x / cap))
  held = {"k": jnp.asarray(k)[None, None], "pos": jnp.asarray([[[0, 1]]])}
  own = {"k": jnp.zeros((1, 1, 2, 2)), "pos": jnp.asarray([[[5, 6]]])}
  found = looked_at(q, jnp.asarray([[5, 6]]), held, own, cap)
  np.testing.assert_allclose(found[0, 0], [3 / 5, 2 / 5], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [12, 32, 5])
def test_what_is_kept_of_a_context(chunk, monkeypatch):
  """Scores of every layer, head and row, and the tokens that they keep; ragged rows, G = 3."""
  found = []
  cut = reconstruct.cut

  def seen(env, caches, scores, method, spec):
    found.extend(map(np.asarray, scores))
    return cut(env, caches, scores, method, spec)

  monkeypatch.setattr(reconstruct, "cut", seen)
  monkeypatch.setattr(reconstruct, "QUERIES", 8)  # several blocks of queries
  method = KVzip(budget=12, room=3)
  _, caches = read(model(), TOKENS[:, :30], LENGTHS, method, ASK, chunk=chunk, sinks=2)
  for row, n in enumerate(LENGTHS):
    want = by_hand(TOKENS[row].tolist(), int(n), chunk, 2)
    for layer, cache in enumerate(caches):
      np.testing.assert_allclose(found[layer][row, :, :n], want[layer], atol=1e-5)
      assert int(cache.used[row]) == 9 and int(cache.seen[row]) == n
      for head in range(2):
        best = np.sort(np.argsort(-want[layer, head], kind="stable")[:9])
        np.testing.assert_array_equal(np.asarray(cache.pos)[row, head, :9], best)
        assert (np.asarray(cache.pos)[row, head, 9:] == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_kept_tokens_enter_as_codes(bits):
  """The tokens that KVzip keeps, rounded by hand; the logits of a question are those of these."""
  plain = KVzip(budget=12, room=3)
  coded = Quantised(plain, bits=bits)
  logits, full, scores = reconstruct.scored(model(), TOKENS[:, :30], LENGTHS, ASK, chunk=12)
  spec = model().spec(2, 64)
  exact, words = (reconstruct.cut(model().env, full, scores, x, spec) for x in (plain, coded))
  by_hand = []
  for kept, mine in zip(exact, words, strict=True):
    np.testing.assert_array_equal(kept.pos, mine.pos)
    np.testing.assert_array_equal(kept.slots["score"], mine.slots["score"])
    np.testing.assert_array_equal(kept.heads["ring"], mine.heads["ring"])
    assert mine.slots["k"].nbytes * 32 // bits == kept.slots["k"].nbytes
    k, v = (np.array(kept.slots[name], np.float64) for name in ("k", "v"))
    for row, head in np.ndindex(2, 2):
      mean = k[row, head, :9].mean(0)
      k[row, head, :9] = own_rounded(k[row, head, :9] - mean, bits) + mean
      v[row, head, :9] = own_rounded(v[row, head, :9], bits)
    numbers = {"k": jnp.asarray(k, jnp.float32), "v": jnp.asarray(v, jnp.float32)}
    by_hand.append(kept.put(slots=numbers))
  before = [np.array(cache.pos) for cache in exact]
  by_hand = live.fork(logits, tuple(by_hand), 1)[1]
  asked = TOKENS[:, 31:34], np.array([3, 2])
  found, words = prefill(model(), *asked, words, coded)
  want, far = (prefill(model(), *asked, mine, plain)[0] for mine in (by_hand, exact))
  np.testing.assert_allclose(found, want, atol=tiny.CLOSE)
  assert np.abs(found - far).max() > 10 * np.abs(found - want).max()
  _, words = generate(model(), found, words, coded, steps=5)
  for pos, mine in zip(before, words, strict=True):
    np.testing.assert_array_equal(pos[:, :, :9], mine.pos[:, :, :9])


@pytest.mark.core(1)
def test_a_context_that_fits_is_the_full_cache():
  """The neutral setting: logits after a question and an answer are the full cache's."""
  method, question = KVzip(budget=60, room=20), TOKENS[:, 31:36]
  _, caches = read(model(), TOKENS[:, :30], LENGTHS, method, ASK, chunk=12)
  full = Full()
  held = full.init_caches(model().spec(2, 64))
  _, held = prefill(model(), TOKENS[:, :30], LENGTHS, held, full, past=0)
  out = []
  for kind, mine in ((method, caches), (full, held)):
    logits, mine = prefill(model(), question, np.array([5, 3]), mine, kind)
    said, _ = generate(model(), logits, mine, kind, steps=6, return_logits=True)
    out.append(np.concatenate([np.asarray(logits)[:, None], np.asarray(said.logits)], 1))
  np.testing.assert_allclose(*out, atol=2e-4)


@pytest.mark.slow
def test_questions_in_any_order_have_the_same_answers():
  """Each on a copy; and a context never gives up a slot to what comes after it."""
  method = KVzip(budget=20, room=6)
  logits, caches = read(model(), TOKENS[:, :30], LENGTHS, method, ASK, chunk=12)
  questions = TOKENS[:, 30:34], TOKENS[:, 34:39]

  def answers(order):
    found = {}
    for i in order:
      _, mine = live.fork(logits, caches, 1)
      begun, mine = prefill(model(), questions[i], np.full(2, questions[i].shape[1]), mine, method)
      said, mine = generate(model(), begun, mine, method, steps=9)
      found[i] = said.tokens
      for before, after in zip(caches, mine, strict=True):
        np.testing.assert_array_equal(before.pos[:, :, :14], after.pos[:, :, :14])
        newest = np.sort(np.asarray(after.pos)[:, :, 14:], -1)
        last = np.asarray(after.seen)[:, None, None] - np.arange(6, 0, -1)
        np.testing.assert_array_equal(newest, np.broadcast_to(last, newest.shape))
    return found

  first, second = answers((0, 1)), answers((1, 0))
  for i in (0, 1):
    np.testing.assert_array_equal(first[i], second[i])


def test_a_prompt_without_scores_keeps_its_newest():
  stream = Stream.random(0, tokens=40)
  layer = begun(KVzip(budget=9, room=2), stream, [30, 7])
  np.testing.assert_array_equal(layer.cache.pos[0], np.broadcast_to(np.arange(21, 30), (3, 9)))
  assert (np.asarray(layer.cache.pos)[1, :, :7] == np.arange(7)).all()


def test_the_memory_is_freed():
  """What stays is what an empty cache of the method holds."""
  method = KVzip(budget=12, room=3)
  _, caches = read(model(), TOKENS[:, :30], LENGTHS, method, ASK, chunk=32)
  empty = jax.eval_shape(lambda: method.init_caches(model().spec(2, 64)))
  shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(c)] for c in (caches, empty)]
  assert shapes[0] == shapes[1]


class Words(Tokenizer):
  """A tokenizer of characters, with a chat template or none."""

  def __init__(self, chat_template="a template"):
    self.chat_template = chat_template

  def encode(self, text, *, bos=None, after=""):
    return [ord(x) for x in text]

  def render(self, messages):
    return f"<u>{messages[0]['content']}</u><a>"


def test_instructions_are_the_authors():
  ask = Instructions.of(Words())
  assert bytes(ask.before([])).decode() == "\n\nRepeat the previous context exactly.</u><a>"
  again = bytes(ask.before([ord(x) for x in " and so it goes on"])).decode()
  assert again.endswith("exactly, starting with goes on</u><a>")
  assert ask.opening == len("<u>")
  assert Instructions.of(Words(None)).suffix == ()


@pytest.mark.slow
def test_what_a_chat_puts_before_a_text_stays_and_is_not_repeated():
  """As with as many sinks."""
  opened = dataclasses.replace(ASK, opening=5)
  found, want = (
    reconstruct.scored(model(), TOKENS[:, :30], LENGTHS, ask, chunk=12, sinks=sinks)[2]
    for ask, sinks in ((opened, 4), (ASK, 5))
  )
  for a, b in zip(found, want, strict=True):
    np.testing.assert_array_equal(a, b)
    assert (np.asarray(a)[:, :, :5] == 2).all() and (np.asarray(a)[:, :, 5:] < 1).all()


def test_refusals(monkeypatch):
  """Of all before anything is scored."""
  monkeypatch.setattr(reconstruct, "_repeat", None)
  ask = (TOKENS[:, :30], LENGTHS)
  with pytest.raises(TypeError, match=r"method: found SnapKV.* expected a kvjax.KVzip"):
    read(model(), *ask, SnapKV(64), ASK)
  for name in ("chunk", "sinks"):
    with pytest.raises(ValueError, match=f"{name}: found 0, expected at least 1"):
      read(model(), *ask, KVzip(12, room=3), ASK, **{name: 0})
  with pytest.raises(ValueError, match="lengths"):
    read(model(), TOKENS[:, :30], np.array([31, 2]), KVzip(12, room=3), ASK)
