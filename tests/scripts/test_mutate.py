"""Faults in a small tree: found by kind, run in a copy, resumed; what no test looks at survives."""

import ast
import json
import pathlib

import pytest

from scripts.tools import mutate
from scripts.tools.mutants import selections, sites

CODE = '''
"""Adds 1 + 1, as 2 - 0 says."""
import jax.numpy as jnp
WIDTH = 1 + 2

def nearest(used: "int | None", scale: float = 0.5) -> int:
  """The smaller of used - 1 and 3."""
  if used < 0:
    raise ValueError(f"found {used + 1}")
  return min(used - 1, 3)

def masked(x, start):
  ok = (x >= start) & (x > 0.5)
  return jnp.where(ok, -x, [*x][start:1])

def settings(rows):
  return rows + 1
'''
KINDS = {
  ("comparison", "used <= 0"),
  ("comparison", "x > start"),
  ("comparison", "x >= 0.5"),
  ("constant", "(1.0)"),
  ("extreme", "max"),
  ("mask", "(-x)"),
  ("mask", "(x >= start)"),
  ("off by one", "(start + 1)"),
  ("off by one", "(used + 1)"),
  ("off by one", "1"),
  ("off by one", "2"),
  ("sign", "(x)"),
  ("sign", "used + 1"),
}


SUMMING = """
def nearest(used):
  return min(used - 1, 3)

def down(x):
  while x > 0:
    x = x - 1
  return x

def unread(x):
  return x + 5.0
"""
TEST = """
from kvjax.methods.summing import down, nearest

def test_summing():
  assert [nearest(x) for x in (1, 9)] == [0, 3]
  assert down(3) == 0
"""


@pytest.fixture
def tree(tmp_path):
  """A method with two functions that have a test, and one that has none."""
  files = {
    "kvjax/__init__.py": "",
    "kvjax/methods/__init__.py": "",
    "kvjax/methods/summing.py": SUMMING,
    "tests/methods/test_summing.py": TEST,
    "pytest.ini": "[pytest]\nmarkers = slow\n",
  }
  for name, text in files.items():
    file = tmp_path / "root" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
  return tmp_path / "root"


def test_sites_of_every_kind(tmp_path):
  """Neither annotations, defaults, messages, docstrings nor what only decides how work is cut."""
  (tmp_path / "code.py").write_text(CODE)
  found = sites.find(tmp_path, "code.py")
  assert {(site.kind, site.wrong) for site in found} == KINDS
  for site in found:
    compile(site.applied(CODE), "code.py", "exec")
    assert site.applied(CODE) != CODE


def test_a_longer_draw_goes_on_with_a_shorter_one():
  root = pathlib.Path(mutate.ROOT)
  every = [site for path in selections.files(root)[::7] for site in sites.find(root, path)]
  long, other = sites.draw(every, 0), sites.draw(every, 1)
  assert sites.draw(every[::-1], 0) == long != other
  assert sorted(long, key=repr) == sorted(every, key=repr)
  folders = {pathlib.PurePath(site.path).parent for site in every}
  assert {pathlib.PurePath(site.path).parent for site in long[: len(folders)]} == folders


def test_what_is_drawn_of_a_file_is_its_own():
  """Other files, and lines before a fault's, change nothing in which faults come first."""

  def code(lines):
    return "\n" * lines + "def f(a, b):\n  return a < b\n\n\ndef g(a, b):\n  return a > b\n"

  def orders(lines, *others):
    every = [site for name in ("x.py", *others) for site in found(name, code(lines))]
    return [site.within for site in sites.draw(every, 3) if site.path == "x.py"]

  def found(name, text):
    return list(sites._File(name, text).sites(ast.parse(text)))

  assert len(orders(0)) == 2
  assert orders(0) == orders(5) == orders(1, "a.py", "z.py")


def test_every_file_has_tests():
  for path in selections.files(mutate.ROOT):
    chosen = selections.selection(mutate.ROOT, path)
    files = [x for x in chosen if x.startswith("tests")]
    assert files and all((mutate.ROOT / x).exists() for x in files), path


@pytest.mark.sweep
@pytest.mark.slow
def test_what_is_tested_is_killed_and_the_rest_survives(tree, capsys, tmp_path):
  args = mutate.Args(sites=100, seconds=4, out=tmp_path / "out", root=tree)
  before = {path: path.read_bytes() for path in tree.rglob("*.py")}
  with pytest.raises(SystemExit):  # more than a tenth survive
    mutate.main(args)
  lines = [json.loads(x) for x in (args.out / "mutations.jsonl").read_text().splitlines()]
  faults = [entry for entry in lines if "result" in entry]
  came = {name: [] for name in mutate.RESULTS}
  for fault in faults:
    came[fault["result"]].append(fault["diff"][1].removeprefix("+").strip())
  assert sorted(came["killed"]) == [
    *("return max(used - 1, 3)", "return min((used + 1) - 1, 3)", "return min(used + 1, 3)"),
    *("return min(used - 2, 3)", "while x > 1:", "while x >= 0:", "x = x - 2"),
  ]
  assert came["timeout"] == ["x = x + 1"]  # and not without the fault
  assert sorted(came["survived"]) == ["return x + (10.0)", "return x - 5.0"]
  assert {x["by"] for x in faults} == {"tests/methods/test_summing.py::test_summing", "timeout", ""}
  assert "20.0% survived, at most 10% may" in capsys.readouterr().out
  assert {path: path.read_bytes() for path in tree.rglob("*.py")} == before


def test_a_stopped_run_resumes(tree, tmp_path, monkeypatch):
  """A line that was cut off is none; survivors run again once their tests have changed."""
  args = mutate.Args(sites=3, seconds=20, out=tmp_path / "out", root=tree)
  ran = []

  def run(copy, site, seconds, results):
    ran.append(site.name)
    tests = mutate.digest(copy, selections.selection(copy, site.path))
    return {"result": "survived" if len(ran) == 1 else "killed", "tests": tests, "diff": []}

  monkeypatch.setattr(mutate, "run", run)
  for _ in range(2):
    with pytest.raises(SystemExit):
      mutate.main(args)
  assert len(ran) == 3
  file = args.out / "mutations.jsonl"
  file.write_bytes(file.read_bytes()[:-9])
  with pytest.raises(SystemExit):
    mutate.main(args)
  assert len(ran) == 4 and ran[3] == ran[2]
  test = tree / "tests/methods/test_summing.py"
  test.write_text(test.read_text() + "\n")
  mutate.main(args)
  assert len(ran) == 5 and ran[4] == ran[0]
  file.write_text("no result\n")
  with pytest.raises(ValueError, match=r"mutations\.jsonl:1: found no result"):
    mutate.main(args)


@pytest.mark.slow
def test_a_sweep_is_cut_to_a_few_cases(tree):
  sweep = "import pytest\n\n\n@pytest.mark.parametrize('x', range(10))\ndef test_sweep(x):\n"
  (tree / "tests" / "test_sweep.py").write_text(f"{sweep}  assert x not in (1, 3, 9)\n")
  status, output = mutate._pytest(tree, ("tests",), 20)
  assert status == 0 and "5 passed, 6 deselected" in output


@pytest.mark.slow
def test_tests_that_fail_without_a_fault_are_named(tree, tmp_path):
  test = tree / "tests/methods/test_summing.py"
  test.write_text(test.read_text().replace("[0, 3]", "[0, 4]"))
  args = mutate.Args(sites=1, seconds=20, out=tmp_path / "out", root=tree)
  with pytest.raises(ValueError, match=r"test_summing: fails without a fault"):
    mutate.main(args)


def test_bad_arguments(tree):
  with pytest.raises(ValueError, match="--sites, --seconds: found 0, 45"):
    mutate.main(mutate.Args(sites=0))
  with pytest.raises(ValueError, match="--only nothing: found no site"):
    mutate.main(mutate.Args(only="nothing", show=True, root=tree))
  with pytest.raises(ValueError, match=r"kvjax/methods/bare\.py: found no tests of this name"):
    selections.selection(tree, "kvjax/methods/bare.py")
