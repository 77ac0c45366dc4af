"""A long text as a part of a prompt: read from its file and tokenised piece by piece."""

import codecs
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from kvjax.models.io.tokenizer import Tokenizer
from kvjax.programs import console

PIECE = 1 << 20  # bytes that are read at a time
SEAM = 64  # characters before a piece that it is encoded after
_MARK = "\N{REPLACEMENT CHARACTER}context\N{REPLACEMENT CHARACTER}"


def read(path: pathlib.Path) -> Iterator[tuple[str, int]]:
  """The text of a file in pieces that end at the end of a line, or else of a word, and their bytes.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is empty, or no text in UTF-8.
  """
  if not path.is_file():
    raise FileNotFoundError(f"--context-file: found no file {path}, expected a text in UTF-8")
  decoder, text, size = codecs.getincrementaldecoder("utf-8-sig")(), "", 0
  with path.open("rb") as file:
    last = False
    while not last:
      data = file.read(PIECE)
      last = len(data) < PIECE
      try:
        text += decoder.decode(data, final=last)
      except UnicodeDecodeError as error:
        raise ValueError(
          f"--context-file: {path}: found bytes near {size + error.start:,} that are no UTF-8, "
          "expected a text"
        ) from error
      if "\0" in text:
        raise ValueError(f"--context-file: {path}: found binary data, expected a text in UTF-8")
      size += len(data)
      end = len(text) if last else max(text.rfind("\n"), text.rfind(" ")) + 1
      if end:
        yield text[:end], len(data)
        text = text[end:]
  if not size:
    raise ValueError(f"--context-file: {path}: found an empty file, expected a text in UTF-8")


def encode(
  tokenizer: Tokenizer,
  path: pathlib.Path,
  prompt: str,
  *,
  system: str | None,
  raw: bool,
  arguments: Mapping[str, Any] | None = None,
) -> list[int]:
  """Token ids of a prompt that a file's text stands before; of a chat unless `raw`.

  `arguments` are the chat template's.

  Raises:
    FileNotFoundError, ValueError: as `read`.
  """
  if raw:
    head, tail, ids = "", prompt, list(tokenizer.prefix)
  else:
    messages = [{"role": "user", "content": f"{_MARK}\n\n{prompt}"}]
    if system is not None:
      messages.insert(0, {"role": "system", "content": system})
    head, found, tail = tokenizer.render(messages, **(arguments or {})).partition(_MARK)
    if not found:
      raise ValueError("chat_template: found no trace of the user's message, expected its text")
    ids = tokenizer.encode(head.rstrip(" "), bos=False)
  # A piece is encoded as what follows the one before; spaces at its end belong to the next word.
  before = head.rstrip(" ")
  spaces = head[len(before) :]
  size = path.stat().st_size if path.is_file() else 0
  with console.bar(size, "tokenising", "B") as bar:
    for text, count in read(path):
      piece = (spaces + text).rstrip(" ")
      spaces = (spaces + text)[len(piece) :]
      ids += tokenizer.encode(piece, bos=False, after=before)
      before = piece[-SEAM:] or before
      bar.update(count)
  return ids + tokenizer.encode(spaces + tail, bos=False, after=before)
