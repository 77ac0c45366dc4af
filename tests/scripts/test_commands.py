"""The program `kvjax`: what it lists, how soon, and that each command starts its program."""

import pathlib
import subprocess
import sys
import time

import pytest

import kvjax
from scripts import commands, common, convert_checkpoint

FOLDER = pathlib.Path(commands.__file__).parent
PROGRAMS = {
  path.stem
  for path in FOLDER.glob("*.py")
  if 'if __name__ == "__main__"' in path.read_text("utf-8")
}


def run(*given):
  command = [sys.executable, "-m", "kvjax", *given]
  return subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True)


def test_every_program_is_listed_once():
  listed = [*commands.MODULES.values(), *commands.DEVELOPERS]
  assert len(listed) == len(set(listed)) and set(listed) == PROGRAMS


@pytest.mark.parametrize("module", sorted(PROGRAMS))
def test_a_summary_is_one_short_sentence(module):
  said = commands.summary(module)
  assert said.endswith(".") and len(said) <= 92
  assert said.startswith("For developers: ") == (module in commands.DEVELOPERS)


@pytest.mark.parametrize("name", commands.MODULES)
def test_help_has_an_example(name):
  text = (FOLDER / f"{commands.MODULES[name]}.py").read_text("utf-8").split('"""')[1]
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
    assert f"  {name} " in done.stdout and commands.summary(module) in done.stdout
  assert min(seconds) < 1, seconds


def test_jax_is_not_imported_before_it_is_needed():
  program = "import sys, kvjax.programs.commands; kvjax.__version__; print('jax' in sys.modules)"
  said = subprocess.run([sys.executable, "-c", program], cwd=FOLDER.parent, capture_output=True)
  assert said.stdout == b"False\n"


def test_public_names_are_found():
  assert set(kvjax.__all__) <= set(dir(kvjax))
  assert all(getattr(kvjax, name) is not None for name in kvjax.__all__)
  assert kvjax.offload.__name__ == "kvjax.offload"
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
  assert "'nonsense'" in done.stderr and all(
    f"'{name}'" in done.stderr for name in commands.MODULES
  )


def test_a_missing_extra_is_said_in_one_line(monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
  monkeypatch.delitem(sys.modules, "scripts.plot", raising=False)
  monkeypatch.setattr(sys, "argv", ["kvjax", "plot", "results"])
  with pytest.raises(SystemExit) as end:
    commands.main()
  assert end.value.code == 1
  (line,) = capsys.readouterr().err.splitlines()
  assert "matplotlib.figure" in line and "pip install 'kvjax[eval]'" in line
