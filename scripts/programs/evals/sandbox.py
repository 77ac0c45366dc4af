"""Runs programs that a model wrote, where that is allowed, and tests them from outside.

A program runs in one process, its tests in another (`confined`). Only values pass between them, as
JSON: a program cannot pass by an exit status, by what it prints, by objects that equal everything,
or by changing the tests, which it does not see. It passes if its functions return what is right.

Both processes are in namespaces of their own: they see Python and the system's libraries, to read,
and a folder in memory that is gone afterwards; there is no network, no other process and none can
be started, and computing time, memory and files are limited. Where the system gives no namespaces
nothing is run, unless KVJAX_RUN_CODE says "unsafe": then there are the limits alone, and a program
can read, change and delete what its user can.

Not guaranteed: that a program finds no fault of the kernel, that it cannot read what the system and
this Python's folder have for all to read, and that another does not run more slowly beside it.
Arguments are handed over as copies: what a function does to them is not seen by its tests.
"""

import contextlib
import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile

ALLOW = "KVJAX_RUN_CODE"
UNSAFE = "unsafe"
SECONDS = 5
MEMORY = 1 << 30  # bytes
_SIDE = pathlib.Path(__file__).with_name("confined.py")
_NOTHING = "def check(candidate):\n  pass\n"


def check_allowed(task: str) -> None:
  """Raises PermissionError where models' code is not to be run, or cannot be shut in."""
  said = os.environ.get(ALLOW)
  if said not in ("1", UNSAFE):
    raise PermissionError(
      f"{task}: scoring runs programs written by the model: found {ALLOW} = {said!r}, "
      "expected 1 (--run-code), on a machine without valuable data"
    )
  if said != UNSAFE and (why := no_namespaces()):
    raise PermissionError(
      f"{task}: its answers are programs: found no namespaces to shut them in ({why}), expected "
      f"a system that gives them, or --unsafe with --run-code ({ALLOW}={UNSAFE}): then nothing "
      "keeps a program from your files"
    )


@functools.cache
def no_namespaces() -> str:
  """Reason why programs cannot be shut in on this system; empty where they can."""
  try:
    _tested("", "", _NOTHING, "f", shut_in=True)
  except OSError as error:
    return str(error)
  return ""


def passes(program: str, head: str, test: str, name: str) -> bool:
  """Returns True if a function of a program passes tests, within the limits.

  Args:
    program: what the model wrote, with what comes before it.
    head: what the tests may use beside the function: code that the model did not write.
    test: code that defines `check(candidate)`, which raises where the function is wrong.
    name: the function's.

  Raises:
    PermissionError: this machine has not been said to run models' code.
    OSError: the processes could not be started.
  """
  check_allowed("sandbox")
  return _tested(program, head, test, name, shut_in=not no_namespaces())


def _tested(program: str, head: str, test: str, name: str, *, shut_in: bool) -> bool:
  ours, theirs = socket.socketpair()
  with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as errors, ours, theirs:

    def start(role: str, end: socket.socket, **texts: str) -> "subprocess.Popen[bytes]":
      own = pathlib.Path(folder) / role
      own.mkdir()
      given = [role, end.fileno(), own if shut_in else "-", SECONDS, MEMORY]
      with tempfile.TemporaryFile() as file:
        file.write(json.dumps(texts).encode())
        file.seek(0)
        return subprocess.Popen(
          [sys.executable, "-I", "-B", str(_SIDE), *map(str, given)],
          stdin=file,
          stdout=subprocess.PIPE,
          stderr=errors,
          cwd=own,
          env={"PATH": os.defpath, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
          pass_fds=(end.fileno(),),
          start_new_session=True,
        )

    sides = []
    try:
      sides.append(start("answer", theirs, program=program))
      sides.append(start("judge", ours, head=head, test=test, name=name))
      theirs.close()
      ours.close()
      said = _verdict(sides[1])
    finally:
      for side in sides:
        _end(side)
    if said not in ("passed", "failed"):
      errors.seek(0)
      lines = errors.read().decode("utf-8", "replace").splitlines()
      # The one that was ended may have been about to print its own.
      ends = [line for line in lines if line[:1].strip() and not line.startswith("Traceback ")]
      raise OSError(said or (ends[-1] if ends else "a process ended without a message"))
    return said == "passed"


def _verdict(judge: "subprocess.Popen[bytes]") -> str:
  """The judge's answer; one that takes too long has failed."""
  try:
    return judge.communicate(timeout=2 * SECONDS)[0].decode("ascii", "replace")
  except subprocess.TimeoutExpired:
    return "failed"


def _end(side: "subprocess.Popen[bytes]") -> None:
  """Ends a side with all that it started."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(side.pid, signal.SIGKILL)
  side.communicate()
