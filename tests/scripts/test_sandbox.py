"""Programs that a model wrote: what they cannot do, and that only right values pass."""

import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time

import pytest

from kvjax.programs import common, evaluate
from kvjax.programs.evals import confined, sandbox

CHECK = "def check(f):\n  assert f() == 3\n"


@pytest.fixture(autouse=True)
def allowed(monkeypatch):
  monkeypatch.setenv(sandbox.ALLOW, "1")


@pytest.fixture
def spaces():
  """Skips the test where the system gives no namespaces."""
  if why := sandbox.no_namespaces():
    pytest.skip(f"this system gives no namespaces: {why}")


@pytest.fixture(params=["namespaces", pytest.param("limits", marks=pytest.mark.slow)])
def either(request, monkeypatch):
  """Both ways to run a program: a verdict is the same in each."""
  if request.param == "limits":
    monkeypatch.setattr(sandbox, "no_namespaces", lambda: "not here")
    monkeypatch.setenv(sandbox.ALLOW, sandbox.UNSAFE)
  else:
    request.getfixturevalue("spaces")


def passes(program, head="", check=CHECK):
  return sandbox.passes(program, head, check, "f")


# ---- verdicts


@pytest.mark.core(6)
@pytest.mark.parametrize(
  ("program", "right"),
  [
    ("def f():\n  return 3", True),
    ("def f():\n  return 4", False),
    ("def f():\n  print(3)", False),
    ("def f():\n  raise ValueError", False),
    ("def (", False),
    ("x = '\udc80'\ndef f():\n  return 3", False),
    ("def g():\n  return 3", False),
    ("import sys\nsys.exit(113)", False),
    ("import sys\ndef f():\n  sys.exit(0)", False),
    ("import os\nos._exit(0)", False),
    ("import os\nos._exit(113)", False),
    ("class A:\n  def __eq__(s, o):\n    return True\ndef f():\n  return A()", False),
    ("class A(int):\n  def __eq__(s, o):\n    return True\ndef f():\n  return A(5)", False),
    ("class A(int):\n  pass\ndef f():\n  return A(3)", True),
    ("import builtins\nbuiltins.AssertionError = ZeroDivisionError\ndef f():\n  return 4", False),
    # What the other side would say is written to everything that is open.
    (
      "import os\nfor n in range(64):\n  try:\n    os.write(n, b'passed')\n  except OSError:\n"
      "    pass\nos._exit(0)",
      False,
    ),
    ("def check(f):\n  pass\ndef f():\n  return 4", False),
    ("def f():\n  x = []\n  for _ in range(9**6):\n    x = [x]\n  return x", False),
    ("def f():\n  return 'x' * (1 << 25)", False),
  ],
)
def test_a_verdict_is_of_values(either, program, right):
  assert passes(program) == right


def test_tests_see_values_and_errors(spaces):
  """The head's own functions, arguments of many types, and errors by their names."""
  program = "def f(*x, **y):\n  if not x:\n    raise KeyError('no')\n  return x, y"
  check = (
    "def check(f):\n"
    "  given = [1, -2**70, 1.5, -0.0, True, None, 'é', b'x', (1, [2]), {3}, 1j]\n"
    "  given += [{(4, 5): {'a': []}}, 10**9999, -(10**9999)]\n"
    "  assert f(*given, k=[given]) == (tuple(given), {'k': [given]})\n"
    "  assert [type(x) for x in f(*given)[0]] == list(map(type, given))\n"
    "  assert f(float('inf'))[0][0] == helper()\n"
    "  try:\n    f()\n  except KeyError:\n    return\n  assert False\n"
  )
  assert passes(program, "def helper():\n  return float('inf')\ndef f():\n  pass\n", check)
  bare = "import math\ndef f(x):\n", "def check(f):\n  assert f(1) == math.sin(1)\n"
  assert passes("import math\ndef f(x):\n  return math.sin(x)", *bare)
  with pytest.raises(OSError, match="tests: value: found object, expected one of Python's own"):
    passes(program, check="def check(f):\n  f(object())\n")


@pytest.mark.parametrize("said", [["exec", []], ["list", 3], ["dict", [[1]]], {"a": 1}, [1, 2, 3]])
def test_what_is_no_value_is_refused(said):
  with pytest.raises((ValueError, TypeError, KeyError)):
    confined.unpacked(said)


# ---- what a program cannot do

# What such programs begin with.
FAILS = """
import os, shutil, signal, socket, subprocess, sys, threading
def fails(act, *given):
  try:
    act(*given)
  except (MemoryError, OSError, RuntimeError):
    return True
"""
SAFE = {
  "write, move or delete a file": """
acts = [lambda path: open(path, "w").write("x"), os.remove, os.listdir, shutil.rmtree]
acts += [lambda path: os.rename(path, "/.answer/taken"), lambda path: os.chmod(path, 0o777)]
failed = [fails(act, path) for path in PATHS for act in acts]
def f():
  return 3 if all(failed) else failed
""",
  "see files that are not Python's": """
def f():
  names = "/etc/passwd", "/home", "/proc/self", "/sys/kernel"
  return list(filter(os.path.exists, names)) or 3
""",
  "reach a network": """
def f():
  places = ("127.0.0.1", PORT), ("1.1.1.1", 53)
  return 3 if all(fails(socket.create_connection, place, 2) for place in places) else 4
""",
  "start a process or a thread": """
def f():
  ways = os.fork, lambda: subprocess.run([sys.executable]), threading.Thread(target=int).start
  return 3 if all(map(fails, ways)) else 4
""",
  "take memory or space": """
def write(name, size):
  with open(name, "wb") as file:
    file.write(bytes(size))
def f():
  write("own", 1)
  full = any(fails(write, str(n), 8 << 20) for n in range(9))
  return 3 if full and fails(bytearray, 2 << 30) else 4
""",
  "get rights back": """
import ctypes
c = ctypes.CDLL(None)
c.unshare(0x10020000)
c.mount(None, b"/usr", None, 32 | 4096, None)
c.umount2(b"/usr", 2)
c.setuid(0)
def f():
  return 3 if fails(open, "/usr/x", "w") and os.getuid() else 4
""",
  "see or stop another process": """
def f():
  seen = [number for number in [*range(2, 3000), PID] if not fails(os.kill, number, 0)]
  return seen or (3 if os.getpid() == 1 else 4)
""",
}


@pytest.mark.parametrize("what", SAFE)
def test_a_program_cannot(spaces, tmp_path, what):
  tmp_path.chmod(0o777)
  precious = tmp_path / "precious"
  precious.write_text("kept")
  precious.chmod(0o666)
  folder = sandbox._SIDE.parent  # what is read from there is not written to
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    facts = f"PATHS, PORT, PID = {[str(precious), str(folder)]!r}, {port}, {os.getpid()}\n"
    assert passes(FAILS + facts + SAFE[what])
  assert precious.read_text() == "kept" and [*tmp_path.iterdir()] == [precious]
  assert precious.stat().st_mode & 0o777 == 0o666


@pytest.mark.slow
@pytest.mark.parametrize("program", ["import time\ntime.sleep(99)", "while True:\n  pass"])
def test_a_program_that_does_not_end_is_ended(spaces, monkeypatch, program):
  """And with it all that runs for it: no process is left."""
  monkeypatch.setattr(sandbox, "SECONDS", 1)
  began = time.monotonic()
  assert not passes(f"{program}\ndef f():\n  return 3")
  assert time.monotonic() - began < 30
  time.sleep(0.1)
  assert sides_of(os.getpid()) == []


def sides_of(parent: int) -> list[str]:
  """Command lines of a process's children that are sides of a test."""
  found = []
  for path in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      line, stat = (path / "cmdline").read_bytes(), (path / "stat").read_text()
    except OSError:
      continue
    if b"confined.py" in line and int(stat.rpartition(")")[2].split()[1]) in (parent, 1):
      found.append(line.decode())
  return found


# ---- where they are run


def test_without_namespaces_nothing_is_run_unless_told(monkeypatch):
  monkeypatch.setattr(sandbox, "no_namespaces", lambda: "not here")
  with pytest.raises(PermissionError, match=r"no namespaces .* \(not here\), expected .* --unsafe"):
    passes("")
  monkeypatch.setenv(sandbox.ALLOW, sandbox.UNSAFE)
  assert passes("def f():\n  return 3")
  with pytest.raises(ValueError, match="--unsafe: found it alone"):
    evaluate.main(common.parse(evaluate.Args, "evaluate", ["--unsafe", "--list"]))


def test_a_system_that_refuses_is_named(monkeypatch, tmp_path):
  """Not a score of 0: what went wrong comes with the error."""
  broken = tmp_path / "confined.py"
  source = sandbox._SIDE.read_text()
  broken.write_text(source.replace("_new_root(root)", "raise OSError('no mounts here')", 1))
  monkeypatch.setattr(sandbox, "_SIDE", broken)
  with pytest.raises(OSError, match=r"no mounts here|Operation not permitted"):
    sandbox._tested("", "", sandbox._NOTHING, "f", shut_in=True)


def test_users_that_are_not_root_are_shut_in_too(spaces, tmp_path):
  """By a Python that all can read, as the user nobody."""
  python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
  if os.getuid() or python is None or not shutil.which("setpriv"):
    pytest.skip("takes root, a system's Python and setpriv, to be another user")
  folder = pathlib.Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
  try:
    for path in (sandbox._SIDE, pathlib.Path(sandbox.__file__)):
      shutil.copy(path, folder)
    folder.chmod(0o755)
    code = (
      "import sandbox, os\n"
      f"assert os.getuid() and not sandbox.no_namespaces(), sandbox.no_namespaces()\n"
      f"assert sandbox.passes({FAILS + SAFE['get rights back']!r}, '', {CHECK!r}, 'f')\n"
      f"assert not sandbox.passes('def f(): return 4', '', {CHECK!r}, 'f')\n"
    )
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-c", code]
    told = {"PYTHONPATH": str(folder), sandbox.ALLOW: "1", "PATH": os.defpath}
    done = subprocess.run(command, env=told, cwd=folder, capture_output=True, text=True)
    if "Operation not permitted" in done.stderr or "Permission denied" in done.stderr:
      pytest.skip("this system gives no namespaces to users")
    assert done.returncode == 0, done.stderr
  finally:
    shutil.rmtree(folder)


def test_a_side_needs_nothing_of_ours():
  """It runs where kvjax cannot be seen."""
  code = f"import runpy; runpy.run_path({str(sandbox._SIDE)!r})"
  assert subprocess.run([sys.executable, "-I", "-c", code], cwd="/").returncode == 0
