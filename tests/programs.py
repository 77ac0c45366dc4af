"""What tests take: programs compiled, seconds of tracing and compiling, CPU seconds.

    pytest tests/laws --programs laws.jsonl    a line of JSON for each test
    python -m tests.programs *.jsonl           what they hold, added up by folder

A program that the compilation cache holds counts as compiled, and its seconds of compiling as those
that it took when it was put there (`saved`). CPU seconds are user and system time, of child
processes too; a fixture's are those of the first test that asks for it.
"""

import collections
import json
import os
import pathlib
import sys

import jax
import pytest

EVENTS = {
  "/jax/core/compile/jaxpr_trace_duration": "trace",
  "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
  "/jax/core/compile/backend_compile_duration": "compile",
  "/jax/compilation_cache/compile_time_saved_sec": "saved",
}


def cpu() -> float:
  return sum(os.times()[:4])


class Recorder:
  """A pytest plugin that appends a line of JSON for each test to a file."""

  def __init__(self, path: pathlib.Path):
    self.path, self.found = path, collections.Counter()
    jax.monitoring.register_event_duration_secs_listener(self.hear)

  def hear(self, event: str, seconds: float, **_) -> None:
    if event in EVENTS:
      self.found[EVENTS[event]] += seconds
      self.found["programs"] += EVENTS[event] == "compile"

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_protocol(self, item):
    self.found.clear()
    start = cpu()
    result = yield
    row = {"test": item.nodeid, "cpu": cpu() - start, **self.found}
    with self.path.open("a") as file:  # one write: workers share the file
      file.write(json.dumps(row) + "\n")
    return result


def table(paths) -> str:
  """By folder: tests, programs, seconds; of a test that ran twice the last run counts."""
  rows = {}
  for path in paths:
    rows |= {row["test"]: row for row in map(json.loads, path.read_text().splitlines())}
  folders: dict = collections.defaultdict(collections.Counter)
  for row in rows.values():
    for folder in (row["test"].split("/")[1], "all"):
      folders[folder].update({"tests": 1, **{n: x for n, x in row.items() if n != "test"}})
  names = ["tests", "programs", "trace", "lower", "compile", "saved", "cpu"]
  lines = [f"{'folder':10}" + "".join(f"{name:>10}" for name in names)]
  for folder, sums in sorted(folders.items(), key=lambda x: (x[0] == "all", x[0])):
    lines.append(f"{folder:10}" + "".join(f"{sums[name]:10.0f}" for name in names))
  return "\n".join(lines)


if __name__ == "__main__":
  print(table(map(pathlib.Path, sys.argv[1:])))
