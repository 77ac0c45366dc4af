"""Chat templates: Jinja with what the publishers' templates are written for, within limits.

The environment is that of transformers: blocks are trimmed, `break` and `continue` work, `tojson`
writes plain JSON, and `raise_exception`, `strftime_now` and `{% generation %}` are there.

A template comes with a checkpoint, from anybody. It runs sandboxed, cannot change its arguments,
and is stopped where it takes too long or makes something too large.
"""

from __future__ import annotations

import contextvars
import datetime
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from kvjax.models.io.token_backends import check_unicode

SECONDS = 10.0  # that a template may run
LARGEST = 1 << 26  # characters of any text in it; a list's entry counts as 64
_ENTRY = 64
_GROWERS = ("replace", "join", "indent", "wordwrap")  # whose result may be a product of sizes
# What a number makes long, and filters that make no text of the containers that they are given.
_WIDENERS = frozenset(
  "center ljust rjust zfill expandtabs to_bytes tojson round indent wordwrap batch slice".split()
)
_LIGHT = frozenset(
  (
    "length count first last default d list items map sum attr select selectattr reject "
    "rejectattr sort unique groupby dictsort min max reverse batch slice random"
  ).split()
)
_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{6}|\*)|:[^}]*(\d{6}|\{)")  # of % and of format

_deadline = contextvars.ContextVar("deadline", default=float("inf"))


class Chat:
  """A chat template, compiled.

  Args:
    source: Jinja.

  Attributes:
    names: what the template reads: its arguments, and names of its own.

  Raises:
    ValueError: it is no Jinja, or uses a filter, test or block that is not there.
  """

  def __init__(self, source: str):
    environment = _Environment()
    try:
      tree = environment.parse(source)
      self._template: Template = environment.from_string(source)
    except Exception as error:  # a RecursionError, too
      raise ValueError(f"found {_said(error)}, expected a Jinja template") from error
    self.names = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "load"}

  def render(self, **arguments: Any) -> str:
    """The text; raises what the template raises, and `SecurityError` at a limit."""
    token = _deadline.set(time.monotonic() + SECONDS)
    try:
      return self._template.render(**arguments)
    finally:
      _deadline.reset(token)

  @functools.cached_property
  def takes_parts(self) -> bool:
    """True if a message's content may be a list of parts, not a text alone."""
    mark = "\N{REPLACEMENT CHARACTER}part\N{REPLACEMENT CHARACTER}"
    message = {"role": "user", "content": [{"type": "text", "text": mark}]}
    try:
      text = self.render(messages=[message], add_generation_prompt=False)
    except Exception:  # whatever it stumbles over
      return False
    return mark in text and "'type'" not in text


@functools.lru_cache(maxsize=32)
def compiled(source: str) -> Chat:
  """`Chat(source)`; raises as it does."""
  return Chat(source)


def flattened(messages: Sequence[Mapping[str, Any]], chat: Chat) -> list[dict[str, Any]]:
  """Copies of messages, without entries that are None; lists of text parts are joined unless the
  template takes them.

  Raises:
    TypeError: these are no messages.
    ValueError: a message has no role or nothing to say, or a part is no text.
  """
  if isinstance(messages, Mapping) or not isinstance(messages, Iterable):
    raise TypeError(f"messages: found {messages!r}, expected a list of dicts")
  out = []
  for message in messages:
    if not isinstance(message, Mapping):
      raise ValueError(f"messages: found {type(message).__name__}, expected dicts")
    # Clients send null for what a message lacks; templates ask whether "tool_calls" is there.
    message = {key: x for key, x in message.items() if x is not None or key == "content"}
    if "role" not in message or not {"content", "tool_calls"} & set(message):
      raise ValueError(
        f"messages: found keys {sorted(message)}, expected 'role' and 'content' in each "
        "('tool_calls' may stand for 'content')"
      )
    content = message.get("content")
    if content is None and not set(message) - {"role", "content"}:
      raise ValueError("messages: content: found None, expected a text or a list of parts")
    if isinstance(content, list):
      texts = [_text_of(part) for part in content]
      message = {**message, "content": content if chat.takes_parts else "".join(texts)}
    elif content is not None and not isinstance(content, str | Mapping):
      raise ValueError(
        f"messages: content: found {type(content).__name__}, expected a text or a list of parts"
      )
    if isinstance(content, str):
      check_unicode(content, "messages: content")
    out.append(message)
  return out


def _text_of(part: Any) -> str:
  kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
  if kind != "text" or not isinstance(part.get("text"), str):
    raise ValueError(
      f"messages: content: found a part of type {kind!r}, expected parts "
      "{'type': 'text', 'text': …}: the model reads text"
    )
  return part["text"]


def _said(error: BaseException) -> str:
  return f"{type(error).__name__}: {error}"


# ---- transformers' environment


class _Generation(Extension):
  """`{% generation %}`: marks an assistant's words for training, and renders as what it holds."""

  tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

  def parse(self, parser: Parser) -> nodes.Node:
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return nodes.CallBlock(self.call_method("inside"), [], [], body).set_lineno(line)

  def inside(self, caller: Callable[[], str]) -> str:
    return caller()


def _tojson(
  x: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: Any = None,
  sort_keys: bool = False,
) -> str:
  return json.dumps(
    x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
  )


def _raise_exception(reason: str) -> None:
  raise TemplateError(reason)


# ---- limits


def _look_at_the_clock() -> None:
  if time.monotonic() > _deadline.get():
    raise SecurityError(f"it runs for more than {SECONDS:g} s")


def _size(x: Any) -> int:
  """Characters of a text, or of all that a container holds; raises above `LARGEST`.

  What a list holds twice counts twice: it would be printed twice.
  """
  total, left = 0, [x]
  while left:
    item = left.pop()
    if isinstance(item, str | bytes):
      total += len(item)
    elif isinstance(item, list | tuple | set | frozenset):
      left += item
      total += _ENTRY * len(item)
    elif isinstance(item, dict):
      left += [*item.keys(), *item.values()]
      total += _ENTRY * len(item)
    if total > LARGEST:
      raise SecurityError(f"it makes something larger than {LARGEST:,} characters")
  return total


def _check_call(name: str, values: Sequence[Any]) -> None:
  """Raises where a filter or a method of a text is given, or would make, something too large."""
  _look_at_the_clock()

  def size(x: Any) -> int:
    if isinstance(x, int):
      return abs(x) if name in _WIDENERS else 0
    return 0 if name in _LIGHT and not isinstance(x, str) else _size(x)

  sizes = [size(x) for x in values]
  product = (sizes[0] + 1) * (max(sizes[1:], default=0) + 1) if name in _GROWERS and sizes else 0
  formats = name in ("format", "%") and values and _too_wide(values[0])
  if max([*sizes, product], default=0) > LARGEST or formats:
    raise SecurityError(f"{name} makes something larger than {LARGEST:,} characters")


def _too_wide(form: Any) -> bool:
  return isinstance(form, str) and bool(_WIDE.search(form))


def _counted(items: Iterable[Any]) -> Iterator[Any]:
  """A loop's items, with an eye on the clock."""
  _look_at_the_clock()
  for item in items:
    yield item
    _look_at_the_clock()


def _sized(x: Any) -> Any:
  _size(x)
  return x


def _joined(parts: Iterable[str]) -> str:
  """Parts of a text; raises before they are too long together."""
  kept, total = [], 0
  for part in parts:
    kept.append(part)
    total += len(part)
    if total > LARGEST:
      raise SecurityError(f"it makes something larger than {LARGEST:,} characters")
  return "".join(kept)


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
  """A filter whose arguments are looked at first."""

  @functools.wraps(function)  # keeps Jinja's marks
  def looked_at(*args: Any, **kwargs: Any) -> Any:
    first = 1 if hasattr(function, "jinja_pass_arg") else 0
    _check_call(name, [*args[first:], *kwargs.values()])
    return function(*args, **kwargs)

  return looked_at


class _Environment(ImmutableSandboxedEnvironment):
  """Jinja's sandbox with transformers' names, and limits on time and sizes."""

  intercepted_binops = frozenset(("+", "*", "**", "%"))
  concat = staticmethod(_joined)

  def __init__(self) -> None:
    super().__init__(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=[_Generation, "jinja2.ext.loopcontrols"],
      finalize=_sized,
    )
    self.globals["raise_exception"] = _raise_exception
    self.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    del self.globals["lipsum"]
    self.filters["tojson"] = _tojson
    self.filters = {name: _limited(name, f) for name, f in self.filters.items()}
    self.filters |= {"_counted": _counted, "_sized": _sized}

  def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
    """Jinja's tree, with every loop counted and every `~` measured."""
    return _Measured().visit(super()._parse(source, name, filename))

  def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
    _look_at_the_clock()
    owner = getattr(__obj, "__self__", None)
    if isinstance(owner, str | int):
      _check_call(__obj.__name__, [owner, *args, *kwargs.values()])
    return super().call(__context, __obj, *args, **kwargs)

  def wrap_str_format(self, value: Any) -> Any:
    if _too_wide(getattr(value, "__self__", None)):
      raise SecurityError(f"format makes something larger than {LARGEST:,} characters")
    return super().wrap_str_format(value)

  def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
    _look_at_the_clock()
    numbers = isinstance(left, int) and isinstance(right, int)
    if operator == "%" and not numbers:
      _check_call("%", [left, right if isinstance(right, tuple | Mapping) else (right,)])
    elif operator == "+" and not numbers:
      _size((left, right))
    elif numbers and operator in ("*", "**"):
      bits = left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length()
      if bits > LARGEST >> 12:
        raise SecurityError(f"{operator} makes a number of more than {LARGEST >> 12:,} bits")
    elif operator == "*":
      times, x = (left, right) if isinstance(left, int) else (right, left)
      if isinstance(times, int) and not isinstance(x, float) and _size(x) * times > LARGEST:
        raise SecurityError(f"* makes something larger than {LARGEST:,} characters")
    return super().call_binop(context, operator, left, right)


def _filtered(node: Any, name: str) -> nodes.Filter:
  made = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
  made.set_environment(node.environment)
  return made


class _Measured(NodeTransformer):
  """Counts the items of every loop, and measures every `~` and what goes into it."""

  def visit_For(self, node: nodes.For) -> nodes.Node:
    node.iter = _filtered(node.iter, "_counted")
    return self.generic_visit(node)

  def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
    self.generic_visit(node)
    node.nodes = [_filtered(x, "_sized") for x in node.nodes]
    return _filtered(node, "_sized")
