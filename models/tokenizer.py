"""A checkpoint's tokenizer: text to token ids and back, and the chat template."""

from __future__ import annotations

import codecs
import functools
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import decoders, pre_tokenizers

# GGUF's tokenizer.ggml.token_type
_CONTROL, _USER_DEFINED = 3, 4

# GGUF's tokenizer.ggml.pre: how text is cut before byte-pair encoding. Every entry maps bytes to
# printable characters (GPT-2's table); they differ in where they cut.
_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
  "smollm": lambda: pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
  ),
}


class Tokenizer:
  """Byte-level BPE tokenizer with its special tokens and chat template.

  Args:
    backend: a `tokenizers.Tokenizer`.
    bos: id of the token that begins a text, or None.
    eos: id of the token that ends an answer, or None.
    add_bos: whether `encode` begins with `bos` unless told otherwise.
    chat_template: Jinja source, or None.
  """

  def __init__(
    self,
    backend: tokenizers.Tokenizer,
    *,
    bos: int | None = None,
    eos: int | None = None,
    add_bos: bool = False,
    chat_template: str | None = None,
  ):
    self.backend = backend
    self.bos = bos
    self.eos = eos
    self.add_bos = add_bos
    self.chat_template = chat_template
    size = backend.get_vocab_size()
    for name, token in (("bos", bos), ("eos", eos)):
      if token is not None and not 0 <= token < size:
        raise ValueError(f"tokenizer: {name}: found id {token}, expected one in [0, {size})")
    if add_bos and bos is None:
      raise ValueError("tokenizer: add_bos: found True without a bos token, expected a bos id")
    added = backend.get_added_tokens_decoder()
    self._added = {i: token.content for i, token in added.items()}
    self._special = {i for i, token in added.items() if token.special}

  @property
  def size(self) -> int:
    """Number of token ids."""
    return self.backend.get_vocab_size()

  def encode(self, text: str, *, bos: bool | None = None) -> list[int]:
    """Token ids of a text; special tokens written out in it are recognised."""
    ids = self.backend.encode(text, add_special_tokens=False).ids
    if self.add_bos if bos is None else bos:
      if self.bos is None:
        raise ValueError("bos: found True, expected False: this tokenizer has no bos token")
      ids = [self.bos, *ids]
    return ids

  def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
    """Text of token ids; bytes that are not UTF-8 become U+FFFD.

    Raises:
      ValueError: an id is out of range.
    """
    stream = self.stream(skip_special=skip_special)
    return "".join([*map(stream.feed, ids), stream.flush()])

  def stream(self, *, skip_special: bool = True) -> TextStream:
    """A decoder that is fed one id at a time."""
    return TextStream(self, skip_special=skip_special)

  def token_bytes(self, token: int) -> bytes:
    """The bytes that a token stands for.

    Raises:
      ValueError: the id is out of range.
    """
    if token in self._added:
      return self._added[token].encode()
    piece = self.backend.id_to_token(token) if token >= 0 else None
    if piece is None:
      raise ValueError(f"token: found id {token}, expected one in [0, {self.size})")
    table = _byte_of_character()
    return bytes(table[c] for c in piece)

  def is_special(self, token: int) -> bool:
    """Whether a token is a control token, not text."""
    return token in self._special

  def chat(
    self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
  ) -> list[int]:
    """Token ids of a conversation.

    Args:
      messages: dicts of "role" and "content".
      add_generation_prompt: end where the assistant's answer begins.

    Raises:
      ValueError: there is no template, or it does not take these messages.
    """
    return self.encode(
      self.render(messages, add_generation_prompt=add_generation_prompt), bos=False
    )

  def render(
    self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
  ) -> str:
    """The text that `chat` encodes."""
    if self.chat_template is None:
      raise ValueError("chat_template: found none, expected a checkpoint with a chat template")
    for message in messages:
      if not {"role", "content"} <= set(message):
        raise ValueError(
          f"messages: found keys {sorted(message)}, expected 'role' and 'content' in each"
        )

    def refuse(reason: str) -> None:
      raise TemplateError(reason)

    # The template comes with the checkpoint: it runs sandboxed, and cannot change its arguments.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    text = {
      name: "" if token is None else self.backend.id_to_token(token)
      for name, token in (("bos_token", self.bos), ("eos_token", self.eos))
    }
    try:
      return environment.from_string(self.chat_template).render(
        messages=[dict(message) for message in messages],
        add_generation_prompt=add_generation_prompt,
        **text,
      )
    except TemplateError as error:
      raise ValueError(f"chat_template: does not take these messages: {error}") from error

  def save(self, folder: str | pathlib.Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json into a folder."""
    folder = pathlib.Path(folder)
    self.backend.save(str(folder / "tokenizer.json"))
    settings = {
      "bos": self.bos,
      "eos": self.eos,
      "add_bos": self.add_bos,
      "chat_template": self.chat_template,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")

  @classmethod
  def load(cls, folder: str | pathlib.Path) -> Tokenizer:
    """Reads what `save` wrote.

    Raises:
      FileNotFoundError, ValueError: a file is missing or damaged.
    """
    folder = pathlib.Path(folder)
    path = folder / "tokenizer.json"
    try:
      source = path.read_text(encoding="utf-8")
      settings_path = folder / "tokenizer_config.json"
      settings_text = settings_path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
      raise FileNotFoundError(
        f"{error.filename}: not found, expected the tokenizer of a converted checkpoint"
      ) from error
    try:
      backend = tokenizers.Tokenizer.from_str(source)
    except Exception as error:  # the Rust library raises plain Exception
      raise ValueError(f"{path}: not a tokenizer: {error}") from error
    try:
      return cls(backend, **json.loads(settings_text))
    except (TypeError, json.JSONDecodeError) as error:
      raise ValueError(
        f"{settings_path}: found {error}, expected an object of bos, eos, add_bos, chat_template"
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

    def entry(key: str) -> Any:
      try:
        return metadata[f"tokenizer.ggml.{key}"]
      except KeyError:
        raise ValueError(f"{name}: tokenizer.ggml.{key}: not found, expected an entry") from None

    kind = entry("model")
    if kind != "gpt2":
      raise NotImplementedError(
        f"{name}: tokenizer.ggml.model: found {kind!r}, expected 'gpt2' (byte-level BPE)"
      )
    pre = entry("pre")
    if pre not in _PRE_TOKENIZERS:
      raise NotImplementedError(
        f"{name}: tokenizer.ggml.pre: found {pre!r}, expected one of {sorted(_PRE_TOKENIZERS)}"
      )
    tokens, merges = entry("tokens"), entry("merges")
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(kinds) != len(tokens):
      raise ValueError(
        f"{name}: tokenizer.ggml.token_type: found {len(kinds)} entries, expected {len(tokens)}"
      )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
      raise ValueError(f"{name}: tokenizer.ggml.tokens: found duplicates, expected none")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
      backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=pairs))
    except Exception as error:  # the Rust library raises plain Exception
      raise ValueError(f"{name}: tokenizer.ggml.merges: {error}") from error
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    added = [
      tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
      for token, kind in zip(tokens, kinds, strict=True)
      if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
    try:
      return cls(
        backend,
        bos=metadata.get("tokenizer.ggml.bos_token_id"),
        eos=metadata.get("tokenizer.ggml.eos_token_id"),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        chat_template=metadata.get("tokenizer.chat_template"),
      )
    except ValueError as error:
      raise ValueError(f"{name}: {error}") from error


class TextStream:
  """Turns ids into text as they come, never splitting a character.

  The texts of all `feed` calls and of `flush` concatenate to `Tokenizer.decode` of all ids.
  """

  def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True):
    self._tokenizer = tokenizer
    self._skip_special = skip_special
    self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

  def feed(self, token: int) -> str:
    """Text that is complete after this token; may be empty."""
    if self._skip_special and self._tokenizer.is_special(int(token)):
      return ""
    return self._utf8.decode(self._tokenizer.token_bytes(int(token)))

  def flush(self) -> str:
    """What is left of an incomplete character, as U+FFFD."""
    return self._utf8.decode(b"", final=True)


@functools.cache
def _byte_of_character() -> dict[str, int]:
  """GPT-2's table (Radford et al., 2019): printable bytes stand for themselves."""
  keep = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
  moved = (byte for byte in range(256) if byte not in keep)
  return {**{chr(b): b for b in keep}, **{chr(256 + n): b for n, b in enumerate(moved)}}
