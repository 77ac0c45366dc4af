"""Requests in a batch of fixed rows: each answer is its own, whatever stands beside it."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.models.decode import batcher as batching
from kvjax.models.decode.batcher import Batcher
from kvjax.models.decode.sampling import Sampling
from kvjax.testing.tiny import CONFIG, model
from scripts.examples.tiny import byte_tokenizer

CAPACITY, ROWS = 64, 3
METHODS = {
  "full": kvjax.Full(),
  "snapkv": kvjax.SnapKV(16, window_size=4),
  "longflow": kvjax.LongFlow(16, window_size=4),
  "quest": kvjax.Quest(16, page=4, dense_layers=1),
  "streaming_llm": kvjax.StreamingLLM(16),
  "int8": kvjax.Quantised(kvjax.Full(), bits=8),
  "infllm": kvjax.settings.example(kvjax.InfLLM, 16),
  "ltri": kvjax.settings.example(kvjax.Ltri, 16),
}
DRAWING = Sampling(temperature=1.0)


def batcher(method=METHODS["full"], sampling=DRAWING, **how):
  return Batcher(model(), method, rows=ROWS, capacity=CAPACITY, sampling=sampling, **how)


def requests(count, seed=0):
  """Prompts and what is asked of them, of random lengths."""
  rng = np.random.default_rng(seed)
  for i in range(count):
    prompt = rng.integers(0, CONFIG.vocab, int(rng.integers(1, 30)), np.int32)
    stop = rng.integers(0, CONFIG.vocab, int(rng.integers(0, 4))).tolist()
    yield {"prompt": prompt, "limit": int(rng.integers(1, 25)), "seed": 1000 + i, "stop": stop}


def alone(method, given, **how):
  """The answer of a request in a batch that has no other."""
  mine = batcher(method, **how)
  mine.submit(**given)
  (answer,) = mine
  return answer


@pytest.mark.core(2)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_answers_are_those_of_a_request_alone(method):
  """More requests than rows, of unequal lengths: none waits for a batch to end."""
  mine, asked = batcher(method), list(requests(8))
  numbers = [mine.submit(**given) for given in asked]
  answers = {answer.request: answer for answer in mine}
  assert sorted(answers) == numbers
  for number, given in zip(numbers, asked, strict=True):
    answer, want = answers[number], alone(method, given)
    np.testing.assert_array_equal(answer.tokens, want.tokens)
    assert answer.end == want.end
    stopped = answer.tokens[-1] in given["stop"]
    assert answer.end == ("stop" if stopped else "limit")
    assert stopped or len(answer.tokens) == given["limit"]
    assert not np.isin(answer.tokens[:-1], given["stop"]).any()


def run(count, seed):
  """A thousand ways to come and go: requests are submitted, cancelled and refused meanwhile."""
  mine, rng = batcher(), np.random.default_rng(seed)
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


def check_each(asked, answers, numbers):
  """These answers are those of requests alone; of cancelled ones as far as they went."""
  for number in numbers:
    want, got = alone(METHODS["full"], asked[number]), answers[number]
    if got.end == "cancelled":
      np.testing.assert_array_equal(got.tokens, want.tokens[: len(got.tokens)])
    else:
      np.testing.assert_array_equal(got.tokens, want.tokens)
      assert got.end == want.end


def test_nothing_is_lost_or_mixed():
  asked, answers = run(40, 0)
  assert sorted(asked) == sorted(answers)
  check_each(asked, answers, range(0, 40, 4))


@pytest.mark.slow
def test_a_thousand_requests_in_flat_memory(caplog):
  run(60, 3)  # warm: every padded length of a prompt
  before = sum(x.nbytes for x in jax.live_arrays())
  with jax.log_compiles():
    asked, answers = run(1000, 1)
  assert sorted(asked) == sorted(answers) == list(range(1000))
  assert [x.getMessage() for x in caplog.records if "Compiling" in x.getMessage()] == []
  assert sum(x.nbytes for x in jax.live_arrays()) <= before + 4096
  check_each(asked, answers, range(0, 1000, 10))


def test_a_request_that_fails_hurts_no_other(monkeypatch):
  asked = list(requests(5))
  want = [alone(METHODS["full"], given) for given in asked]
  whole = batching.prefill

  def prefill(decoder, tokens, *rest, **how):
    if np.array_equal(tokens[0], asked[1]["prompt"]):
      raise FloatingPointError("row 0: found NaN")
    return whole(decoder, tokens, *rest, **how)

  monkeypatch.setattr(batching, "prefill", prefill)
  mine = batcher()
  numbers = [mine.submit(**given) for given in asked]
  answers = {answer.request: answer for answer in mine}
  assert sorted(answers) == numbers
  assert answers[1].end == "failed" and "found NaN" in str(answers[1].error)
  for number in (0, 2, 3, 4):
    np.testing.assert_array_equal(answers[number].tokens, want[number].tokens)


def test_cancelled_requests():
  mine = batcher(sampling=Sampling())
  for given in requests(5):
    mine.submit(**given | {"limit": 20, "stop": []})
  mine.cancel(4)  # it waits
  for _ in range(6):
    mine.step()
  mine.cancel(0)
  answers = {answer.request: answer for answer in mine}
  assert [answers[i].end for i in range(5)] == ["cancelled", *3 * ["limit"], "cancelled"]
  assert answers[4].tokens.size == 0 < answers[0].tokens.size < 20
  mine.cancel(0)  # has ended
  with pytest.raises(ValueError, match="request: found 9, expected one of 5 that were submitted"):
    mine.cancel(9)
  assert list(mine) == []


def test_texts_and_stop_strings():
  tokenizer = byte_tokenizer()
  mine = batcher(tokenizer=tokenizer)
  given = {"prompt": [5, 6, 7], "limit": 20, "seed": 4}
  mine.submit(**given)
  (whole,) = mine
  assert whole.text == tokenizer.decode(whole.tokens.tolist())
  part = whole.text[3:5]
  mine.submit(**given, stop_strings=[part])
  (cut,) = mine
  assert (cut.end, cut.text) == ("stop", whole.text.partition(part)[0])
  np.testing.assert_array_equal(cut.tokens, whole.tokens[: len(cut.tokens)])


@pytest.mark.parametrize(
  ("given", "error", "message"),
  [
    ({"prompt": []}, ValueError, r"prompt: found no token, expected ids in \[0, 61\)"),
    ({"prompt": [61]}, ValueError, r"prompt: found ids in \[61, 61\], expected ids in \[0, 61\)"),
    ({"prompt": [[1]]}, TypeError, "prompt: found int64 .* expected a list of integers"),
    ({"limit": 0}, ValueError, "limit: found 0, expected at least 1"),
    ({"limit": 60}, ValueError, "limit: found 60 after a prompt of 3, expected at most 59: a row"),
    ({"limit": 2.0}, TypeError, r"limit: found 2\.0, expected an integer"),
    ({"seed": -1}, ValueError, "seed: found -1"),
    ({"stop": [61]}, ValueError, "stop: found 61"),
    ({"stop_strings": ["x"]}, ValueError, "tokenizer: found None, expected one"),
  ],
)
def test_bad_requests_are_refused(given, error, message, untyped):
  mine = batcher()
  with pytest.raises(error, match=message):
    mine.submit(**{"prompt": [1, 2, 3], "limit": 4} | given)
  assert list(mine) == []


@pytest.mark.slow
def test_prompts_in_pieces():
  """As far as pieces of a prompt leave the likeliest tokens what they are."""
  given = {"prompt": np.arange(30) % CONFIG.vocab, "limit": 10}
  whole = alone(METHODS["full"], given, sampling=Sampling())
  parts = alone(METHODS["full"], given, sampling=Sampling(), chunk=8)
  np.testing.assert_array_equal(parts.tokens, whole.tokens)


def test_bad_batchers_are_refused():
  with pytest.raises(ValueError, match="rows: found 0, expected at least 1"):
    Batcher(model(), METHODS["full"], rows=0, capacity=8)
  with pytest.raises(ValueError, match="capacity: found 2, expected at least 3"):
    Batcher(model(), METHODS["full"], rows=1, capacity=2)
  with pytest.raises(NotImplementedError, match="chunk: found 8, expected None: SnapKV"):
    Batcher(model(), METHODS["snapkv"], rows=1, capacity=64, chunk=8)
