"""Labels of methods in text: a method, with settings, over another one.

snapkv    snapkv:window_size=16    quantised:bits=4+snapkv    adakv:safeguard=0+kvzip
duo_attention:pattern=gates.tsv    ltri:heads=heads.json,quantile=spans.json    mymodule:Mine
"""

import ast
import dataclasses
import functools
import json
import math
import operator
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from kvjax.core import settings
from kvjax.families.method import Method
from kvjax.methods.duo_attention import gates
from kvjax.methods.registry import METHODS, find_method

_INNER = re.compile(r"\+(?=[A-Za-z_])")


def split(label: str) -> list[str]:
  """The parts of "outer+inner+…", each of which `parts` reads."""
  return _INNER.split(label)


def instance(label: str, budget: int, option: str = "label") -> Method:
  """The method that a label means, with a budget.

  >>> from kvjax.methods import labels
  >>> method = labels.instance("quantised:bits=4+snapkv:window_size=16", budget=1024)
  >>> method.bits, method.base.budget, method.base.window_size
  (4, 1024, 16)

  Args:
    label: "name", or "name:field=value,field=value" for other settings than `usual` has, or
      "outer+inner", a method over another, each with its own settings. An external method is
      "module:Class". If a value is a file name with a suffix of FILES, its contents are used.
    budget: tokens; of methods over others, the innermost one's.
    option: what errors call the label.

  Raises:
    ValueError: a name, a field or a file is not one, or a method refuses it.
  """
  outer, *inner = _INNER.split(label, 1)
  name, fields = parts(outer, option)
  method = settings.usual(find_method(name, option), budget)
  if inner and "base" not in (field.name for field in dataclasses.fields(method)):
    raise ValueError(f"{option}: found {label!r}, expected a method over others before the +")
  if inner and "base" in fields:
    raise ValueError(f"{option}: found base twice in {label!r}, expected it after the + alone")
  over = {"base": instance(inner[0], budget, option)} if inner else {}
  return changed(method, fields, option, name, **over)


def changed(
  method: Method, fields: Mapping[str, str], option: str, name: str, **more: Any
) -> Method:
  """The method of this name with other settings, as `parts` reads them, and more as they are.

  Raises:
    ValueError: it has no such field, or refuses its value.
  """
  known = [field.name for field in dataclasses.fields(method) if field.init]
  if unknown := sorted(set(fields) - set(known)):
    raise ValueError(f"{option}: {name} has no {', '.join(unknown)}, it has: {', '.join(known)}")
  values = {field: value_of(field, text, option) for field, text in fields.items()}
  return dataclasses.replace(method, **(values | more))


def parts(label: str, option: str = "label") -> tuple[str, dict[str, str]]:
  """Name and settings of "name:settings" or "module:Class:settings"."""
  name, _, rest = label.partition(":")
  if name not in METHODS and rest and "=" not in rest.partition(":")[0]:
    more, _, rest = rest.partition(":")
    name = f"{name}:{more}"
  fields = {}
  for part in filter(None, _listed(rest)):
    field, equals, value = part.partition("=")
    if not equals:
      raise ValueError(f"{option}: found {label!r}, expected name:field=value,field=value")
    if field in fields:
      raise ValueError(f"{option}: found {field} twice in {label!r}, expected each field once")
    fields[field] = value
  return name, fields


def _listed(text: str) -> list[str]:
  """Pieces of a text between its commas, but for those inside of brackets."""
  depth, found = 0, [""]
  for char in text:
    depth += (char in "([{") - (char in ")]}")
    found = [*found, ""] if char == "," and depth == 0 else [*found[:-1], found[-1] + char]
  return found


def value_of(field: str, text: str, option: str = "label") -> Any:
  """A literal of Python, infinity, what a file holds for the field, or the text itself."""
  if text == "inf":
    return math.inf
  path = pathlib.Path(text)
  if path.suffix in FILES:
    return read(functools.partial(FILES[path.suffix], field=field), path, option)
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text


def read(reader: Callable[[pathlib.Path], Any], path: pathlib.Path, option: str = "label") -> Any:
  """Reads the file that a label names; ValueError where there is none."""
  try:
    return reader(path)
  except FileNotFoundError:
    raise ValueError(f"{option}: {path}: not found, expected a file") from None


def read_heads(path: pathlib.Path) -> tuple[tuple[int, int, float], ...]:
  """Retrieval heads (layer, head, score) out of a file of `kvjax retrieval-heads`.

  Raises:
    ValueError: it is another file.
  """

  def one(found: Any) -> tuple[int, int, float]:
    layer, head, score = found
    return operator.index(layer), operator.index(head), score + 0.0

  return _read_list(path, "heads", one, "a file of retrieval heads")


def _read_json(path: pathlib.Path, field: str) -> Any:
  """Retrieval heads, or a number for each layer, which stand under the field's name."""
  if field == "heads":
    return read_heads(path)
  return _read_list(path, field, lambda x: x + 0.0, f"numbers under {field!r}")


def _read_list(
  path: pathlib.Path, field: str, read_one: Callable[[Any], Any], expected: str
) -> tuple[Any, ...]:
  """A list under a field's name, one by one: nothing converts in silence."""
  try:
    held = json.loads(path.read_text("utf-8"))[field]
    if not isinstance(held, list):
      raise TypeError(f"a {type(held).__name__}, no list")
    return tuple(map(read_one, held))
  except (KeyError, TypeError, ValueError, RecursionError) as error:
    raise ValueError(f"{path}: found {error!r}, expected {expected}") from error


# Values that stand in files, by how their names end.
FILES: dict[str, Callable[..., Any]] = {
  ".tsv": lambda path, field: gates.pattern_of(gates.read_gates(path)),
  ".json": _read_json,
}
