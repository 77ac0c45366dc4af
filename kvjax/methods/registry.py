"""Name -> class of every method; laws, demo, evaluations and benchmarks run over this mapping.

A method from outside needs no line in the table: programs take "module:Class" for a name, and
`METHODS["mine"] = Mine` gives it a short one in your own process.
"""

import importlib
from collections import UserDict
from difflib import get_close_matches
from typing import Any

from kvjax.families.method import Method
from kvjax.methods import TABLE


class _Methods(UserDict[str, type[Method]]):
  """Classes by name, in the order of the table; each is imported when it is first asked for."""

  def __getitem__(self, name: str) -> type[Method]:
    found: Any = super().__getitem__(name)
    if isinstance(found, str):
      module, _, attribute = found.partition(":")
      found = self[name] = getattr(importlib.import_module(module), attribute)
    return found


METHODS = _Methods(TABLE)  # type: ignore[arg-type]


def find_method(name: str, option: str = "name") -> type[Method]:
  """The class of a method, by its name.

  >>> import kvjax
  >>> kvjax.find_method("snapkv") is kvjax.METHODS["snapkv"] is kvjax.SnapKV
  True
  >>> kvjax.find_method("snapkw")
  Traceback (most recent call last):
  ...
  ValueError: name: found 'snapkw', expected one of: ... (did you mean 'snapkv'?)

  Args:
    name: a registered one; or "module:Class", which is imported: a method from outside.
    option: what errors call the name.

  Raises:
    TypeError: it is no text.
    ValueError: no method has this name, the module is not there, or what it holds is no method.
  """
  if not isinstance(name, str):
    raise TypeError(f"{option}: found {name!r}, expected a method's name, such as 'quest'")
  if name in METHODS:
    return METHODS[name]
  module, colon, attribute = name.partition(":")
  if not colon:
    known = ", ".join(METHODS)
    near = "".join(f" (did you mean {x!r}?)" for x in get_close_matches(name, METHODS, 1))
    raise ValueError(f"{option}: found {name!r}, expected one of: {known}; or module:Class{near}")
  if module[:1] in ("", "."):
    raise ValueError(f"{option}: found {name!r}, expected module:Class, a whole module name")
  try:
    found = getattr(importlib.import_module(module), attribute)
  except (ImportError, AttributeError) as error:
    raise ValueError(f"{option}: found {name!r}, expected module:Class ({error})") from error
  if not (isinstance(found, type) and issubclass(found, Method)):
    raise ValueError(f"{option}: found {name!r}, {found!r}, expected a subclass of kvjax.Method")
  return found


def check_method(name: str, found: Any) -> None:
  """Raises TypeError for an argument that is no method, or none that can be static."""
  if isinstance(found, Method):
    try:
      hash(found)
    except TypeError as error:
      expected = "hashable fields, as it is static under jax.jit: tuples, not lists or arrays"
      raise TypeError(f"{name}: found {found!r}, expected {expected} ({error})") from None
    return
  name_of, what = "quest", repr(found)
  if isinstance(found, str):
    what = f"the string {found!r}"
    name_of = found if found in METHODS else name_of
  elif isinstance(found, type):
    what = f"the class {found.__name__}"
    name_of = next((known for known, cls in METHODS.items() if cls is found), name_of)
  instance = f"kvjax.settings.usual(kvjax.METHODS[{name_of!r}], 1024)"
  raise TypeError(f"{name}: found {what}, expected a method such as {instance}")
