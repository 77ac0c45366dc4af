"""What the documents name is there: modules, what is in them, files."""

import ast
import importlib
import re
import sys

import pytest

import kvjax
from kvjax import METHODS
from kvjax.methods import labels
from kvjax.programs import commands
from scripts.studies.beside_kvpress import PAIRS
from scripts.tools import reference
from tests.processes import ROOT

PAGES = [
  *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "MOVING.md", "kvjax/methods/README.md"),
  *("kvjax/README.md", "models/README.md", "models/decode/README.md", "pallas_kernels/README.md"),
  *("models/processes.md", "scripts/README.md", "tests/README.md"),
  *(f"kvjax/design/{path.name}" for path in (ROOT / "kvjax/design").glob("*.md")),
  *(f"scripts/results/{path.name}" for path in (ROOT / "scripts/results").glob("*.md")),
]
TEXTS = {name: (ROOT / name).read_text("utf-8") for name in PAGES}
# Of what was, and is not any more: earlier releases, and what tables have before "now".
TEXTS["CHANGELOG.md"] = "\n## [".join(TEXTS["CHANGELOG.md"].split("\n## [")[:2])
for _name in ("CHANGELOG.md", "MOVING.md"):
  TEXTS[_name] = re.sub(r"^ *\|[^|]*\|", "|", TEXTS[_name], flags=re.MULTILINE)
FILES = ("py", "json", "txt", "md", "png", "ipynb")
NO_MODULES = (*FILES, "NAME")  # what such a name ends with

documents = pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)


def is_module(dotted):
  path = ROOT / dotted.replace(".", "/")
  return path.is_dir() or path.with_suffix(".py").exists()


def found(dotted):
  """Whether a dotted name is a module, or stands in one; who lacks an extra is believed."""
  module, names = dotted, []
  while not is_module(module):
    module, _, name = module.rpartition(".")
    names.insert(0, name)
  try:
    value = importlib.import_module(module)
  except ImportError as error:
    return "pip install" in str(error)
  for name in names:
    value = getattr(value, name, None)
  return value is not None


@documents
def test_names(text):
  packages = "kvjax|scripts|tests"
  named = set(re.findall(rf"(?<![.\w])(?:{packages})(?:\.\w+)+", text))
  assert [x for x in sorted(named) if x.rpartition(".")[2] not in NO_MODULES and not found(x)] == []


@documents
def test_paths(text):
  inside = r"(?:kvjax|models|pallas_kernels|scripts|tests)/[\w./-]*\w"
  paths = set(re.findall(rf"`({inside})/?`|\]\(({inside})\)", text))
  named = {ROOT / (quoted or linked) for quoted, linked in paths}
  benches = re.findall(r"`(bench_\w+\.txt)`", text)
  named |= {ROOT / "scripts/results/nvidia-h200" / name for name in benches}
  templates = re.compile(r"\b((test_)?x|x/kernel)\.py$")  # of a method that is to be added
  missing = [path for path in named if not (path.exists() or templates.search(str(path)))]
  assert missing == []


def anchors(name):
  """What can be linked in a page."""
  headings = re.findall(r"^#+ (.*)$", TEXTS[name], re.MULTILINE)
  return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
  """To files, and to headings of other pages."""
  here = (ROOT / name).parent
  for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", TEXTS[name]):
    path, _, anchor = link.partition("#")
    target = (here / path).resolve() if path else ROOT / name
    assert target.exists(), link
    page = str(target.relative_to(ROOT))
    assert not anchor or anchor in anchors(page), link


@documents
def test_commands(text):
  """`kvjax NAME` is one of the program's."""
  code = re.findall(r"`([^`\n]+)`|^    (.*)$", text, re.MULTILINE)
  named = {found[1] for part in code for found in re.finditer(r"\bkvjax ([a-z][\w-]*)", max(part))}
  assert named <= set(commands.MODULES), named - set(commands.MODULES)


def test_the_first_page_is_short_and_names_every_method():
  """A newcomer reads it; the rest is where it belongs."""
  text = TEXTS["README.md"]
  assert len(text.encode()) <= 8192
  assert [name for name in METHODS if f"`{name}`" not in text] == []


def test_pages_of_folders_stay_short():
  """Design is in the records, and the reference in docstrings."""
  most = {"kvjax/README.md": 10_000, "models/README.md": 10_000, "CONTRIBUTING.md": 6000}
  sizes = {name: len(TEXTS[name].encode()) for name in most}
  assert {name: size for name, size in sizes.items() if size > most[name]} == {}


def test_every_method_is_described():
  text = TEXTS["kvjax/methods/README.md"]
  rows = re.findall(r"^\| `(\w+)` \| `kvjax\.(\w+)` \|", text, re.MULTILINE)
  assert {name: METHODS[name].__name__ for name in METHODS} == dict(rows)


def test_presses_and_their_methods():
  """Those that were compared, with the settings under which they were."""
  text = TEXTS["kvjax/design/coming_from.md"]
  rows = re.findall(r"^\| `(\w+Press)\(.*?\)` \| `([^`]+)` \|", text, re.MULTILINE)
  told = {press: labels.instance(label, 1024) for press, label in rows}
  pairs = {name: each for name, each in PAIRS.items() if name in METHODS and name != "full"}
  compared = {x.under or x.press: x.method(1024) for x in pairs.values() if x.method}
  assert told == told | compared and len(compared) == 10


def test_answers_end_where_the_model_ends_them():
  """Without `stop` a chat model goes on into turns that nobody took."""
  pages = TEXTS["README.md"] + TEXTS["models/README.md"] + TEXTS["models/decode/README.md"]
  snippets = re.findall(r"```python\n(.*?)```", pages, re.DOTALL)
  calls = [
    {argument.arg for argument in node.keywords}
    for snippet in snippets
    for node in ast.walk(ast.parse(snippet))
    if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "generate"
  ]
  assert len(calls) >= 3 and all("stop" in given for given in calls), calls


def test_every_public_name_says_its_shapes_errors_and_source():
  assert reference.untold() == []


UNTOLD = """
import jax
from jaxtyping import Array, Float

def bare(x): return x
def told(x: Float[Array, "B S"]) -> jax.Array:
  "Of x [B, S]."
def shapeless(x: jax.Array) -> Float[Array, "B S"]:
  "Of x."
def silent(x: int) -> int:
  "Of x."
  if x: raise ValueError("x")
  def inner(): raise KeyError
class Base:
  "With y [B]."
  def move(self, y: jax.Array):
    "Of y."
    raise NotImplementedError("move")
class Own(Base):
  "Its own."
  def move(self, y: jax.Array): return y
  def more(self): return 1
"""


def test_what_is_not_said_is_found(monkeypatch, tmp_path):
  (tmp_path / "untold.py").write_text(UNTOLD)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(reference, "MODULES", ("untold",))
  monkeypatch.setattr(reference, "SOURCE", re.compile("no such source"))
  monkeypatch.setattr(reference.kvjax, "METHODS", {"full": METHODS["full"], "h2o": METHODS["h2o"]})
  named = ["untold.bare: a docstring", "untold.shapeless: shapes", "untold.silent: ValueError"]
  assert reference.untold() == [*named, "untold.Own.more: a docstring", "h2o: its source"]


def test_every_public_name_is_on_a_page_of_the_reference():
  index, *pages = reference.topics().values()
  told = {name for page in pages for name in page.__all__}
  assert {name for name in kvjax.__all__ if callable(getattr(kvjax, name))} <= told
  assert all(f"]({page.__name__}.html)" in index.__doc__ and page.__all__ for page in pages)
  assert "[SnapKV](methods.html#SnapKV)" in index.__doc__


_N = '<span class="n">{}</span>'
_DOT = '<span class="o">.</span>'


@pytest.mark.parametrize(
  ("given", "shown"),
  [
    (_DOT.join(map(_N.format, ("jax", "jaxlib", "_jax", "Array"))), "Array"),
    (_DOT.join(map(_N.format, ("kvjax", "core", "cache", "Cache"))), "Cache"),
    ("<code>kvjax.core.cache.Cache</code>", "kvjax.core.cache.Cache"),
    ("<a>your_own_method.Cache</a>", "Cache"),
    ("Union[Array, ndarray, bool, number, bool, int, float, complex]", "ArrayLike"),
    ("Union[_typing._Buffer, list[bytes | str], NoneType]", "ArrayLike | None"),
    ("kvjax.unknown.Name", "kvjax.unknown.Name"),
  ],
)
def test_types_of_the_reference_are_short(given, shown):
  page = reference._plain(given, {"kvjax.core.cache.Cache": "your_own_method.html#Cache"})
  assert re.sub("<[^>]*>", "", page) == shown
  assert ('href="your_own_method.html#Cache"' in page) == ("core" in given)


def test_the_reference_says_what_it_needs(monkeypatch, tmp_path):
  monkeypatch.setitem(sys.modules, "pdoc", None)
  with pytest.raises(ModuleNotFoundError, match=r"pip install 'kvjax\[docs\]'"):
    reference.main(reference.Args(tmp_path))
