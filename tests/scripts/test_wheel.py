"""The wheel: what is inside, and that it works beside a project's own packages."""

import json
import pathlib
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest

import kvjax
from tests import readme

REPO = pathlib.Path(__file__).resolve().parents[2]
SCORES = "kvjax/programs/results/nvidia-h200/real"  # those of `kvjax advise`
LINKS = {"models": "models", "kernels": "pallas_kernels", "programs": "scripts/programs"}

pytestmark = pytest.mark.slow


def run(*command: str | pathlib.Path, **kwargs) -> str:
  done = subprocess.run([*map(str, command)], capture_output=True, text=True, **kwargs)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def build(source: pathlib.Path, folder: pathlib.Path, *what: str) -> pathlib.Path:
  run(sys.executable, "-m", "build", *what, "--no-isolation", "--outdir", folder, source)
  (path,) = (x for x in folder.iterdir() if x.suffix in (".whl", ".gz"))
  return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
  return build(REPO, tmp_path_factory.mktemp("dist"), "--wheel")


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> pathlib.Path:
  """The interpreter of an environment that holds the wheel alone."""
  home = tmp_path_factory.mktemp("installed") / "venv"
  venv.create(home, with_pip=False)
  python = home / "bin" / "python"
  pip = sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"
  run(*pip, "install", "--no-deps", "--quiet", wheel)
  return python


def in_project(python: pathlib.Path, folder: pathlib.Path, program: str) -> str:
  """Runs code in a project with packages of its own that are called as our folders are."""
  for name in ("models", "pallas_kernels", "scripts"):
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("OWNER = 'the project'\n")
  # Dependencies come from this environment, later on the path than the wheel; a plain folder runs
  # no .pth files, so that no editable kvjax is found.
  dependencies = [p for p in sys.path if p.endswith("site-packages")]
  paths = f"import sys\nsys.path[:0] = [{str(folder)!r}]\nsys.path += {dependencies!r}\n"
  return run(python, "-I", "-c", paths + program, cwd=folder)


def files_of(folder: pathlib.Path, name: str) -> set[str]:
  """What a wheel takes of a folder, by the names that it has there."""
  return {
    f"{name}/{path.relative_to(folder).as_posix()}"
    for path in folder.rglob("*")
    if path.suffix in (".py", ".pyi", ".json") or path.name == "py.typed"
  }


def test_wheel_holds_the_packages_and_their_data(wheel):
  assert wheel.name == f"kvjax-{kvjax.__version__}-py3-none-any.whl"
  with zipfile.ZipFile(wheel) as archive:
    names = [name for name in archive.namelist() if ".dist-info/" not in name]
  sources = files_of(REPO / "kvjax", "kvjax")
  for link, folder in LINKS.items():
    sources |= files_of(REPO / folder, f"kvjax/{link}")
  sources |= {f"{SCORES}/rows.jsonl.gz", f"{SCORES}/settings.json"}
  assert "kvjax/py.typed" in sources
  assert any(name.startswith("kvjax/kernels/tuned/") for name in sources)
  assert sorted(sources) == sorted(names)  # each once


def test_a_wheel_of_the_sdist_is_the_same(wheel, tmp_path):
  sdist = build(REPO, tmp_path / "sdist", "--sdist")
  with tarfile.open(sdist) as archive:
    archive.extractall(tmp_path, filter="data")
  (source,) = (path for path in tmp_path.iterdir() if path.name.startswith("kvjax-"))
  again = build(source, tmp_path / "dist", "--wheel")
  with zipfile.ZipFile(wheel) as a, zipfile.ZipFile(again) as b:
    assert {x.filename: x.CRC for x in a.infolist()} == {x.filename: x.CRC for x in b.infolist()}


def test_wheel_imports_beside_packages_of_our_folders_names(python, tmp_path):
  program = """
import json, kvjax, kvjax.kernels.decode.dense, kvjax.models.decode.generate, kvjax.programs.bench
import models, pallas_kernels, scripts
assert {module.OWNER for module in (models, pallas_kernels, scripts)} == {"the project"}
ours = (kvjax, kvjax.kernels.decode.dense, kvjax.models.decode.generate, kvjax.programs.bench)
print(json.dumps([kvjax.__version__, [module.__file__ for module in ours]]))
"""
  version, files = json.loads(in_project(python, tmp_path, program))
  assert version == kvjax.__version__
  (own,) = python.parents[1].glob("lib/python*/site-packages")
  assert all(pathlib.Path(file).is_relative_to(own) for file in files)


def test_advise_has_its_scores(python, tmp_path):
  program = """
from kvjax.programs import advise
advise.main(advise.Args(length=8192, methods=("snapkv",), budgets=("1024",)))
"""
  assert "8K, 32K: score of Qwen2.5-Coder-1.5B-Instruct" in in_project(python, tmp_path, program)


def test_readme_snippets_run_from_the_wheel(python, tmp_path):
  """In order, in a folder with nothing but a project's own packages of our folders' names."""
  shutil.copy(REPO / "scripts/examples/tiny.py", tmp_path)
  assert in_project(python, tmp_path, readme.program(tmp_path, "import tiny"))


def test_the_command_is_installed(python, tmp_path):
  """It lists the commands without any dependency, and has no jax to name."""
  command = python.with_name("kvjax")
  assert "Hold a conversation" in run(command, "--help", cwd=tmp_path)
  assert f"kvjax {kvjax.__version__}, jax not installed" in run(command, "--version", cwd=tmp_path)


@pytest.mark.parametrize("name", ["models.decode", "pallas_kernels.decode", "scripts.programs"])
def test_a_second_copy_by_the_old_name_is_refused(name):
  """In a checkout the folders are found by their own names too, where a copy would be made."""
  done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=REPO, capture_output=True)
  assert b"expected kvjax." in done.stderr and b"ImportError" in done.stderr
