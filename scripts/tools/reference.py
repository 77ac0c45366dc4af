"""For developers: write the API reference from the docstrings; a warning is an error.

    make docs                                      installs pdoc, writes build/docs/index.html
    python -m scripts.tools.reference --out build/docs

It covers the public names of `kvjax`, the modules of `kvjax.models` and the others in MODULES. What
a public name does not say is an error, too: a docstring; the shapes of its arrays, there or in
their annotations; the errors that it raises; of a method, the paper with section or algorithm. A
class, and what a function overrides, may say it in its place.
"""

import ast
import dataclasses
import importlib
import inspect
import pathlib
import re
import textwrap
import warnings
from collections.abc import Iterator
from typing import Annotated, Any

import tyro

import kvjax
from kvjax.programs import common

MODULES = (
  "kvjax",
  *(
    "kvjax.core.fields",
    "kvjax.core.settings",
    "kvjax.core.leaves",
    "kvjax.core.traits",
    "kvjax.families.sliding",
    "kvjax.primitives.rope",
    "kvjax.runtime.sharding",
    "kvjax.runtime.memory",
    "kvjax.ops.offload",
  ),
  *(
    "kvjax.families.streamed",
    "kvjax.analysis.certificates",
    "kvjax.analysis.diagnostics",
    "kvjax.analysis.early_stops",
  ),
  *(f"kvjax.methods.{name}" for name in ("double_sparsity", "duo_attention.gates", "ltri.rates")),
  *(f"kvjax.models.io.{name}" for name in ("convert", "tokenizer")),
  *(f"kvjax.models.nn.{name}" for name in ("transformer", "config", "presets", "parallel", "flat")),
  *(
    f"kvjax.models.decode.{name}"
    for name in ("prefill", "generate", "reconstruct", "compress", "sampling", "caches", "rows")
  ),
  *(f"kvjax.models.decode.{name}" for name in ("step_bytes", "by_layer", "batcher")),
  "kvjax.testing",
  "kvjax.models.decode.pipeline",
)


@dataclasses.dataclass(frozen=True)
class Args:
  """Arguments: where the pages go."""

  out: Annotated[pathlib.Path, tyro.conf.arg(metavar="FOLDER")] = pathlib.Path("build/docs")
  """A page for each module, and index.html."""


# A shape in a docstring: [B, K, S], [B, ...], or a word for it.
SHAPED = re.compile(r"\[[A-Za-z#….][\w·#, +….:/()*−-]*\]|scalar|shape")
ANNOTATED = re.compile(r"\w+\[(?:jax\.)?Array(?:Like)?, '[^']*'\]")  # Float[Array, 'B K S']
SOURCE = re.compile(r"§|Alg\.|Eq\.|Fig\.|Tab\.|arXiv|20\d\d")
CONTROLS = ("full", "random", "topk_oracle")  # no paper's


def public() -> Iterator[tuple[str, Any, type | None]]:
  """Public classes and functions of MODULES and what is in them: name, value, class around it."""
  told = set()
  for name in MODULES:
    module = importlib.import_module(name)
    for each in getattr(module, "__all__", None) or [x for x in vars(module) if x[0] != "_"]:
      value = getattr(module, each)
      own = name == "kvjax" or getattr(value, "__module__", None) == name
      if not own or id(value) in told or not (inspect.isclass(value) or inspect.isfunction(value)):
        continue
      told.add(id(value))
      yield f"{name}.{each}", value, None
      for inner in vars(value) if inspect.isclass(value) else ():
        one = vars(value)[inner]
        one = one.fget if isinstance(one, property) else getattr(one, "__func__", one)
        if inner[0] != "_" and inspect.isfunction(one):
          yield f"{name}.{each}.{inner}", one, value


def untold() -> list[str]:
  """Gaps in what public names say, one line each."""
  lines = []
  for name, value, around in public():
    bases = around.__mro__[1:] if around else ()
    above = [vars(base).get(name.rpartition(".")[2]) for base in bases]
    said = [value.__doc__, around and around.__doc__, *(each.__doc__ for each in above if each)]
    text = "\n".join(filter(None, said))
    if not value.__doc__ and not any(each is not None and each.__doc__ for each in above):
      lines.append(f"{name}: a docstring")
    tree = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    if not isinstance(tree, ast.FunctionDef):
      continue
    if any(each is not None for each in above) and not value.__doc__:
      continue  # as the move that it overrides
    lines += [f"{name}: {error}" for error in _raised(tree) if error not in text]
    if _shapeless(tree) and not SHAPED.search(text) and not any(above):
      lines.append(f"{name}: shapes")
  for name, method in kvjax.METHODS.items():
    text = f"{method.__doc__}{inspect.getmodule(method).__doc__}"
    if name not in CONTROLS and not SOURCE.search(text):
      lines.append(f"{name}: its source")
  return lines


def _raised(tree: ast.FunctionDef) -> list[str]:
  """Errors that a function raises itself; what has to be overridden is none."""
  found = set()
  for node in _own(tree):
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
      found.add(ast.unparse(node.exc.func))
  return sorted(name for name in found - {"NotImplementedError"} if name.isidentifier())


def _shapeless(tree: ast.FunctionDef) -> bool:
  """True if an annotation has an array without a shape."""
  given = [arg.annotation for arg in (*tree.args.args, *tree.args.kwonlyargs)]
  texts = [ast.unparse(each) for each in (*given, tree.returns) if each is not None]
  return any("Array" in ANNOTATED.sub("", text) for text in texts)


def _own(tree: ast.AST) -> Iterator[ast.AST]:
  """The nodes of a function, but for those of functions in it."""
  for node in ast.iter_child_nodes(tree):
    if not isinstance(node, ast.FunctionDef | ast.Lambda):
      yield node
      yield from _own(node)


def main(args: Args) -> None:
  try:
    import pdoc
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError("found no pdoc, expected it: pip install 'kvjax[docs]'") from error
  if missing := untold():
    raise ValueError(f"docstrings: found none of these, expected all of them: {'; '.join(missing)}")
  pdoc.render.configure(docformat="google", math=False, show_source=False)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    pdoc.pdoc(*MODULES, output_directory=args.out)
  pages = sum(1 for _ in args.out.rglob("*.html"))
  print(f"{args.out / 'index.html'}: {pages} pages")


if __name__ == "__main__":
  common.run(main, Args)
