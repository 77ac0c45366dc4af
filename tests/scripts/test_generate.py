"""`kvjax generate`: one JSON object, bytes in use, warnings, long prompts in pieces; --file."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.programs import common, console, generate, keep, many, turn
from scripts.examples import tiny
from tests.tiny_tokenizers import FAMILIES

ARGS = generate.Args("Who?", steps=8, method="streaming_llm", budget=16)


@pytest.fixture
def loaded(monkeypatch):
  model, tokenizer = tiny.load()
  monkeypatch.setattr(common, "load_model", lambda *_, **__: (model, tokenizer))
  return model, tokenizer


@pytest.mark.slow
def test_json_is_all_of_standard_output(loaded, capsys):
  how = {"method": "full", "temperature": 1.5, "top_k": 40, "seed": 1, "prefill_chunk": 8}
  args = dataclasses.replace(ARGS, **how)
  generate.main(args)
  streamed = capsys.readouterr()
  assert "read 23 tokens" in streamed.err and "MB used, " in streamed.err
  assert "wrote 8 at" in streamed.err
  generate.main(dataclasses.replace(args, json=True))
  said = json.loads(capsys.readouterr().out)
  assert said["text"] + "\n" == streamed.out
  assert (said["tokens"], said["end"], said["prompt_tokens"]) == (8, "limit", 23)
  assert set(said["seconds"]) == {"read", "write", "compile"}
  assert 0 < said["cache_bytes"]["used"] <= said["cache_bytes"]["allocated"]
  mark = said["text"][2:4]
  cut = said["text"][: said["text"].index(mark)]
  generate.main(dataclasses.replace(args, json=True, stop=("never", mark)))
  stopped = json.loads(capsys.readouterr().out)
  assert (stopped["end"], stopped["text"]) == ("stop", cut)
  generate.main(dataclasses.replace(args, stop=("never", mark)))
  assert capsys.readouterr().out == cut + "\n"
  with pytest.raises(ValueError, match="--method: found 'none', expected one of: full"):
    generate.main(dataclasses.replace(args, method="none"))


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
  bytewise = Tokenizer(FAMILIES["llama2"]().backend)
  assert turn.stopped(bytewise, bytewise.encode("hello\n", bos=False), 2, ("\n",))


@pytest.mark.core(2)
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("method", ["full", "ltri"])
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
  monkeypatch.setattr(keep.origin, "weights", lambda _: "others")
  monkeypatch.setattr(keep.PromptStream, "restore", None)  # no cache is read for that
  with pytest.raises(ValueError, match=r"found caches of another model in .*kept"):
    generate.main(args)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("text", ["a", "abcde"])
def test_a_prompt_of_which_the_last_token_is_left_goes_on(tmp_path, capsys, text):
  args = generate.Args(text, raw=True, steps=2, prefill_chunk=4, keep=tmp_path / "kept")
  generate.main(args)
  once = capsys.readouterr().out
  generate.main(args)
  assert capsys.readouterr().out == once


# ---- a file of prompts: each is answered as alone, and a bad one ends alone

QUESTIONS = [f"Name {n} rivers." * n for n in range(1, 6)]


@pytest.fixture
def asked(loaded, tmp_path, capsys):
  def ask(lines, name="q.txt", **how):
    (tmp_path / name).write_text("\n".join(lines), "utf-8")
    how = {"file": tmp_path / name, "method": "snapkv:window_size=4", "budget": 16, **how}
    status = generate.main(generate.Args(**{"steps": 12, "rows": 2, **how}))
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return status, {each["index"]: each for each in found}

  return ask


@pytest.mark.slow
def test_answers_are_those_of_each_alone(asked):
  status, found = asked([*QUESTIONS[:2], "", *QUESTIONS[2:]], temperature=1.5, seed=5)
  assert status == 0 and sorted(found) == [0, 1, 2, 3, 4]
  assert all(each["tokens"] <= 12 and each["end"] in ("limit", "stop") for each in found.values())
  assert len({each["text"] for each in found.values()}) == 5
  whole = [json.dumps({"messages": [{"role": "user", "content": x}]}) for x in QUESTIONS]
  assert asked(whole, "q.jsonl", temperature=1.5, seed=5 + 2**31)[1] == found
  _, raw = asked([json.dumps({"prompt": QUESTIONS[0]})], "r.jsonl", raw=True)
  assert raw[0]["text"] != found[0]["text"]
  stop = found[2]["text"][3:5]
  _, ended = asked(QUESTIONS, temperature=1.5, seed=5, stop=(stop,))
  assert ended[2]["end"] == "stop" and stop not in ended[2]["text"]


@pytest.mark.slow
def test_a_prompt_that_fails_ends_alone(asked, monkeypatch):
  submit = many.Batcher.submit

  def refusing(batcher, prompt, **how):
    if how["seed"] == 1:
      raise ValueError("prompt: too long")
    return submit(batcher, prompt, **how)

  monkeypatch.setattr(many.Batcher, "submit", refusing)
  status, found = asked(QUESTIONS[:3])
  assert status == 1 and sorted(found) == [0, 1, 2]
  assert found[1]["end"] == "failed" and found[1]["error"] == "line 2: prompt: too long"
  assert all("error" not in found[i] and found[i]["text"] for i in (0, 2))


@pytest.mark.slow
def test_a_chat_that_its_template_refuses_ends_alone(asked):
  """With its line; where none is taken, the whole run ends."""
  messages = {"role": "user"}, {"role": "user", "content": 3}
  chats = [json.dumps({"messages": [message]}) for message in messages]
  good = json.dumps({"prompt": "Who?"})
  status, found = asked([good, "", chats[0], chats[1], good], "q.jsonl", steps=2)
  assert status == 1 and [found[i]["end"] for i in range(4)] == ["limit", *["failed"] * 2, "limit"]
  assert all(found[i]["error"].startswith(f"line {i + 2}: messages: ") for i in (1, 2))
  _, found = asked([good, chats[0]], "q.jsonl", steps=2, raw=True)
  assert found[1]["error"] == "line 2: --raw: found messages, expected a text"
  with pytest.raises(ValueError, match="--file: line 1: messages"):
    asked(chats, "q.jsonl")


@pytest.mark.parametrize(
  ("sizes", "rows", "chunk", "expected"),
  [
    ([200] * 32, 32, None, 4),
    ([200] * 32, 8, None, 2),  # a quarter of the rows
    ([200] * 32, 3, None, 1),
    ([60] * 32, 64, None, 8),
    ([3000] * 32, 64, None, 1),  # one keeps the device busy
    ([3000] * 32, 64, 512, 2),
    ([60, 100, 150, 200], 64, None, 1),  # none has a companion
    ([200] * 5, 64, None, 4),
    ([900] * 5, 64, None, 1),
  ],
)
def test_short_prompts_of_equal_width_are_read_together(monkeypatch, sizes, rows, chunk, expected):
  given = kvjax.Full(), sizes, rows, chunk
  assert many.together(*given) == 1  # on a CPU
  monkeypatch.setattr(many, "BUSY", {})
  assert many.together(*given) == expected


def test_lines_end_where_json_lines_do(tmp_path):
  """Not at what only Python takes for the end of a line."""
  texts = ["one\u2028two", "three\x85four", "five\ffour"]
  lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
  (tmp_path / "q.jsonl").write_text("\r\n".join(lines), "utf-8")
  (tmp_path / "q.txt").write_text("\r".join(texts), "utf-8")
  for name in ("q.jsonl", "q.txt"):
    assert many.read(tmp_path / name) == dict(enumerate(texts, 1))


def test_what_is_no_file_of_prompts_is_refused(tmp_path):
  def refused(text, message, name="q.jsonl"):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
      many.read(tmp_path / name)

  refused("\n \n", "q.txt: found no prompt, expected one a line", "q.txt")
  for line in ("{", '{"prompt": 3}', '{"prompt": " "}', "[]", '{"messages": []}'):
    refused(f'{{"prompt": "x"}}\n{line}\n', r"q.jsonl: line 2: found .*expected \{\"prompt\": text")
  with pytest.raises(FileNotFoundError, match="--file: found no file"):
    many.read(tmp_path / "missing")
  both = generate.Args("x", file=tmp_path / "q.jsonl")
  neither = dataclasses.replace(both, prompt=None, file=None)
  alone = dataclasses.replace(both, prompt=None)
  for args, message in (
    (both, "PROMPT, --file: found both, expected one"),
    (neither, "PROMPT, --file: found neither, expected one"),
    (dataclasses.replace(alone, context_file=both.file), "--context-file: found with --file"),
    (dataclasses.replace(alone, json=True), "--json: found with --file, expected it with PROMPT"),
    (generate.Args("x", raw=True, system="y"), "--system: found with --raw, which has no chat"),
    (generate.Args("x", raw=True, template_args="{}"), "--template-args: found with --raw"),
  ):
    with pytest.raises(ValueError, match=message):
      generate.main(args)
