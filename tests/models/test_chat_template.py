"""Chat templates: what publishers' templates are written for, and limits on what they may do."""

import datetime

import pytest

from kvjax.models.io import chat_template
from kvjax.models.io.tokenizer import Tokenizer
from tests import tiny_hf
from tests.tiny_tokenizers import FAMILIES

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {
  "type": "function",
  "function": {
    "name": "größe",
    "description": "<a & b>",
    "parameters": {"type": "object", "properties": {"z": {"type": "int"}, "a": {"type": "str"}}},
  },
}


def render(source, messages=HELLO, **arguments):
  return Tokenizer(tiny_hf.tokenizer(), chat_template=source).render(messages, **arguments)


# ---- the environment


@pytest.mark.parametrize(
  ("source", "text"),
  [
    ("{{ {'ü': '<&>', 'a': [1, none, true]}|tojson }}", '{"ü": "<&>", "a": [1, null, true]}'),
    ("{{ {'b': 1, 'a': 2}|tojson(indent=2) }}", '{\n  "b": 1,\n  "a": 2\n}'),
    ("{{ {'b': 1, 'a': 2}|tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
    ("{{ 'ü'|tojson(ensure_ascii=true) }}", '"\\u00fc"'),
    (
      "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}"
      "{% endif %}{{ i }}{{ loop.length }}{{ loop.last }} {% endfor %}",
      "09False 19False 39False ",
    ),
    ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
    ("{% generation %}{{ messages[0].content }}{% endgeneration %}.", "hello."),
    ("{{ bos_token }}|{{ tools is none }}|{{ documents is none }}", "|True|True"),
    ("{{ x is defined }}", "False"),
    ("{{ namespace(a=1).a }}{{ messages|map(attribute='role')|join(',') }}", "1user"),
    (
      "{{ '%s-%05d' % ('a', 7) }}{{ '{:>3}'.format(1) }}{{ 'ab' * 2 }}{{ 2 ** 10 }}{{ [1] + [2] }}",
      "a-00007  1abab1024[1, 2]",
    ),
  ],
)
def test_environment(source, text):
  assert render(source) == text


@pytest.mark.usefixtures("untyped")
def test_arguments_reach_the_template_or_are_refused_by_name():
  source = "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}{{ day }}"
  assert render(source, enable_thinking=False, day="Monday") == "noMonday"
  with pytest.raises(ValueError, match=r"enable_thinkin: .*not read, .*'day', 'enable_thinking'"):
    render(source, enable_thinkin=False)
  with pytest.raises(ValueError, match="tools: found an argument that the chat template does not"):
    render("{{ messages[0].content }}", tools=[TOOL])
  with pytest.raises(ValueError, match=r"tools: found .*expected a list of dicts"):
    render("{{ tools }}", tools=[len])


def test_special_tokens_by_name():
  names = {"bos_token": "<s>", "pad_token": "<pad>", "additional_special_tokens": ["<a>", "<b>"]}
  made = Tokenizer(
    tiny_hf.tokenizer(),
    special_tokens=names,
    chat_template="{{ bos_token }}{{ pad_token }}{{ additional_special_tokens[1] }}{{ eos_token }}",
  )
  assert made.render(HELLO) == "<s><pad><b>"


@pytest.mark.usefixtures("untyped")
def test_lists_of_parts():
  """As they are where a template takes them, joined where it takes texts, refused for images."""
  parts = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}]
  loop = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
  assert render(loop, parts) == "[a][b]"
  assert render("{{ messages[0].content }}", parts) == "ab"
  assert render("{{ messages[0]['content'].strip() + '!' }}", parts) == "ab!"
  image = [{"role": "user", "content": [{"type": "image", "url": "x"}]}]
  with pytest.raises(ValueError, match="found a part of type 'image', expected parts"):
    render(loop, image)
  for nothing, kind in ((7, "int"), (None, "None")):
    with pytest.raises(ValueError, match=f"content: found {kind}, expected a text"):
      render("{{ messages[0].content }}", [{"role": "user", "content": nothing}])
  with pytest.raises(ValueError, match="messages: found str, expected dicts"):
    render(loop, "hello")


def test_long_conversations_are_within_limits(monkeypatch):
  """Limits cost next to nothing: a filter over all messages in a loop over all messages."""
  monkeypatch.setattr(chat_template, "SECONDS", 5)
  monkeypatch.setattr(chat_template, "LARGEST", 1 << 22)
  source = "{% for m in messages %}{{ messages|length - loop.index }} {{ '{}'.format(1700000000) }}"
  source += "{{ messages|selectattr('role', 'equalto', 'x')|list|length if loop.first }}"
  source += "{% endfor %}"
  assert render(source, HELLO * 2000).startswith("1999 170000000001998 1700000000")


# ---- the families' templates, written out by hand


def of(name, messages=HELLO, **arguments):
  family = FAMILIES[name]()
  named = {k: v for k, v in family.settings.items() if k.endswith("s_token") and v}
  made = Tokenizer(family.backend, chat_template=family.template, special_tokens=named)
  return made.render(messages, **arguments)


def test_llama3_date_tools_and_calls():
  call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
  assert of("llama3", [*HELLO, call], date_string="1 May 2025", add_generation_prompt=False) == (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 1 May 2025\n\n"
    "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nhello<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "f", "parameters": {"a": 1}}<|eom_id|>'
  )
  answer = {"role": "assistant", "content": "hello"}
  spoken = [*HELLO, {**answer, "tool_calls": None, "refusal": None}]  # as OpenAI's clients have it
  assert of("llama3", spoken) == of("llama3", [*HELLO, answer])
  assert '{\n    "type": "function",\n' in of("llama3", tools=[TOOL])
  assert f"{datetime.datetime.now():%b %Y}" in of("llama3")
  with pytest.raises(ValueError, match="does not take these messages: one call"):
    of("llama3", [*HELLO, {**call, "tool_calls": call["tool_calls"] * 2}])


def test_qwen3_thinking_and_calls():
  assert of("qwen3").endswith("<|im_start|>assistant\n")
  short = of("qwen3", enable_thinking=False)
  assert short.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
  thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nhi"}
  assert "<|im_start|>assistant\nhi<|im_end|>" in of("qwen3", [*HELLO, thought, *HELLO])
  call = {"role": "assistant", "content": None, "tool_calls": [{"arguments": {"ü": "<"}}]}
  assert '<tool_call>{"ü": "<"}</tool_call>' in of("qwen3", [*HELLO, call])
  assert '\n{"type": "function", "function": {"name": "größe", "descr' in of("qwen3", tools=[TOOL])


def test_gpt_oss_macros_effort_and_date():
  text = of("gpt-oss", tools=[TOOL], reasoning_effort="low")
  assert text == (
    f"<|start|>system<|message|>Current date: {datetime.datetime.now():%Y-%m-%d}\nReasoning: low"
    "<|end|><|start|>developer<|message|>type größe = z: int,a: str<|end|>"
    "<|start|>user<|message|>hello<|end|><|start|>assistant"
  )


# ---- limits


GROWING = "{%% set ns = namespace(x=%s) %%}{%% for i in range(64) %%}%s{%% endfor %%}{{ ns.x }}"


ENDLESS = [
  "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
  "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(64) }}",
  "{% for m in messages * 64 recursive %}{{ loop(messages * 64) if loop.depth < 9 }}{% endfor %}",
]
HUGE = [
  "{{ 'a' * 10 ** 9 }}",
  "{{ 10 ** 9 * [1] }}",
  "{{ 9 ** (9 ** 9) }}",
  "{{ '%999999999d' % 1 }}",
  "{{ '%*d' % (999999999, 1) }}",
  "{{ '{:999999999}'.format(1) }}",
  "{{ 'a'.ljust(999999999) }}",
  "{{ 'a'|center(999999999) }}",
  "{{ messages|tojson(indent=999999999) }}",
  "{{ (1).to_bytes(999999999) }}",
  "{{ 1.5|round(999999999, 'floor') }}",
  "{{ [1]|batch(999999999, 0)|list }}",
  "{{ '{:{}}'.format(1, 99999999) }}",
  "{{ ('a' * 9999).replace('a', 'a' * 9999) }}",
  "{{ ('a' * 9999)|replace('a', 'a' * 9999) }}",
  "{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}",
  GROWING % ("'a'", "{% set ns.x = ns.x ~ ns.x %}"),
  GROWING % ("'a'", "{% set ns.x = ns.x + ns.x %}"),
  GROWING % ("'a'", "{% set ns.x = [ns.x, ns.x]|join %}"),
  GROWING % ("'a'", "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}"),
  GROWING % ("[1]", "{% set ns.x = ns.x + ns.x %}"),
  GROWING % ("[1]", "{% set ns.x = [ns.x, ns.x] %}"),
  GROWING % ("9", "{% set ns.x = ns.x * ns.x %}"),
]
# More than a template is given.
REACHING = [
  "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
  "{{ " + "(" * 999 + "1" + ")" * 999 + " }}",
  "{% include 'other' %}",
  "{{ lipsum(99999) }}",
  "{{ messages[0].__class__ }}{{ messages.append(1) }}",
]


@pytest.mark.core(3)
@pytest.mark.parametrize(
  ("source", "limits", "message"),
  [
    *((x, {"SECONDS": 0.2}, r"it runs for more than 0\.2 s") for x in ENDLESS),
    *((x, {"LARGEST": 1 << 22}, r"not take these messages: .* (larger|more) than") for x in HUGE),
    *((x, {}, "chat_template: does not take these messages") for x in REACHING),
  ],
)
def test_templates_that_ask_for_too_much(source, limits, message, monkeypatch):
  for name, limit in limits.items():
    monkeypatch.setattr(chat_template, name, limit)
  with pytest.raises(ValueError, match=message):
    render(source)
