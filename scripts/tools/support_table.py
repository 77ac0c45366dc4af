"""For developers: write the tables of families, devices and integrations, from the tests.

    python -m scripts.tools.support_table                 runs them, minutes, and writes the tables
    python -m scripts.tools.support_table --junit FILE ...  takes runs of `pytest --junitxml FILE`

A number is in models/README.md's table of devices if the test of that method on so many devices
passed; a method is in its table of families, or in kvjax/README.md's of integrations, if its test
there did. A table without tests stays as it is.
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
from kvjax.models.io import families
from kvjax.programs import common
from scripts.tools import markers
from tests import tiny_hf

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTS = {
  "tensor": "test_tensor_parallel_equals_one_device",
  "context": "test_context_parallel_equals_one_device",
}
_CASE = re.compile(r"(\w+)\[(\w+)-(\d+)x(\d+)\]")
FAMILY_TESTS = {
  "prompt": "test_logits_equal_the_goldens",
  "steps": "test_decoding_equals_the_goldens",
  "gguf": "test_gguf_holds_the_same_items",
  "methods": "test_every_method_runs",
}
INTEGRATION_TEST = "test_integration"
INTEGRATIONS = {
  "tunix_gemma": ("google-tunix 0.1.7", "its Gemma 3"),
  "bonsai": ("bonsai", "a minimal model after its Qwen 3"),
  "jax_llm_examples": ("jax-llm-examples", "a minimal model after its Llama 3"),
}


@dataclasses.dataclass(frozen=True)
class Args:
  """Writes the tables of families, devices and integrations from the tests."""

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


def cases_of(tests: Sequence[str], reports: Sequence[pathlib.Path]) -> dict[str, dict[str, bool]]:
  """Test -> its cases, and whether each passed, by the last report."""
  found: dict[str, dict[str, bool]] = {test: {} for test in tests}
  for case in (case for report in reports for case in ET.parse(report).iter("testcase")):
    test, _, rest = case.get("name", "").partition("[")
    if test in found:
      found[test][rest.removesuffix("]")] = not list(case)
  return {test: cases for test, cases in found.items() if cases}


def family_table(found: dict[str, dict[str, bool]]) -> list[str]:
  """The lines of the table of families in Markdown.

  Raises:
    ValueError: a test did not run, or none of a family's cases.
  """
  if missing := set(FAMILY_TESTS.values()) - set(found):
    raise ValueError(
      f"reports: found no cases of {sorted(missing)}, expected those of all families"
    )
  prompt, steps, gguf, methods = (found[test] for test in FAMILY_TESTS.values())
  lines = ["| family | models | Hugging Face folder | GGUF | equals transformers | methods |"]
  lines.append("|---|---|---|---|---|---|")
  for family, facts in families.FAMILIES.items():
    own = [name for name, case in tiny_hf.CASES.items() if case["model_type"] == family]
    in_file = [x for x in gguf if x.rpartition("-")[0] in own]
    run = [name for name in kvjax.METHODS if methods.get(f"{family}-{name}")]
    others = [f"`{name}`" for name in kvjax.METHODS if name not in run]
    cells = [
      f"`{family}`",
      facts.models,
      _all(prompt, own),
      _all(gguf, in_file),
      "prompts and steps" if _all(steps, own) == _all(prompt, own) == "yes" else "no",
      f"all {len(run)}" if not others else f"{len(run)}, not {', '.join(others)}",
    ]
    lines.append(f"| {' | '.join(cells)} |")
  return lines


def integration_table(passed: dict[str, bool]) -> list[str]:
  """The lines of the table of integrations in Markdown; a dash where a case did not run."""
  methods = list(dict.fromkeys(case.rpartition("-")[2] for case in passed))
  lines = [f"| code base | run here | {' | '.join(f'`{name}`' for name in methods)} |"]
  lines.append("|---" * (2 + len(methods)) + "|")
  for name, cells in INTEGRATIONS.items():
    ran = [_all(passed, [f"{name}-{method}"]) for method in methods]
    lines.append(f"| {' | '.join([*cells, *ran])} |")
  return lines


def _all(passed: dict[str, bool], cases: Sequence[str]) -> str:
  """Yes if all of these cases that ran passed, else no; a dash if none ran."""
  ran = [passed[case] for case in cases if case in passed]
  return "–" if not ran else "yes" if all(ran) else "no"


def main(args: Args) -> None:
  with tempfile.TemporaryDirectory() as folder:
    reports = args.junit
    if not reports:
      reports = (report := pathlib.Path(folder) / "report.xml",)
      command = [sys.executable, "-m", "pytest", "-q", "-n", "auto"]
      command += ["tests/devices", "tests/models", "tests/scripts/test_integrations.py"]
      names = [*TESTS.values(), *FAMILY_TESTS.values(), INTEGRATION_TEST]
      subprocess.run([*command, "-k", " or ".join(names), f"--junitxml={report}"], cwd=ROOT)
    found, cases = passed(reports), cases_of([*FAMILY_TESTS.values()], reports)
    integrations = cases_of([INTEGRATION_TEST], reports).get(INTEGRATION_TEST)
  if not found and not cases and not integrations:
    raise ValueError(f"{reports}: found no test that a table tells of")
  made = [
    ("models", "devices", found and table(found)),
    ("models", "families", cases and family_table(cases)),
    ("kvjax", "integrations", integrations and integration_table(integrations)),
  ]
  for folder, name, lines in made:
    if lines:
      readme = ROOT / folder / "README.md"
      readme.write_text(markers.filled(readme.read_text("utf-8"), name, lines), "utf-8")


if __name__ == "__main__":
  common.run(main, Args)
