"""Prompts with a long text before them: pieces of a file, clear errors, nothing lost on a fault."""

import io
import sys

import jax
import pytest

from kvjax.models.io.tokenizer import Tokenizer
from kvjax.programs import common, console, context
from kvjax.programs import generate as program
from kvjax.testing.tiny import model
from tests import tiny_tokenizers
from tests.tiny_tokenizers import FAMILIES, letters


def write(folder, data):
  path = folder / "text.txt"
  path.write_bytes(data)
  return path


def test_pieces_put_together_are_the_file(tmp_path, monkeypatch):
  monkeypatch.setattr(context, "PIECE", 10)
  text = "one line\nand a länger line of wörds\nwithout" + "x" * 40 + " an end"
  pieces = list(context.read(write(tmp_path, text.encode())))
  assert "".join(piece for piece, _ in pieces) == text
  assert sum(size for _, size in pieces) <= len(text.encode())
  assert all(piece[-1] in "\n " for piece, _ in pieces[:-1])


@pytest.mark.parametrize(
  ("data", "message"),
  [
    (b"", "found an empty file"),
    (b"fine \xff\xfe not", r"found bytes near 5 that are no UTF-8"),
    (b"PK\x03\x04\x00\x00", "found binary data"),
    (b"cut in a character \xc3", "found bytes near 19"),
  ],
)
def test_files_that_are_no_text(tmp_path, data, message):
  with pytest.raises(ValueError, match=rf"--context-file: .*{message}"):
    list(context.read(write(tmp_path, data)))


def test_a_mark_of_the_byte_order_is_no_text(tmp_path, monkeypatch):
  path = write(tmp_path, b"\xef\xbb\xbfhi\xef\xbb\xbf")
  assert [text for text, _ in context.read(path)] == [common.read_text(path, "--text")]
  assert common.read_text(path, "--text") == "hi\ufeff"
  monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes()), "utf-8"))
  assert common.read_stdin() == "hi\ufeff"


@pytest.mark.parametrize("family", ["llama2", "mistral", "gemma", "llama3"])
def test_pieces_are_encoded_as_the_whole_is(tmp_path, monkeypatch, family):
  """No piece has a space of its own before it, and none takes the one before its neighbour's."""
  monkeypatch.setattr(context, "PIECE", 24)
  made = Tokenizer.from_huggingface(tiny_tokenizers.write(tmp_path, FAMILIES[family]()))
  text = "hello hello he.\nhello  in the well\nhell t" * 3
  path = write(tmp_path, text.encode())
  raw = context.encode(made, path, " hello", system=None, raw=True)
  assert raw == [*made.prefix, *made.encode(text + " hello", bos=False)]
  chat = context.encode(made, path, "hello", system=None, raw=False)
  assert chat == made.chat([{"role": "user", "content": f"{text}\n\nhello"}])


def test_files_and_pipes_that_are_no_text(tmp_path, monkeypatch):
  path = write(tmp_path, b"caf\xe9 au lait")
  with pytest.raises(ValueError, match=r"--text: .*text.txt: found a byte 0xE9 at 3 .*UTF-8"):
    common.read_text(path, "--text")
  with pytest.raises(FileNotFoundError, match=r"--text: found no file .*expected a text in UTF-8"):
    common.read_text(tmp_path / "other", "--text")
  with pytest.raises(FileNotFoundError, match="--context-file: found no file"):
    list(context.read(tmp_path / "nothing"))
  monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes()), "utf-8"))
  with pytest.raises(ValueError, match="standard input: found a byte 0xE9"):
    common.read_stdin()
  monkeypatch.setattr(sys, "stdin", io.StringIO("café"))
  assert common.read_stdin() == "café"


def run(monkeypatch, tmp_path, out):
  """The program on a tiny model, writing to `out`."""
  monkeypatch.setattr(common, "load_model", lambda *args, **kwargs: (model(), letters()))
  path = write(tmp_path, b"ABCDEFGH IJKLMNOP\n" * 12)
  monkeypatch.setattr(sys, "stdout", out)
  args = program.Args("WHO?", method="ltri", budget=24, context_file=path, steps=24, raw=True)
  try:
    program.main(args)
  finally:
    monkeypatch.undo()


class Faulty(io.StringIO):
  """A stream that fails once, after the text of 2, 4 and 8 tokens."""

  def __init__(self, fault):
    super().__init__()
    self.fault, self.left = fault, 3

  def write(self, text):
    self.left -= 1
    if self.left == -1:
      raise self.fault
    return super().write(text)


GONE = jax.errors.JaxRuntimeError("INTERNAL: the device is gone\nand more of it")


@pytest.mark.slow
@pytest.mark.parametrize(
  ("fault", "says"),
  [
    (GONE, r"the device failed after (\d+) of \1 tokens had been read and 14 generated .*gone$"),
    (MemoryError("no room"), r"memory ran out after (\d+) of \1 .* and 14 generated .*no room$"),
  ],
)
def test_what_was_generated_is_not_lost(monkeypatch, tmp_path, fault, says):
  whole, cut = io.StringIO(), Faulty(fault)
  run(monkeypatch, tmp_path, whole)
  with pytest.raises(SystemExit, match=says):
    run(monkeypatch, tmp_path, cut)
  written = cut.getvalue().rstrip("\n")
  assert 12 < len(written) < len(whole.getvalue())
  assert whole.getvalue().startswith(written)


@pytest.mark.slow
def test_a_fault_while_reading(monkeypatch, tmp_path):
  says = r"the device failed after 112 of 196 tokens had been read and 0 generated"

  def progress(step, text):
    if text == "57%":
      raise GONE

  monkeypatch.setattr(console.Step, "progress", progress)
  with pytest.raises(SystemExit, match=says):
    run(monkeypatch, tmp_path, io.StringIO())
