"""Backends of tokenizers: how text is cut, and which tokens the pieces become."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers


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


# Mistral's pattern: GPT-4o's without endings, numerals one by one.
_TEKKEN = _GPT4O.replace(_ENDINGS, "").replace(r"\p{N}{1,3}", r"\p{N}")

LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_LONG_NUMERALS = ("dbrx", "glm4", "chatglm-bpe")  # dbrx: Phi-4
_NORMALISED = ("qwen2", "deepseek-r1-qwen")  # to NFC, before anything else

# GGUF's tokenizer.ggml.pre: how text is cut before byte-pair encoding. Every entry maps bytes to
# printable characters (GPT-2's table); they differ in where they cut.
# Several names of one cut are of several times.
PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
  "smollm": lambda: pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
  ),
  **dict.fromkeys((*LLAMA3, *_LONG_NUMERALS), lambda: _cut(r"\p{N}{1,3}")),
  "gpt-4o": lambda: _split(_GPT4O),  # gpt-oss, Phi-4-mini
  "tekken": lambda: _split(_TEKKEN),  # Mistral's later models
  **dict.fromkeys(_NORMALISED, lambda: _cut(r"\p{N}")),
}


def read(path: pathlib.Path, expected: str) -> tokenizers.Tokenizer:
  try:
    return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8-sig"))
  except FileNotFoundError as error:
    raise FileNotFoundError(f"{path}: not found, expected {expected}") from error
  except BaseException as error:  # the Rust library raises plain Exception, and its panics are none
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
      raise
    raise ValueError(f"{path}: not a tokenizer: {error}") from error


def check_unicode(text: str, what: str) -> None:
  """Raises ValueError for a lone surrogate: what JSON can spell, or a byte that was no UTF-8.

  TypeError where it is no text.
  """
  if not isinstance(text, str):
    raise TypeError(f"{what}: found {text!r}, expected a string")
  try:
    text.encode()
  except UnicodeEncodeError as error:
    code, found = ord(text[error.start]), "a lone surrogate U+{:04X}, which UTF-8 has no bytes for,"
    if 0xDC80 <= code <= 0xDCFF:
      code, found = code - 0xDC00, "a byte 0x{:02X} that is no UTF-8"
    raise ValueError(
      f"{what}: found {found.format(code)} at character {error.start:,}, expected Unicode text"
    ) from error


def encode_as_it_is(backend: tokenizers.Tokenizer) -> None:
  """Turns off what a file may have kept: truncation, padding, merges left out by chance.

  Without a decoder, tokens are bytes spelled as characters.
  """
  backend.no_truncation()
  backend.no_padding()
  if backend.decoder is None:  # the library would put spaces between tokens
    backend.decoder = decoders.ByteLevel()
  if getattr(backend.model, "dropout", None) is not None:
    backend.model.dropout = None


def around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
  """Ids that the backend's post-processor puts before and after a text."""
  if backend.post_processor is None:
    return [], []
  text, mark = "a", 1 << 30  # a text of one token, which no id is taken for
  one = tokenizers.Tokenizer(tokenizers.models.WordLevel({text: mark}, unk_token=text))
  ids = backend.post_processor.process(one.encode(text)).ids
  at = ids.index(mark)
  return ids[:at], ids[at + 1 :]


def decoder_kinds(backend: tokenizers.Tokenizer) -> set[str]:
  """The steps of the backend's decoder."""
  if backend.decoder is None:
    return set()
  state = json.loads(backend.decoder.__getstate__())
  return {step["type"] for step in state.get("decoders", [state])}


def byte_level(vocabulary: dict[str, int], merges: list[str], pre: str) -> tokenizers.Tokenizer:
  pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
  # Some take a word that is a token as it is, whatever their merges would make of it.
  whole = pre in (*LLAMA3, "tekken")
  model = tokenizers.models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=whole)
  backend = tokenizers.Tokenizer(model)
  if pre in _NORMALISED:
    backend.normalizer = normalizers.NFC()
  backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
  backend.decoder = decoders.ByteLevel()
  return backend


def sentencepiece(
  vocabulary: dict[str, int], scores: list[float], unknown: str | None, prefix: str
) -> tokenizers.Tokenizer:
  """SentencePiece joins the neighbours that make the token of the highest score: merges, ranked.

  A space is put before a text: "always", also behind a marker; "first", only where it begins; or
  "never".
  """
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
  if prefix == "first":
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=prefix, split=False)
  else:
    before = [normalizers.Prepend("▁")] if prefix == "always" else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
  after = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
  if prefix != "never":
    after.append(decoders.Strip(" ", 1, 0))
  backend.decoder = decoders.Sequence(after)
  return backend
