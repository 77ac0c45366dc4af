"""`kvjax generate`: one JSON object, bytes in use, warnings, long prompts in pieces."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.programs import common, console, generate, keep, turn
from scripts.examples import tiny

ARGS = generate.Args("Who?", steps=8, method="streaming_llm", budget=16)


@pytest.fixture
def loaded(monkeypatch):
  model, tokenizer = tiny.load()
  monkeypatch.setattr(common, "load_model", lambda *_, **__: (model, tokenizer))
  return model, tokenizer


@pytest.mark.slow
def test_json_is_all_of_standard_output(loaded, capsys):
  args = dataclasses.replace(ARGS, temperature=1.5, seed=1)
  generate.main(args)
  streamed = capsys.readouterr()
  assert "read 23 tokens" in streamed.err and "MB used, " in streamed.err
  generate.main(dataclasses.replace(args, json=True))
  said = json.loads(capsys.readouterr().out)
  assert said["text"] + "\n" == streamed.out
  assert (said["tokens"], said["end"], said["prompt_tokens"]) == (8, "limit", 23)
  assert set(said["seconds"]) == {"read", "write", "compile"}
  assert 0 < said["cache_bytes"]["used"] <= said["cache_bytes"]["allocated"]
  mark = said["text"][2:4]
  generate.main(dataclasses.replace(args, json=True, stop=(mark,)))
  stopped = json.loads(capsys.readouterr().out)
  assert stopped["end"] == "stop" and mark not in stopped["text"]


def test_an_answer_that_stops_at_its_last_token_has_stopped():
  tokenizer = tiny.byte_tokenizer()
  ids = tokenizer.encode("abc", bos=False)
  for tokens, limit, stop, stopped in (
    (ids, 3, (), False),
    (ids, 4, (), True),
    (ids, 3, ("bc",), True),
    (ids, 3, ("bd",), False),
    ([*ids, *tokenizer.ends], 3 + len(tokenizer.ends), (), True),
  ):
    assert turn.stopped(tokenizer, tokens, limit, stop) == stopped


@pytest.mark.core(4)
@pytest.mark.parametrize("name", ["full", "snapkv", "duo_attention", "adakv", "ltri"])
def test_bytes_used_are_those_of_tokens(name):
  """None at first, all of a row that is full; in between by the tokens that are held."""
  model, _ = tiny.load()
  method = kvjax.settings.example(kvjax.METHODS[name], 32)
  spec = model.spec(1, 128)
  caches = method.init_caches(spec)
  empty, allocated = turn.bytes_of(caches)
  assert allocated == sum(x.nbytes for x in jax.tree.leaves(caches))
  ids, used = np.ones((1, 128), np.int32), []
  for tokens in (8, 96):
    _, held = turn.prefill(model, ids, np.array([tokens]), method.init_caches(spec), method)
    used.append(turn.bytes_of(held)[0])
  assert 0 <= empty < used[0] <= used[1] <= allocated
  if name == "full":
    of_token = (allocated - empty) / 128
    assert used == [pytest.approx(empty + n * of_token, abs=1) for n in (8, 96)]


@pytest.mark.parametrize(
  ("method", "length", "size"),
  [
    (kvjax.Full(), 2048, None),
    (kvjax.Full(), 2049, 2048),
    (kvjax.Full(), 32768, 2048),
    (kvjax.Full(), 32769, 4096),
    (kvjax.Full(), 131072, 8192),
    (kvjax.SnapKV(), 131072, None),  # sees a prompt at once
    (kvjax.Ltri(), 131072, None),  # reads pieces of its own
  ],
)
def test_pieces_of_a_prompt(method, length, size):
  assert turn.pieces(method, length) == size


def test_a_long_prompt_is_read_in_pieces_that_show(monkeypatch, capsys):
  """The same logits as at once."""
  model, _ = tiny.load()
  monkeypatch.setattr(turn, "LEAST", 16)
  shown, ids, method = [], list(range(50)), kvjax.Full()
  step = console.step("reading")
  monkeypatch.setattr(step, "progress", shown.append)
  taken, spec = turn.Turn(), model.spec(1, 64)
  logits, _ = turn.read(model, ids, method.init_caches(spec), method, spec, taken, step)
  assert shown == ["32%", "64%", "96%", ""] and taken.read == 50
  once, _ = turn.prefill(model, jnp.array([ids]), np.array([50]), method.init_caches(spec), method)
  np.testing.assert_allclose(logits, once, atol=1e-5)


def test_a_context_that_is_outgrown_is_said_before_the_prompt_is_read(loaded, monkeypatch):
  model, _ = loaded
  model.config = dataclasses.replace(model.config, max_context=30)
  monkeypatch.setattr(turn, "read", None)  # is not reached
  args = dataclasses.replace(ARGS, method="full")
  said = r"the prompt and --steps 8: .* more tokens than max_context = 30"
  with pytest.warns(UserWarning, match=said), pytest.raises(TypeError):
    generate.main(args)
  model.config = dataclasses.replace(model.config, limited=True)
  with pytest.raises(ValueError, match="the prompt and --steps 8: found 31 tokens"):
    generate.main(args)


@pytest.mark.core(1)
@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("method", ["ltri", "full"])
def test_a_prompt_that_is_kept_goes_on_where_it_was_stopped(monkeypatch, tmp_path, method):
  """The same answer as of a prompt that nothing stopped; another prompt is refused."""
  monkeypatch.setattr(turn, "LEAST", 16)
  text = "".join(chr(97 + i * i % 26) for i in range(400))
  args = generate.Args(text, raw=True, steps=8, method=method, budget=128)
  shown = []
  monkeypatch.setattr(generate.sys.stdout, "write", shown.append)
  generate.main(args)
  whole = "".join(shown)
  args, kept = dataclasses.replace(args, keep=tmp_path / "kept"), keep.Keeper._save
  times = iter(range(100))

  def interrupted(self, stream):
    kept(self, stream)
    if next(times) == 1:
      raise KeyboardInterrupt

  monkeypatch.setattr(keep, "EVERY", -1.0)  # after each chunk
  monkeypatch.setattr(keep.Keeper, "_save", interrupted)
  with pytest.raises(SystemExit, match=r"stopped: [1-9]\d* of \d+ tokens are in .*kept"):
    generate.main(args)
  shown.clear()
  generate.main(args)
  assert "".join(shown) == whole
  with pytest.raises(ValueError, match=r"found [1-9]\d* tokens of another"):
    generate.main(dataclasses.replace(args, prompt="b" + text))
