"""A conversation: live caches, another method between turns, and what is refused."""

import dataclasses
import functools
import io
import os
import pathlib
import pty
import select
import subprocess
import sys
import time

import numpy as np
import pytest

import kvjax
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.programs import chat, common, console, turn
from scripts.examples import tiny
from tests import tiny_tokenizers

ARGS = chat.Args(length=256, steps=6, budget=32)


@pytest.fixture
def talk(loaded):
  return chat.Conversation(*loaded, ARGS)


def said(talk):
  return [message["content"] for message in talk.messages if message["role"] == "assistant"]


def read(line):
  return int(line.split("read ")[1].split()[0])


def test_a_turn_reads_what_is_new_and_answers_as_if_it_had_read_all(loaded, talk, monkeypatch):
  """On live caches, and again from the first token: the same logits under the full cache."""
  letters = np.asarray([loaded[1].encode("abcdef", bos=False)])  # text that has these tokens again
  generate, reading, asked = chat.generate, turn.read, []

  def spy(*args, **how):
    asked.append(reading(*args, **how))
    return asked[-1]

  monkeypatch.setattr(turn, "read", spy)
  monkeypatch.setattr(chat, "generate", functools.partial(generate, forced=letters))
  first, second = talk.ask("Who?"), talk.ask("Why?")
  again = chat.obey(talk, "/again")
  assert said(talk) == ["abcdef"] * 2
  assert read(again) == read(first) + ARGS.steps + read(second)
  live, anew = (np.asarray(logits) for logits, _ in asked[1:])
  np.testing.assert_allclose(live, anew, atol=1e-4)


def test_another_method_reads_the_conversation_again(talk):
  talk.ask("Who?")
  answer = said(talk)
  assert "SnapKV" in chat.obey(talk, "/method snapkv 24")
  assert isinstance(talk.method, kvjax.SnapKV) and talk.method.budget == 24
  line = talk.ask("Why?")
  assert line.startswith("snapkv 24 · read ") and said(talk)[:1] == answer
  assert len(said(talk)) == 2


def test_commands(talk):
  assert "/again" in chat.obey(talk, "/help")
  assert all(name in chat.obey(talk, "/methods") for name in kvjax.METHODS)
  talk.ask("Who?")
  chat.obey(talk, "/clear")
  assert talk.messages == []
  with pytest.raises(EOFError):
    chat.obey(talk, "/quit")


@pytest.mark.parametrize(
  ("line", "says"),
  [
    ("/again", "found no message, expected one to answer again"),
    ("/nonsense", "'/nonsense': no such command"),
    ("/clear now", "'/clear now': no such command"),
    ("/method", "'/method': no such command"),
    ("/method nonsense", "method: found 'nonsense', expected one of: full"),
    ("/method quest many", "found budget 'many', expected a number of tokens"),
    ("/method quest 0", "budget: found 0, expected at least 1"),
    ("/file none.txt", "/file: found no file none.txt, expected a text in UTF-8"),
    ("/file", "'/file': no such command"),
  ],
)
def test_what_cannot_be_done_leaves_the_conversation(talk, line, says):
  method = talk.method
  with pytest.raises((ValueError, FileNotFoundError), match=says):
    chat.obey(talk, line)
  assert talk.method is method


def test_a_file_goes_with_the_next_message(talk, tmp_path):
  (tmp_path / "my notes.txt").write_text("Notes.", "utf-8")
  for _ in range(2):
    assert "notes.txt: 6 tokens" in chat.obey(talk, f"/file {tmp_path}/my notes.txt")
  talk.ask("Who?")
  talk.ask("Why?")
  asked = [message["content"] for message in talk.messages if message["role"] == "user"]
  assert asked == ["Notes.\n\nNotes.\n\nWho?", "Why?"]
  chat.obey(talk, f"/file {tmp_path}/my notes.txt")
  chat.obey(talk, "/clear")
  talk.ask("Who?")
  assert talk.messages[0]["content"] == "Who?"


def test_a_context_that_is_outgrown_is_said_before_anything_is_read(loaded, monkeypatch):
  model, tokenizer = loaded
  monkeypatch.setattr(model, "config", dataclasses.replace(model.config, max_context=16))
  monkeypatch.setattr(turn, "read", None)  # is not reached
  said = r"the conversation and --steps 6: .* max_context = 16"
  with pytest.warns(UserWarning, match=said), pytest.raises(TypeError):
    chat.Conversation(model, tokenizer, ARGS).ask("Who?")


def test_a_conversation_ends_where_the_caches_do(talk, tmp_path, monkeypatch):
  """A file waits for a message that fits, that there is memory for, and that is not stopped."""
  (tmp_path / "notes.txt").write_text("Notes.", "utf-8")
  chat.obey(talk, f"/file {tmp_path}/notes.txt")
  with pytest.raises(ValueError, match="room for 256 of --length 256: /clear begins a new one"):
    talk.ask("word " * 60)
  with monkeypatch.context() as patch:
    patch.setattr(turn, "prefill", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
      talk.ask("Who?")
    patch.setattr(turn, "prefill", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert talk.ask("Who?").startswith("stopped")
  assert talk.messages == []
  talk.ask("Who?")
  assert talk.messages[0]["content"] == "Notes.\n\nWho?"


def test_an_answer_that_is_stopped_is_kept(talk, monkeypatch):
  def stopped(*args, **kwargs):
    kwargs["on_text"](["half "])
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(chat, "generate", stopped)
    assert talk.ask("Who?").startswith("stopped")
  assert said(talk) == ["half "]
  assert read(talk.ask("Why?")) > 30  # all of it again


@pytest.mark.slow
@pytest.mark.parametrize("name", ["infllm", "full"])
def test_a_message_whose_reading_is_stopped_is_read_on(loaded, tmp_path, monkeypatch, name):
  """The same question, or another about the same file; then one that begins otherwise."""
  (file := tmp_path / "text").write_text("".join(map(chr, range(33, 122))) * 2)
  monkeypatch.setattr(turn, "LEAST", 16)
  reads, prefilled = [], turn.read
  reading = lambda *a, **how: reads.append(how["begun"]) or prefilled(*a, **how)  # noqa: E731
  monkeypatch.setattr(turn, "read", reading)

  def stop(self, said):
    raise KeyboardInterrupt

  def conversation(*stopped, attached=True, last="Why?"):
    talk = chat.Conversation(*loaded, dataclasses.replace(ARGS, method=name, length=600))
    talk.ask("Who?")
    if attached:
      chat.obey(talk, f"/file {file}")
    for question in stopped:
      with monkeypatch.context() as patch:
        patch.setattr(console.Step, "progress", stop)
        said = talk.ask(question)
      read_so_far = int(said.split("stopped after ")[1].split()[0])
    line = talk.ask(last)
    assert reads[-1] == (read_so_far if attached and stopped else 0)
    return talk.messages, read(line)

  plain = conversation()
  assert conversation("Why?") == conversation("Where?", "Where?", "Why?") == plain
  _, count = conversation(attached=False)
  again, more = conversation("Long " * 20, attached=False)
  assert [x["content"] for x in again[::2]] == ["Who?", "Why?"]
  assert more > count  # all of the conversation


def test_the_program_talks_until_the_end_of_its_input(loaded, monkeypatch, capsys):
  monkeypatch.setattr(common, "load_model", lambda *args: loaded)
  typed = "Who?\n\n/method quest 16\nWhy?\n/nonsense\n"
  monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
  chat.main(dataclasses.replace(ARGS, system="Be brief."))
  out = capsys.readouterr().out
  assert "(full · read" in out and "(quest 16 · read" in out and "no such command" in out


def test_a_message_that_is_no_text_costs_no_more_than_itself(loaded, monkeypatch, capsys):
  """A Latin-1 byte: one line that says so; the caches still hold the conversation."""
  monkeypatch.setattr(common, "load_model", lambda *args: loaded)
  typed = io.BytesIO(b"\xef\xbb\xbfWho?\ncaf\xe9\n/caf\xe9\nWhy?\n")
  monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(typed, "utf-8"))
  chat.main(ARGS)
  out = capsys.readouterr().out.splitlines()
  (said,) = (line for line in out if line.startswith("(error: messages: content: "))
  assert said.endswith("found a byte 0xE9 that is no UTF-8 at character 3, expected Unicode text)")
  assert any("'/caf\\udce9': no such command" in line for line in out)
  first, second = (line for line in out if line.startswith("(full · read"))
  assert read(second) < read(first) + ARGS.steps
  assert read(first) == len(loaded[1].chat([{"role": "user", "content": "Who?"}]))


def test_what_cannot_be_answered_again_stays(talk):
  talk.ask("Who?")
  before = list(talk.messages)
  talk._args = dataclasses.replace(ARGS, length=8)
  talk.switch("full", 32)
  with pytest.raises(ValueError, match="/clear begins a new one"):
    chat.obey(talk, "/again")
  assert talk.messages == before


THINKING = (
  "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
  "{% if enable_thinking is defined and not enable_thinking %}short{% endif %}"
)


def test_template_arguments_reach_every_turn(loaded):
  model, tokenizer = loaded
  tokenizer = Tokenizer(tokenizer.backend, eos=tokenizer.eos, chat_template=THINKING)
  lines = []
  for given in (None, '{"enable_thinking": false}'):
    talk = chat.Conversation(model, tokenizer, dataclasses.replace(ARGS, template_args=given))
    lines.append([read(talk.ask("Who?")), read(talk.ask("Why?"))])
  (first, second), both = lines
  assert both == [first + len("short"), second + len("short")]
  with pytest.raises(ValueError, match=r"enable_think: .*chat template does not read"):
    args = dataclasses.replace(ARGS, template_args='{"enable_think": 1}')
    chat.Conversation(model, tokenizer, args).ask("Who?")


def test_the_last_part_of_an_answer_is_what_it_says(tmp_path):
  folder = tiny_tokenizers.write(tmp_path, tiny_tokenizers.FAMILIES["gpt-oss"]())
  tokenizer = Tokenizer.from_huggingface(folder)
  parts = (
    "<|channel|>analysis<|message|>He asks.<|end|><|start|>assistant"
    "<|channel|>final<|message|>hello.<|return|>"
  )
  tokens = np.array([*tokenizer.encode(parts, bos=False), -1], np.int32)
  assert chat.spoken(tokenizer, tokens, "all of it") == "hello."
  plain = np.array(tokenizer.encode("hello.", bos=False), np.int32)
  assert chat.spoken(tokenizer, plain, "all of it") == "all of it"


@pytest.mark.parametrize("given", ["{", "[]", "no", '{"messages": []}'])
def test_template_arguments_that_are_none(given, monkeypatch):
  monkeypatch.setattr(common, "load_model", None)  # which comes later
  with pytest.raises(ValueError, match=r"--template-args: found .*expected a JSON object"):
    chat.main(dataclasses.replace(ARGS, template_args=given))


class Typed:
  """The program on a terminal of its own."""

  PROGRAM = """
import fcntl, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is deaf to it
from scripts.examples import tiny
from kvjax.programs import chat, common
common.load_model = lambda *_, **__: tiny.load()
common.run(chat.main, chat.Args, command="chat", given=["--steps", "3000", "--length", "8192"])
"""

  def __init__(self):
    self.end, terminal = pty.openpty()
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "TERM": "xterm"}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    command = [sys.executable, "-c", self.PROGRAM]
    self.process = subprocess.Popen(command, env=env, start_new_session=True, **streams)
    os.close(terminal)
    self._seen = b""

  def type(self, data):
    os.write(self.end, data)

  def waits(self):
    """Returns once it waits for a key: between the prompt and that, readline hears no signal."""
    stat, asleep = pathlib.Path(f"/proc/{self.process.pid}/stat"), 0
    while asleep < 5:
      asleep = asleep + 1 if stat.read_text().rpartition(")")[2].split()[0] == "S" else 0
      time.sleep(0.1)

  def interrupt(self):
    """Ctrl-C at the prompt."""
    self.waits()
    self.type(b"\x03")

  def until(self, mark):
    """What it prints up to a mark."""
    while mark not in self._seen:
      assert select.select([self.end], [], [], 120)[0], self._seen
      self._seen += os.read(self.end, 4096)
    shown, _, self._seen = self._seen.partition(mark)
    return shown.decode()


@pytest.fixture
def typed():
  made = Typed()
  yield made
  made.process.kill()
  made.process.wait()
  os.close(made.end)


@pytest.mark.slow
def test_on_a_terminal(typed):
  """A paste is one message; Ctrl-C stops an answer, and at the prompt asks once in a row."""
  ready, asks = b"\x1b[?2004h> ", b"(press Ctrl-C again to leave)\r\n"
  typed.until(ready)
  typed.type(b"\x1b[200~one\rtwo\x1b[201~")
  typed.type(b"\r")
  said = typed.until(ready)
  pasted = tiny.byte_tokenizer().chat([{"role": "user", "content": "one\ntwo"}])
  assert said.count("(full · read") == 1 and read(said) == len(pasted)
  typed.type(b"Go on.\r")
  typed.until(b"\x1b[K")  # the prompt is read
  typed.type(b"\x03")
  assert "(stopped: the conversation" in typed.until(ready)
  for line in (b"/help\r", None):
    typed.interrupt()
    typed.until(asks + ready)
    if line:
      typed.type(line)
      typed.until(ready)
  typed.interrupt()
  assert typed.process.wait(60) == 0


@pytest.mark.slow
def test_a_terminated_conversation_ends_at_once(typed):
  typed.until(b"> ")
  typed.waits()
  typed.process.terminate()
  assert "stopped" in typed.until(b"\r\n") + typed.until(b"\r\n")
  assert typed.process.wait(60) == 1
