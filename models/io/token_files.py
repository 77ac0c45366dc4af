"""Tokenizers as published files state them: GGUF metadata, and the files of a Hugging Face folder.

Both readers return the arguments of `Tokenizer`.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import tokenizers

from kvjax.models.io import files, token_backends

# GGUF's tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_KINDS = range(7)

# Entries that name a token which ends an answer: a text, a turn, a message to a tool.
_GGUF_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Control tokens that end an answer in whatever model has them; old GGUF files have no such entry.
_KNOWN_ENDS = (
  *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<end_of_turn>"),
  *("<|return|>", "<|call|>", "<|endoftext|>"),
)
# The names that GGUF has for the tokens which templates know as …_token.
_GGUF_NAMES = {
  "bos": "bos",
  "eos": "eos",
  "unknown": "unk",
  "separator": "sep",
  "seperator": "sep",  # as llama.cpp spells it
  "padding": "pad",
  "cls": "cls",
  "mask": "mask",
}


def of_gguf(metadata: Mapping[str, Any], name: str) -> dict[str, Any]:
  """Arguments of `Tokenizer` from a file's key-value section; raises as `Tokenizer.from_gguf`."""

  def entry(key: str) -> Any:
    try:
      return metadata[f"tokenizer.ggml.{key}"]
    except KeyError:
      raise ValueError(f"{name}: tokenizer.ggml.{key}: not found, expected an entry") from None

  def flag(key: str, default: bool) -> bool:
    found = metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(found, bool):
      raise ValueError(f"{name}: tokenizer.ggml.{key}: found {found!r}, expected True or False")
    return found

  kind, tokens = entry("model"), entry("tokens")
  kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
  listed = {"token_type": kinds, **({"scores": entry("scores")} if kind == "llama" else {})}
  for key, found in listed.items():
    if len(found) != len(tokens):
      raise ValueError(
        f"{name}: tokenizer.ggml.{key}: found {len(found)} entries, expected {len(tokens)}"
      )
  if strange := [found for found in kinds if found not in _KINDS]:
    raise ValueError(
      f"{name}: tokenizer.ggml.token_type: found {strange[0]!r}, expected 0 to {_KINDS[-1]}"
    )
  # What ends an answer is no text, whatever an old converter said of it; llama.cpp says so, too.
  kinds = [
    _CONTROL if token in (*_KNOWN_ENDS, "<|end|>") else kind
    for token, kind in zip(tokens, kinds, strict=True)
  ]
  vocabulary = {token: i for i, token in enumerate(tokens)}
  if len(vocabulary) != len(tokens):
    raise ValueError(f"{name}: tokenizer.ggml.tokens: found duplicates, expected none")
  begins = True  # with bos, where the file does not say
  match kind:
    case "gpt2":
      pre, merges = entry("pre"), entry("merges")
      if pre not in token_backends.PRE_TOKENIZERS:
        raise NotImplementedError(
          f"{name}: tokenizer.ggml.pre: found {pre!r}, expected one of "
          f"{sorted(token_backends.PRE_TOKENIZERS)}"
        )
      if odd := [merge for merge in merges if merge.count(" ") != 1]:
        raise ValueError(f"{name}: tokenizer.ggml.merges: found {odd[0]!r}, expected 'left right'")
      begins = pre in (*token_backends.LLAMA3, "tekken")
      try:
        backend = token_backends.byte_level(vocabulary, merges, pre)
      except TypeError:
        raise
      except Exception as error:  # the Rust library raises plain Exception
        raise ValueError(f"{name}: tokenizer.ggml.merges: {error}") from error
    case "llama":
      unknown = next((t for t, k in zip(tokens, kinds, strict=True) if k == _UNKNOWN), None)
      prefix = "always" if flag("add_space_prefix", True) else "never"
      # Mistral's files with markers have no space behind them; GGUF has no entry for it.
      prefix = "first" if prefix == "always" and "[INST]" in vocabulary else prefix
      backend = token_backends.sentencepiece(vocabulary, listed["scores"], unknown, prefix)
    case _:
      raise NotImplementedError(
        f"{name}: tokenizer.ggml.model: found {kind!r}, expected 'gpt2' (byte-level BPE) or "
        "'llama' (SentencePiece)"
      )
  # Phi-3's markers take the white space behind them; GGUF has no entry for it.
  strips = kind == "llama" and metadata.get("general.architecture") == "phi3"
  plain = ("<unk>", "<s>", "<|endoftext|>")
  backend.add_tokens(
    [
      tokenizers.AddedToken(
        token,
        special=kind != _USER_DEFINED,
        normalized=False,
        rstrip=strips and token not in plain,
      )
      for token, kind in zip(tokens, kinds, strict=True)
      if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
  )
  bos, eos = (metadata.get(f"tokenizer.ggml.{x}_token_id") for x in ("bos", "eos"))
  ends = [
    token
    for key in _GGUF_ENDS
    for token in _ids(metadata.get(f"tokenizer.ggml.{key}"), f"{name}: tokenizer.ggml.{key}")
  ]
  # gpt-oss ends each part of an answer with <|end|>.
  known = _KNOWN_ENDS if "<|call|>" in vocabulary else ("<|end|>", *_KNOWN_ENDS)
  ends += [vocabulary[x] for x in known if x in vocabulary]
  named = {
    f"{ours}_token": tokens[token]
    for theirs, ours in _GGUF_NAMES.items()
    if isinstance(token := metadata.get(f"tokenizer.ggml.{theirs}_token_id"), int)
    and 0 <= token < len(tokens)
  }
  named_template = "tokenizer.chat_template."
  return {
    "backend": backend,
    "bos": bos,
    "eos": eos,
    "add_bos": flag("add_bos_token", begins and bos is not None),
    "add_eos": flag("add_eos_token", False) and eos is not None,
    "ends": [token for token in ends if 0 <= token < len(tokens)],
    "chat_template": metadata.get("tokenizer.chat_template"),
    "templates": {
      key.removeprefix(named_template): source
      for key, source in metadata.items()
      if key.startswith(named_template)
    },
    "special_tokens": named,
  }


def of_huggingface(folder: pathlib.Path) -> dict[str, Any]:
  """Arguments of `Tokenizer` from a folder's files; raises as `Tokenizer.from_huggingface`."""
  path, settings_path = folder / "tokenizer.json", folder / "tokenizer_config.json"
  backend = token_backends.read(path, "a Hugging Face folder with a fast tokenizer")
  settings = {**_object(folder / "special_tokens_map.json"), **_object(settings_path)}
  try:
    named = _special_tokens(settings)
  except ValueError as error:
    raise ValueError(f"{settings_path}: {error}") from error
  _add_tokens(backend, settings, named, settings_path)

  def special(key: str) -> int | None:
    if key not in named:
      return None
    found = backend.token_to_id(named[key])
    if found is None:
      raise ValueError(
        f"{settings_path}: {key}: found {named[key]!r}, expected a token of {path.name}"
      )
    return found

  bos, eos = special("bos_token"), special("eos_token")
  before, after = token_backends.around(backend)
  add_bos, add_eos = settings.get("add_bos_token"), settings.get("add_eos_token")
  if add_bos is None:
    add_bos = bos is not None and before[:1] == [bos]
  if add_eos is None:
    add_eos = eos is not None and after[-1:] == [eos]
  size = max(backend.get_vocab().values(), default=-1) + 1
  ends = [
    token
    for file in ("generation_config.json", "config.json")
    for token in _ids(_object(folder / file).get("eos_token_id"), f"{folder / file}: eos_token_id")
  ]
  templates = _templates(folder, settings.get("chat_template"))
  return {
    "backend": backend,
    "bos": bos,
    "eos": eos,
    "add_bos": add_bos,
    "add_eos": add_eos,
    "ends": [token for token in ends if 0 <= token < size],  # others are never generated
    "chat_template": templates.pop("default", None),
    "templates": templates,
    "special_tokens": named,
  }


def _ids(entry: Any, what: str) -> list[int]:
  """Token ids of an entry: an id, a list of ids, or nothing."""
  ids = [] if entry is None else entry if isinstance(entry, list) else [entry]
  if any(type(token) is not int for token in ids):
    raise ValueError(f"{what}: found {entry!r}, expected a token id or a list of them")
  return ids


def _object(path: pathlib.Path) -> dict[str, Any]:
  """A JSON file's object; {} where there is no such file."""
  return files.read_json(path, "a tokenizer's settings") if path.is_file() else {}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Texts of special tokens by the name under which templates read them."""

  def text(token: Any) -> Any:
    return token.get("content") if isinstance(token, Mapping) else token

  named = {key: text(value) for key, value in settings.items() if key.endswith("_token")}
  for key in ("bos_token", "eos_token"):
    if not isinstance(named.get(key), str | None):
      raise ValueError(f"{key}: found {settings[key]!r}, expected a token's text, or null")
  extra = settings.get("extra_special_tokens")
  if isinstance(extra, Mapping):
    named |= {key: text(value) for key, value in extra.items()}
  out: dict[str, Any] = {key: value for key, value in named.items() if isinstance(value, str)}
  more = settings.get("additional_special_tokens") or extra  # a list in transformers 5
  if isinstance(more, list) and more:
    out["additional_special_tokens"] = [text(token) for token in more]
  return out


def _add_tokens(
  backend: tokenizers.Tokenizer,
  settings: Mapping[str, Any],
  named: Mapping[str, Any],
  path: pathlib.Path,
) -> None:
  """Adds what tokenizer_config.json knows of tokens and tokenizer.json does not, or otherwise."""
  known = {token.content: repr(token) for token in backend.get_added_tokens_decoder().values()}
  flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
  listed = settings.get("added_tokens_decoder") or {}
  try:
    entries = sorted((int(i), dict(entry)) for i, entry in listed.items()) if listed else []
    for i, entry in entries:
      text, kind = entry["content"], {flag: bool(entry[flag]) for flag in flags if flag in entry}
      token = tokenizers.AddedToken(text, **kind)
      if known.get(text) != repr(token):
        backend.add_tokens([token])  # of one that is there, the flags are replaced
        if text not in known and backend.token_to_id(text) != i:
          raise ValueError(f"{text!r} would have the id after the last, not {i}")
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f"{path}: added_tokens_decoder: found {error}, expected ids of tokens and their flags"
    ) from error
  # What is named is special, and found in a text as a whole.
  added = {token.content for token in backend.get_added_tokens_decoder().values()}
  texts = [x for value in named.values() for x in (value if isinstance(value, list) else [value])]
  backend.add_tokens(
    [
      tokenizers.AddedToken(text, special=True, normalized=False)
      for text in dict.fromkeys(texts)
      if isinstance(text, str) and text not in added and backend.token_to_id(text) is not None
    ]
  )


def _templates(folder: pathlib.Path, entry: Any) -> dict[str, Any]:
  """Chat templates by name, "default" among them; files of their own go before the settings."""
  found: dict[str, Any] = {}
  old = _object(folder / "chat_template.json").get("chat_template")
  for source in (old, entry):
    if isinstance(source, list):
      found |= {str(x.get("name")): x.get("template") for x in source if isinstance(x, Mapping)}
    elif isinstance(source, Mapping):
      found |= source
    elif source is not None:
      found["default"] = source
  files = {"default": folder / "chat_template.jinja"}
  files |= {x.stem: x for x in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
  for name, file in files.items():
    if file.is_file():
      try:
        found[name] = file.read_text(encoding="utf-8-sig")
      except UnicodeDecodeError as error:
        raise ValueError(f"{file}: {error}, expected a template in UTF-8") from error
  return found
