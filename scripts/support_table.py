"""For developers: write models/README.md's table of methods and devices, from the tests.

    python -m scripts.support_table                   runs them, minutes, and writes the table
    python -m scripts.support_table --junit FILE ...  takes runs of `pytest --junitxml FILE`

A number is in the table if the test of that method on so many devices passed.
"""

import dataclasses
import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Annotated

import tyro

import kvjax

from . import common, markers

ROOT = pathlib.Path(__file__).resolve().parent.parent
TESTS = {
  "tensor": "test_tensor_parallel_equals_one_device",
  "context": "test_context_parallel_equals_one_device",
}
_CASE = re.compile(r"(\w+)\[(\w+)-(\d+)x(\d+)\]")


@dataclasses.dataclass(frozen=True)
class Args:
  """Writes models/README.md's table of methods and devices from the tests."""

  junit: Annotated[tuple[pathlib.Path, ...], tyro.conf.arg(metavar="FILE ...")] = ()
  """Reports of the tests; by default they are run."""


def passed(reports: Sequence[pathlib.Path]) -> dict[str, set[tuple[int, int]]]:
  """Method -> meshes (heads, slots) on which it gave what one device gives, by the last report."""
  found: dict[str, set[tuple[int, int]]] = {}
  for case in (case for report in reports for case in ET.parse(report).iter("testcase")):
    match = _CASE.fullmatch(case.get("name", ""))
    if match and match[1] in TESTS.values():
      mesh, meshes = (int(match[3]), int(match[4])), found.setdefault(match[2], set())
      meshes.discard(mesh)
      if not list(case):  # a child says what went wrong
        meshes.add(mesh)
  return found


def table(found: dict[str, set[tuple[int, int]]]) -> list[str]:
  """The lines of the table in Markdown: methods that ran over the same meshes share a row."""
  rows: dict[frozenset, list[str]] = {}
  for name in kvjax.METHODS:
    if name in found:
      rows.setdefault(frozenset(found[name]), []).append(f"`{name}`")
  lines = ["| methods | heads over | slots over | heads × slots |", "|---|---|---|---|"]
  for meshes, names in rows.items():
    heads = ", ".join(str(h) for h, s in sorted(meshes) if s == 1)
    slots = ", ".join(str(s) for h, s in sorted(meshes) if h == 1 and s > 1)
    both = ", ".join(f"{h} × {s}" for h, s in sorted(meshes) if h > 1 and s > 1)
    lines.append(f"| {', '.join(names)} | {heads or '–'} | {slots or '–'} | {both or '–'} |")
  return lines


def main(args: Args) -> None:
  with tempfile.TemporaryDirectory() as folder:
    reports = args.junit
    if not reports:
      reports = (report := pathlib.Path(folder) / "report.xml",)
      command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "tests/devices"]
      subprocess.run(
        [*command, "-k", " or ".join(TESTS.values()), f"--junitxml={report}"], cwd=ROOT
      )
    found = passed(reports)
  if not found:
    raise ValueError(f"{reports}: found no test of several devices that passed")
  readme = ROOT / "models" / "README.md"
  text = markers.filled(readme.read_text("utf-8"), "devices", table(found))
  readme.write_text(text, "utf-8")


if __name__ == "__main__":
  common.run(main, Args, "support_table")
