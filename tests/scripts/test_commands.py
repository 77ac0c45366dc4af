"""The program `kvjax`: what it lists, how soon, and that each command starts its program."""

import importlib
import os
import pathlib
import re
import runpy
import subprocess
import sys
import time

import pytest

import kvjax
from kvjax.methods import labels
from kvjax.programs import arguments, commands, common, convert_checkpoint, installed, methods

FOLDER = installed.FOLDER.parents[1]
PROGRAMS = {
  module: path
  for package in ("kvjax.programs", "scripts.studies", "scripts.tools")
  for module in installed.modules(package).values()
  if 'if __name__ == "__main__"' in (path := installed.file_of(module)).read_text("utf-8")
}
DEVELOPERS = [f"scripts.{name}" for name in commands.DEVELOPERS]
# Their oracle is PyTorch's transformers, which no extra of this project installs.
OUTSIDE = {"scripts.tools.make_family_goldens", "scripts.tools.make_golden"}


def run(*given):
  command = [sys.executable, "-m", "kvjax", *given]
  return subprocess.run(command, cwd=FOLDER, capture_output=True, text=True)


def test_every_program_is_listed_once():
  listed = [*commands.MODULES.values(), *DEVELOPERS]
  assert len(listed) == len(set(listed)) and set(listed) == set(PROGRAMS)


@pytest.mark.parametrize("module", sorted(PROGRAMS))
def test_a_summary_is_one_short_sentence(module):
  said = installed.summary(module)
  assert said.endswith(".") and len(said) <= 92
  assert said.startswith("For developers: ") == (module in DEVELOPERS)


# runpy says so of each module that another test has imported.
@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("module", sorted(set(PROGRAMS) - OUTSIDE))
def test_a_module_that_is_run_says_how_it_is_used(module, monkeypatch, capsys):
  monkeypatch.setattr(sys, "argv", [module, "--help"])
  monkeypatch.setattr(os, "environ", os.environ.copy())
  with pytest.raises(SystemExit) as end:
    runpy.run_module(module, run_name="__main__")
  assert not end.value.code and "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("name", commands.MODULES)
def test_help_has_an_example(name):
  text = PROGRAMS[commands.MODULES[name]].read_text("utf-8").split('"""')[1]
  assert f"\n    kvjax {name}" in text


def test_the_help_comes_at_once():
  """It lists every command, in less than a second at best."""
  seconds = []
  for _ in range(3):
    begin = time.perf_counter()
    done = run("--help")
    seconds.append(time.perf_counter() - begin)
  assert done.returncode == 0 and not done.stderr
  for name, module in commands.MODULES.items():
    assert f"  {name} " in done.stdout and installed.summary(module) in done.stdout
  assert min(seconds) < 1, seconds
  assert run().stdout == done.stdout


HELP = """
import sys
from kvjax.programs import commands
for name in commands.MODULES:
  sys.argv = ["kvjax", name, "--help"]
  try:
    commands.main()
  except SystemExit as end:
    assert not end.code, name
print("jax" in sys.modules, "matplotlib" in sys.modules)
"""


def test_the_help_of_a_command_comes_without_jax():
  done = subprocess.run([sys.executable, "-c", HELP], cwd=FOLDER, capture_output=True, text=True)
  assert not done.stderr and done.stdout.endswith("\nFalse False\n")
  assert all(f"usage: kvjax {name} " in done.stdout for name in commands.MODULES)


@pytest.mark.parametrize("module", commands.MODULES.values())
def test_it_is_the_help_of_the_whole_program(module, capsys):
  for args in (arguments.of(module), importlib.import_module(module).Args):
    with pytest.raises(SystemExit):
      common.parse(args, "name", ["--help"])
  cut, whole = re.split("(?=usage: )", capsys.readouterr().out)[1:]
  assert cut == whole


def test_a_wheel_has_no_studies(monkeypatch, capsys):
  """It lists none, and says where they are; suites of bench are those that it carries."""
  monkeypatch.setattr(installed, "_FOLDERS", {"kvjax.programs": installed.FOLDER})
  assert installed.modules("scripts.benches") == {}
  assert set(installed.modules("kvjax.programs.suites")) > {"decode", "e2e", "prr", "sparse"}
  assert "tools." not in commands._listing() and "art-study" not in commands._listing()
  monkeypatch.setattr(sys, "argv", ["kvjax", "art-study", "recorded.npz"])
  with pytest.raises(SystemExit) as end:
    commands.main()
  assert end.value.code == 1
  assert capsys.readouterr().err == "error: art-study is a study, expected in a checkout of kvjax\n"


def test_public_names_are_found():
  assert set(kvjax.__all__) <= set(dir(kvjax))
  assert all(getattr(kvjax, name) is not None for name in kvjax.__all__)
  assert kvjax.ops.offload.__name__ == "kvjax.ops.offload"
  with pytest.raises(AttributeError, match="module 'kvjax' has no attribute 'nonsense'"):
    _ = kvjax.nonsense


def test_a_command_starts_its_program(monkeypatch, capsys):
  given = []
  monkeypatch.setattr(convert_checkpoint, "main", given.append)
  monkeypatch.setattr(common, "keep_programs", lambda: None)
  monkeypatch.setattr(sys, "argv", ["kvjax", "convert", "here", "there", "--dtype", "float16"])
  commands.main()
  here, there = pathlib.Path("here"), pathlib.Path("there")
  assert given == [convert_checkpoint.Args(str(here), there, dtype="float16")]
  monkeypatch.setattr(sys, "argv", ["kvjax", "convert", "--help"])
  with pytest.raises(SystemExit):
    commands.main()
  assert "usage: kvjax convert " in capsys.readouterr().out


def test_an_unknown_command_is_refused_with_those_there_are():
  done = run("nonsense")
  assert done.returncode == 2
  assert all(f"'{name}'" in done.stderr for name in ("nonsense", *commands.MODULES))


@pytest.mark.parametrize(
  ("command", "lacks", "extra"),
  [("plot results", "matplotlib.figure", "eval"), ("serve", "uvicorn", "serve")],
)
def test_a_missing_extra_is_said_in_one_line(monkeypatch, capsys, command, lacks, extra):
  name, *given = command.split()
  monkeypatch.setitem(sys.modules, lacks, None)
  monkeypatch.delitem(sys.modules, f"kvjax.programs.{name}", raising=False)
  monkeypatch.setattr(sys, "argv", ["kvjax", name, *given])
  with pytest.raises(SystemExit) as end:
    commands.main()
  assert end.value.code == 1
  (line,) = capsys.readouterr().err.splitlines()
  assert lacks in line and f"pip install 'kvjax[{extra}]'" in line


def test_methods_are_listed_and_explained(capsys):
  methods.main(methods.Args())
  assert set(kvjax.METHODS) <= {line.split()[0] for line in capsys.readouterr().out.splitlines()}
  for name in kvjax.METHODS:
    methods.main(methods.Args(name))
    *_, asked = capsys.readouterr().out.split()
    assert labels.instance(asked, 1024)  # what is proposed can be asked for
  with pytest.raises(ValueError, match=r"NAME: found 'snapkw', .*\(did you mean 'snapkv'\?\)"):
    methods.main(methods.Args("snapkw"))
  methods.main(methods.Args("quantised:bits=4+snapkv:window_size=16"))
  text = capsys.readouterr().out
  assert "  base = snapkv:window_size=16\n" in text and "  bits = 4\n" in text
  assert text.endswith("--methods quantised:bits=4+snapkv:window_size=16\n")
  with pytest.raises(ValueError, match="NAME: snapkv has no window, it has: budget, window_size"):
    methods.main(methods.Args("snapkv:window=3"))


@pytest.mark.slow
def test_a_method_of_the_folder_in_which_one_is(tmp_path):
  (tmp_path / "mine.py").write_text("import kvjax\n\n\nclass Mine(kvjax.Full):\n  '''Mine.'''\n")
  program = f"import sys; sys.path.append({str(FOLDER)!r})\nfrom kvjax.programs import commands\n"
  command = [sys.executable, "-P", "-c", f"{program}commands.main()", "methods", "mine:Mine"]
  done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
  assert done.stdout.startswith("Mine.\n"), done.stderr


BREAKING = """
from kvjax.programs import common
with common.one_line_errors():
  for i in range({lines}):
    print(i, flush=True)
  raise BrokenPipeError(32, "another pipe")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  ("lines", "reader", "says"),
  [(100_000, "(read first; echo $first)", ""), (1, "cat", "error: [Errno 32] another pipe")],
)
def test_a_reader_that_has_seen_enough(lines, reader, says):
  """It ends a program without a word; another pipe that breaks is an error."""
  command = f"{sys.executable} -c '{BREAKING.format(lines=lines)}' | {reader}"
  done = subprocess.run(command, shell=True, cwd=FOLDER, capture_output=True, text=True)
  assert done.stdout == "0\n" and done.stderr.partition("\n")[0] == says
