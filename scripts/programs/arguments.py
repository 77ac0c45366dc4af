"""A program's arguments without the rest of the program: help that does not wait for JAX."""

import ast
import sys
import types
from collections.abc import Iterator

from kvjax.programs.installed import file_of


def of(module: str, name: str = "Args") -> type:
  """The dataclass of a program's arguments, run with only those statements that it needs.

  Args:
    module: a program of this installation (`kvjax.programs.installed`), which is not imported.
    name: a name of the module; what it takes of other programs is cut out of these alike.
  """
  file = file_of(module)
  assert file is not None, module
  tree = ast.parse(file.read_text("utf-8"), str(file))
  made = types.ModuleType(f"{module} (arguments)", ast.get_docstring(tree, clean=False))
  made.__file__ = str(file)
  sys.modules[made.__name__] = made  # where dataclasses and tyro look for types and help texts
  for statement in reversed([*_needed(tree.body, name)]):
    if isinstance(statement, ast.ImportFrom) and file_of(statement.module or ""):
      vars(made).update({x.asname or x.name: of(statement.module, x.name) for x in statement.names})
    else:
      exec(compile(ast.Module([statement], []), str(file), "exec"), vars(made))
  return getattr(made, name)


def _needed(body: list[ast.stmt], name: str) -> Iterator[ast.stmt]:
  """The statements that bind a name, or the help text, and what they read; last one first."""
  read = {name, "__doc__"}
  for statement in reversed(body):
    if isinstance(statement, ast.Import | ast.ImportFrom):
      statement.names = [x for x in statement.names if _bound(x) in read]
      bound = {_bound(x) for x in statement.names}
    elif isinstance(statement, ast.ClassDef | ast.FunctionDef):
      bound = {statement.name}
    else:
      bound = _names(statement, ast.Store)
    if bound & read:
      yield statement
      read |= _names(statement, ast.Load)


def _names(statement: ast.stmt, how: type[ast.expr_context]) -> set[str]:
  names = (x for x in ast.walk(statement) if isinstance(x, ast.Name))
  return {x.id for x in names if isinstance(x.ctx, how)}


def _bound(name: ast.alias) -> str:
  return name.asname or name.name.partition(".")[0]
