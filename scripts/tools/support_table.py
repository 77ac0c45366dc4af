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

import pandas as pd
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
_CASE = re.compile(r"(\w+)-(\d+)x(\d+)")
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
  junit: Annotated[tuple[pathlib.Path, ...], tyro.conf.arg(metavar="FILE ...")] = ()
  """Reports of the tests; by default they are run."""


def cases_of(reports: Sequence[pathlib.Path]) -> dict[str, dict[str, bool]]:
  """Test -> its cases, and whether each passed, by the last report."""
  found: dict[str, dict[str, bool]] = {}
  for case in (case for report in reports for case in ET.parse(report).iter("testcase")):
    test, _, rest = case.get("name", "").partition("[")
    found.setdefault(test, {})[rest.removesuffix("]")] = not list(case)  # a child: what went wrong
  return found


def device_table(found: dict[str, dict[str, bool]]) -> list[str]:
  """Meshes on which a method gave what one device gives; alike methods share a row."""
  meshes: dict[str, set[tuple[int, int]]] = {}
  for case, passed in (pair for test in TESTS.values() for pair in found.get(test, {}).items()):
    method, heads, slots = _CASE.fullmatch(case).groups()
    meshes.setdefault(method, set()).update([(int(heads), int(slots))] * passed)
  rows: dict[tuple, list[str]] = {}
  for name in filter(meshes.__contains__, kvjax.METHODS):
    rows.setdefault(tuple(sorted(meshes[name])), []).append(f"`{name}`")
  made = []
  for both, names in rows.items():
    heads = [str(h) for h, s in both if s == 1]
    slots = [str(s) for h, s in both if h == 1 and s > 1]
    mixed = [f"{h} × {s}" for h, s in both if h > 1 and s > 1]
    made.append([", ".join(names), *(", ".join(x) or "–" for x in (heads, slots, mixed))])
  head = ("methods", "heads over", "slots over", "heads × slots")
  return markers.markdown(pd.DataFrame(made, columns=head).set_index("methods"))


def family_table(found: dict[str, dict[str, bool]]) -> list[str]:
  """Table of the families of models, by what their tests say.

  Raises:
    ValueError: a test did not run, or none of a family's cases.
  """
  if missing := set(FAMILY_TESTS.values()) - set(found):
    raise ValueError(
      f"reports: found no cases of {sorted(missing)}, expected those of all families"
    )
  prompt, steps, gguf, methods = (found[test] for test in FAMILY_TESTS.values())
  rows = []
  for family, facts in families.FAMILIES.items():
    own = [name for name, case in tiny_hf.CASES.items() if case["model_type"] == family]
    in_file = [x for x in gguf if x.rpartition("-")[0] in own]
    run = [name for name in kvjax.METHODS if methods.get(f"{family}-{name}")]
    others = [f"`{name}`" for name in kvjax.METHODS if name not in run]
    equal = _all(steps, own) == _all(prompt, own) == "yes"
    row = [f"`{family}`", facts.models, _all(prompt, own), _all(gguf, in_file)]
    row.append("prompts and steps" if equal else "no")
    rows.append([*row, f"all {len(run)}" if not others else f"{len(run)}, not {', '.join(others)}"])
  head = ("family", "models", "Hugging Face folder", "GGUF", "equals transformers", "methods")
  return markers.markdown(pd.DataFrame(rows, columns=head).set_index("family"))


def integration_table(passed: dict[str, bool]) -> list[str]:
  """Methods that each code base ran; a dash where a case did not run."""
  methods = list(dict.fromkeys(case.rpartition("-")[2] for case in passed))
  rows = [
    [*about, *(_all(passed, [f"{name}-{method}"]) for method in methods)]
    for name, about in INTEGRATIONS.items()
  ]
  head = ("code base", "run here", *(f"`{name}`" for name in methods))
  return markers.markdown(pd.DataFrame(rows, columns=head).set_index("code base"))


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
    found = cases_of(reports)
  made = [
    ("models", "devices", set(TESTS.values()), device_table),
    ("models", "families", set(FAMILY_TESTS.values()), family_table),
    ("kvjax", "integrations", {INTEGRATION_TEST}, lambda found: integration_table(*found.values())),
  ]
  if not any(tests & set(found) for _, _, tests, _ in made):
    raise ValueError(f"{reports}: found no test that a table tells of")
  for folder, name, tests, table in made:
    if there := {test: found[test] for test in tests if test in found}:
      readme = ROOT / folder / "README.md"
      text = markers.filled(readme.read_text("utf-8"), name, table(there))
      readme.write_text(text, "utf-8")


if __name__ == "__main__":
  common.run(main, Args)
