"""A checkpoint's tokenizer: text to token ids and back, and the chat template.

Two kinds of byte-pair encoding are known: over bytes spelled as printable characters (GPT-2's way:
Llama 3, Qwen, SmolLM2), and over text with spaces spelled ▁ and rare bytes as <0x..> tokens
(SentencePiece's way: Llama 2, Mistral). Both encode and decode as the `tokenizers` library does.
"""

from __future__ import annotations

import copy
import json
import operator
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from kvjax.models.io import chat_template as chats
from kvjax.models.io import files, token_backends, token_files

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_LOST = "\N{REPLACEMENT CHARACTER}"
# What `Tokenizer.save` keeps beside the backend.
_SETTINGS = (
  *("bos", "eos", "add_bos", "add_eos", "ends", "chat_template", "templates"),
  *("special_tokens", "rows"),
)


class Tokenizer:
  """A byte-pair encoding with its special tokens and chat template.

  Args:
    backend: a `tokenizers.Tokenizer`. Truncation, padding and dropout are turned off; without a
      decoder it gets ByteLevel's.
    bos: id of the token that begins a text, or None.
    eos: id of the token that ends a text, or None.
    add_bos: whether `encode` begins with `bos` unless told otherwise.
    add_eos: whether `encode` ends with `eos` unless told otherwise.
    ends: ids of further tokens that end an answer.
    chat_template: Jinja source, or None.
    templates: other templates by name ("tool_use" is used with tools).
    special_tokens: text of special tokens by the name that templates read ("bos_token"); by default
      those of `bos` and `eos`.
    rows: rows of the model's embedding, if known. If there are more rows than tokens, the further
      ids decode to nothing; if there are fewer, texts with the further tokens raise an error.

  Attributes:
    size: number of token ids.
    ends: ids of the tokens that end an answer, `eos` first: the argument `stop` of `generate`.
    prefix, suffix: ids that `encode` puts before and after a text: those of the backend's
      post-processor, with `bos` and `eos` according to `add_bos` and `add_eos`.

  Raises:
    ValueError: an id is out of range, or `add_bos` without `bos`.
    NotImplementedError: the backend decodes neither as GPT-2 nor as SentencePiece does.
  """

  _before: Sequence[int] = ()  # a token before what a stream is fed

  def __init__(
    self,
    backend: tokenizers.Tokenizer,
    *,
    bos: int | None = None,
    eos: int | None = None,
    add_bos: bool = False,
    add_eos: bool = False,
    ends: Sequence[int] = (),
    chat_template: str | None = None,
    templates: Mapping[str, str] | None = None,
    special_tokens: Mapping[str, Any] | None = None,
    rows: int | None = None,
  ):
    self.backend = backend
    token_backends.encode_as_it_is(backend)
    self.bos = bos
    self.eos = eos
    self.add_bos = add_bos
    self.add_eos = add_eos
    self.chat_template = chat_template
    self.templates = templates = dict(templates or {})
    self.rows = rows
    self.size = size = max(backend.get_vocab().values(), default=-1) + 1
    kinds = token_backends.decoder_kinds(backend)
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
      raise NotImplementedError(
        f"tokenizer: decoder: found {sorted(kinds)}, expected ByteLevel or ByteFallback"
      )
    for name, value, kind in (
      ("bos", bos, int),
      ("eos", eos, int),
      ("add_bos", add_bos, bool),
      ("add_eos", add_eos, bool),
      ("chat_template", chat_template, str),
      ("rows", rows, int),
      *((f"ends[{i}]", value, int) for i, value in enumerate(ends)),
      *((f"templates[{name!r}]", value, str) for name, value in templates.items()),
    ):
      if value is not None and type(value) is not kind:
        raise ValueError(f"tokenizer: {name}: found {value!r}, expected {kind.__name__}")
    for name, token in (("bos", bos), ("eos", eos), *(("ends", token) for token in ends)):
      if token is not None and not 0 <= token < size:
        raise ValueError(f"tokenizer: {name}: found id {token}, expected one in [0, {size})")
    for name, wanted, token in (("bos", add_bos, bos), ("eos", add_eos, eos)):
      if wanted and token is None:
        raise ValueError(
          f"tokenizer: add_{name}: found True without a {name} token, expected a {name} id"
        )
    self.ends = tuple(dict.fromkeys(ends if eos is None else [eos, *ends]))
    if rows is not None:
      self.fit(rows)
    added = backend.get_added_tokens_decoder()
    self._special = {i: token.content for i, token in added.items() if token.special}
    self._bytes = {  # which a decoder makes one text of, as many as there are in a row
      token
      for piece, token in backend.get_vocab().items()
      if "ByteFallback" in kinds and _BYTE.fullmatch(piece)
    }
    if special_tokens is None:
      named = {"bos_token": bos, "eos_token": eos}
      special_tokens = {n: backend.id_to_token(i) for n, i in named.items() if i is not None}
    self.special_tokens = dict(special_tokens)
    before, after = token_backends.around(backend)
    before = before[1:] if bos is not None and before[:1] == [bos] else before
    after = after[:-1] if eos is not None and after[-1:] == [eos] else after
    self.prefix = [bos, *before] if add_bos and bos is not None else before
    self.suffix = [*after, eos] if add_eos and eos is not None else after

  def fit(self, rows: int) -> None:
    """Takes the number of rows of the model's embedding: a token without a row ends no answer.

    Raises:
      ValueError: tokens without a row are not all added ones.
    """
    known = self.size - self.added_from(rows)
    if rows < known:
      raise ValueError(f"tokenizer: rows: found {rows}, expected at least {known}, one a token")
    self.rows, self.ends = rows, tuple(token for token in self.ends if token < rows)

  def added_from(self, first: int) -> int:
    """Number of added tokens whose ids are `first` or higher."""
    return sum(token >= first for token in self.backend.get_added_tokens_decoder())

  def encode(self, text: str, *, bos: bool | None = None, after: str = "") -> list[int]:
    """Token ids of a text; special tokens written out in it are recognised.

    Args:
      text: any length.
      bos: None puts `prefix` before the text and `suffix` after it; True puts `bos` before it,
        False nothing.
      after: text that stands before this one and has been encoded (`bos` is False then): the ids
        are those that the text has in the whole, without the space that begins a text of
        SentencePiece, say. Where a token reaches over the seam, the nearest that begin there.

    Raises:
      TypeError: the text is none.
      ValueError: the text is not Unicode, the model has no row for a token in it, or the tokenizer
        is inconsistent (its token for unknown ones is not there, say).
    """
    if bos and self.bos is None:
      raise ValueError("bos: found True, expected False: this tokenizer has no bos token")
    if after:
      token_backends.check_unicode(after, "after")
      for before in (after, "a", "\n"):
        ids, known = self._ids(before + text), self._ids(before)
        if ids[: len(known)] == known:
          return ids[len(known) :]
      return self._ids(text)
    if bos is None:
      return [*self.prefix, *self._ids(text), *self.suffix]
    return [*([self.bos] if bos and self.bos is not None else []), *self._ids(text)]

  def _ids(self, text: str) -> list[int]:
    """Token ids of a text, with nothing around them."""
    token_backends.check_unicode(text, "text")
    try:
      ids = self.backend.encode(text, add_special_tokens=False).ids
    except Exception as error:  # the Rust library raises plain Exception
      raise ValueError(f"tokenizer: cannot encode this text: {error}") from error
    rows = self.size if self.rows is None else self.rows
    if rows < self.size and ids and max(ids) >= rows:
      raise ValueError(
        f"text: found token {self.backend.id_to_token(max(ids))!r} of id {max(ids)}, expected ids "
        f"in [0, {rows}): the model has no row for it"
      )
    return ids

  def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
    """Text of token ids; bytes that are not UTF-8 become U+FFFD.

    Spaces before punctuation stay, even if the files ask for clean-up.

    Raises:
      TypeError: an id is no integer, or `ids` is no list.
      ValueError: an id is out of range.
    """
    if not isinstance(ids, Iterable):
      raise TypeError(f"ids: found {ids!r}, expected a list of token ids")
    ids = [self._known(token) for token in ids]
    return self.backend.decode(ids, skip_special_tokens=skip_special)

  def _known(self, token: int) -> int:
    try:
      token = operator.index(token)
    except TypeError:
      raise TypeError(f"token: found {token!r}, expected an integer") from None
    if not 0 <= token < max(self.size, self.rows or 0):
      raise ValueError(f"token: found id {token}, expected one in [0, {self.size})")
    return token

  def stream(self, *, skip_special: bool = True) -> TextStream:
    """A decoder that is fed one id at a time."""
    return TextStream(self, skip_special=skip_special)

  def continuing(self) -> Tokenizer:
    """The same, whose streams continue a text: a space that SentencePiece begins with stays."""
    made = copy.copy(self)
    made._before = self._ids("a")[-1:]
    return made

  def is_special(self, token: int) -> bool:
    """True if a token is a control token, not text."""
    return token in self._special

  def chat(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> list[int]:
    """Token ids of a conversation; arguments and errors are those of `render`."""
    return self.encode(self.render(messages, **arguments), bos=False)

  def render(
    self,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    template: str | None = None,
    **arguments: Any,
  ) -> str:
    """The text that `chat` encodes.

    Args:
      messages: dicts of "role" and "content", a text or a list of {"type": "text", "text": …};
        the template may read further entries ("tool_calls").
      add_generation_prompt: end where the assistant's answer begins.
      tools: JSON schemas of functions, each a dict.
      documents: dicts of "title" and "text".
      template: name of one among `templates`.
      arguments: further values that the template reads (enable_thinking, date_string, …).

    Raises:
      ValueError: there is no template, it rejects these messages, it does not read an argument, or
        it exceeds a limit (10 s, 2²⁶ characters).
    """
    source = self._source(template, tools is not None)
    try:
      chat = chats.compiled(source)
    except ValueError as error:
      raise ValueError(f"chat_template: does not take these messages: {error}") from error
    for name, value in (("tools", tools), ("documents", documents)):
      if value is not None:
        if isinstance(value, str) or not all(isinstance(entry, Mapping) for entry in value):
          raise ValueError(f"{name}: found {value!r}, expected a list of dicts")
        arguments[name] = list(value)
    if unread := sorted(set(arguments) - chat.names):
      raise ValueError(
        f"{unread[0]}: found an argument that the chat template does not read, expected some of "
        f"{sorted(chat.names - {'messages', 'add_generation_prompt', *self.special_tokens})}"
      )
    messages = chats.flattened(messages, chat)
    given = {"tools": None, "documents": None, **self.special_tokens, **arguments}
    try:
      return chat.render(messages=messages, add_generation_prompt=add_generation_prompt, **given)
    except Exception as error:  # a template can divide by zero, too
      raise ValueError(f"chat_template: does not take these messages: {error}") from error

  def _source(self, name: str | None, tools: bool) -> str:
    """The template of a name; by default the one for tools, or the one for everything."""
    name = "tool_use" if name is None and tools and "tool_use" in self.templates else name
    source = self.chat_template if name in (None, "default") else self.templates.get(name)
    if source is not None:
      return source
    if not self.templates:
      raise ValueError("chat_template: found none, expected a checkpoint with a chat template")
    names = sorted({*self.templates, *(["default"] if self.chat_template is not None else [])})
    raise ValueError(f"template: found {name!r}, expected one of the checkpoint's {names}")

  def save(self, folder: str | pathlib.Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json into a folder."""
    folder = pathlib.Path(folder)
    self.backend.save(str(folder / "tokenizer.json"))
    settings = {name: getattr(self, name) for name in _SETTINGS}
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")

  @classmethod
  def load(cls, folder: str | pathlib.Path) -> Tokenizer:
    """Reads what `save` wrote.

    Raises:
      FileNotFoundError, ValueError: a file is missing or damaged.
    """
    folder = pathlib.Path(folder)
    expected = "the tokenizer of a converted checkpoint"
    settings_path = folder / "tokenizer_config.json"
    backend = token_backends.read(folder / "tokenizer.json", expected)
    settings = files.read_json(settings_path, expected)
    try:
      made = cls(backend, **settings)
      return made if "ends" in settings else _closing(made)  # converted before they were kept
    except (TypeError, ValueError) as error:
      raise ValueError(
        f"{settings_path}: found {error}, expected an object of {', '.join(_SETTINGS)}, as "
        "'kvjax convert' writes it: Tokenizer.from_huggingface reads a Hugging Face folder"
      ) from error

  @classmethod
  def from_gguf(cls, metadata: Mapping[str, Any], name: str = "GGUF") -> Tokenizer:
    """Builds the tokenizer that a GGUF file's metadata describes.

    Args:
      metadata: the file's key-value section.
      name: the file, for messages.

    Raises:
      ValueError: an entry is missing or inconsistent.
      NotImplementedError: the tokenizer's kind is not supported.
    """
    settings = token_files.of_gguf(metadata, name)
    try:
      return _closing(cls(**settings))
    except ValueError as error:
      raise ValueError(f"{name}: {error}") from error

  @classmethod
  def from_huggingface(cls, folder: str | pathlib.Path) -> Tokenizer:
    """Reads the tokenizer of a Hugging Face folder.

    Files: tokenizer.json; tokenizer_config.json, special_tokens_map.json for the special tokens;
    generation_config.json and config.json for further tokens that end an answer; chat templates
    from tokenizer_config.json, chat_template.jinja, chat_template.json and
    additional_chat_templates. A text begins with bos where add_bos_token says so or, without that
    entry, where tokenizer.json itself puts it there.

    Raises:
      FileNotFoundError: there is no tokenizer.json.
      ValueError: a file is damaged, or a special token is not in the vocabulary.
      NotImplementedError: the tokenizer's kind is not supported.
    """
    folder = pathlib.Path(folder)
    settings = token_files.of_huggingface(folder)
    try:
      return _closing(cls(**settings))
    except (ValueError, NotImplementedError) as error:
      raise type(error)(f"{folder / 'tokenizer.json'}: {error}") from error


def _closing(tokenizer: Tokenizer) -> Tokenizer:
  """With the token that its chat template puts after an answer among `ends`.

  Files often name only the token that ends a text: base models' eos stays in many a fine-tune.
  """
  mark = f"{_LOST}answer{_LOST}"
  asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
  if tokenizer.chat_template is None:
    return tokenizer
  try:
    text = tokenizer.render(asked, add_generation_prompt=False)
    ids = tokenizer.encode(text.partition(mark)[2].strip(), bos=False)
  except ValueError:  # it is said where somebody chats
    return tokenizer
  if ids and tokenizer.is_special(ids[0]):
    tokenizer.ends = tuple(dict.fromkeys([*tokenizer.ends, ids[0]]))
  return tokenizer


class TextStream:
  """Turns ids into text as they come, never splitting a character.

  The texts of all `feed` calls and of `flush` concatenate to `Tokenizer.decode` of all ids. Bytes
  of <0x..> tokens are text once another token follows: decoders take them together. The
  DecodeStream of `tokenizers` has no `flush`, and may hold back text after a broken character.
  """

  _left_out: Mapping[int, str] = {}

  def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True):
    self._tokenizer = tokenizer
    self._left_out = tokenizer._special if skip_special else {}
    self._ids = list(tokenizer._before)  # of the text that is not out yet, and one before it
    self._out = self._text(self._ids)  # their text as far as it is out

  def left_out(self, token: int) -> str:
    """The text of a special token that is left out; "" of any other."""
    return self._left_out.get(int(token), "")

  def feed(self, token: int) -> str:
    """Text that is complete after this token; may be empty."""
    token = self._tokenizer._known(token)
    if token in self._left_out or self._tokenizer.backend.id_to_token(token) is None:
      return ""
    self._ids.append(token)
    if token in self._tokenizer._bytes:
      return ""
    text = self._text(self._ids)
    if text.endswith(_LOST):
      return ""
    new, self._out = text[len(self._out) :], text
    # One token before is enough to decode the next: a decoder looks at where the text begins, and
    # at bytes that belong together. A token whose text is gone there would not tell.
    if last := self._text([token]):
      self._ids, self._out = [token], last
    return new

  def flush(self) -> str:
    """The rest of an incomplete character, as U+FFFD."""
    new = self._text(self._ids)[len(self._out) :]
    self._ids, self._out = [], ""
    return new

  def _text(self, ids: list[int]) -> str:
    return self._tokenizer.backend.decode(ids, skip_special_tokens=False)
