"""The wheel: what is inside, and that it imports from an empty environment."""

import json
import pathlib
import subprocess
import sys
import venv
import zipfile

import pytest

import kvjax

REPO = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ("kvjax", "pallas_kernels", "models")

pytestmark = pytest.mark.slow


def run(*command: str | pathlib.Path, **kwargs) -> str:
  done = subprocess.run([*map(str, command)], capture_output=True, text=True, **kwargs)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp("dist")
  run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, REPO)
  (path,) = folder.glob("*.whl")
  return path


def test_wheel_holds_the_packages_and_their_data(wheel):
  assert wheel.name == f"kvjax-{kvjax.__version__}-py3-none-any.whl"
  with zipfile.ZipFile(wheel) as archive:
    names = set(archive.namelist())
  sources = {
    str(path.relative_to(REPO))
    for package in PACKAGES
    for path in (REPO / package).rglob("*")
    if path.suffix in (".py", ".json") or path.name == "py.typed"
  }
  tuned = {name for name in sources if name.startswith("pallas_kernels/tuned/")}
  assert tuned, "no tuned file in the checkout"
  assert {f"{package}/py.typed" for package in PACKAGES} <= sources
  assert sources == {name for name in names if ".dist-info/" not in name}


def test_wheel_imports_from_an_empty_environment(wheel, tmp_path):
  """Installed alone; its dependencies are the ones of the environment that runs this test."""
  home = tmp_path / "venv"
  venv.create(home, with_pip=False)
  python = home / "bin" / "python"
  run(
    *(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--quiet"),
    *("--disable-pip-version-check", wheel),
  )
  (own,) = home.glob("lib/python*/site-packages")
  dependencies = [p for p in sys.path if p.endswith("site-packages")]
  # Later on the path than the wheel; a plain folder runs no .pth files, so no editable kvjax.
  program = f"""
import json, sys
sys.path += {dependencies!r}
import kvjax, pallas_kernels, models
import models.convert, models.generate, models.tokenizer
print(json.dumps([kvjax.__version__, [m.__file__ for m in (kvjax, pallas_kernels, models)]]))
"""
  version, files = json.loads(run(python, "-I", "-c", program, cwd=tmp_path))
  assert version == kvjax.__version__
  assert all(pathlib.Path(file).is_relative_to(own) for file in files)
