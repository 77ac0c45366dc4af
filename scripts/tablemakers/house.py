"""The house, drawn from its code: which room imports which, and which moves each method has."""

import ast
import contextlib
import dataclasses
import inspect
import pathlib
from collections.abc import Iterator
from typing import Any

import kvjax
from kvjax.method import Method

from . import cells
from .records import Part
from .results import Results

CODE = pathlib.Path(kvjax.__file__).resolve().parent
# Room -> what stands in it, beside the folders of the same name.
ROOMS = {
  "models": "generation, the decoder, conversion",
  "registry": "methods by their names",
  "methods": "one paper, one file",
  "families": "what several methods share",
  "protocol": "a method's moves and their order",
  "dispatch": "operations that have kernels, and which runs",
  "ops": "operations in plain JAX",
  "kernels": "Pallas, through Triton",
  "shared": "types, ropes, devices, memory",
}
_FILES = {
  **dict.fromkeys(
    ("bounded", "coded", "prompt_scored", "selective", "streamed", "wrapper"), "families"
  ),
  **dict.fromkeys(("retrieval", "predictor", "forked"), "families"),
  **dict.fromkeys(("method", "full", "entrance", "sight", "forms", "traits"), "protocol"),
}
# Leaves of the house: they look at methods, and no room looks at them.
_BESIDE = ("testing", "programs", "certificates", "diagnostics", "early_stops", "measured")


def room_of(module: str) -> str | None:
  """The room of kvjax.<module>; None of what stands beside the house."""
  first = module.split(".")[0]
  if first in _BESIDE or not first:
    return None
  return first if first in ROOMS else _FILES.get(first, "shared")


def imports(path: pathlib.Path, module: str) -> Iterator[str]:
  """Modules of kvjax, without that name in front, that a file imports, late or by name too."""
  package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
  for node in ast.walk(ast.parse(path.read_text("utf-8"))):
    if isinstance(node, ast.Import):
      yield from (x.name.removeprefix("kvjax.") for x in node.names if x.name.startswith("kvjax."))
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
      named = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
      if isinstance(named, ast.Constant) and str(named.value).startswith("kvjax."):
        yield str(named.value).removeprefix("kvjax.")
    elif isinstance(node, ast.ImportFrom):
      if node.level:
        base = package[: len(package) - node.level + 1]
      elif node.module and node.module.split(".")[0] == "kvjax":
        base = []
      else:
        continue
      parts = (node.module or "").split(".")
      where = [*base, *filter(None, parts if node.level else parts[1:])]
      yield from (".".join([*where, x.name]) for x in node.names)


def doors() -> set[tuple[str, str]]:
  """(room, room that it imports), but for what is only there for types."""
  found = set()
  folders = CODE, CODE / "models", CODE / "kernels"  # the latter two may be links
  for path in sorted({path for folder in folders for path in folder.glob("**/*.py")}):
    parts = path.relative_to(CODE).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    here = room_of(module)
    for other in imports(path, module) if here else ():
      there = room_of(other) if "." in other or _is_module(other) else None
      if there and there != here:
        found.add((here, there))
  return found


def _is_module(name: str) -> bool:
  return (CODE / f"{name}.py").exists() or (CODE / name).is_dir()


def rooms(results: Results) -> Part:
  """A graph for Mermaid; rooms that import each other have a thick line."""
  found = {door for door in doors() if "shared" not in door}
  lines = ["```mermaid", "graph TD"]
  lines += [f'  {room}["{room}<br/>{what}"]' for room, what in ROOMS.items() if room != "shared"]
  order = list(ROOMS)
  for a, b in sorted(found, key=lambda door: (order.index(door[0]), order.index(door[1]))):
    if (b, a) not in found:
      lines.append(f"  {a} --> {b}")
    elif order.index(a) < order.index(b):
      lines.append(f"  {a} <==> {b}")
  return ["", *lines, "```"]


# ---- methods and moves


def own(cls: type) -> list[str]:
  """The moves that a method has of its own, or of a method that it extends, in their order."""
  found: dict[str, Any] = {}
  for base in reversed(cls.__mro__):
    if base in kvjax.METHODS.values():
      found |= {name: x for name, x in vars(base).items() if _is_move(name, x)}
  return list(found)


def _is_move(name: str, value: Any) -> bool:
  kinds = inspect.isfunction(value) or isinstance(value, property)
  return kinds and not name.startswith("_")


def family(cls: type) -> str:
  """The next class up that is no method itself."""
  registered = kvjax.METHODS.values()
  above = next(base for base in cls.__mro__ if base not in registered)
  return "–" if above is Method else f"`{above.__name__}`"


def moves(results: Results) -> Part:
  """Every method, its family, and the moves that are not its family's."""
  rows = [
    [f"`{name}`", family(cls), ", ".join(f"`{move}`" for move in own(cls)) or "–"]
    for name, cls in kvjax.METHODS.items()
  ]
  return cells.table(("method", "family", "moves of its own"), rows)


# ---- what goes over what

BUDGET = 64  # of the examples that are put together


def takes(cls: type[Method], base: Method) -> Method:
  """An example of a method over a base.

  Raises:
    ValueError: the two do not go together, and the message says why.
  """
  return dataclasses.replace(kvjax.settings.example(cls, BUDGET), base=base)


def over(name: str) -> list[str] | None:
  """The methods that one goes over, by their names; None: it has no base to be chosen."""
  cls, found = kvjax.METHODS[name], []
  fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
  if "base" not in fields or not fields["base"].init:
    return None
  for other, base in kvjax.METHODS.items():
    with contextlib.suppress(ValueError):
      takes(cls, kvjax.settings.example(base, BUDGET))
      found.append(other)
  return found


def compositions(results: Results) -> Part:
  """Every method that takes a base, and the bases that it takes; alike ones share a row."""
  rows: dict[tuple[str, ...], list[str]] = {}
  for name in kvjax.METHODS:
    bases = over(name)
    if bases is not None:
      rows.setdefault(tuple(bases), []).append(name)
  lines = [
    [", ".join(f"`{x}`" for x in names) for names in (over, under)] for under, over in rows.items()
  ]
  return cells.table(("method", "goes over"), lines)
