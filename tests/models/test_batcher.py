"""Requests in a batch of fixed rows: each answer is its own, whatever stands beside it."""

import dataclasses
import re
import signal

import jax
import numpy as np
import pytest
from jax.experimental.checkify import JaxRuntimeError

import kvjax
from kvjax.models.decode import batcher as batching
from kvjax.models.decode import by_layer, checks
from kvjax.models.decode import prefill as reading
from kvjax.models.decode.batcher import Batcher
from kvjax.models.decode.generate import generate, prefill
from kvjax.models.decode.requests import Request
from kvjax.models.decode.sampling import Sampling
from kvjax.models.decode.step import Device
from kvjax.models.decode.stopping import RowText
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.testing.tiny import CONFIG, drawn, model
from scripts.examples.tiny import byte_tokenizer
from tests.tiny_tokenizers import FAMILIES

CAPACITY, ROWS = 64, 3
FULL = kvjax.Full()
METHODS = {
  "full": FULL,
  "snapkv": kvjax.SnapKV(16, window_size=4),
  "longflow": kvjax.LongFlow(16, window_size=4),
  "quest": kvjax.Quest(16, page=4, dense_layers=1),
  "streaming_llm": kvjax.StreamingLLM(16),
  "int8": kvjax.Quantised(kvjax.Full(), bits=8),
  "infllm": kvjax.settings.example(kvjax.InfLLM, 16),
  "ltri": kvjax.settings.example(kvjax.Ltri, 16),
}
DRAWING = Sampling(temperature=1.0)


def batcher(method=METHODS["full"], **how):
  how = {"rows": ROWS, "capacity": CAPACITY, "sampling": DRAWING, **how}
  return Batcher(model(), method, **how)


def requests(count, seed=0):
  """Prompts and what is asked of them, of random lengths."""
  rng = np.random.default_rng(seed)
  for i in range(count):
    prompt = rng.integers(0, CONFIG.vocab, int(rng.integers(1, 30)), np.int32)
    stop = rng.integers(0, CONFIG.vocab, int(rng.integers(0, 4))).tolist()
    yield {"prompt": prompt, "limit": int(rng.integers(1, 25)), "seed": 1000 + i, "stop": stop}


def live_bytes():
  return sum(x.nbytes for x in jax.live_arrays())


def alone(method, given, **how):
  """The answer of a request in a batch that has no other."""
  mine = batcher(method, **how)
  mine.submit(**given)
  (answer,) = mine
  return answer


@pytest.mark.core(1)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_answers_are_those_of_a_request_alone(method):
  """More requests than rows, of unequal lengths: none waits for a batch to end. Two are read at a
  time, one of them ahead of a row, and alone at a place that has no other.
  """
  mine, asked = batcher(method, together=2), list(requests(8))
  numbers = [mine.submit(**given) for given in asked]
  answers = {answer.request: answer for answer in mine}
  assert sorted(answers) == numbers
  for number, given in zip(numbers, asked, strict=True):
    answer, want = answers[number], alone(method, given, together=2)
    np.testing.assert_array_equal(answer.tokens, want.tokens)
    assert answer.end == want.end
    stopped = answer.tokens[-1] in given["stop"]
    assert answer.end == ("stop" if stopped else "limit")
    assert stopped or len(answer.tokens) == given["limit"]
    assert not np.isin(answer.tokens[:-1], given["stop"]).any()


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
def test_a_call_takes_several_steps_where_methods_stream(monkeypatch, keep):
  """As on a GPU, beside programs of a layer; a step alone for a request that keeps its caches."""
  asked, made, step = list(requests(6)), [], Device.step

  def answers():
    mine = batcher(METHODS["infllm"])
    for given in asked:
      mine.submit(**given, keep=keep)
    return {x.request: x for x in mine}

  want = answers()
  monkeypatch.setattr(by_layer, "decodes", lambda *_: False)
  monkeypatch.setattr(Device, "step", lambda self, n: made.append(n) or step(self, n))
  for number, got in answers().items():
    np.testing.assert_array_equal(got.tokens, want[number].tokens)
    assert got.end == want[number].end
  assert sum(made) > len(made) if not keep else set(made) == {1}


def run(count, seed, together):
  """A thousand ways to come and go: requests are submitted, cancelled and refused meanwhile."""
  mine, rng = batcher(together=together), np.random.default_rng(seed)
  coming, asked, answers, cancelled = iter(requests(count, seed)), {}, {}, set()
  refused = 0
  while len(answers) < count:
    for given in [next(coming, None) for _ in range(int(rng.integers(0, 4)))]:
      if given is None:
        continue
      if rng.random() < 0.1:
        bad = given | ({"limit": CAPACITY} if rng.random() < 0.5 else {"prompt": [CONFIG.vocab]})
        with pytest.raises(ValueError, match="expected"):
          mine.submit(**bad)
        refused += 1
      asked[mine.submit(**given)] = given
    if asked and rng.random() < 0.05:
      number = int(rng.integers(0, len(asked)))
      mine.cancel(number)
      cancelled.add(number)
    mine.step()
    for answer in mine.ready():
      assert answer.request not in answers
      answers[answer.request] = answer
  assert refused and {x.request for x in answers.values() if x.end == "cancelled"} <= cancelled
  return asked, answers


@pytest.mark.slow
def test_a_thousand_requests_in_flat_memory(caplog):
  ways = 1, 4
  for together in ways:
    run(60, 3, together)  # warm: every padded length of a prompt
  before = live_bytes()
  for together in ways:
    caplog.clear()
    with jax.log_compiles():
      asked, answers = run(500, together, together)
    assert sorted(asked) == sorted(answers) == list(range(500))
    assert [x.getMessage() for x in caplog.records if "Compiling" in x.getMessage()] == []
    assert live_bytes() <= before + 4096
    for number in range(0, 500, 10):
      # Those of requests alone; of cancelled ones as far as they went.
      want, got = alone(METHODS["full"], asked[number], together=together), answers[number]
      cancelled = got.end == "cancelled"
      assert cancelled or got.end == want.end
      most = len(got.tokens) if cancelled else None
      np.testing.assert_array_equal(got.tokens, want.tokens[:most])


@pytest.mark.slow
def test_prompts_are_read_ahead_of_rows_with_the_next_of_their_width(monkeypatch):
  """A row of its own is all that the first one waits for; what it overtakes waits for it alone."""
  read, whole = [], batching.read_prompt

  def read_prompt(decoder, tokens, lengths, *rest, **how):
    read.append(lengths.tolist())
    return whole(decoder, tokens, lengths, *rest, **how)

  monkeypatch.setattr(batching, "read_prompt", read_prompt)
  mine = batcher(METHODS["snapkv"], rows=1, capacity=200, together=3, sampling=Sampling())
  for size in (10, 100, 20, 64, 30, 70, 5):  # widths 64 and 128
    mine.submit(np.arange(size) % CONFIG.vocab, limit=2)
  held = live_bytes()
  assert (mine.free, mine.waiting, read) == (1, 7, [])
  mine.step()
  assert (mine.free, mine.waiting, read) == (0, 6, [[10, 20, 64]])
  mine.cancel(2)  # it has been read
  assert mine.waiting == 5
  mine.cancel(4)  # it is in the queue
  assert mine.waiting == 4
  assert [x.request for x in mine] == [2, 4, 0, 3, 1, 5, 6]
  assert read == [[10, 20, 64], [100, 70, 0], [5, 0, 0]]
  assert (mine.free, mine.waiting) == (1, 0)
  assert live_bytes() <= held  # the readings' caches are gone


@pytest.mark.core(2)
@pytest.mark.parametrize(
  ("name", "chunk"), [("full", None), ("full", 8), ("infllm", None), ("ltri", None)]
)
def test_widths_are_those_of_the_calls(monkeypatch, name, chunk):
  """By which prompts are read together."""
  called, method = [], METHODS[name]

  def caller(*_):
    return lambda caches, tokens, *_: called.append(tokens.shape[1]) or (np.zeros((1, 3)), caches)

  monkeypatch.setattr(reading, "caller", caller)
  caches = method.init_caches(model().spec(1, 200))
  most = checks.capacity(caches, method)
  for size in range(1, 130):
    given = np.zeros((1, size), np.int32), np.array([size]), caches, method, np.array([size]), 0
    reading.read_prompt(model(), *given, chunk=chunk)
    assert tuple(called) == reading.widths(method, size, chunk, most)
    called.clear()


@pytest.mark.slow
def test_one_reading_at_a_time_has_caches(monkeypatch):
  """Also where rows are free for the prompts of two."""
  held, whole = [], batching.read_prompt

  def read_prompt(decoder, tokens, lengths, caches, *rest, **how):
    held.append((live_bytes(), sum(x.nbytes for x in jax.tree.leaves(caches))))
    return whole(decoder, tokens, lengths, caches, *rest, **how)

  monkeypatch.setattr(batching, "read_prompt", read_prompt)
  mine = batcher(rows=4, together=2)
  for given in requests(4):
    mine.submit(**given)
  mine.step()
  (first, of_caches), (second, _) = held
  assert second < first + of_caches / 2


@pytest.mark.slow
@pytest.mark.parametrize(
  ("together", "error"), [(1, MemoryError), (4, MemoryError), (4, JaxRuntimeError), (4, OSError)]
)
def test_a_request_that_fails_hurts_no_other(monkeypatch, together, error):
  """Nor one that it is read with; an error of no request is raised, and all are read again."""
  asked = list(requests(5))
  want = [alone(METHODS["full"], given, together=together) for given in asked]
  whole, came = batching.read_prompt, []

  def read_prompt(decoder, tokens, lengths, *rest, **how):
    def found(i):
      rows = zip(tokens, lengths, strict=True)
      return np.array([np.array_equal(row[:n], asked[i]["prompt"]) for row, n in rows])

    if found(3).any() and not (came and error is OSError):
      came.append(error)
      raise error("found no room")
    logits, caches = whole(decoder, tokens, lengths, *rest, **how)
    return logits + np.where(found(1), np.nan, 0)[:, None].astype(np.float32), caches

  monkeypatch.setattr(batching, "read_prompt", read_prompt)
  mine = batcher(together=together)
  numbers = [mine.submit(**given) for given in asked]
  if error is OSError:
    with pytest.raises(OSError, match="no room"):
      mine.step()
  answers = {answer.request: answer for answer in mine}
  assert sorted(answers) == numbers
  own = error is not OSError
  assert answers[1].end == "failed" and ("no room" in str(answers[3].error)) == own
  said = "request 1: found logits that are NaN or infinite after its prompt"
  assert str(answers[1].error) == said
  for number in (0, 2, 4) if own else (0, 2, 3, 4):
    np.testing.assert_array_equal(answers[number].tokens, want[number].tokens)


@pytest.mark.slow
def test_a_model_that_checks_for_nan_says_whose_it_is():
  """Of a prompt, and of a token of an answer; the other request has all of its tokens."""
  decoder = drawn(dataclasses.replace(CONFIG, tie_embeddings=False), "reference")
  decoder.embedding[...] = decoder.embedding[...].at[60].set(np.nan)
  decoder.env = dataclasses.replace(decoder.env, check_nan=True)
  mine = Batcher(decoder, FULL, rows=2, capacity=CAPACITY, together=2)
  for prompt in ([1, 2, 3], [1, 60, 3], [4, 5, 6]):
    mine.submit(prompt, limit=40)
  whole, *failed = sorted(mine, key=lambda x: x.request)
  assert whole.error is None and len(whole.tokens) == 40
  for answer, cached in zip(failed, (0, 3 + len(failed[1].tokens)), strict=True):
    assert re.match(rf"Full, layer 0: .* NaN .* cached {cached} tokens", str(answer.error))


def test_cancelled_requests():
  mine = batcher(sampling=Sampling())
  for given in requests(5):
    mine.submit(**given | {"limit": 20, "stop": []})
  mine.cancel(4)  # it waits
  for _ in range(batching.AHEAD + 4):
    mine.step()
  mine.cancel(0)
  answers = {answer.request: answer for answer in mine}
  assert [answers[i].end for i in range(5)] == ["cancelled", *3 * ["limit"], "cancelled"]
  assert answers[4].tokens.size == 0 < answers[0].tokens.size < 20
  mine.cancel(0)  # has ended
  with pytest.raises(ValueError, match=r"request: found 9, expected an integer in \[0, 5\)"):
    mine.cancel(9)
  assert list(mine) == []


def test_texts_and_stop_strings():
  """The text of an answer is told as it is made, and ends before a string."""
  tokenizer, told = byte_tokenizer(), []
  mine = batcher(tokenizer=tokenizer)
  given = {"prompt": [5, 6, 7], "limit": 20, "seed": 4}
  mine.submit(**given, on_text=told.append)
  (whole,) = mine
  assert whole.text == tokenizer.decode(whole.tokens.tolist()) == "".join(told) and len(told) > 5
  part = whole.text[3:5]
  mine.submit(**given, stop_strings=[part])
  (cut,) = mine
  assert (cut.end, cut.text) == ("stop", whole.text.partition(part)[0])
  np.testing.assert_array_equal(cut.tokens, whole.tokens[: len(cut.tokens)])


def test_what_comes_between_costs_no_token(monkeypatch):
  """An error of `on_text`; Ctrl-C, which waits for the end of a step; a loop that is left."""
  came, fetch = [], Device.fetch

  def fetched(self, step):
    if len(came) == 1:
      came.append(step)
      signal.raise_signal(signal.SIGINT)
    return fetch(self, step)

  def told(text):
    if not came:
      came.append(text)
      raise OSError("no room")

  mine, asked = batcher(tokenizer=byte_tokenizer()), {"prompt": [5, 6, 7], "limit": 12, "seed": 4}
  for _ in range(ROWS):
    mine.submit(**asked, on_text=told)
  with pytest.raises(OSError, match="no room"):
    list(mine)
  monkeypatch.setattr(Device, "fetch", fetched)
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  with pytest.raises(KeyboardInterrupt):
    list(mine)
  other, enter, caches = batcher(), Device.enter, FULL.init_caches(model().spec(1, CAPACITY))
  given = prefill(model(), [asked["prompt"]], [3], caches, FULL)

  def struck(*given):
    signal.raise_signal(signal.SIGINT)
    enter(*given)

  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(Device, "enter", struck)
    other.insert(*given, limit=12, seed=4)
  signal.signal(signal.SIGINT, before)
  answers = [next(iter(mine)), *mine, *other]
  wanted = alone(FULL, asked).tokens
  assert [answer.request for answer in answers] == [0, 1, 2, 0]
  for answer in answers:
    np.testing.assert_array_equal(answer.tokens, wanted)


def test_a_stop_of_bytes_is_found_at_the_limit():
  """A line break is a byte under SentencePiece, and text once no token follows."""
  tokenizer = Tokenizer(FAMILIES["llama2"]().backend)
  ids, text = tokenizer.encode("hello\n", bos=False), RowText(tokenizer.stream(), ["\n"])
  request = Request(0, len(ids), 0, (), DRAWING, text, None, False)
  assert [request.feed(token, None) for token in ids] == [None, "stop"]
  assert request.answer("stop", False, None).text == "hello"


@pytest.mark.parametrize(
  ("given", "error", "message"),
  [
    ({"prompt": []}, ValueError, r"prompt: found no token, expected ids in \[0, 61\)"),
    ({"prompt": [61]}, ValueError, r"prompt: found ids in \[61, 61\], expected ids in \[0, 61\)"),
    ({"prompt": [[1]]}, TypeError, "prompt: found int64 .* expected a list of integers"),
    ({"limit": 0}, ValueError, "limit: found 0, expected at least 1"),
    ({"limit": 62}, ValueError, "limit: found 62 after a prompt of 3, expected at most 64 tokens"),
    ({"limit": 2.0}, TypeError, r"limit: found 2\.0, expected an integer"),
    ({"seed": -1}, ValueError, "seed: found -1"),
    ({"stop": [61]}, ValueError, "stop: found 61"),
    ({"stop_strings": ["x"]}, ValueError, "tokenizer: found None, expected one"),
    ({"on_text": print}, ValueError, "tokenizer: found None, expected one"),
    ({"on_text": 1}, TypeError, "on_text: found 1, expected"),
    ({"sampling": 0.5}, TypeError, "sampling: found 0.5, expected"),
  ],
)
def test_bad_requests_are_refused(given, error, message, untyped):
  mine = batcher()
  with pytest.raises(error, match=message):
    mine.submit(**{"prompt": [1, 2, 3], "limit": 4} | given)
  assert list(mine) == []


@pytest.mark.core(1)
@pytest.mark.parametrize(
  ("together", "order"),
  [
    (1, ["piece"] * 5 + ["step", "piece"] * 2 + ["step"]),
    (2, ["piece"] * 4 + ["step"] * 6),
  ],
)
def test_prompts_in_pieces(monkeypatch, together, order):
  """As far as pieces of a prompt leave the likeliest tokens what they are; others go on between."""
  given = {"prompt": np.arange(30) % CONFIG.vocab, "limit": 10}
  whole = alone(METHODS["full"], given, sampling=Sampling())
  done, one = [], Device.step
  monkeypatch.setattr(Device, "step", lambda self, n: done.append("step") or one(self, n))
  read = batching.read_prompt

  def piece(*given, **how):
    done.append("piece")
    return read(*given, **how)

  monkeypatch.setattr(batching, "read_prompt", piece)
  mine = batcher(sampling=Sampling(), chunk=8, together=together)
  for _ in range(2):
    mine.submit(**given)
  for answer in mine:
    np.testing.assert_array_equal(answer.tokens, whole.tokens)
  assert done[:10] == order


def test_a_prompt_that_fills_its_pieces_beside_one_that_does_not():
  """To the bit as alone: what a row's last piece may see does not depend on the other."""
  how = {"chunk": 16, "together": 2, "logprobs": True}
  asked = [{"prompt": np.arange(n) % CONFIG.vocab, "limit": 3, "seed": 0} for n in (32, 17)]
  mine = batcher(**how)
  for given in asked:
    mine.submit(**given)
  for answer, given in zip(sorted(mine, key=lambda x: x.request), asked, strict=True):
    wanted = alone(METHODS["full"], given, **how)
    np.testing.assert_array_equal(answer.logprobs, wanted.logprobs)


@pytest.mark.slow
def test_prompts_that_were_read_elsewhere():
  """They wait for no queue, answer as submitted ones do, and leave what a further turn needs."""
  first, second = requests(2)
  first |= {"stop": []}
  method, mine = METHODS["snapkv"], batcher(METHODS["snapkv"])
  spec = model().spec(1, CAPACITY)

  def read(prompt):
    return prefill(model(), prompt[None], [prompt.size], method.init_caches(spec), method)

  for _ in range(ROWS):
    mine.submit(**second)
  asked = {name: first[name] for name in ("limit", "seed")}
  number = mine.insert(*read(first["prompt"]), **asked, keep=True)
  answers = {answer.request: answer for answer in mine}
  want = alone(method, first)
  np.testing.assert_array_equal(answers[number].tokens, want.tokens)
  held = answers[number].caches
  assert held[0].seen.tolist() == [first["prompt"].size + len(want.tokens)]
  assert answers[0].caches is None
  logits, caches = read(first["prompt"])
  how = {"steps": first["limit"], "sampling": DRAWING, "rows": [first["seed"]]}
  _, caches = generate(model(), logits, caches, method, **how)
  turn = np.arange(5)[None]
  (theirs, _), (ours, _) = (prefill(model(), turn, [5], x, method) for x in (caches, held))
  np.testing.assert_allclose(ours, theirs, atol=1e-5)

  logits, caches = read(first["prompt"])
  for _ in range(ROWS):
    mine.insert(logits, caches, limit=3)
  with pytest.raises(RuntimeError, match="insert: found 3 rows that are held, expected a free one"):
    mine.insert(logits, caches, limit=3)
  with pytest.raises(ValueError, match=r"row: found 1, expected an integer in \[0, 1\)"):
    batcher(method).insert(logits, caches, 1, limit=3)
  with pytest.raises(ValueError, match="row: found 0, which holds no token, expected a prompt"):
    batcher(method).insert(logits, method.init_caches(spec), limit=3)
  with pytest.raises(ValueError, match="SnapKV"):
    batcher().insert(logits, caches, limit=3)
  jax.tree.map(lambda x: x.delete(), caches)
  with pytest.raises(ValueError, match="caches: found"):
    batcher(method).insert(logits, caches, limit=3)


@pytest.mark.slow
def test_each_request_draws_in_its_own_way():
  given = next(requests(1)) | {"stop": [], "limit": 20}
  ways = [Sampling(), DRAWING, Sampling(temperature=2.0, top_k=3), Sampling(0.7, top_p=0.8)]
  mine = batcher(logprobs=True)
  for way in ways:
    mine.submit(**given, sampling=way)
  for answer, way in zip(sorted(mine, key=lambda x: x.request), ways, strict=True):
    want = alone(METHODS["full"], given, sampling=way, logprobs=True)
    np.testing.assert_array_equal(answer.tokens, want.tokens)
    np.testing.assert_array_equal(answer.logprobs, want.logprobs)
    assert (answer.logprobs < 0).all() and len(answer.logprobs) == 20
  with pytest.raises(ValueError, match="sampling: found temperature 1, expected 0"):
    batcher(sampling=Sampling()).submit(**given, sampling=DRAWING)


def test_bad_batchers_are_refused():
  with pytest.raises(ValueError, match="rows: found 0, expected at least 1"):
    Batcher(model(), METHODS["full"], rows=0, capacity=8)
  with pytest.raises(ValueError, match="together: found 0, expected at least 1"):
    Batcher(model(), METHODS["full"], rows=1, capacity=8, together=0)
  with pytest.raises(ValueError, match="capacity: found 1, expected at least 2"):
    Batcher(model(), METHODS["full"], rows=1, capacity=1)
  with pytest.raises(NotImplementedError, match="chunk: found 8, expected None for SnapKV"):
    Batcher(model(), METHODS["snapkv"], rows=1, capacity=64, chunk=8)
