"""Programs of this installation: a wheel has those of users, a checkout all of them."""

import pathlib
from collections.abc import Sequence

FOLDER = pathlib.Path(__file__).resolve().parent
# Folders of programs, by the package that imports them; a wheel has the first alone.
_FOLDERS = {"kvjax.programs": FOLDER}
if FOLDER.parent.name == "scripts":
  _FOLDERS["scripts"] = FOLDER.parent


def in_checkout() -> bool:
  """True where `scripts` is beside the programs of users."""
  return "scripts" in _FOLDERS


def modules(package: str, besides: Sequence[str] = ()) -> dict[str, str]:
  """The modules of a folder of programs by their names, but for `besides`; {} if it is not here."""
  found = file_of(f"{package}.__init__")
  files = () if found is None else sorted(found.parent.glob("[!_]*.py"))
  return {path.stem: f"{package}.{path.stem}" for path in files if path.stem not in besides}


def summary(module: str) -> str:
  """The first line of a program's docstring, without importing it."""
  file = file_of(module)
  if file is None:
    raise FileNotFoundError(f"{module}: found no such program, expected one of this installation")
  with file.open(encoding="utf-8") as text:
    return text.readline().strip().strip('"')


def file_of(module: str) -> pathlib.Path | None:
  """File of a program; None: not in this installation, as those of `scripts` in a wheel."""
  for package, folder in _FOLDERS.items():
    path = folder.joinpath(*module.removeprefix(f"{package}.").split(".")).with_suffix(".py")
    if module.startswith(f"{package}.") and path.is_file():
      return path
  return None
