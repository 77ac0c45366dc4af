"""Labels of the command line: a method, with settings, over another one.

snapkv    snapkv:window=32    quantised:bits=4+snapkv    adakv+kvzip:room=64
duo_attention:pattern=gates.tsv    ltri:heads=heads.json    mymodule:Mine

Values that are found by looking at a model say what they were fitted on (`fitted`).
"""

import ast
import dataclasses
import pathlib
import re
from collections.abc import Callable
from typing import Any

import kvjax
from kvjax.methods.duo_attention import gates
from kvjax.programs import retrieval_heads
from kvjax.programs.evals.fitted import Fitted, of

# Values that stand in files, by how their names end.
FILES: dict[str, Callable[[pathlib.Path], Any]] = {
  ".tsv": lambda path: gates.pattern_of(gates.read_gates(path)),
  ".json": retrieval_heads.load,
}
FIELDS = ("heads", "pattern")  # fields that are found by looking at a model
UNFITTED = (None, "alternate")  # values of theirs that are not
_INNER = re.compile(r"\+(?=[A-Za-z_])")


def instance(label: str, budget: int, option: str = "--methods") -> kvjax.Method:
  """The method that a label means, with a budget.

  Args:
    label: "name", or "name:field=value,field=value" for other settings than `usual` has, or
      "outer+inner", a method over another, each with settings of its own. A method from outside is
      "module:Class". A value that names a file of FILES is what stands there.
    budget: tokens; of methods over others, the innermost one's.
    option: what errors call the label.

  Raises:
    ValueError: a name, a field or a file is not one, or a method refuses it.
  """
  outer, *inner = _INNER.split(label, maxsplit=1)
  name, fields = _parts(outer, option)
  method = kvjax.settings.usual(kvjax.find_method(name, option), budget)
  values = {field: _value(text, option) for field, text in fields.items()}
  known = [field.name for field in dataclasses.fields(method)]
  if unknown := sorted(set(values) - set(known)):
    raise ValueError(f"{option}: {name} has no {', '.join(unknown)}, it has: {', '.join(known)}")
  if inner:
    if "base" not in known:
      raise ValueError(f"{option}: found {label!r}, expected a method over others before the +")
    values["base"] = instance(inner[0], budget, option)
  return dataclasses.replace(method, **values)


def fitted(label: str) -> tuple[Fitted, ...]:
  """Records of what a label's values were fitted on, out of files or as heads given by hand.

  Raises:
    ValueError: a file is not there, or its record is damaged.
  """
  outer, *inner = _INNER.split(label, maxsplit=1)
  name, fields = _parts(outer)
  found = []
  for field, text in fields.items():
    path = pathlib.Path(text)
    if path.suffix in FILES:
      found.append(Fitted(f"{name}:{field}={text}", _read(of, path)))
    elif field in FIELDS and _value(text) not in UNFITTED:
      found.append(Fitted(f"{name}:{field}={text}", None))
  return (*found, *(each for part in inner for each in fitted(part)))


def _parts(label: str, option: str = "--methods") -> tuple[str, dict[str, str]]:
  """Name and settings of "name:settings" or "module:Class:settings"."""
  name, _, rest = label.partition(":")
  if name not in kvjax.METHODS and rest and "=" not in rest.partition(":")[0]:
    more, _, rest = rest.partition(":")
    name = f"{name}:{more}"
  fields = {}
  for part in filter(None, re.split(r",(?![^(]*\))", rest)):  # not inside of (0, 1)
    field, equals, value = part.partition("=")
    if not equals:
      raise ValueError(f"{option}: found {label!r}, expected name:field=value,field=value")
    fields[field] = value
  return name, fields


def _value(text: str, option: str = "--methods") -> Any:
  """A literal of Python, what a file holds, or the text itself."""
  path = pathlib.Path(text)
  if path.suffix in FILES:
    return _read(FILES[path.suffix], path, option)
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text


def _read(
  reader: Callable[[pathlib.Path], Any], path: pathlib.Path, option: str = "--methods"
) -> Any:
  try:
    return reader(path)
  except FileNotFoundError:
    raise ValueError(f"{option}: {path}: not found, expected a file") from None
