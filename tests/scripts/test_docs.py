"""What the documents name is there: modules, what is in them, files."""

import ast
import importlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TEXTS = {
  path.name: path.read_text("utf-8")
  for path in (ROOT / f"{name}.md" for name in ("README", "RESULTS", "CHANGELOG", "CONTRIBUTING"))
}
FILES = ("py", "json", "txt", "md", "png")

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
  assert [x for x in sorted(named) if x.rpartition(".")[2] not in FILES and not found(x)] == []


@documents
def test_paths(text):
  inside = r"(?:kvjax|models|pallas_kernels|scripts|tests)/[\w./-]*\w"
  paths = set(re.findall(rf"`({inside})/?`|\]\(({inside})\)", text))
  named = {ROOT / (quoted or linked) for quoted, linked in paths}
  named |= {
    ROOT / "scripts/results/nvidia-h200" / name for name in re.findall(r"`(bench_\w+\.txt)`", text)
  }
  templates = re.compile(r"\b(test_)?x\.py$")  # of a method that is to be added
  missing = [path for path in named if not (path.exists() or templates.search(str(path)))]
  assert missing == []


def test_results_are_linked_by_their_headings():
  headings = re.findall(r"^#+ (.*)$", TEXTS["RESULTS.md"], re.MULTILINE)
  anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
  assert set(re.findall(r"RESULTS\.md#([\w-]+)", TEXTS["README.md"])) <= anchors


def test_answers_end_where_the_model_ends_them():
  """Without `stop` a chat model goes on into turns that nobody took."""
  snippets = re.findall(r"```python\n(.*?)```", TEXTS["README.md"], re.DOTALL)
  calls = [
    {argument.arg for argument in node.keywords}
    for snippet in snippets
    for node in ast.walk(ast.parse(snippet))
    if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "generate"
  ]
  assert len(calls) >= 3 and all("stop" in given for given in calls), calls
