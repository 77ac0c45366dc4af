"""Methods and families name no kernel and no implementation: choosing is for operations."""

import ast
import pathlib

import pytest

from scripts.tools import house

# What operations choose by.
CHOOSING = {"choose", "kernel", "pallas", "over_plan", "beyond_kernel", "beyond_device"}
CHOOSING |= {"declare", "unlowered"}
OPS = "kvjax.ops."
METHODS = sorted(x for x in house.CODE.glob("methods/**/*.py") if x.name != "kernel.py")
FAMILIES = sorted(house.CODE.glob("families/*.py"))
OPERATIONS = sorted(house.CODE.glob("ops/*.py"))
KERNELS = sorted((house.CODE / "kernels").glob("**/*.py"))


def chosen(source: str) -> list[str]:
  """What a file names of kernels, of implementations and of how they are chosen."""
  tree, found = ast.parse(source), []
  modules = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import | ast.ImportFrom):
      where = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
      names = {f"{where}{x.name}": x.asname or x.name for x in node.names}
      modules |= {own for name, own in names.items() if name.startswith(OPS)}
      found += [name for name in names if names_kernels(name)]
      found += [x for x in names if x.startswith(OPS) and x.split(".")[-1] in CHOOSING]
    elif isinstance(node, ast.Call) and any(
      isinstance(x, ast.Constant) and names_kernels(str(x.value)) for x in node.args
    ):
      found.append(ast.unparse(node))
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute):
      root = ast.unparse(node.value).split(".")[0]
      if node.attr == "impl" or (root in modules and node.attr in CHOOSING):
        found.append(ast.unparse(node))
  return found


def names_kernels(module: str) -> bool:
  """Whether it is the name of a kernels' module."""
  parts = module.split(".")
  return parts[0] == "pallas_kernels" or parts[:2] == ["kvjax", "kernels"]


def caught(source: str) -> list[str]:
  """Where a file waits for what an implementation says that it cannot do."""
  return [
    ast.unparse(node)
    for node in ast.walk(ast.parse(source))
    if (isinstance(node, ast.ExceptHandler) and "NotImplementedError" in ast.unparse(node.type))
    or (isinstance(node, ast.Call) and ast.unparse(node).endswith("suppress(NotImplementedError)"))
  ]


@pytest.mark.parametrize("path", METHODS + FAMILIES, ids=lambda path: path.stem)
def test_no_file_chooses(path: pathlib.Path):
  assert chosen(path.read_text("utf-8")) == []


@pytest.mark.parametrize("path", METHODS + FAMILIES + OPERATIONS, ids=lambda path: path.stem)
def test_what_an_implementation_cannot_do_is_asked_beforehand(path: pathlib.Path):
  assert caught(path.read_text("utf-8")) == []


def asked(source: str) -> list[str]:
  """What a file asks of the outermost method: a call-back."""
  return [
    ast.unparse(node)
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.Attribute)
    and node.attr == "top"
    and ast.unparse(node.value).split(".")[-1] in ("at", "alone", "site")
  ]


@pytest.mark.parametrize(
  "path", OPERATIONS + KERNELS, ids=lambda path: f"{path.parent.stem}-{path.stem}"
)
def test_no_operation_asks_the_method(path: pathlib.Path):
  """Operations take arrays and flags; what queries see is in the plan (`kvjax.families.sight`)."""
  assert asked(path.read_text("utf-8")) == []


def strings(tree: ast.AST) -> set[str]:
  return {
    x.value for x in ast.walk(tree) if isinstance(x, ast.Constant) and isinstance(x.value, str)
  }


def declared(source: str) -> set[str]:
  """Operations whose kernels a file declares."""
  calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
  made = (node for node in calls if ast.unparse(node.func).split(".")[-1] == "declare")
  return {name for node in made for name in strings(node.args[0])}


@pytest.mark.slow
def test_who_names_an_operation_imports_its_declaration():
  """By way of others too: modules come one by one, and what nobody has declared cannot run."""
  modules, graph = house.modules(), house.imported()
  sources = {name: path.read_text("utf-8") for name, path in modules.items()}
  homes = {x: name for name, source in sources.items() for x in declared(source)}
  assert len(homes) > 40
  choosing = [name for name in modules if name.startswith(OPS) or name.endswith(".kernel")]
  lacking = {
    (name, operation)
    for name in [*choosing, "kvjax.models.nn.products"]
    for operation in strings(ast.parse(sources[name])) & homes.keys()
    if homes[operation] not in {name, *house.reached(graph, name)}
  }
  assert not lacking


def test_a_question_is_found():
  source = "x = at.top.window(at, q), self.at.top, walk.top, at.env\nf = alone.top"
  assert sorted(asked(source)) == ["alone.top", "at.top", "self.at.top"]


def test_all_are_looked_at():
  assert {"similarity", "order", "forecast", "quest"} < {path.stem for path in METHODS}
  assert {"selective", "streamed", "bounded"} < {path.stem for path in FAMILIES}
  assert {"attention", "scores", "selection"} < {path.stem for path in OPERATIONS}
  assert {"top_k", "tiling"} < {path.stem for path in KERNELS}


BEGINNING = "from kvjax.ops import selection, table\n"


@pytest.mark.parametrize(
  ("line", "found"),
  [
    ("from kvjax.kernels.selection import top_k", "kvjax.kernels.selection.top_k"),
    ("from kvjax import kernels", "kvjax.kernels"),
    ("import pallas_kernels.cis.read", "pallas_kernels.cis.read"),
    ("run = importlib.import_module('kvjax.kernels.cis.read')", "importlib.import_module("),
    ("from kvjax.ops.table import pallas", "kvjax.ops.table.pallas"),
    ("run = table.kernel('art', 'pallas')", "table.kernel"),
    ("run = selection.pallas(at, 'art')", "selection.pallas"),
    ("from kvjax.ops import table as t\nt.choose('art', 'auto')", "t.choose"),
    ("alone = at.env.impl == 'reference'", "at.env.impl"),
  ],
)
def test_a_choice_is_found(line: str, found: str):
  assert chosen(BEGINNING + "x = self.kernel, at.top.choose(at), selection.best_tiles(at)") == []
  (only,) = chosen(BEGINNING + line)
  assert only.startswith(found)


@pytest.mark.parametrize(
  "source",
  [
    "try:\n  f()\nexcept NotImplementedError:\n  g()",
    "try:\n  f()\nexcept (KeyError, NotImplementedError):\n  g()",
    "with contextlib.suppress(NotImplementedError):\n  f()",
  ],
)
def test_waiting_for_an_error_is_found(source: str):
  assert caught(source)
