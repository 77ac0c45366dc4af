"""Tiny tokenizers of every family: the traits of its published files, in vocabularies of our own.

Each family has the backend's parts, flags of added tokens, post-processor, settings, ends and a
chat template that does with roles, white space, tools and switches what the published one does.
"""

import dataclasses
import functools
import json
import pathlib
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from kvjax.models.io.tokenizer import Tokenizer
from kvjax.testing.tiny import CONFIG
from tests import tiny_hf

GPT4 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
  r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ t", "1 2", "Ċ Ċ", ". Ċ", "Ġ Ġ"]
SCORED = ["▁▁", "he", "ll", "hell", "hello", "▁hello", "▁[", "▁t", "in"]


@dataclasses.dataclass(frozen=True)
class Family:
  """A published tokenizer's files.

  Attributes:
    backend: of tokenizer.json.
    settings: of tokenizer_config.json.
    ends: tokens that end an answer, of generation_config.json in this order.
    closes: the token with which an answer ends.
    template: of chat_template.jinja.
  """

  backend: tokenizers.Tokenizer
  settings: dict[str, Any]
  ends: tuple[str, ...]
  closes: str
  template: str


def byte_level(
  tokens: list[AddedToken],
  *,
  split: str | None = GPT4,
  digits: bool = False,
  normalizer: Any = None,
  ignore_merges: bool = False,
) -> tokenizers.Tokenizer:
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  pieces = [*alphabet, *(merge.replace(" ", "") for merge in MERGES)]
  model = models.BPE(
    vocab={piece: i for i, piece in enumerate(pieces)},
    merges=[tuple(merge.split()) for merge in MERGES],
    ignore_merges=ignore_merges,
  )
  backend = tokenizers.Tokenizer(model)
  if normalizer is not None:
    backend.normalizer = normalizer
  steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
  steps += [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
  last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
  backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
  backend.decoder = decoders.ByteLevel()
  backend.add_tokens(tokens)
  return backend


def scored(
  tokens: list[AddedToken],
  *,
  prefix: str = "normalizer",
  strip: bool = True,
) -> tokenizers.Tokenizer:
  """SentencePiece's way; `prefix` says who puts the space before a text: normalizer, metaspace,
  or nobody.
  """
  base = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
  letters = sorted(
    set("▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ[]/|<>.,?!:;'_-012345")
  )
  vocab = {piece: i for i, piece in enumerate(dict.fromkeys([*base, *letters, *SCORED]))}
  merges = [
    (piece[:cut], piece[cut:])
    for piece in SCORED
    for cut in range(1, len(piece))
    if piece[:cut] in vocab and piece[cut:] in vocab
  ]
  model = models.BPE(
    vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
  )
  backend = tokenizers.Tokenizer(model)
  after: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
  if prefix == "normalizer":
    backend.normalizer = normalizers.Sequence(
      [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
  elif prefix == "metaspace":
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
  else:
    backend.normalizer = normalizers.Replace(" ", "▁")
  backend.decoder = decoders.Sequence([*after, *([decoders.Strip(" ", 1, 0)] if strip else [])])
  backend.add_tokens(tokens)
  return backend


def begins(backend: tokenizers.Tokenizer, *first: str, byte: bool = False) -> tokenizers.Tokenizer:
  """With a post-processor that puts tokens before a text."""
  made = processors.TemplateProcessing(
    single=[*first, "$A"],
    pair=[*first, "$A", *(f"{token}:1" for token in first), "$B:1"],
    special_tokens=[(token, backend.token_to_id(token)) for token in first],
  )
  backend.post_processor = (
    processors.Sequence([processors.ByteLevel(trim_offsets=False), made]) if byte else made
  )
  return backend


def special(*texts: str, **flags: Any) -> list[AddedToken]:
  return [AddedToken(text, special=True, normalized=False, **flags) for text in texts]


def plain(*texts: str, **flags: Any) -> list[AddedToken]:
  return [AddedToken(text, special=False, **{"normalized": False, **flags}) for text in texts]


_LLAMA2 = (
  "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
  "{% set system_message = messages[0]['content'] %}"
  "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
  "{% for message in loop_messages %}"
  "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
  "{{ raise_exception('roles must alternate') }}{% endif %}"
  "{% if loop.index0 == 0 and system_message != false %}"
  "{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}"
  "{% else %}{% set content = message['content'] %}{% endif %}"
  "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
  "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}"
  "{% endif %}{% endfor %}"
)
_LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
  {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
  {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
  {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
  {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
        + message['content'] | trim + '<|eot_id|>' }}
  {%- elif 'tool_calls' in message %}
    {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call") }}{%- endif %}
    {%- set tool_call = message.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
    {{- '{"name": "' + tool_call.name + '", "parameters": ' + tool_call.arguments | tojson + "}" }}
    {{- "<|eom_id|>" }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
_MISTRAL = """{{- bos_token }}
{%- for message in messages %}
  {%- if message['role'] == 'user' %}
    {%- if tools is not none and tools and loop.last %}
      {{- '[AVAILABLE_TOOLS]' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}
    {%- endif %}
    {{- '[INST] ' + message['content'] + '[/INST]' }}
  {%- elif message['role'] == 'assistant' %}
    {{- ' ' + message['content'] + eos_token }}
  {%- endif %}
{%- endfor %}
"""
_CHATML = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
_QWEN3 = """{%- if tools %}
  {{- '<|im_start|>system\\n<tools>' }}
  {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
  {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
  {%- set index = (messages|length - 1) - loop.index0 %}
  {%- if message.role == "user" %}{%- set ns.last = index %}{%- break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
  {%- set content = message.content if message.content is string else '' %}
  {%- if message.role == "assistant" and '</think>' in content %}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
  {%- endif %}
  {{- '<|im_start|>' + message.role + '\\n' + content }}
  {%- if message.tool_calls %}
    {%- for call in message.tool_calls %}
      {{- '<tool_call>' + (call.arguments | tojson) + '</tool_call>' }}
    {%- endfor %}
  {%- endif %}
  {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
  {%- endif %}
{%- endif %}
"""
_PHI3 = (
  "{% for message in messages %}"
  "{{'<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n'}}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
_PHI4 = (
  "{% for message in messages %}{{'<|im_start|>' + message['role'] + '<|im_sep|>' + "
  "message['content'] + '<|im_end|>'}}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
_GLM4 = """[gMASK]<sop>
{%- for item in messages %}
  {%- if item['tools'] is defined %}<|system|>\n{{ item['tools'] | tojson(indent=4) }}{%- endif %}
  {%- if item['content'] %}
    {{- '<|' + item['role'] + '|>' + item['metadata'] | default('') + '\\n' + item['content'] }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""
_GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
  {%- if messages[0]['content'] is string -%}
    {%- set first = messages[0]['content'] + '\\n\\n' -%}
  {%- else -%}{%- set first = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
  {%- set rest = messages[1:] -%}
{%- else -%}{%- set first = "" -%}{%- set rest = messages -%}{%- endif -%}
{%- for message in rest -%}
  {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
  {{ '<start_of_turn>' + role + '\\n' + (first if loop.first else "") }}
  {%- if message['content'] is string -%}{{ message['content'] | trim }}
  {%- elif message['content'] is iterable -%}
    {%- for item in message['content'] -%}
      {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
    {%- endfor -%}
  {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
  {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
_GPT_OSS = """{%- macro schema(tools) -%}
  {%- for tool in tools %}{{- "type " + tool.function.name + " = " }}
    {%- for name, spec in tool.function.parameters.properties.items() -%}
      {{- name + ": " + spec.type }}{%- if not loop.last -%},{%- endif -%}
    {%- endfor -%}
  {%- endfor -%}
{%- endmacro -%}
{{- "<|start|>system<|message|>Current date: " + strftime_now("%Y-%m-%d") }}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
{{- "\\nReasoning: " + reasoning_effort + "<|end|>" }}
{%- if tools %}{{- "<|start|>developer<|message|>" + schema(tools) + "<|end|>" }}{%- endif %}
{%- for message in messages -%}
  {%- if message.role == "assistant" -%}
    {%- if loop.last and not add_generation_prompt %}
      {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
    {%- else %}
      {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
  {%- elif message.role == "user" -%}
    {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""


def llama2(prefix: str) -> Family:
  """A space before a text; bos by the post-processor; ▁ before the closing </s>."""
  backend = begins(scored(special("<unk>", "<s>", "</s>"), prefix=prefix), "<s>")
  settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None}
  settings |= {"add_bos_token": True, "add_eos_token": False, "legacy": False}
  return Family(backend, settings, ("</s>",), "</s>", _LLAMA2)


def llama3() -> Family:
  """Words that are tokens whatever their merges; bos by the post-processor alone; three ends."""
  names = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
  ends = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
  backend = byte_level(special(*names, *ends[1:]), ignore_merges=True)
  begins(backend, names[0], byte=True)
  settings = {"bos_token": names[0], "eos_token": "<|eot_id|>"}
  settings |= {"clean_up_tokenization_spaces": True}
  return Family(backend, settings, ends, "<|eot_id|>", _LLAMA3)


def mistral() -> Family:
  """As Llama 2 without a space before the closing </s>, and control tokens for tools."""
  tools = special("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
  backend = begins(scored([*special("<unk>", "<s>", "</s>"), *tools], prefix="metaspace"), "<s>")
  settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
  return Family(backend, settings, ("</s>",), "</s>", _MISTRAL)


def qwen2() -> Family:
  """NFC; no bos; an end of text beside the end of a turn."""
  names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
  backend = byte_level(special(*names), normalizer=normalizers.NFC())
  backend.post_processor = processors.ByteLevel(trim_offsets=False)
  settings = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
  settings |= {"add_bos_token": False, "additional_special_tokens": list(names[1:])}
  return Family(backend, settings, ("<|im_end|>", "<|endoftext|>"), names[2], _CHATML)


def qwen3() -> Family:
  """As Qwen 2, with added tokens that are text: <think>, <tool_call>."""
  made = qwen2()
  marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
  made.backend.add_tokens(plain(*marks))
  return dataclasses.replace(made, template=_QWEN3)


def phi3() -> Family:
  """Markers that take the white space behind them; no bos; eos that is not the end of a turn."""
  strips = special("</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", rstrip=True)
  backend = scored([*special("<unk>", "<s>", "<|endoftext|>"), *strips])
  settings = {"bos_token": "<s>", "eos_token": "<|endoftext|>", "add_bos_token": False}
  ends = ("<|endoftext|>", "<|assistant|>", "<|end|>")
  return Family(backend, settings, ends, "<|end|>", _PHI3)


def phi4() -> Family:
  """Markers that take white space on both sides, and no line break in the template."""
  names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>")
  backend = byte_level(special(*names, lstrip=True, rstrip=True))
  settings = {"bos_token": names[0], "eos_token": "<|im_end|>", "pad_token": names[0]}
  return Family(backend, settings, (names[0], names[2]), names[2], _PHI4)


def glm4() -> Family:
  """Two tokens before a text, no bos; an answer ends where the next role begins."""
  names = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>")
  names += ("<|observation|>",)
  backend = begins(byte_level(special(*names)), "[gMASK]", "<sop>", byte=True)
  settings = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "bos_token": None}
  ends = ("<|endoftext|>", "<|user|>", "<|observation|>")
  return Family(backend, settings, ends, "<|user|>", _GLM4)


def gemma() -> Family:
  """No space before a text, runs of spaces and tags as added tokens, bos; ends as a list."""
  names = special("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
  backend = scored([*names, *plain("▁▁▁", "<h1>", "\n\n")], prefix="nobody", strip=False)
  begins(backend, "<bos>")
  settings = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True}
  ends = ("<eos>", "<end_of_turn>")
  return Family(backend, settings, ends, "<end_of_turn>", _GEMMA)


def gpt_oss() -> Family:
  """The last answer ends with <|return|>, those before with <|end|>, a call with <|call|>."""
  names = ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|call|>", "<|end|>", "<|start|>")
  backend = byte_level(special(*names, "<|channel|>", "<|message|>"))
  settings = {"bos_token": names[0], "eos_token": "<|return|>", "pad_token": "<|endoftext|>"}
  ends = ("<|return|>", "<|endoftext|>", "<|call|>")
  return Family(backend, settings, ends, "<|return|>", _GPT_OSS)


def smollm2() -> Family:
  """Digits apart, GPT-2's cut, bos that no text begins with."""
  names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
  backend = byte_level(special(*names), split=None, digits=True)
  settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": names[0]}
  return Family(backend, settings, ("<|im_end|>",), "<|im_end|>", _CHATML)


FAMILIES = {
  "llama2": lambda: llama2("normalizer"),
  "llama2-metaspace": lambda: llama2("metaspace"),
  "llama3": llama3,
  "mistral": mistral,
  "qwen2": qwen2,
  "qwen3": qwen3,
  "phi3": phi3,
  "phi4": phi4,
  "glm4": glm4,
  "gemma": gemma,
  "gpt-oss": gpt_oss,
  "smollm2": smollm2,
}


def write(folder: pathlib.Path, family: Family) -> pathlib.Path:
  """The tokenizer's files of a published folder."""
  folder.mkdir(parents=True, exist_ok=True)
  family.backend.save(str(folder / "tokenizer.json"))
  (folder / "chat_template.jinja").write_text(family.template)
  (folder / "tokenizer_config.json").write_text(json.dumps(family.settings))
  ids = [family.backend.token_to_id(end) for end in family.ends]
  eos = {"eos_token_id": ids if len(ids) > 1 else ids[0]}
  (folder / "generation_config.json").write_text(json.dumps(eos))
  return folder


@functools.cache
def letters():
  """A tokenizer whose tokens are single printable characters."""
  return Tokenizer(tiny_hf.tokenizer(CONFIG.vocab))


class Letters:
  """A tokenizer of one token a character."""

  chat_template, ends = None, ()

  def encode(self, text, *, bos=True):
    return [ord(c) for c in text]

  def decode(self, ids):
    return "".join(map(chr, ids))
