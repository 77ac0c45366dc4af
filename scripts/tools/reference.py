"""For developers: write the API reference from the docstrings; a warning is an error.

    make docs                                      installs pdoc, writes build/docs/index.html
    python -m scripts.tools.reference --out build/docs

It covers the public names of `kvjax` and those of MODULES, a page a topic, with an overview. What a
public name does not say is an error, too: a docstring; the shapes of its arrays, there or in their
annotations; the errors that it raises; of a method, the paper with section or algorithm. A class,
and what a function overrides, may say it in its place.
"""

import ast
import dataclasses
import importlib
import inspect
import pathlib
import re
import textwrap
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import tyro

import kvjax
from kvjax import _public
from kvjax.programs import common

# Modules of which every public name is in the reference; of others those that `kvjax` has.
MODULES = (
  *(f"kvjax.core.{name}" for name in ("fields", "settings", "leaves", "traits")),
  *("kvjax.families.sliding", "kvjax.families.streamed", "kvjax.primitives.rope"),
  *(f"kvjax.analysis.{name}" for name in ("certificates", "diagnostics", "early_stops")),
  *(f"kvjax.methods.{name}" for name in ("double_sparsity", "duo_attention.gates", "ltri.rates")),
  *("kvjax.runtime.sharding", "kvjax.runtime.memory", "kvjax.ops.offload"),
  *(f"kvjax.models.io.{name}" for name in ("convert", "presets", "tokenizer")),
  *(f"kvjax.models.nn.{name}" for name in ("transformer", "config", "parallel", "flat")),
  *(
    f"kvjax.models.decode.{name}"
    for name in ("prefill", "generate", "reconstruct", "compress", "sampling", "caches", "rows")
  ),
  *(f"kvjax.models.decode.{name}" for name in ("step_bytes", "by_layer", "batcher", "pipeline")),
  "kvjax.testing",
)


@dataclasses.dataclass(frozen=True)
class Topic:
  """A page.

  Attributes:
    title: its heading.
    about: what it is for.
    within: packages and modules whose names it has; the first topic that has one takes it, and the
      one without any the rest.
  """

  title: str
  about: str
  within: tuple[str, ...]


TOPICS = {
  "methods": Topic(
    "Methods",
    "Which tokens are kept, and which are read.",
    ("kvjax.methods", "kvjax.families.full"),
  ),
  "families": Topic("Families", "Bases to derive a method from.", ("kvjax.families",)),
  "front_door": Topic(
    "Front door",
    "Methods under attention layers of your own, on plain arrays.",
    ("kvjax.runtime.front", "kvjax.runtime.layer_cache", "kvjax.primitives.rope"),
  ),
  "models": Topic("Models", "Checkpoints, prompts and generation.", ("kvjax.models",)),
  "devices": Topic(
    "Devices and memory",
    "Meshes, bytes beforehand, shared prompts, host memory.",
    ("kvjax.runtime", "kvjax.ops"),
  ),
  "evaluation": Topic("Evaluation", "What a method drops, and bounds of it.", ("kvjax.analysis",)),
  "laws": Topic("Laws", "Property tests for a method of your own.", ("kvjax.testing",)),
  "your_own_method": Topic("Your own method", "What moves are given and return.", ()),
}


@dataclasses.dataclass(frozen=True)
class Args:
  out: Annotated[pathlib.Path, tyro.conf.arg(metavar="FOLDER")] = pathlib.Path("build/docs")
  """A page for each topic, and index.html."""


# A shape in a docstring: [B, K, S], [B, ...], or a word for it.
SHAPED = re.compile(r"\[[A-Za-z#….][\w·#, +….:/()*−-]*\]|scalar|shape")
ANNOTATED = re.compile(r"\w+\[(?:jax\.)?Array(?:Like)?, '[^']*'\]")  # Float[Array, 'B K S']
SOURCE = re.compile(r"§|Alg\.|Eq\.|Fig\.|Tab\.|arXiv|20\d\d")
CONTROLS = ("full", "random", "topk_oracle")  # no paper's


def public() -> Iterator[tuple[str, Any, type | None]]:
  """Classes and functions of the pages and what is in them: name, value, class around it."""
  pages = named().values()
  told = {
    f"{where}.{x}": y for page in pages for where, names in page.items() for x, y in names.items()
  }
  for name, value in told.items():
    if inspect.isclass(value) or inspect.isfunction(value):
      yield name, value, None
    for inner, one in vars(value).items() if inspect.isclass(value) else ():
      one = one.fget if isinstance(one, property) else getattr(one, "__func__", one)
      if inner[0] != "_" and inspect.isfunction(one):
        yield f"{name}.{inner}", one, value


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


def named() -> dict[str, dict[str, dict[str, Any]]]:
  """Topic -> module that it is imported from -> public name -> value."""
  made: dict[str, dict[str, dict[str, Any]]] = {topic: {} for topic in TOPICS}
  for module in dict.fromkeys([*_public.MODULES.values(), *MODULES]):
    value = importlib.import_module(module)
    names = [name for name, where in _public.MODULES.items() if where == module]
    if module in MODULES:
      own = getattr(value, "__all__", None) or [x for x in vars(value) if x[0] != "_"]
      names += [x for x in own if _within(getattr(getattr(value, x), "__module__", ""), [module])]
    found = {name: getattr(value, name, None) for name in dict.fromkeys(names)}
    topic = next(name for name, each in TOPICS.items() if _within(module, each.within or (module,)))
    for name, x in found.items():
      if callable(x):
        public = _public.MODULES.get(name) == module
        made[topic].setdefault("kvjax" if public else module, {})[name] = x
  return made


def _within(module: str | None, packages: Sequence[str]) -> bool:
  return any(f"{module}.".startswith(f"{package}.") for package in packages)


def topics() -> dict[str, types.ModuleType]:
  """Pages as modules: an overview, and for each topic its names after a table of them."""
  over = types.ModuleType("index", f"# kvjax {kvjax.__version__}\n")
  pages = {over.__name__: over}
  for topic, modules in named().items():
    about = TOPICS[topic]
    page = pages[topic] = types.ModuleType(topic, f"# {about.title}\n\n{about.about}\n")
    over.__doc__ += f"\n## [{about.title}]({topic}.html)\n\n{about.about}\n\n"
    for module, names in modules.items():
      first = {x: (inspect.getdoc(value) or "").split("\n")[0] for x, value in names.items()}
      rows = "".join(f"| [{x}](#{x}) | {said} |\n" for x, said in first.items())
      page.__doc__ += f"\n`{module}`\n\n| | |\n|---|---|\n{rows}"
      told = {x: x for x in names} if module == "kvjax" else {module: next(iter(names))}
      over.__doc__ += "".join(f"[{x}]({topic}.html#{name}) " for x, name in told.items())
      vars(page).update(names)
    page.__all__ = [name for names in modules.values() for name in names]
    if twice := {x for x in page.__all__ if page.__all__.count(x) > 1}:
      raise ValueError(f"{topic}: found {twice} twice, expected different names on a page")
  return pages


def _links() -> dict[str, str]:
  """Where a dotted name of the library is told: page and anchor."""
  made = {}
  for topic, modules in named().items():
    for module, names in modules.items():
      for name, value in names.items():
        where = f"{topic}.html#{name}"
        made |= {f"{module}.{name}": where, f"{value.__module__}.{value.__qualname__}": where}
  return made


_DOT = r'(?:</span><span class="o">)?\.(?:</span><span class="n">)?'
_FOREIGN = re.compile(
  rf'(?<=<span class="n">)(?:(?:jax|jaxlib|_jax|jaxtyping|typing|numpy){_DOT})+'
)
_BETWEEN = r"(?:<[^>]*>|[\s,])*"
_ARRAY = r"Union \[ (?:Array ndarray bool number bool int float complex|_typing.*?bytes \| str \])"
_ARRAY_LIKE = re.compile(rf"{_ARRAY} (?P<none>NoneType)? \]".replace(" ", _BETWEEN))
_TOPIC = re.compile(rf"(?<=>)(?:{'|'.join(TOPICS)})\.(?=\w+</a>)")
_OURS = re.compile(rf"(?<![\w./#=\"'-])kvjax(?:{_DOT}\w+)+")
_WRAPPED = "<style>.pdoc .attr { overflow-wrap: anywhere; }</style></head>"


def _plain(page: str, links: dict[str, str]) -> str:
  """A page whose types are short, lie within its width, and lead to where they are told."""

  def linked(found: re.Match[str]) -> str:
    name = re.sub("<[^>]*>", "", found[0])
    where, _, member = (name, "", "") if name in links else name.rpartition(".")
    if where not in links:
      return found[0]
    in_text = found.string[: found.start()].endswith("<code>") or where.count(".") == 1
    told = name if in_text else name.removeprefix(f"{where.rpartition('.')[0]}.")
    return f'<a href="{links[where]}{member and "." + member}">{told}</a>'

  page = _TOPIC.sub("", _OURS.sub(linked, _FOREIGN.sub("", page)))
  page = _ARRAY_LIKE.sub(lambda x: f"ArrayLike{' | None' if x['none'] else ''}", page)
  return page.replace("</head>", _WRAPPED, 1)


def main(args: Args) -> None:
  try:
    import pdoc
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError("found no pdoc, expected it: pip install 'kvjax[docs]'") from error
  if missing := untold():
    raise ValueError(f"docstrings: found none of these, expected all of them: {'; '.join(missing)}")
  pdoc.render.configure(docformat="google", math=False, show_source=False)
  args.out.mkdir(parents=True, exist_ok=True)
  links = _links()
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    pages = {name: pdoc.doc.Module(module) for name, module in topics().items()}
    for name, page in pages.items():
      text = _plain(pdoc.render.html_module(page, pages), links)
      (args.out / f"{name}.html").write_text(text, "utf-8")
    (args.out / "search.js").write_text(pdoc.render.search_index(pages), "utf-8")
  print(f"{args.out / 'index.html'}: {len(pages)} pages")


if __name__ == "__main__":
  common.run(main, Args)
