"""For developers: put faults into the code, one at a time, and count those no test finds.

    python -m scripts.tools.mutate                 120 faults, an hour or two; a stopped run resumes
    python -m scripts.tools.mutate --sites 200     80 more
    python -m scripts.tools.mutate --only quest --show  the faults of files with that in their path

A fault is a change of one operator or number: a sign, a comparison, a span off by one, a mask left
out, a constant, a minimum for a maximum (`scripts.tools.mutants.sites`). It is made in a copy of
the tree, where the tests of its file run, a few cases of each, until one fails: the fault is killed
(`scripts.tools.mutants.selections`). One that no test fails has survived: it wants a test, or
changes nothing that anybody sees.

A line per fault goes to mutations.jsonl, and the summary to mutations.txt beside it. What is there
is not run again while its line of code stays as it is; a survivor is, once its tests have changed.
"""

import collections
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import tyro

from kvjax.programs import common, console
from scripts.tools.mutants import equivalent, few_cases, selections, sites
from scripts.tools.mutants.sites import Site

ROOT = pathlib.Path(__file__).resolve().parents[2]
WAIT = 12  # seconds of the clock, for each of computing, until a process is taken to hang
WELL_WITHIN = 0.6  # of the limit, that tests without a fault take, if running out of it tells one
ALLOWED = 0.1  # of the faults may survive
RESULTS = ("killed", "timeout", "equivalent", "survived", "unclear")
ASIDE = shutil.ignore_patterns(".*", "__pycache__", "results", "dist", "build", "*.egg-info")


@dataclasses.dataclass(frozen=True)
class Args:
  """Puts faults into methods, operations and kernels, and counts those that no test fails."""

  sites: int = 120
  """Faults to draw; a larger number adds to the same ones."""
  seed: int = 0
  """Seed of the draw."""
  seconds: int = 45
  """Computing time that the tests of one fault may take."""
  minutes: float | None = None
  """Begin no fault after that."""
  only: str = ""
  """Draw from files whose path contains it."""
  show: bool = False
  """List the faults, and run nothing."""
  out: Annotated[pathlib.Path, tyro.conf.arg(metavar="FOLDER")] = ROOT / "scripts/results/cpu"
  """Folder of mutations.jsonl and mutations.txt."""
  root: Annotated[pathlib.Path, tyro.conf.arg(metavar="FOLDER")] = ROOT
  """The tree that is copied."""


def main(args: Args) -> None:
  if args.sites < 1 or args.seconds < 1:
    found = f"{args.sites}, {args.seconds}"
    raise ValueError(f"--sites, --seconds: found {found}, expected at least 1")
  if args.show:
    for site in drawn(args, args.root):
      print(diff(args.root, site))
    return
  results = Results(args.out / "mutations.jsonl")
  with tree(args.root) as copy:  # which stays as it is, whatever is edited meanwhile
    chosen = drawn(args, copy)
    put_in(args, copy, chosen, results)
    found = [judged(site, results.of(copy, site)) for site in chosen]
  text = summary([(site, x) for site, x in zip(chosen, found, strict=True) if x is not None])
  with common.written_aside(args.out / "mutations.txt") as file:
    file.write_text(
      f"python -m scripts.tools.mutate --sites {args.sites} --seed {args.seed}\n{text}\n"
    )
  print(text)
  if left := found.count(None):
    print(f"{left} of {len(found)} faults are left: the same command resumes there")
  if survivors(x for x in found if x is not None) > ALLOWED:
    sys.exit(1)


def drawn(args: Args, root: pathlib.Path) -> list[Site]:
  """The faults that the arguments name."""
  paths = [path for path in selections.files(root) if args.only in path]
  every = [site for path in paths for site in sites.find(root, path)]
  if not every:
    raise ValueError(f"--only {args.only}: found no site, expected a part of a path")
  return sites.draw(every, args.seed)[: args.sites]


def put_in(args: Args, copy: pathlib.Path, chosen: Sequence[Site], results: "Results") -> None:
  """Runs the faults that have no result."""
  end = math.inf if args.minutes is None else time.monotonic() + 60 * args.minutes
  with console.bar(len(chosen), "putting in faults", "fault") as bar:
    for site in chosen:
      if results.of(copy, site) is None:
        if time.monotonic() > end:
          return
        results.add(identity(copy, site), run(copy, site, args.seconds, results))
      bar.update()


# ---- results


class Results:
  """mutations.jsonl: a line per fault, and one per selection of tests without a fault."""

  def __init__(self, path: pathlib.Path):
    self.path = path
    self.held: dict[str, dict[str, Any]] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.read_bytes() if path.exists() else b""
    whole = whole[: whole.rfind(b"\n") + 1]  # a line that was cut off is none
    for number, line in enumerate(whole.splitlines(), 1):
      try:
        entry = json.loads(line)
        self.held[entry["key"]] = entry
      except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}:{number}: found no result, expected a line of mutate") from None
    if path.exists():
      os.truncate(path, len(whole))

  def of(self, root: pathlib.Path, site: Site) -> dict[str, Any] | None:
    """Result of a fault; None: nothing yet, or it survived tests that have changed since."""
    entry = self.held.get(identity(root, site))
    if entry is None or entry["result"] == "killed":
      return entry
    tests = digest(root, selections.selection(root, site.path))
    return entry if entry["tests"] == tests else None

  def add(self, key: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Appends a line, whole or not at all."""
    entry = {"key": key, **entry}
    with self.path.open("ab", buffering=0) as file:
      file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
    self.held[key] = entry
    return entry


def identity(root: pathlib.Path, site: Site) -> str:
  """Key of a result: the fault and its lines, wherever in the file they stand now."""
  lines = hashlib.sha256(f"{changed(root, site)}".encode()).hexdigest()[:12]
  return f"{site.path} {site.kind} {site.column} {lines}"


def digest(root: pathlib.Path, selection: Sequence[str]) -> str:
  """Hash of the selected tests, and the files that they stand in."""
  code = hashlib.sha256(repr(selection).encode())
  for name in (x.split("::")[0] for x in selection):
    for file in [root / name] if name.endswith(".py") else sorted((root / name).glob("*.py")):
      code.update(file.read_bytes())
  return code.hexdigest()[:8]


def changed(root: pathlib.Path, site: Site) -> tuple[str, str]:
  """The lines of a fault, before and after."""
  text = (root / site.path).read_text()
  data, wrong = text.encode(), site.applied(text).encode()
  first = data.rfind(b"\n", 0, site.start) + 1
  last = data.find(b"\n", site.stop)
  behind = len(data) - last
  return data[first:last].decode(), wrong[first : len(wrong) - behind].decode()


def diff(root: pathlib.Path, site: Site) -> str:
  """The fault as a difference."""
  before, after = changed(root, site)
  lines = [f"- {x}" for x in before.splitlines()] + [f"+ {x}" for x in after.splitlines()]
  return "\n".join([site.name, *lines])


# ---- one fault


def run(copy: pathlib.Path, site: Site, seconds: int, results: Results) -> dict[str, Any]:
  """Runs the tests of a file with a fault in it: whether one fails, and the first that does.

  What fails has to pass without the fault. Running out of time tells a fault only where the tests
  take much less without it.
  """
  selection, file, shown = selections.selection(copy, site.path), copy / site.path, diff(copy, site)
  text = file.read_text()
  try:
    put(file, site.applied(text))
    took, failed = tested(copy, selection, seconds)
  finally:
    put(file, text)
  result = "killed" if failed else "survived"
  if failed == "timeout":
    usual = without_fault(copy, selection, seconds, results)
    result = "timeout" if usual <= WELL_WITHIN * seconds else "unclear"
  elif failed:
    without_fault(copy, (failed,) if "::" in failed else selection, seconds, results)
  entry = {"result": result, "tests": digest(copy, selection), "seconds": round(took, 1)}
  return entry | {"by": failed, "diff": shown.split("\n")[1:]}


def without_fault(
  copy: pathlib.Path, selection: Sequence[str], seconds: int, results: Results
) -> float:
  """Computing time of tests without a fault, at most the limit; taken once.

  Raises:
    ValueError: they fail.
  """
  key = f"tests {digest(copy, selection)}"
  if key not in results.held:
    took, failed = tested(copy, selection, seconds)
    if failed and failed != "timeout":
      raise ValueError(f"{' '.join(selection)}: fails without a fault ({failed})")
    results.add(key, {"of": " ".join(selection), "seconds": round(took, 1)})
  return results.held[key]["seconds"]


def put(file: pathlib.Path, text: str) -> None:
  """Writes a module, and sweeps up what is compiled of it."""
  file.write_text(text)
  for stale in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
    stale.unlink()


def tested(copy: pathlib.Path, selection: Sequence[str], seconds: int) -> tuple[float, str]:
  """Computing time of the tests, and the first that failed, "timeout", or "" where none did."""
  began = _computed()
  status, output = _pytest(copy, selection, seconds)
  took = _computed() - began
  if status == 5:
    raise ValueError(f"{' '.join(selection)}: found no test, expected some")
  if status in (-signal.SIGXCPU, -signal.SIGKILL):
    return took, "timeout"
  name = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
  last = output.strip().splitlines()[-1:] or [f"status {status}"]
  return took, "" if not status else name[1] if name else last[0][:200]


def _pytest(copy: pathlib.Path, selection: Sequence[str], seconds: int) -> tuple[int, str]:
  """pytest's exit status and output; it is ended after so much computing."""
  command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
  process = subprocess.Popen(
    [*command, "-p", "few_cases", "--tb=no", "-m", "not slow", *selection],
    cwd=copy,
    env={**os.environ, "PYTHONPATH": str(pathlib.Path(few_cases.__file__).parent)},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
  )
  resource.prlimit(process.pid, resource.RLIMIT_CPU, (seconds, seconds + 5))
  try:
    output, _ = process.communicate(timeout=WAIT * seconds)
  except subprocess.TimeoutExpired:
    output = ""
  finally:
    if process.poll() is None:
      os.killpg(process.pid, signal.SIGKILL)
      process.wait()
  return process.returncode, output


def _computed() -> float:
  """Seconds that ended processes of ours have computed."""
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return used.ru_utime + used.ru_stime


@contextmanager
def tree(root: pathlib.Path) -> Iterator[pathlib.Path]:
  """A copy of the tree, in which compiled programs are kept where those of the tree are."""
  os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(root / ".cache" / "jax"))
  with tempfile.TemporaryDirectory() as name:
    copy = pathlib.Path(name) / "tree"
    shutil.copytree(root, copy, ignore=ASIDE, symlinks=True)
    yield copy


# ---- all of them


def judged(site: Site, entry: dict[str, Any] | None) -> dict[str, Any] | None:
  """A result, in which faults that survive and can change nothing are called equivalent."""
  if entry is None or entry["result"] not in ("survived", "unclear"):
    return entry
  return {**entry, "result": "equivalent"} if equivalent.reason(site, entry["diff"]) else entry


def survivors(found: Any) -> float:
  """The share of faults that no test failed."""
  results = [x["result"] for x in found]
  return sum(x in ("survived", "unclear") for x in results) / max(len(results), 1)


def summary(found: Sequence[tuple[Site, dict[str, Any]]]) -> str:
  """Counts by folder and kind, and what has survived."""
  counts: dict[tuple[str, str], collections.Counter] = {}
  for site, entry in found:
    folder = str(pathlib.PurePath(site.path).parent)
    for key in {(folder, site.kind), (folder, "all"), ("all", "all")}:
      counts.setdefault(key, collections.Counter())[entry["result"]] += 1
  rows = [
    (*key, *(str(count[name]) for name in RESULTS), str(count.total()))
    for key, count in sorted(counts.items())
  ]
  lines = [console.table(("folder", "kind", *RESULTS, "faults"), rows, left=(0, 1))]
  share = survivors(entry for _, entry in found)
  lines.append(f"\n{share:.1%} survived, at most {ALLOWED:.0%} may")
  lines.append(
    "equivalent: no test fails, and none can; scripts/tools/mutants/equivalent.py says why"
  )
  for site, entry in found:
    if entry["result"] in ("survived", "unclear"):
      lines.append("\n".join(["", f"{site.name}: {entry['result']}", *entry["diff"]]))
  return "\n".join(lines)


if __name__ == "__main__":
  common.run(main, Args)
