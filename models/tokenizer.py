"""A checkpoint's tokenizer: text to token ids and back, and the chat template.

Two kinds of byte-pair encoding are known: over bytes spelled as printable characters (GPT-2's way:
Llama 3, Qwen, SmolLM2), and over text with spaces spelled ▁ and rare bytes as <0x..> tokens
(SentencePiece's way: Llama 2, Mistral).
"""

from __future__ import annotations

import codecs
import functools
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import decoders, normalizers, pre_tokenizers

# GGUF's tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_BYTE = re.compile("<0x([0-9A-F]{2})>")


def _cut(numerals: str) -> Any:
  """GPT-4's pattern, by how numerals are cut."""
  pattern = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + numerals
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
  )
  return _split(pattern)


# GPT-4o's pattern (tiktoken's o200k): words are cut where a capital follows, and keep endings.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = "|".join(
  [
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
  ]
)


def _split(pattern: str) -> Any:
  """Cuts by a pattern, then bytes as printable characters."""
  return pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )


# GGUF's tokenizer.ggml.pre: how text is cut before byte-pair encoding. Every entry maps bytes to
# printable characters (GPT-2's table); they differ in where they cut.
_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
  "smollm": lambda: pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
  ),
  "llama-bpe": lambda: _cut(r"\p{N}{1,3}"),
  "dbrx": lambda: _cut(r"\p{N}{1,3}"),  # Phi-4
  "glm4": lambda: _cut(r"\p{N}{1,3}"),
  "gpt-4o": lambda: _split(_GPT4O),  # gpt-oss, Phi-4-mini
  "qwen2": lambda: _cut(r"\p{N}"),
  "deepseek-r1-qwen": lambda: _cut(r"\p{N}"),
}
_NORMALISED = ("qwen2", "deepseek-r1-qwen")  # to NFC, before anything else


class Tokenizer:
  """A byte-pair encoding with its special tokens and chat template.

  Args:
    backend: a `tokenizers.Tokenizer`.
    bos: id of the token that begins a text, or None.
    eos: id of the token that ends an answer, or None.
    add_bos: whether `encode` begins with `bos` unless told otherwise.
    chat_template: Jinja source, or None.
    rows: rows of the model's embedding, where it is padded: ids from `size` to there mean nothing
      and decode to nothing.

  Attributes:
    size: number of token ids.

  Raises:
    ValueError: an id is out of range, or `add_bos` without `bos`.
    NotImplementedError: the backend decodes neither as GPT-2 nor as SentencePiece does.
  """

  def __init__(
    self,
    backend: tokenizers.Tokenizer,
    *,
    bos: int | None = None,
    eos: int | None = None,
    add_bos: bool = False,
    chat_template: str | None = None,
    rows: int | None = None,
  ):
    self.backend = backend
    self.bos = bos
    self.eos = eos
    self.add_bos = add_bos
    self.chat_template = chat_template
    self.rows = rows
    self.size = size = max(backend.get_vocab().values(), default=-1) + 1
    kinds = _decoder_kinds(backend)
    self._sentencepiece = bool({"ByteFallback", "Metaspace"} & kinds)
    self.drops_first_space = bool({"Strip", "Metaspace"} & kinds)
    if kinds and not self._sentencepiece and "ByteLevel" not in kinds:
      raise NotImplementedError(
        f"tokenizer: decoder: found {sorted(kinds)}, expected ByteLevel or ByteFallback"
      )
    for name, value, kind in (
      ("bos", bos, int),
      ("eos", eos, int),
      ("add_bos", add_bos, bool),
      ("chat_template", chat_template, str),
      ("rows", rows, int),
    ):
      if value is not None and type(value) is not kind:
        raise ValueError(f"tokenizer: {name}: found {value!r}, expected {kind.__name__}")
    for name, token in (("bos", bos), ("eos", eos)):
      if token is not None and not 0 <= token < size:
        raise ValueError(f"tokenizer: {name}: found id {token}, expected one in [0, {size})")
    if add_bos and bos is None:
      raise ValueError("tokenizer: add_bos: found True without a bos token, expected a bos id")
    added = backend.get_added_tokens_decoder()
    self._added = {i: token.content for i, token in added.items()}
    self._special = {i for i, token in added.items() if token.special}

  def encode(self, text: str, *, bos: bool | None = None) -> list[int]:
    """Token ids of a text; special tokens written out in it are recognised.

    Raises:
      ValueError: the tokenizer is inconsistent (its token for unknown ones is not there, say).
    """
    try:
      ids = self.backend.encode(text, add_special_tokens=False).ids
    except TypeError:
      raise
    except Exception as error:  # the Rust library raises plain Exception
      raise ValueError(f"tokenizer: cannot encode this text: {error}") from error
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
      if 0 <= token < max(self.size, self.rows or 0):
        return b""
      raise ValueError(f"token: found id {token}, expected one in [0, {self.size})")
    if self._sentencepiece:
      byte = _BYTE.fullmatch(piece)
      return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()
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
    environment = ImmutableSandboxedEnvironment(
      trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
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
    except Exception as error:  # a template can divide by zero, too
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
      "rows": self.rows,
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
    settings_path = folder / "tokenizer_config.json"
    backend = _read_backend(path, "the tokenizer of a converted checkpoint")
    try:
      settings_text = settings_path.read_bytes()
    except FileNotFoundError as error:
      raise FileNotFoundError(
        f"{settings_path}: not found, expected the tokenizer of a converted checkpoint"
      ) from error
    try:
      return cls(backend, **json.loads(settings_text))
    except (TypeError, ValueError) as error:
      raise ValueError(
        f"{settings_path}: found {error}, expected an object of bos, eos, add_bos, chat_template, "
        "rows"
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

    kind, tokens = entry("model"), entry("tokens")
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(kinds) != len(tokens):
      raise ValueError(
        f"{name}: tokenizer.ggml.token_type: found {len(kinds)} entries, expected {len(tokens)}"
      )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
      raise ValueError(f"{name}: tokenizer.ggml.tokens: found duplicates, expected none")
    begins = False  # with bos, where the file does not say
    try:
      match kind:
        case "gpt2":
          pre = entry("pre")
          if pre not in _PRE_TOKENIZERS:
            raise NotImplementedError(
              f"{name}: tokenizer.ggml.pre: found {pre!r}, expected one of "
              f"{sorted(_PRE_TOKENIZERS)}"
            )
          backend = _byte_level(vocabulary, entry("merges"), pre)
          begins = pre == "llama-bpe"
        case "llama":
          unknown = next((t for t, k in zip(tokens, kinds, strict=True) if k == _UNKNOWN), None)
          prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
          backend = _sentencepiece(vocabulary, entry("scores"), unknown, prefix)
          begins = True
        case _:
          raise NotImplementedError(
            f"{name}: tokenizer.ggml.model: found {kind!r}, expected 'gpt2' (byte-level BPE) or "
            "'llama' (SentencePiece)"
          )
    except (NotImplementedError, TypeError):
      raise
    except Exception as error:  # the Rust library raises plain Exception
      raise ValueError(f"{name}: tokenizer.ggml.merges: {error}") from error
    added = [
      tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
      for token, kind in zip(tokens, kinds, strict=True)
      if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    try:
      return cls(
        backend,
        bos=bos,
        eos=metadata.get("tokenizer.ggml.eos_token_id"),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", begins and bos is not None)),
        chat_template=metadata.get("tokenizer.chat_template"),
      )
    except ValueError as error:
      raise ValueError(f"{name}: {error}") from error

  @classmethod
  def from_huggingface(cls, folder: str | pathlib.Path) -> Tokenizer:
    """Reads the tokenizer of a Hugging Face folder.

    Files: tokenizer.json; tokenizer_config.json for bos, eos and the chat template, which may also
    lie in chat_template.jinja. A text begins with bos where add_bos_token says so or, without that
    entry, where tokenizer.json itself puts it there.

    Raises:
      FileNotFoundError: there is no tokenizer.json.
      ValueError: a file is damaged, or a special token is not in the vocabulary.
      NotImplementedError: the tokenizer's kind is not supported.
    """
    folder = pathlib.Path(folder)
    path, settings_path = folder / "tokenizer.json", folder / "tokenizer_config.json"
    backend = _read_backend(path, "a Hugging Face folder with a fast tokenizer")
    settings: Any = {}
    if settings_path.is_file():
      try:
        settings = json.loads(settings_path.read_text(encoding="utf-8"))
      except ValueError as error:
        raise ValueError(f"{settings_path}: not JSON ({error}), expected an object") from error
    if not isinstance(settings, dict):
      raise ValueError(f"{settings_path}: found {type(settings).__name__}, expected an object")

    def special(key: str) -> int | None:
      token = settings.get(key)
      token = token.get("content") if isinstance(token, dict) else token
      if token is None:
        return None
      found = backend.token_to_id(str(token))
      if found is None:
        raise ValueError(
          f"{settings_path}: {key}: found {token!r}, expected a token of {path.name}"
        )
      return found

    bos, eos = special("bos_token"), special("eos_token")
    add_bos = settings.get("add_bos_token")
    if add_bos is None:
      add_bos = bos is not None and backend.encode("").ids[:1] == [bos]
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
      named = {entry.get("name"): entry.get("template") for entry in template}
      template = named.get("default")
    if (folder / "chat_template.jinja").is_file():
      template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    try:
      return cls(backend, bos=bos, eos=eos, add_bos=bool(add_bos), chat_template=template)
    except (ValueError, NotImplementedError) as error:
      raise type(error)(f"{path}: {error}") from error


class TextStream:
  """Turns ids into text as they come, never splitting a character.

  The texts of all `feed` calls and of `flush` concatenate to `Tokenizer.decode` of all ids.
  """

  def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True):
    self._tokenizer = tokenizer
    self._skip_special = skip_special
    self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    self._drop_space = tokenizer.drops_first_space

  def feed(self, token: int) -> str:
    """Text that is complete after this token; may be empty."""
    if self._skip_special and self._tokenizer.is_special(int(token)):
      return ""
    data = self._tokenizer.token_bytes(int(token))
    if self._drop_space and data:  # the space that SentencePiece puts before every text
      data, self._drop_space = data.removeprefix(b" "), False
    return self._utf8.decode(data)

  def flush(self) -> str:
    """What is left of an incomplete character, as U+FFFD."""
    return self._utf8.decode(b"", final=True)


def _read_backend(path: pathlib.Path, expected: str) -> tokenizers.Tokenizer:
  try:
    return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
  except FileNotFoundError as error:
    raise FileNotFoundError(f"{path}: not found, expected {expected}") from error
  except BaseException as error:  # the Rust library raises plain Exception, and its panics are none
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
      raise
    raise ValueError(f"{path}: not a tokenizer: {error}") from error


def _decoder_kinds(backend: tokenizers.Tokenizer) -> set[str]:
  """The steps of the backend's decoder."""
  if backend.decoder is None:
    return set()
  state = json.loads(backend.decoder.__getstate__())
  return {step["type"] for step in state.get("decoders", [state])}


def _byte_level(vocabulary: dict[str, int], merges: list[str], pre: str) -> tokenizers.Tokenizer:
  pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
  # Llama 3 takes a word that is a token as it is, whatever its merges would make of it.
  model = tokenizers.models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe")
  backend = tokenizers.Tokenizer(model)
  if pre in _NORMALISED:
    backend.normalizer = normalizers.NFC()
  backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
  backend.decoder = decoders.ByteLevel()
  return backend


def _sentencepiece(
  vocabulary: dict[str, int], scores: list[float], unknown: str | None, prefix: bool
) -> tokenizers.Tokenizer:
  """SentencePiece joins the neighbours that make the token of the highest score: merges, ranked."""
  merges = []
  for token, i in vocabulary.items():
    for cut in range(1, len(token)):
      left, right = token[:cut], token[cut:]
      if left in vocabulary and right in vocabulary:
        merges.append((-scores[i], i, left, right))
  model = tokenizers.models.BPE(
    vocab=vocabulary,
    merges=[(left, right) for _, _, left, right in sorted(merges)],
    unk_token=unknown,
    fuse_unk=True,
    byte_fallback=True,
  )
  backend = tokenizers.Tokenizer(model)
  spaces = normalizers.Replace(" ", "▁")
  before = [normalizers.Prepend("▁"), spaces] if prefix else [spaces]
  backend.normalizer = normalizers.Sequence(before)
  after = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
  if prefix:
    after.append(decoders.Strip(" ", 1, 0))
  backend.decoder = decoders.Sequence(after)
  return backend


@functools.cache
def _byte_of_character() -> dict[str, int]:
  """GPT-2's table (Radford et al., 2019): printable bytes stand for themselves."""
  keep = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
  moved = (byte for byte in range(256) if byte not in keep)
  return {**{chr(b): b for b in keep}, **{chr(256 + n): b for n, b in enumerate(moved)}}
