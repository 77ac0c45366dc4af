"""Caches kept in a file, forked, and taken on by a further turn."""

import dataclasses
import json
import threading
import zipfile

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import kvjax
from kvjax.models.decode.caches import VERSION, fork, fork_shared, next_turn, restore, save
from kvjax.models.decode.generate import generate, pad, prefill
from kvjax.models.decode.sampling import Sampling
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.ops import offload
from kvjax.testing.tiny import LENGTHS, TOKENS, model
from scripts.examples.tiny import byte_tokenizer

BUDGET, CAPACITY = 16, 64
FULL = kvjax.Full()
METHODS = [
  pytest.param(kvjax.settings.example(kvjax.METHODS[name], BUDGET), id=name)
  for name in ("full", "streaming_llm", "random")
]


def start(method, dtype=None):
  """Two rows of different lengths, and their spec."""
  spec = model().spec(2, CAPACITY, dtype)
  logits, caches = prefill(model(), TOKENS[:, :23], LENGTHS, method.init_caches(spec), method)
  return logits, caches, spec


def go_on(logits, caches, method, steps=5, **kwargs):
  return generate(model(), logits, caches, method, steps=steps, chunk=4, **kwargs)[0].tokens


@pytest.fixture
def saved(tmp_path):
  """A file of full caches, and what is in it."""
  logits, caches, spec = start(FULL)
  return save(tmp_path / "x.npz", logits, caches, FULL, spec), logits, caches, spec


CACHES = "kvjax-caches"


def header(kind, version):
  said = {"format": kind} | ({"version": version} if version else {})
  return {"header.json": json.dumps(said).encode()}


def read_zip(path):
  with zipfile.ZipFile(path) as file:
    return {name: file.read(name) for name in file.namelist()}


def write_zip(path, entries):
  with zipfile.ZipFile(path, "w") as file:
    for name, data in entries.items():
      file.writestr(name, data)


# ---- files


@pytest.mark.core(1)
@pytest.mark.parametrize("method", METHODS)
def test_restored_caches_go_on_as_the_saved_ones(method, tmp_path):
  logits, caches, spec = start(method)
  path = save(tmp_path / "new" / "x.npz", logits, caches, method, spec)
  again, restored = restore(path, method, spec)
  chex.assert_trees_all_equal((again, restored), (logits, caches))
  assert jax.tree.structure(restored) == jax.tree.structure(caches)
  np.testing.assert_array_equal(go_on(again, restored, method), go_on(logits, caches, method))
  assert [p.name for p in path.parent.iterdir()] == ["x.npz"]


def test_bfloat16_is_kept_bit_by_bit(tmp_path):
  method = kvjax.Full()
  logits, caches, spec = start(method, jnp.bfloat16)
  path = save(tmp_path / "x.npz", logits, caches, method, spec)
  _, restored = restore(path, method, spec)
  assert restored[0].slots["k"].dtype == jnp.bfloat16
  chex.assert_trees_all_equal(restored, caches)
  assert np.load(path)["layer0.slots.k"].shape == caches[0].slots["k"].shape


def test_files_of_other_caches_are_refused(tmp_path):
  method = kvjax.StreamingLLM(16)
  logits, caches, spec = start(method)
  path = save(tmp_path / "x.npz", logits, caches, method, spec)
  with pytest.raises(ValueError, match=r"found caches of StreamingLLM.*expected Full\(\)"):
    restore(path, kvjax.Full(), spec)
  with pytest.raises(ValueError, match=r"budget=16.*expected StreamingLLM\(budget=32"):
    restore(path, kvjax.StreamingLLM(32), spec)
  for name, value in (("batch", 3), ("capacity", 32), ("layers", 5), ("dtype", jnp.bfloat16)):
    other = dataclasses.replace(spec, **{name: value})
    with pytest.raises(ValueError, match=rf"x\.npz: spec\.{name}: found .* expected"):
      restore(path, method, other)
  with pytest.raises(ValueError, match=r"caches: layer0\.slots\.k: found .* expected .* Full"):
    save(path, logits, caches, kvjax.Full(), spec)


def test_damaged_files_are_refused(saved):
  path, *_, spec = saved
  whole, entries = path.read_bytes(), read_zip(path)
  for data in (whole[:-100], whole[: len(whole) // 2], b"", b"text"):
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"x\.npz: found .*expected a whole file of saved caches"):
      restore(path, FULL, spec)
  with pytest.raises(FileNotFoundError):
    restore(path.with_name("y.npz"), FULL, spec)
  # A header of another version, whatever else it says, or does not say.
  says = "found format 'kvjax-caches' version"
  split = entries["header.json"].replace(b"DENSE", b"SPLIT", 1)
  for change, message in (
    ({"layer3.rows.seen.npy": None}, r"layer3\.rows\.seen"),
    ({"header.json": split}, r"layouts: found \['SPLIT', .*, expected \['DENSE', .*Full"),
    (header("x", None), "found format 'x' version None"),
    (
      header(CACHES, VERSION + 1),
      rf"x\.npz: {says} 3, expected '{CACHES}' version 2 .*by a newer kvjax",
    ),
    (header(CACHES, 1), rf"x\.npz: {says} 1, expected '{CACHES}' version 2 .*by an older kvjax"),
  ):
    write_zip(path, {name: x for name, x in {**entries, **change}.items() if x is not None})
    with pytest.raises(ValueError, match=message):
      restore(path, FULL, spec)


def test_an_interrupted_save_leaves_the_old_file(saved, tmp_path, monkeypatch):
  path, logits, caches, spec = saved
  before = path.read_bytes()

  def stop(*_, **__):
    raise KeyboardInterrupt

  monkeypatch.setattr(np.lib.format, "write_array", stop)
  with pytest.raises(KeyboardInterrupt):
    save(path, logits, caches, FULL, spec)
  assert path.read_bytes() == before
  assert list(tmp_path.iterdir()) == [path]


def test_any_flipped_byte_is_refused_in_one_line(saved):
  """Sizes, flags and offsets of the zip, its headers and those of arrays, and the numbers."""
  path, logits, caches, spec = saved
  whole = path.read_bytes()
  with zipfile.ZipFile(path) as file:
    starts = [entry.header_offset for entry in file.infolist()]
  places = [start + i for start in starts for i in range(250)]
  places += range(len(whole) - 2500, len(whole))
  rng, refused = np.random.default_rng(0), 0
  for place in rng.choice(places, 250, replace=False):
    data = bytearray(whole)
    data[place] ^= rng.integers(1, 256)
    path.write_bytes(data)
    try:
      found = restore(path, FULL, spec)
    except ValueError as error:
      assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
      refused += 1
    else:  # dates and the like
      chex.assert_trees_all_equal(found, (logits, caches))
  assert refused > 150


def test_a_header_that_asks_for_more_memory_than_there_is(saved):
  """An array's own header is believed in nothing."""
  path, *_, spec = saved
  entries = read_zip(path)
  head = entries["logits.npy"]
  entries["logits.npy"] = head.replace(b"(2, 61), }" + b" " * 9, b"(2, 61000000000), }")
  assert entries["logits.npy"] != head
  write_zip(path, entries)
  with pytest.raises(ValueError, match=r"x\.npz: found .*logits.*, expected a whole file"):
    restore(path, FULL, spec)


def test_windows_of_another_model_are_refused(tmp_path):
  """Windows that lay out alike, in this capacity: only the header tells them apart."""
  method = kvjax.Full()
  plain = dataclasses.replace(model().spec(2, CAPACITY), windows=(None,) * 4)
  wide, wider = (
    dataclasses.replace(plain, layers=2, windows=(None, size, None, size)) for size in (128, 256)
  )
  none = dataclasses.replace(plain, windows=())
  for own, other in ((wide, wider), (plain, none), (none, plain)):
    path = save(tmp_path / "x.npz", jnp.zeros((2, 61)), method.init_caches(own), method, own)
    restore(path, method, own)
    with pytest.raises(ValueError, match=r"x\.npz: spec\.windows: found .* expected"):
      restore(path, method, other)


def test_two_who_save_to_one_path(saved, tmp_path):
  """The file is the one's or the other's."""
  path, logits, caches, spec = saved
  both, failed = (logits, logits + 1), []

  def write(mine):
    try:
      save(path, mine, caches, FULL, spec)
    except BaseException as error:
      failed.append(error)

  for _ in range(8):
    threads = [threading.Thread(target=write, args=(mine,)) for mine in both]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    found, others = restore(path, FULL, spec)
    assert any(np.array_equal(found, mine) for mine in both)
    chex.assert_trees_all_equal(others, caches)
  assert not failed and [p.name for p in tmp_path.iterdir()] == ["x.npz"]


def test_arrays_lie_where_those_of_empty_caches_do(tmp_path, monkeypatch):
  """Stores in the host's memory, as on a GPU: kept in a file, and forked."""
  monkeypatch.setattr(offload, "on_host", lambda: True)
  method = kvjax.settings.example(kvjax.METHODS["infllm"], BUDGET)
  spec = model().spec(2, CAPACITY)
  caches, logits = method.init_caches(spec), jnp.zeros((2, 61))

  def kinds(tree):
    return jax.tree.map(lambda x: x.sharding.memory_kind, tree)

  assert len(set(jax.tree.leaves(kinds(caches)))) == 2
  path = save(tmp_path / "x.npz", logits, caches, method, spec)
  again, restored = restore(path, method, spec)
  assert kinds((again, restored)) == kinds((logits, caches))
  assert kinds(fork(logits, caches, 2)) == kinds((logits, caches))


# ---- forks


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_forked_rows_are_the_row_again(method):
  logits, caches, _ = start(method)
  forked = fork(logits, caches, 2)
  assert forked[0].shape[0] == forked[1][0].seen.shape[0] == 4
  row = fork(logits, caches, 3, row=1)
  drawn = go_on(*row, method, sampling=Sampling(5.0))
  assert len({tuple(x) for x in drawn.tolist()}) == 3  # by their numbers, rows draw on their own
  greedy = go_on(logits, caches, method)  # the forks are copies: the rows are still alive
  np.testing.assert_array_equal(go_on(*forked, method), np.repeat(greedy, 2, 0))


def test_forks_are_refused(untyped):
  logits, caches, _ = start(kvjax.Full())
  with pytest.raises(ValueError, match="times: found 0"):
    fork(logits, caches, 0)
  with pytest.raises(ValueError, match=r"row: found 2, expected an integer in \[0, 2\)"):
    fork(logits, caches, 2, row=2)
  for call, message in (
    (lambda: fork(logits, caches, 2.0), r"times: found 2\.0, expected an integer"),
    (lambda: fork(logits, caches, True), "times: found True, expected an integer"),
    (lambda: fork(logits, caches, 2, row=1.0), r"row: found 1\.0, expected an integer"),
    (lambda: fork(logits, (), 2), "caches: found tuple, expected the tuple that"),
    (lambda: fork(logits[0], caches, 2), r"logits: found shape \(\d+,\), expected \[2, V\]"),
    (
      lambda: fork_shared(logits, caches, kvjax.Full(), 2, room=4.0),
      r"room: found 4\.0, expected an integer",
    ),
  ):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
      call()


def test_what_is_no_logits_or_no_sizes_is_not_saved(tmp_path, untyped):
  _, caches, spec = start(kvjax.Full())
  path = tmp_path / "caches"
  for logits, sizes, message in (
    (None, spec, "logits: found None, expected an array of numbers"),
    (1.0, spec, r"logits: found shape \(\), expected \[B, V\]"),
    (1.0, None, r"spec: found None, expected a kvjax\.CacheSpec"),
  ):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
      save(path, logits, caches, kvjax.Full(), sizes)
  with pytest.raises(TypeError, match=r"^spec: found None, expected a kvjax\.CacheSpec"):
    restore(path, kvjax.Full(), None)
  assert not path.exists()


# ---- further turns


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_turn_onto_live_caches(method):
  """Each row alone gives what the batch gives; a row that says nothing stays as it is."""
  logits, caches, _ = start(method)
  out, caches = generate(model(), logits, caches, method, steps=4, chunk=4)
  idle = jax.tree.map(lambda x: np.asarray(x[1]), caches)
  turn, lengths = pad([TOKENS[0, 25:34].tolist(), []])
  after, caches = prefill(model(), turn, lengths, caches, method)
  chex.assert_trees_all_equal(jax.tree.map(lambda x: np.asarray(x[1]), caches), idle)
  assert caches[0].seen.tolist() == [LENGTHS[0] + 4 + 9, LENGTHS[1] + 4]

  first, alone = prefill(
    model(), TOKENS[:1, :23], LENGTHS[:1], method.init_caches(model().spec(1, CAPACITY)), method
  )
  own, alone = generate(model(), first, alone, method, steps=4, chunk=4)
  np.testing.assert_array_equal(own.tokens, out.tokens[:1])
  second, _ = prefill(model(), turn[:1], lengths[:1], alone, method)
  chex.assert_trees_all_close(second, after[:1], rtol=1e-4, atol=1e-4)
  if method.traits.order_independent:  # the conversation read at once
    spoken = np.concatenate([TOKENS[:1, :23], own.tokens, turn[:1, : lengths[0]]], 1)
    fresh = method.init_caches(model().spec(1, CAPACITY))
    whole, _ = prefill(model(), spoken, [spoken.shape[1]], fresh, method)
    chex.assert_trees_all_close(second, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("special", [True, False])
def test_a_turn_is_what_the_whole_conversation_has_more(special):
  """The token that closes a message may be one among `ends` that its file does not call special."""
  tokenizer = byte_tokenizer()
  if not special:
    text = tokenizer.backend.to_str().replace('"special":true', '"special":false')
    backend = tokenizers.Tokenizer.from_str(text)
    tokenizer = Tokenizer(backend, eos=tokenizer.eos, chat_template=tokenizer.chat_template)
  assert tokenizer.is_special(tokenizer.eos) == special
  check_turns(tokenizer)


@pytest.mark.parametrize(
  ("told", "message"),
  [
    ((None, []), "message: found None, expected a string"),
    (("", [1.5]), r"answer: found float64 \(1,\), expected a list of integers"),
    (("", [[1, 2], [3, 4]]), r"answer: found int64 \(2, 2\), expected a list of integers"),
    (("", "yes"), r"answer: found <U3 \(\), expected a list of integers"),
  ],
)
def test_a_turn_takes_a_string_and_ids(told, message, untyped):
  with pytest.raises((TypeError, ValueError), match=f"^{message}"):
    next_turn(byte_tokenizer(), *told)


@pytest.mark.slow
def test_a_turn_under_a_published_template(smollm2):
  check_turns(Tokenizer.load(smollm2))


def check_turns(tokenizer):
  one = {"role": "user", "content": "Who?"}
  prompt, answer = tokenizer.chat([one]), [*tokenizer.encode("Me."), tokenizer.eos]
  conversation = [one, {"role": "assistant", "content": "Me."}, {"role": "user", "content": "Why?"}]
  whole = tokenizer.chat(conversation)
  assert prompt + answer + next_turn(tokenizer, "Why?", answer) == whole
  # An answer that was cut off is closed first.
  assert prompt + answer[:-1] + next_turn(tokenizer, "Why?", answer[:-1]) == whole
  padded = [*answer, -1, -1]
  assert next_turn(tokenizer, "Why?", padded) == next_turn(tokenizer, "Why?", answer)


def test_a_template_that_drops_answers_is_refused():
  tokenizer = byte_tokenizer()
  tokenizer.chat_template = "{{ messages[-1].content }}"
  with pytest.raises(ValueError, match="chat_template: found no trace of an assistant's message"):
    next_turn(tokenizer, "Why?")
