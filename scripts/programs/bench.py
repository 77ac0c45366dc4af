"""Time kernels and whole decode steps against other libraries; outputs are checked first.

    kvjax bench decode                      on a GPU, with the peers that are installed
    kvjax bench decode --quick              tiny shapes, also on a CPU
    kvjax bench prr --only "8B B1" --minutes 2 --out run     a part of a long suite

Peers are those that are installed of tokamax, torch and flashinfer-python, and jax's cuDNN. A
contender gets no time if its output differs from the float32 reference, or its number of steps
differs (tiles of a walk that may stop). A case that needs more than the device's memory is named
and skipped. The floor is the number of bytes that must move, divided by the bandwidth of a plain
streaming read in the same run. Results are written after every case and merged with other cases of
the same versions: a stopped run keeps its results, and the other cases can be measured later, or by
another process at the same time.

    kvjax bench --add run/nvidia-h200 --out scripts/results      from another folder
    kvjax bench --compare scripts/results/nvidia-h200 run        before and after a change

Two folders of results, or two files, are compared case by case and contender by contender: the
ratio of the medians with the bootstrap's 95 % interval over all repetitions, then what became
slower and what faster, where the interval excludes 1 and the median moved by more than 1 %.
"""

import dataclasses
import importlib
import json
import math
import os
import pathlib
import platform
import shlex
import statistics
import sys
import time
from importlib import metadata
from typing import Annotated, Any, Literal

# torch, where it runs beside JAX, needs memory too, and can grow its tensors in place of new ones.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
# Of the device's memory, for suites that fill it, as torch may; JAX would stop at three quarters.
if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
  os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.97")
# The most that JAX may pin of the host's memory: room for the whole stream of `offload`.
os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "112")

import jax
import numpy as np
import tyro

from kvjax.kernels.common.devices import slug
from kvjax.models.io import files
from kvjax.models.io.asides import alone
from kvjax.programs import bench_files, common, compare, installed
from kvjax.programs.suites import Case, exhausted, in_turn, too_large

# Suites that `speed`, `cold` and `tune` need lie beside the programs; a checkout has the others.
SUITES = installed.modules("kvjax.programs.suites", besides=("torch_decoder",))
SUITES |= installed.modules("scripts.benches")
Suite = Literal[tuple(sorted(SUITES))]  # type: ignore[valid-type]
_SUITES = (f"    {name:11} {installed.summary(SUITES[name])}" for name in sorted(SUITES))
__doc__ = "\n".join([str(__doc__), "Suites:\n", *_SUITES])
ROUNDS = 3  # at most, where quartiles are wide
PACKAGES = ("jax", "jaxlib", "jax-triton", "torch", "triton", "flashinfer-python", "tokamax")


@dataclasses.dataclass(frozen=True)
class Args:
  suite: Annotated[Suite | None, tyro.conf.Positional, common.choice()] = None
  """Suites to time."""
  quick: bool = False
  """Tiny shapes, few repetitions, any device."""
  only: Annotated[str, tyro.conf.arg(metavar="TEXT")] = ""
  """Only cases whose name contains it."""
  no_peers: bool = False
  """Omit other libraries."""
  repetitions: Annotated[int | None, common.optional("N")] = None
  """Interleaved repetitions of every contender; by default the suite's, 20, or 3 with --quick."""
  out: Annotated[pathlib.Path | None, common.optional("FOLDER")] = None
  """Write <device>/bench_<suite>.json and .txt there, such as scripts/results."""
  minutes: Annotated[float, tyro.conf.arg(metavar="M")] = math.inf
  """Start no case after this many minutes."""
  add: Annotated[tuple[pathlib.Path, ...], common.optional("FOLDER ...")] = ()
  """Run nothing: take over the cases of the bench_*.json there, into --out."""
  compare: Annotated[tuple[pathlib.Path, pathlib.Path] | None, common.optional("OLD NEW")] = None
  """Run nothing: compare two folders of results, or two bench_*.json."""
  fail_slower: bool = False
  """With --compare: exit status 1 if anything is slower."""


def suite(name: str) -> Any:
  """The module of a suite."""
  return importlib.import_module(SUITES[name])


def environment() -> dict[str, str]:
  """Device, versions and command line of this run."""
  versions = {}
  for package in PACKAGES:
    try:
      versions[package] = metadata.version(package)
    except metadata.PackageNotFoundError:
      continue
  return {
    "device": jax.devices()[0].device_kind,
    "python": platform.python_version(),
    **versions,
    "command": shlex.join(
      ["kvjax", pathlib.Path(sys.argv[0]).stem.replace("_", "-"), *_said(sys.argv[1:])]
    ),
  }


def _said(arguments: list[str]) -> list[str]:
  """A command's arguments but for where results went."""
  if "--out" not in arguments:
    return arguments
  at = arguments.index("--out")
  return arguments[:at] + arguments[at + 2 :]


def check(case: Case) -> dict[str, float]:
  """Relative error of every contender that has an output, by name."""
  want = case.reference().astype(np.float64)
  errors = {}
  for contender in case.contenders:
    if contender.output is not None:
      got = contender.output().astype(np.float64)
      errors[contender.name] = float(np.linalg.norm(got - want) / np.linalg.norm(want))
  return errors


def check_steps(case: Case) -> dict[str, int]:
  """Largest difference from the case's steps, of every contender that counts its own, by name."""
  if case.steps is None:
    return {}
  want = case.steps()
  counted = {c.name: c.steps() for c in case.contenders if c.steps is not None}
  return {name: int(np.abs(got - want).max()) for name, got in counted.items()}


def measure(case: Case, repetitions: int) -> dict[str, Any]:
  """Checks, then times the contenders in turn, `repetitions` times each.

  All over again where any one's quartiles are wider than 5 % of its median, three times at most:
  the last round counts.
  """
  errors, apart = check(case), check_steps(case)
  wrong = {name for name, error in errors.items() if not error <= case.tolerance}
  wrong |= {name for name, steps in apart.items() if steps > case.slack}
  timed = [contender for contender in case.contenders if contender.name not in wrong]
  for contender in timed:
    contender.seconds()
  times, rounds = in_turn(timed, repetitions), 1
  while wide(times) and rounds < ROUNDS:
    times, rounds = in_turn(timed, repetitions), rounds + 1
  results = []
  for contender in case.contenders:
    row: dict[str, Any] = {"name": contender.name, "error": errors.get(contender.name)}
    if contender.name in apart:
      row["steps_apart"] = apart[contender.name]
    if contender.name in times:
      low, median, high = _quartiles(times[contender.name])
      row |= {
        "us": median * 1e6,
        "us_quartiles": [low * 1e6, high * 1e6],
        "us_all": [round(t * 1e6, 2) for t in times[contender.name]],
      }
    results.append(row)
  medians = {name: statistics.median(values) for name, values in times.items()}
  read, mine = medians.get("read"), times.get(case.subject)
  figures = case.figures(medians) if mine else {}
  there = {name: times[other] for name, other in case.paired.items() if mine and other in times}
  figures |= {name: slower(mine, theirs) for name, theirs in there.items()}
  return {
    "case": case.name,
    "shapes": case.shapes,
    "subject": case.subject,
    "bytes": case.bytes,
    "read_bandwidth": case.bytes / read if read else None,
    "floor_us": read * 1e6 if read else None,
    "tolerance": case.tolerance,
    "slack": case.slack,
    "repetitions": repetitions,
    "rounds": rounds,
    "results": results,
    "figures": {name: np.asarray(value, float).tolist() for name, value in figures.items()},
    "remarks": [
      f"{n}: quartiles wider than {bench_files.SPREAD:.0%}, not to be divided by"
      for n in wide(times)
    ],
  }


def slower(mine: list[float], theirs: list[float]) -> list[float]:
  """Percent, the median of the paired ratios less 1, and its interval of 95 % by a bootstrap."""
  pairs = 100 * (np.asarray(mine) / np.asarray(theirs) - 1)
  draws = np.random.default_rng(0).choice(pairs, (2000, len(pairs)))
  return [np.median(pairs), *np.percentile(np.median(draws, 1), [2.5, 97.5])]


def wide(times: dict[str, list[float]]) -> list[str]:
  """Those that are not steady."""
  return [n for n, seconds in times.items() if not bench_files.steady(*_quartiles(seconds))]


def _quartiles(times: list[float]) -> tuple[float, float, float]:
  if len(times) < 2:
    return times[0], times[0], times[0]
  low, median, high = statistics.quantiles(times, n=4)
  return low, median, high


def table(report: dict[str, Any]) -> str:
  """The table of one case, for the terminal and for the file beside the JSON."""
  rows = report["results"]
  subject = report["subject"]
  lines = [f"{report['case']}: {report['shapes']}"]
  read = ""
  if report["read_bandwidth"]:
    rate = report["read_bandwidth"] / 1e12
    read = f"; a streaming read ran at {rate:.3g} TB/s: floor {report['floor_us']:.1f} µs"
  lines.append(f"  {report['bytes'] / 2**20:.1f} MiB to move{read}")
  mine = next((row.get("us") for row in rows if row["name"] == subject), None)
  lines.append(
    f"  {'':24} {'µs':>8} {'quartiles':>17} {'of floor':>9} {subject + ' /':>9} {'error':>9}"
  )
  for row in rows:
    error = "" if row["error"] is None else f"{row['error']:.1e}"
    if "us" not in row:
      lines.append(f"  {row['name']:24} wrong: error {error}, expected {report['tolerance']:.0e}")
      if "steps_apart" in row:
        lines[-1] += f"; {row['steps_apart']} steps apart, expected at most {report['slack']}"
      continue
    spread = "{:.1f}-{:.1f}".format(*row["us_quartiles"])
    share = f"{report['floor_us'] / row['us']:.3f}" if report["floor_us"] else ""
    ratio = f"{mine / row['us']:.3f}" if mine else ""
    lines.append(
      f"  {row['name']:24} {row['us']:8.1f} {spread:>17} {share:>9} {ratio:>9} {error:>9}".rstrip()
    )
  for name, value in report.get("figures", {}).items():
    lines.append(f"  {name}: {', '.join(map(_short, np.ravel(value)))}")
  return "\n".join([*lines, *(f"  {remark}" for remark in report["remarks"])])


def _short(x: float) -> str:
  """Four figures of a number, all before its point."""
  return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"


def main(options: Args) -> int:
  common.check_numbers(options, repetitions=1, minutes=0)
  chosen = sum(map(bool, (options.suite, options.add, options.compare)))
  if chosen != 1 or (options.add and not options.out):
    raise ValueError("arguments: expected one of a suite to run, --add with --out, or --compare")
  if options.fail_slower and not options.compare:
    raise ValueError("--fail-slower: found no --compare, expected two runs that it is to judge")
  if options.compare:
    compared = compare.compare(*options.compare)
    print(compared.text())
    return int(options.fail_slower and any(change.slower for change in compared.changes))
  if options.add:
    for folder in options.add:
      print("\n".join(add(folder, options.out)))
    return 0
  module = suite(options.suite)
  usual = 3 if options.quick else getattr(module, "REPETITIONS", 20)
  repetitions = options.repetitions or usual
  facts = environment()
  if options.out:
    check_versions(results_of(options.out, options.suite, facts), facts, "this run")
  print(_head(facts))
  reports, end = [], time.monotonic() + 60 * options.minutes
  for case in module.cases(options.quick, not options.no_peers, options.only):
    common.drop_programs()
    try:
      measured = measure(case, repetitions)
    except jax.errors.JaxRuntimeError as error:
      if not exhausted(error):
        raise
      print(too_large(case.name), flush=True)
      continue
    reports.append({**measured, "command": facts["command"]})
    print("\n" + table(reports[-1]), flush=True)
    if options.out:
      write(options.out, options.suite, facts, reports)
    if time.monotonic() > end:
      print(f"\n{options.minutes:g} minutes are over: there may be more cases")
      break
  if not reports:
    raise ValueError(
      f"--only: found {options.only!r}, in no case's name of suite {options.suite} "
      "that this device has room for"
    )
  return int(any("us" not in row for report in reports for row in report["results"]))


def results_of(folder: pathlib.Path, suite: str, facts: dict[str, str]) -> pathlib.Path:
  """<folder>/<device>/bench_<suite>.json."""
  return folder / slug(facts["device"]) / f"bench_{suite}.json"


def write(folder: pathlib.Path, name: str, facts: dict[str, str], reports: list[dict]) -> None:
  """<folder>/<device>/bench_<name>.json and .txt, complete after every case."""
  path = results_of(folder, name, facts)
  path.parent.mkdir(parents=True, exist_ok=True)
  new = {report["case"]: report for report in reports}
  with alone(path.parent):
    held = earlier(path, facts)
    cases = [new.pop(report["case"], report) for report in held.pop("cases", [])]
    cases += new.values()
    # Each case has the command that measured it.
    facts = {**held, **facts, "command": f"kvjax bench {name}"}
    for whole, text in (
      (path, json.dumps({**facts, "cases": cases}, indent=1)),
      (path.with_suffix(".txt"), "\n\n".join([_head(facts), *map(table, cases)])),
    ):
      common.write(whole, text)


def earlier(path: pathlib.Path, facts: dict[str, str]) -> dict[str, Any]:
  """Content of a file, if it was made with the same versions of what both name."""
  held = bench_files.read(path) if path.exists() else {}
  same = all(held.get(key, value) == value for key, value in facts.items() if key != "command")
  return held if same else {}


def check_versions(path: pathlib.Path, facts: dict[str, str], of: Any) -> None:
  """Raises ValueError where a file's results would give way to others, of other versions."""
  if path.exists() and not earlier(path, facts):
    raise ValueError(
      f"{path}: found results of other versions than {of}, expected the same, another --out, or "
      "the file gone"
    )


def add(folder: pathlib.Path, out: pathlib.Path) -> list[str]:
  """Takes over the cases of another folder's files; what was taken, a line each.

  Raises:
    FileNotFoundError: there are none.
    ValueError: one is damaged, or one here was made with other versions; then nothing is taken.
  """
  taken, found = [], []
  for path in sorted(folder.glob("bench_*.json")):
    facts = bench_files.read(path)
    name, cases = path.stem.removeprefix("bench_"), facts.pop("cases")
    check_versions(results_of(out, name, facts), facts, path)
    with files.whole(path, "results of bench"):
      taken += [f"{name}: {case['case']}" for case in cases if table(case)]
    found.append((out, name, facts, cases))
  for each in found:
    write(*each)
  if not taken:
    raise FileNotFoundError(f"{folder}: found no bench_*.json, expected results of bench")
  return taken


def _head(facts: dict[str, str]) -> str:
  return "\n".join(f"{key:18} {value}" for key, value in facts.items())


if __name__ == "__main__":
  common.run(main, Args)
