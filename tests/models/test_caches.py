"""Caches kept in a folder, forked, and taken on by a further turn."""

import dataclasses
import errno
import json
import signal
import subprocess
import sys
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tokenizers

import kvjax
from kvjax.models.decode.caches import fork, fork_shared, next_turn, restore, save, save_async
from kvjax.models.decode.generate import generate, prefill
from kvjax.models.decode.sampling import Sampling
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.ops import offload
from kvjax.runtime import sharding
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


def filled(caches):
  """Caches whose every bit is drawn: what is kept of one of them is kept of all."""
  rng = np.random.default_rng(0)

  def draw(x):
    drawn = np.frombuffer(rng.bytes(x.size * x.dtype.itemsize), np.uint8)
    drawn = drawn % 2 == 1 if x.dtype == bool else drawn.view(x.dtype)
    return jnp.asarray(drawn.reshape(x.shape))

  return jax.tree.map(draw, caches)


def bits(tree):
  return jax.tree.map(lambda x: np.asarray(x).reshape(-1).view(np.uint8), tree)


@pytest.fixture
def saved(tmp_path):
  """A folder of full caches, and what is in it."""
  logits, caches, spec = start(FULL)
  return save(tmp_path / "x", logits, caches, FULL, spec), logits, caches, spec


def files_of(path):
  return sorted(x for x in path.rglob("*") if x.is_file())


# ---- folders


@pytest.mark.kin
@pytest.mark.core(1)
@pytest.mark.rest
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", kvjax.METHODS)
def test_every_bit_of_every_layout_is_kept(name, dtype, tmp_path):
  """Saved from one device or two, restored onto one or two, wherever the method runs on these."""
  method = kvjax.settings.example(kvjax.METHODS[name], BUDGET)
  spec, mesh = model().spec(2, CAPACITY, dtype), kvjax.make_mesh(heads=2)
  uneven = method.traits.uneven
  meshes = [None] if uneven is not None and uneven(spec, 2) else [None, mesh]
  shapes = jax.eval_shape(lambda: method.init_caches(spec))
  state = filled((jax.ShapeDtypeStruct((2, 61), jnp.float32), shapes))
  for source in meshes:
    if source is not None:
      where = sharding.named(source, sharding.cache_specs(state[1], method))
      state = state[0], jax.device_put(state[1], where)
    path = save(tmp_path / "new" / "x", *state, method, spec)
    for mesh in meshes:
      found = restore(path, method, spec, mesh=mesh)
      chex.assert_trees_all_equal(bits(found), bits(state))
      assert jax.tree.structure(found) == jax.tree.structure(state)
      for x in jax.tree.leaves(found):
        assert len(x.sharding.device_set) == (1 if mesh is None else 2)


@pytest.mark.core(1)
@pytest.mark.parametrize("method", METHODS)
def test_decoding_goes_on_while_caches_are_written(method, tmp_path):
  """What is saved is what was there when `save_async` returned, though steps had it donated."""
  logits, caches, spec = start(method)
  kept = jax.tree.map(np.array, (logits, caches))
  saving = save_async(tmp_path / "x", logits, caches, method, spec)
  tokens = go_on(logits, caches, method)
  chex.assert_trees_all_equal(restore(saving.wait(), method, spec), kept)
  np.testing.assert_array_equal(tokens, go_on(*start(method)[:2], method))


def test_what_goes_wrong_in_writing_is_raised_where_it_is_waited_for(saved, monkeypatch):
  path, logits, caches, spec = saved

  def full(*_, **__):
    if threading.current_thread() is not threading.main_thread():
      raise OSError(errno.ENOSPC, "no room")

  with monkeypatch.context() as patch:
    patch.setattr(ocp.CheckpointManager, "wait_until_finished", full)
    saving = save_async(path, logits + 1, caches, FULL, spec)
    with pytest.raises(OSError, match=r"x: cannot be written \(No space left on device\)"):
      saving.wait()
  (path.parent / "file").write_text("here")
  with pytest.raises(OSError, match=r"file: cannot be written \(File exists\)"):
    save(path.parent / "file", logits, caches, FULL, spec)


def test_numbers_of_numpy_are_numbers(tmp_path, untyped):
  """A budget or a capacity that was computed is the one that somebody types."""
  method, plain = kvjax.StreamingLLM(np.int64(16)), kvjax.StreamingLLM(16)
  logits, caches, spec = start(plain)
  computed = dataclasses.replace(spec, capacity=np.int32(spec.capacity))
  caches = method.init_caches(computed)
  path = save(tmp_path / "x", logits, caches, method, computed)
  chex.assert_trees_all_equal(bits(restore(path, plain, spec)), bits((logits, caches)))


def test_folders_of_other_caches_are_refused(tmp_path):
  method = kvjax.StreamingLLM(16)
  logits, caches, spec = start(method)
  path = save(tmp_path / "x", logits, caches, method, spec)
  with pytest.raises(ValueError, match=r"found caches of StreamingLLM.*expected Full\(\)"):
    restore(path, kvjax.Full(), spec)
  with pytest.raises(ValueError, match=r"budget=16.*expected StreamingLLM\(budget=32"):
    restore(path, kvjax.StreamingLLM(32), spec)
  for name, value in (("batch", 3), ("capacity", 32), ("layers", 5), ("dtype", jnp.bfloat16)):
    other = dataclasses.replace(spec, **{name: value})
    with pytest.raises(ValueError, match=rf"x: spec\.{name}: found .* expected"):
      restore(path, method, other)
  with pytest.raises(ValueError, match=r"caches: layer0\.slots\.k: found .* expected .* Full"):
    save(path, logits, caches, kvjax.Full(), spec)
  with pytest.raises(NotImplementedError, match="mesh: found slots split over devices"):
    restore(path, method, spec, mesh=kvjax.make_mesh(slots=2))


def test_other_versions_are_refused(saved, tmp_path):
  path, *_, spec = saved
  head = path / "1" / "header" / "metadata"
  whole, says = json.loads(head.read_text()), "found format 'kvjax-caches' version"
  layouts = ["SPLIT", *whole["layouts"][1:]]
  for change, message in (
    ({"layouts": layouts}, r"layouts: found \['SPLIT', .*, expected \['DENSE', .*Full"),
    ({"format": "x", "version": None}, "found format 'x' version None"),
    ({"version": 4}, rf"x: {says} 4, expected 'kvjax-caches' version 3 .*by a newer kvjax"),
    ({"version": 1}, rf"x: {says} 1, expected 'kvjax-caches' version 3 .*by an older kvjax"),
    ({"sums": {**whole["sums"], "logits": 7}}, r"x: found other numbers than were .* in logits"),
  ):
    head.write_text(json.dumps({**whole, **change}))
    with pytest.raises(ValueError, match=message):
      restore(path, FULL, spec)
  for name in ("none", "empty"):
    (tmp_path / "empty").mkdir(exist_ok=True)
    with pytest.raises(FileNotFoundError, match=rf"{name}: found nothing saved, expected"):
      restore(tmp_path / name, FULL, spec)
  (tmp_path / "x.npz").write_bytes(b"PK")
  with pytest.raises(ValueError, match=r"x\.npz: found a file, expected a folder .* version 3 "):
    restore(tmp_path / "x.npz", FULL, spec)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's threads
def test_damage_anywhere_is_refused_in_one_line(saved):
  """A byte changed, the end cut off, a file gone: the same numbers, or an error by name."""
  path, logits, caches, spec = saved
  rng, refused = np.random.default_rng(0), set()
  for file in files_of(path):
    whole = file.read_bytes()
    places = rng.choice(len(whole), min(len(whole), 3), replace=False)  # `fuzz` tries many
    flips = ((i, bytes([whole[i] ^ rng.integers(1, 256)])) for i in places)
    flipped = [whole[:i] + byte + whole[i + 1 :] for i, byte in flips]
    for data in (None, b"", whole[: len(whole) // 2], *flipped):
      file.unlink() if data is None else file.write_bytes(data)
      try:
        found = restore(path, FULL, spec)
      except (ValueError, FileNotFoundError) as error:
        assert str(error).startswith(f"{path}") and "\n" not in str(error)
        refused.add(file)
      else:
        chex.assert_trees_all_equal(found, (logits, caches))
      file.write_bytes(whole)
  assert {"_METADATA", "manifest.ocdbt", "metadata"} <= {file.name for file in refused}
  assert max(files_of(path), key=lambda x: x.stat().st_size) in refused


def test_an_interrupted_save_leaves_the_old_version(saved, monkeypatch):
  path, logits, caches, spec = saved

  def stop(*_, **__):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(ocp.CheckpointManager, "save", stop)
    with pytest.raises(KeyboardInterrupt):
      save(path, logits + 1, caches, FULL, spec)
  chex.assert_trees_all_equal(restore(path, FULL, spec), (logits, caches))
  save(path, logits + 1, caches, FULL, spec)  # nobody is waited for
  assert [p.name for p in path.iterdir()] == ["2"]


KILLED = """
import os, signal, sys, time
import jax.numpy as jnp
import kvjax
from kvjax.models.decode.caches import save, save_async
spec, method = kvjax.CacheSpec(1, 1 << 16, 4, 1, 64, 2), kvjax.Full()
caches = method.init_caches(spec)
save(sys.argv[1], jnp.zeros((1, 5)), caches, method, spec)
save_async(sys.argv[1], jnp.ones((1, 5)), caches, method, spec)
while len(os.listdir(sys.argv[1])) < 2:
  time.sleep(1e-3)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_save_leaves_the_old_version(tmp_path):
  path, method = tmp_path / "x", kvjax.Full()
  done = subprocess.run(
    [sys.executable, "-c", KILLED, path], capture_output=True, text=True, timeout=120
  )
  assert done.returncode == -signal.SIGKILL, done.stderr
  assert len(list(path.iterdir())) == 2  # it was in the middle
  spec = kvjax.CacheSpec(1, 1 << 16, 4, 1, 64, 2)
  logits, caches = restore(path, method, spec)
  assert not logits.any()
  save(path, logits + 2, caches, method, spec)
  assert [p.name for p in path.iterdir()] == ["2"] and restore(path, method, spec)[0].all()


def test_windows_of_another_model_are_refused(tmp_path):
  """Windows that lay out alike, in this capacity: only the header tells them apart."""
  method = kvjax.Full()
  plain = dataclasses.replace(model().spec(2, CAPACITY), windows=(None,) * 4)
  wide, wider = (
    dataclasses.replace(plain, layers=2, windows=(None, size, None, size)) for size in (128, 256)
  )
  none = dataclasses.replace(plain, windows=())
  for own, other in ((wide, wider), (plain, none), (none, plain)):
    path = save(tmp_path / "x", jnp.zeros((2, 61)), method.init_caches(own), method, own)
    restore(path, method, own)
    with pytest.raises(ValueError, match=r"x: spec\.windows: found .* expected"):
      restore(path, method, other)


@pytest.mark.slow
def test_two_who_save_to_one_path(saved, tmp_path):
  """The folder is the one's or the other's: one after the other."""
  path, logits, caches, spec = saved
  both, failed = (logits, logits + 1), []

  def write(mine):
    try:
      save(path, mine, caches, FULL, spec)
    except BaseException as error:
      failed.append(error)

  for _ in range(4):
    threads = [threading.Thread(target=write, args=(mine,)) for mine in both]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    found, others = restore(path, FULL, spec)
    assert any(np.array_equal(found, mine) for mine in both)
    chex.assert_trees_all_equal(others, caches)
  assert not failed and [p.name for p in path.iterdir()] == ["9"]


@pytest.mark.slow
def test_arrays_lie_where_those_of_empty_caches_do(tmp_path, monkeypatch):
  """Stores in the host's memory, as on a GPU: kept in a folder, and forked."""
  monkeypatch.setattr(offload, "on_host", lambda: True)
  method = kvjax.settings.example(kvjax.METHODS["infllm"], BUDGET)
  spec = model().spec(2, CAPACITY)
  caches, logits = method.init_caches(spec), jnp.zeros((2, 61))

  def kinds(tree):
    return jax.tree.map(lambda x: x.sharding.memory_kind, tree)

  assert len(set(jax.tree.leaves(kinds(caches)))) == 2
  path = save(tmp_path / "x", logits, caches, method, spec)
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
    (lambda: fork_shared(logits, caches, FULL, 2, room=4.0), "room: found 4.0, .* an integer"),
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
    (("", [1, [2]]), r"answer: found object \(2,\), expected a list of integers"),
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
