"""Prompts that come in parts: the same bits however they come, are interrupted, grow, are kept."""

import json
import os
import signal
import subprocess
import sys

import chex
import jax
import numpy as np
import pytest

import kvjax
from kvjax.models.decode import pieces, streams
from kvjax.models.decode.generate import generate, pad, prefill
from kvjax.models.decode.streams import PromptStream
from kvjax.testing.tiny import CONFIG, model

SMALL = {"init_tokens": 3, "local": 8, "block": 6, "retrieved": 2, "chunk": 12, "held": 3}
PIECES = {"spans": 2, "vectors": 6, "last": 5, "rate": (6.0, 2.0), "quantile": (0.7, 0.6)}
METHODS = {
  "infllm": kvjax.InfLLM(**SMALL, representatives=2),
  "ltri": kvjax.Ltri(**SMALL, **PIECES, heads=((1, 4, 0.6), (2, 3, 0.3))),
  "ltri, all heads": kvjax.Ltri(**SMALL, **PIECES),
}
MODEL = model(layers=3)
LENGTHS = np.array([151, 97, 12])
TOKENS = np.random.default_rng(1).integers(0, CONFIG.vocab, (3, 151), np.int32)
SPEC = MODEL.spec(3, 170)


@pytest.fixture(params=[pytest.param(x, marks=[pytest.mark.slow] * ("ltri" in x)) for x in METHODS])
def method(request):
  return METHODS[request.param]


@pytest.fixture
def small(monkeypatch):
  """Stores that grow twice: from 50 tokens to 100 and to the capacity."""
  monkeypatch.setattr(streams, "FIRST", 50)


def splits(rng, parts):
  """Each row's tokens in as many parts, some of them empty: [(tokens, lengths)]."""
  cuts = [np.sort(rng.integers(0, n + 1, parts - 1)) for n in LENGTHS]
  ends = np.array([[0, *cut, n] for cut, n in zip(cuts, LENGTHS, strict=True)])
  for start, stop in zip(ends.T, ends.T[1:], strict=False):
    rows = [row[a:b].tolist() for row, a, b in zip(TOKENS, start, stop, strict=True)]
    if any(rows):
      yield pad(rows, multiple=1)


def fed(stream, parts):
  for tokens, lengths in parts:
    stream.feed(tokens, lengths)
  return stream


def whole(method):
  return PromptStream(MODEL, method, SPEC)


def go_on(logits, caches, method):
  return generate(MODEL, logits, caches, method, steps=9)[0].last


@pytest.mark.slow
@pytest.mark.parametrize("first", [50, 1 << 17])
def test_parts_of_any_size_give_the_bits_of_prefill(method, first, monkeypatch):
  """Rows of other lengths, at other places in each part; a store grows twice, or not at all."""
  monkeypatch.setattr(streams, "FIRST", first)
  logits, caches = prefill(MODEL, TOKENS, LENGTHS, method.init_caches(SPEC), method)
  want, last = jax.tree.map(np.array, (logits, caches)), go_on(logits, caches, method)
  for seed, parts in ((0, 1), (1, 3), (2, 40)):
    stream, sizes = whole(method), []
    for part in splits(np.random.default_rng(seed), parts):
      stream.feed(*part)
      sizes.append(stream.spec.capacity)
    found = stream.finish()
    chex.assert_trees_all_equal(found, want)
    np.testing.assert_array_equal(go_on(*found, method), last)
  assert sorted(set(sizes)) == ([50, 100, 170] if first == 50 else [170])


@pytest.fixture
def interruptible():
  """A process that hears Ctrl-C, as one in the background does not."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_for_the_chunk_and_leaves_usable_caches(
  method, small, interruptible, number
):
  """At any chunk, in the midst of its layers; what was read is there, and reading goes on."""
  want = fed(whole(method), [(TOKENS, LENGTHS)]).finish()
  stream, calls = whole(method), [0]
  read = stream._pieces._read

  def struck(*given):
    calls[0] += 1
    if calls[0] % 3 == 0:
      os.kill(os.getpid(), number)
    return read(*given)

  def stopped(*_):
    raise KeyboardInterrupt

  stream._pieces._read = struck
  before, seen = signal.signal(signal.SIGTERM, stopped), []
  try:
    with pytest.raises(KeyboardInterrupt):
      stream.feed(TOKENS, LENGTHS)
    for _ in range(20):
      seen.append(int(stream.seen.max()))
      assert stream.caches[0].seen.tolist() == stream.seen.tolist()
      try:
        found = stream.finish()
        break
      except KeyboardInterrupt:
        pass
  finally:
    signal.signal(signal.SIGTERM, before)
  assert seen[:3] == [36, 72, 108] and signal.getsignal(signal.SIGTERM) == before
  chex.assert_trees_all_equal(found, want)


def test_a_second_interrupt_does_not_wait(interruptible):
  reached = []
  with pytest.raises(KeyboardInterrupt), pieces.undivided():
    for _ in range(2):
      reached.append(0)
      os.kill(os.getpid(), signal.SIGINT)
    reached.append(0)
  assert len(reached) == 2 and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_a_callback_leaves_usable_caches(method):
  want = fed(whole(method), [(TOKENS, LENGTHS)]).finish()
  stream, told = whole(method), []

  def fails(seen, end):
    told.append((seen, end))
    if len(told) == 3:
      raise OSError("no room to note it")

  with pytest.raises(OSError, match="no room to note it"):
    stream.feed(TOKENS, LENGTHS, on_chunk=fails)
  assert told == [(12, 151), (24, 151), (36, 151)] and stream.seen.tolist()[0] == 36
  assert (stream.seen + stream.waiting).tolist() == LENGTHS.tolist()
  chex.assert_trees_all_equal(stream.finish(), want)


def test_a_prompt_of_another_length_than_was_told_is_refused():
  told = (
    ([1.5], "total: found float64, expected integers"),
    ([-1], r"total: found \[-1\], expected"),
  )
  for total, message in told:
    with pytest.raises(ValueError, match=message):
      PromptStream(MODEL, kvjax.Full(), MODEL.spec(1, 64), chunk=8, total=total)
  stream = PromptStream(MODEL, kvjax.Full(), MODEL.spec(1, 64), chunk=8, total=[10])
  stream.feed(TOKENS[:1, :6])
  with pytest.raises(ValueError, match=r"found \[11\] in all, expected at most total = \[10\]"):
    stream.feed(TOKENS[:1, 6:11])
  assert (stream.seen + stream.waiting).tolist() == [6]


@pytest.mark.slow
def test_a_stream_that_was_kept_goes_on_with_the_same_bits(method, small, tmp_path):
  """Kept at several places, before and after its store grew, with rows at different places."""
  want = fed(whole(method), [(TOKENS, LENGTHS)]).finish()
  stream = whole(method)
  for end in (20, 60, 110):
    stream.feed(*pad([row[s:end].tolist() for row, s in rest(stream)], multiple=1))
    path, seen = stream.save(tmp_path / "stream"), stream.seen
    stream = PromptStream.restore(path, MODEL, method, SPEC)
    np.testing.assert_array_equal(stream.seen, seen)
    assert stream.spec.capacity == min(n for n in (50, 100, 170) if n >= seen.max())
  found = fed(stream, [pad([row[s:].tolist() for row, s in rest(stream)], multiple=1)]).finish()
  chex.assert_trees_all_equal(found, want)


def rest(stream):
  rows = [row[:n] for row, n in zip(TOKENS, LENGTHS, strict=True)]
  return [
    (row, int(n + waits)) for row, n, waits in zip(rows, stream.seen, stream.waiting, strict=True)
  ]


@pytest.mark.slow
def test_a_stream_that_is_killed_has_the_bits_of_one_that_is_not(tmp_path):
  """SIGKILL at random places, once while it saves; each time a new process goes on."""
  command = [sys.executable, "-m", "scripts.tools.soak_streams", "--method", "infllm"]
  how = {"tokens": 1500, "kills": 3, "every": 200, "budget": 64, "out": tmp_path}
  subprocess.run([*command, *(f"--{name}={x}" for name, x in how.items())], check=True)
  record = json.loads((tmp_path / "cpu" / "soak_streams.json").read_text())
  assert record["differ"] == [] and record["tokens"] == 1500
  assert len(record["kills"]) == 3 and any(kill["saving"] for kill in record["kills"])
  assert all(kill["resumed"] <= kill["at"] for kill in record["kills"])
