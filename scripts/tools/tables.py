"""For developers: write the tables of README and of the results from the result files.

The pictures and tables of kvjax/README and kvjax/methods/README come from the code.

    python -m scripts.tools.tables         rewrites what differs
    python -m scripts.tools.tables --check writes nothing: shows what differs, and fails if any does

Parts of documents that stand between markers are made by `scripts.tools.tablemakers`, which says
how the markers read, from cases and contenders by name: after a new run of a suite, this is all
there is to do. A case that is missing is named, and nothing is written.
"""

import dataclasses
import difflib
import pathlib
import sys
from typing import Annotated

from kvjax.programs import common
from scripts.tools import house, markers, tablemakers
from scripts.tools.tablemakers import Results

ROOT = pathlib.Path(__file__).resolve().parents[2]
_PAGES = ("README", "art", "prr", "prhs", "longflow", "ltri", "real_model", "smollm2")
_PAGES += ("selection", "codes", "cards", "beside")
DOCUMENTS = (
  *(f"scripts/results/{page}.md" for page in _PAGES),
  *("README.md", "kvjax/README.md", "kvjax/methods/README.md"),
)
FROM_TESTS = {"integrations"}  # parts that scripts.tools.support_table writes


@dataclasses.dataclass(frozen=True)
class Args:
  check: bool = False
  """Writes nothing: shows what differs, with exit status 1 if anything does."""
  documents: Annotated[pathlib.Path, common.optional("FOLDER")] = ROOT
  """Folder of README.md and scripts/results; by default this checkout."""


def made(text: str, results: Results) -> str:
  """A document with its parts made anew.

  Raises:
    ValueError: a part has no maker, or a file lacks a figure; all of them are named.
  """
  wrong = []
  for name in markers.names(text):
    if name not in FROM_TESTS:
      try:
        part = tablemakers.maker(name)(results)
        lines = part if isinstance(part, list) else markers.markdown(part)
        text = markers.filled(text, name, lines)
      except (ValueError, OSError) as error:
        wrong.append(f"{name}: {error}")
      except KeyError as error:
        wrong.append(f"{name}: found no {error} in its files")
  if wrong:
    raise ValueError("\n".join(wrong))
  return text


def documents(folder: pathlib.Path, results: Results) -> dict[pathlib.Path, tuple[str, str]]:
  """Each document's text as it is and as it should be.

  Raises:
    ValueError: as `made`, of one of them.
  """
  found = {}
  for document in DOCUMENTS:
    path = folder / document
    text = path.read_text("utf-8")
    try:
      found[path] = text, made(text, results)
    except ValueError as error:
      raise ValueError(f"{path}: {error}") from None
  if (path := folder / "kvjax" / "__init__.pyi").is_file():  # of documents alone there is none
    found[path] = path.read_text("utf-8"), house.stub()
  return found


def main(args: Args) -> None:
  different = False
  for path, (old, new) in documents(args.documents, Results()).items():
    if old == new:
      continue
    different = True
    if args.check:
      lines = (old.splitlines(keepends=True), new.splitlines(keepends=True))
      sys.stdout.writelines(difflib.unified_diff(*lines, path.name, "from the files", n=0))
    else:
      with common.written_aside(path) as aside:
        aside.write_text(new, "utf-8")
      print(f"{path}: written anew")
  if not different:
    print("all tables are those of the files")
  elif args.check:
    sys.exit(1)


if __name__ == "__main__":
  common.run(main, Args)
