"""Runs programs that a model wrote: each in a process with limits, and only where that is allowed.

The limits are seconds, memory, processes and files written; there is no network where `unshare` can
take it away. They stop accidents, not attacks: allow it only where nothing is at stake.
"""

import functools
import os
import subprocess
import sys
import tempfile

ALLOW = "KVJAX_RUN_CODE"
SECONDS = 5
MEMORY = 1 << 30  # bytes
ENDED = 113  # what a program exits with at its end; one that leaves by itself has not passed
_NO_NETWORK = ("unshare", "--map-root-user", "--net")
_LIMITS = f"""
import resource
for name, most in (("CPU", {SECONDS}), ("AS", {MEMORY}), ("FSIZE", 0), ("NPROC", 0), ("CORE", 0)):
  resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
import os, sys
leave = os._exit
exec(compile(sys.stdin.read(), "answer", "exec"), {{"__name__": "answer"}})
leave({ENDED})
"""


def check_allowed(task: str) -> None:
  """Raises PermissionError where this machine has not been said to run models' code."""
  if os.environ.get(ALLOW) != "1":
    raise PermissionError(
      f"{task}: its answers are programs, which are run to be scored: found {ALLOW} = "
      f"{os.environ.get(ALLOW)!r}, expected 1 (--run-code), on a machine where nothing is at stake"
    )


def ends(program: str) -> bool:
  """Whether a Python program comes to its end within the limits, without an error.

  Raises:
    PermissionError: this machine has not been said to run models' code.
  """
  check_allowed("sandbox")
  with tempfile.TemporaryDirectory() as folder:
    try:
      done = subprocess.run(
        [*_without_network(), sys.executable, "-I", "-c", _LIMITS],
        input=program.encode("utf-8", "replace"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={"PATH": os.defpath},
        timeout=2 * SECONDS,
        check=False,
      )
    except subprocess.TimeoutExpired:
      return False
  return done.returncode == ENDED


@functools.cache
def _without_network() -> tuple[str, ...]:
  try:
    subprocess.run([*_NO_NETWORK, "true"], check=True, capture_output=True, timeout=SECONDS)
  except (OSError, subprocess.SubprocessError):
    return ()
  return _NO_NETWORK
