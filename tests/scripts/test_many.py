"""`kvjax generate --file`: every prompt is answered, as alone; a bad one ends alone."""

import dataclasses
import json

import pytest

import kvjax
from kvjax.programs import common, generate, many
from scripts.examples import tiny

QUESTIONS = [f"Name {n} rivers." * n for n in range(1, 6)]


@pytest.fixture
def asked(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(common, "load_model", lambda *_, **__: tiny.load())

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
  assert asked(whole, "q.jsonl", temperature=1.5, seed=5)[1] == found
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


def test_a_chat_that_its_template_refuses_ends_alone(asked):
  """With its line; where none is taken, the whole run ends."""
  chats = [
    json.dumps({"messages": [message]})
    for message in ({"role": "user"}, {"role": "user", "content": 3})
  ]
  good = json.dumps({"prompt": "Who?"})
  status, found = asked([good, "", chats[0], chats[1], good], "q.jsonl", steps=2)
  assert status == 1 and [found[i]["end"] for i in range(4)] == ["limit", *["failed"] * 2, "limit"]
  assert [found[i]["error"].split(": ")[:2] for i in (1, 2)] == [
    ["line 3", "messages"],
    ["line 4", "messages"],
  ]
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
  ):
    with pytest.raises(ValueError, match=message):
      generate.main(args)
