"""The house, drawn from its code: which rooms and moves it has."""

import ast
import contextlib
import dataclasses
import functools
import glob
import itertools
import pathlib
import re
import types
from collections.abc import Collection, Iterable

import pandas as pd

import kvjax
from kvjax import _public
from kvjax.families.method import Method
from scripts.tools.tablemakers import Part, Results

CODE = pathlib.Path(kvjax.__file__).resolve().parent
# Folders from the top down: each imports those below it, and none above.
ROOMS = ("programs", "testing", "models.decode", "models.io", "models.nn", "analysis", "runtime")
ROOMS += ("methods", "families", "ops", "kernels", "core", "primitives")


def room_of(module: str) -> str | None:
  """The folder of a module; None of the root."""
  return next((room for room in ROOMS if f"{module}.".startswith(f"kvjax.{room}.")), None)


def modules() -> dict[str, pathlib.Path]:
  """All of kvjax by their names, those behind its links too."""
  files = sorted(glob.glob("**/*.py", root_dir=CODE, recursive=True))
  names = (f"kvjax/{file.removesuffix('.py')}".removesuffix("/__init__") for file in files)
  return {name.replace("/", "."): CODE / file for name, file in zip(names, files, strict=True)}


def _for_types(test: ast.expr) -> bool:
  return isinstance(test, ast.Name | ast.Attribute) and ast.unparse(test).endswith("TYPE_CHECKING")


def imports(source: str, known: Collection[str]) -> set[str]:
  """The known modules that a file imports, late or by name too, not for types alone."""
  found: set[str] = set()
  left: list[ast.AST] = [ast.parse(source)]
  while left:
    node = left.pop()
    if isinstance(node, ast.If) and _for_types(node.test):
      continue
    left += ast.iter_child_nodes(node)
    if isinstance(node, ast.Import):
      found |= {x.name for x in node.names}
    elif isinstance(node, ast.ImportFrom):
      inner = {f"{node.module}.{x.name}" for x in node.names}
      found |= {name if name in known else str(node.module) for name in inner}
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
      found.add(node.value.partition(":")[0])
  return found & set(known)


@functools.cache
def imported() -> dict[str, set[str]]:
  """Modules of kvjax, and those of it that each imports."""
  known = modules()
  return {name: imports(path.read_text("utf-8"), known) - {name} for name, path in known.items()}


def doors() -> set[tuple[str, str]]:
  """(folder, folder that it imports)."""
  graph = imported().items()
  pairs = {(room_of(here), room_of(there)) for here, found in graph for there in found}
  return {(a, b) for a, b in pairs if a and b and a != b}


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
  """Modules that one imports, by way of others too."""
  found, left = set(), [start]
  while left:
    new = graph[left.pop()] - found
    found |= new
    left += new
  return found


def rooms(results: Results) -> Part:
  """A graph for Mermaid of the folders, without arrows that others make in steps."""
  found, lines = doors(), []
  for room in ROOMS:
    source = (CODE / room.replace(".", "/") / "__init__.py").read_text("utf-8")
    about = re.split("[:;.]", ast.get_docstring(ast.parse(source)) or "")[0]
    lines.append(f'  {room.replace(".", "_")}["{room}<br/>{about}"]')
  for a, b in itertools.product(ROOMS, repeat=2):
    if (a, b) in found and not any((a, c) in found and (c, b) in found for c in ROOMS):
      lines.append(f"  {a} --> {b}".replace(".", "_"))
  return ["", "```mermaid", "graph TD", *lines, "```"]


def stub() -> str:
  """The text of kvjax/__init__.pyi: public names, from where they stand."""
  found = sorted((module, name) for name, module in _public.MODULES.items())
  lines = [f"from {module} import {name} as {name}" for module, name in found]
  return "\n".join([*lines, "", "__version__: str", "__all__: list[str]", ""])


def own(cls: type) -> list[str]:
  """The moves that a method, or one that it extends, has of its own, in order."""
  registered = [base for base in reversed(cls.__mro__) if base in kvjax.METHODS.values()]
  found = {name: x for base in registered for name, x in vars(base).items()}
  moves = (types.FunctionType, property)
  return [name for name, x in found.items() if isinstance(x, moves) and name[0] != "_"]


def family(cls: type) -> str:
  """The next class up that is no method itself."""
  registered = kvjax.METHODS.values()
  above = next(base for base in cls.__mro__ if base not in registered)
  return "–" if above is Method else f"`{above.__name__}`"


def moves(results: Results) -> Part:
  """Every method, its family, and the moves that are not its family's."""
  rows = {
    f"`{name}`": {"family": family(cls), "moves of its own": _quoted(own(cls)) or "–"}
    for name, cls in kvjax.METHODS.items()
  }
  return pd.DataFrame.from_dict(rows, "index").rename_axis("method")


def _quoted(names: Iterable[str]) -> str:
  """Names one after the other, as code."""
  return ", ".join(f"`{name}`" for name in names)


def takes(cls: type[Method], base: type[Method]) -> Method:
  """An example of a method over one of another.

  Raises:
    ValueError: the two do not go together, and the message says why.
  """
  return dataclasses.replace(_example(cls), base=_example(base))


@functools.cache
def _example(cls: type[Method]) -> Method:
  return kvjax.settings.example(cls, 64)


def over(name: str) -> list[str] | None:
  """The methods that one goes over; None: it has no base to be chosen."""
  cls, found = kvjax.METHODS[name], []
  if not any(field.name == "base" and field.init for field in dataclasses.fields(cls)):
    return None
  for other, base in kvjax.METHODS.items():
    with contextlib.suppress(ValueError):
      takes(cls, base)
      found.append(other)
  return found


def compositions(results: Results) -> Part:
  """Every method that takes a base, and its bases; alike ones share a row."""
  pairs = [(name, _quoted(bases)) for name in kvjax.METHODS if (bases := over(name)) is not None]
  rows = pd.DataFrame(pairs, columns=["method", "goes over"]).groupby("goes over", sort=False)
  return rows.method.agg(_quoted).reset_index().set_index("method")
