"""One side of a test of a model's program: shuts itself in, then runs the program or its tests.

    python -I -B confined.py answer|judge SOCKET ROOT|- SECONDS MEMORY

`sandbox` starts two of these, which have a socket between them, and gives each its text on stdin.
The answer's side runs what the model wrote, and calls its functions when it is asked to. The
judge's side runs the tests, sees values only, and writes the verdict to its stdout.

ROOT is a folder in which the process makes a root of its own, in namespaces for users (where it is
not root), mounts, processes, network and System V IPC: Python and the system's libraries read-only,
a folder of 16 MB in memory to write in, no other file, no network, no further process. "-": limits
only. It imports nothing of kvjax: it runs where that cannot be seen.
"""

import builtins
import contextlib
import ctypes
import decimal
import fractions
import json
import os
import resource
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

WORK = 16 << 20  # bytes of the folder to write in
MOST = 16 << 20  # bytes of a message
NOBODY = 65534
HOME = "/.answer"  # the folder to write in: no folder of Python has such a name
# What Python's libraries need of a system, where it is there.
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store", "/gnu/store")
SYSTEM += ("/etc/ld.so.cache",)
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")

# Of <sched.h>, <sys/mount.h>, <linux/mount.h> and <sys/prctl.h>.
NEW_MOUNTS, NEW_UTS, NEW_IPC, NEW_USER = 0x20000, 0x4000000, 0x8000000, 0x10000000
NEW_PIDS, NEW_NETWORK = 0x20000000, 0x40000000
NO_SUID, NO_DEVICES, BIND, RECURSIVE, PRIVATE = 2, 4, 4096, 16384, 1 << 18
DETACH = 2
AT_CWD, AT_RECURSIVE, READ_ONLY = -100, 0x8000, 1
MOUNT_SETATTR = 442  # its number on every architecture
DEATH_SIGNAL, DROP_BOUND, NO_NEW_PRIVILEGES, DUMPABLE = 1, 24, 38, 4

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *values: Any) -> None:
  """A function of the C library, which gives 0 where it did what it was asked."""
  if getattr(_libc, name)(*values):
    number = ctypes.get_errno()
    raise OSError(number, f"{name}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
  texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
  _call("mount", texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])


def _read_only(path: str, flags: int = AT_RECURSIVE) -> None:
  attributes = struct.pack("QQQQ", READ_ONLY | NO_SUID, 0, 0, 0)
  _call("syscall", MOUNT_SETATTR, AT_CWD, os.fsencode(path), flags, attributes, len(attributes))


# ---- shut in


def shut_in(root: str, seconds: int, memory: int) -> None:
  """Moves into namespaces and a root of its own, and gives up all rights; returns in a child.

  Raises:
    OSError: the system does not allow it, or does less than it should.
  """
  own = os.getuid(), os.getgid()
  spaces = NEW_MOUNTS | NEW_UTS | NEW_IPC | NEW_PIDS | NEW_NETWORK
  rooted = own[0] == 0
  try:
    _call("unshare", spaces | (0 if rooted else NEW_USER))
  except PermissionError:
    if not rooted:
      raise
    rooted = False  # root of a container
    _call("unshare", spaces | NEW_USER)
  if not rooted:
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{own[0]} {own[0]} 1")
    _write("/proc/self/gid_map", f"{own[1]} {own[1]} 1")
  _call("prctl", DEATH_SIGNAL, 9, 0, 0, 0)
  child = os.fork()
  if child:  # the first process of the new space is the child; with it all of the others end
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
  _new_root(root)
  for capability in range(64):
    _libc.prctl(DROP_BOUND, capability, 0, 0, 0)
  if rooted:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
  else:
    _call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
  _call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
  _call("prctl", DEATH_SIGNAL, 9, 0, 0, 0)  # a change of user has cleared it
  _call("prctl", DUMPABLE, 0, 0, 0, 0)
  limit(seconds, memory, WORK)
  _check()


def _write(path: str, text: str) -> None:
  with open(path, "w", encoding="ascii") as file:
    file.write(text)


def _new_root(root: str) -> None:
  """Leaves all of the file system behind but Python and the system's libraries."""
  _mount("none", "/", None, RECURSIVE | PRIVATE)
  _mount("tmpfs", root, "tmpfs", NO_SUID | NO_DEVICES, "mode=755,size=1m")
  shown: list[str] = []
  prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)
  for path in sorted({*SYSTEM, *prefixes, *map(os.path.realpath, prefixes)}, key=len):
    if not any(os.path.commonpath([path, other]) == other for other in shown):
      _show(path, root + path)
      shown.append(path)
  for path in DEVICES:
    with contextlib.suppress(OSError):
      _show(path, root + path, read_only=False)
  os.mkdir(root + HOME)
  _mount(
    "tmpfs", root + HOME, "tmpfs", NO_SUID | NO_DEVICES, f"mode=1777,size={WORK},nr_inodes=999"
  )
  os.chdir(root)
  _call("pivot_root", b".", b".")
  _call("umount2", b".", DETACH)
  _read_only("/", 0)
  os.chdir(HOME)


def _show(path: str, at: str, *, read_only: bool = True) -> None:
  """A file or folder in the new root, at its old place."""
  os.makedirs(os.path.dirname(at), exist_ok=True)
  if os.path.islink(path):
    os.symlink(os.readlink(path), at)
  elif os.path.exists(path):
    if os.path.isdir(path):
      os.makedirs(at, exist_ok=True)
    else:
      os.close(os.open(at, os.O_CREAT | os.O_WRONLY))
    _mount(path, at, None, BIND | RECURSIVE)
    if read_only:
      _read_only(at)


def limit(seconds: int, memory: int, written: int) -> None:
  """Seconds of computing, bytes of memory, bytes of a file; no process beside this one."""
  limits = {"CPU": seconds, "AS": memory, "FSIZE": written, "NPROC": 0, "CORE": 0, "NOFILE": 64}
  for name, most in limits.items():
    resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


def _check() -> None:
  """Raises OSError where something is possible that should not be."""
  try:
    child = os.fork()
  except OSError:
    pass
  else:
    if not child:
      os._exit(0)
    os.waitpid(child, 0)
    raise OSError("processes: found another one started, expected a limit of none")
  for path in ("/x", f"{sys.base_prefix}/x", "/usr/x"):
    try:
      os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    except OSError:
      continue
    raise OSError(f"{path}: found it written, expected it read-only")


# ---- messages: JSON, so that what comes from the program are values and nothing else


def send(peer: socket.socket, message: Any) -> None:
  """Sends what JSON can hold."""
  data = json.dumps(message).encode()
  peer.sendall(struct.pack("!I", len(data)) + data)


def receive(peer: socket.socket) -> Any:
  """The message from the other side; raises ValueError or EOFError where it is none."""
  (size,) = struct.unpack("!I", _exactly(peer, 4))
  if size > MOST:
    raise ValueError(f"message: found {size} bytes, expected at most {MOST}")
  return json.loads(_exactly(peer, size))


def _exactly(peer: socket.socket, size: int) -> bytes:
  data = peer.recv(size, socket.MSG_WAITALL)
  if len(data) < size:
    raise EOFError("message: found its end")
  return data


_PLAIN: dict[type, Callable[[Any], Any]] = {
  int: int.__pos__,
  float: float.__pos__,
  str: str.__str__,
}
_MANY: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def packed(x: Any) -> Any:
  """A value as JSON; subclasses as what they derive from. Raises TypeError for other objects."""
  if x is None or isinstance(x, bool):
    return x
  if isinstance(x, int) and int.bit_length(x) > 64:  # of which decimals are slow, or refused
    return ["int", hex(int.__pos__(x))]
  if isinstance(x, int | float | str):
    return next(plain(x) for kind, plain in _PLAIN.items() if isinstance(x, kind))
  if isinstance(x, dict):
    return ["dict", [[packed(key), packed(x[key])] for key in dict.keys(x)]]
  for name, kind in _MANY.items():
    if isinstance(x, kind):
      return [name, [packed(one) for one in kind.__iter__(x)]]
  if isinstance(x, complex):
    return ["complex", [x.real, x.imag]]
  if isinstance(x, bytes | bytearray):
    return ["bytes", x.hex()]
  if isinstance(x, range):
    return ["range", [x.start, x.stop, x.step]]
  if isinstance(x, fractions.Fraction):
    return ["fraction", [x.numerator, x.denominator]]
  if isinstance(x, decimal.Decimal):
    return ["decimal", str(x)]
  if type(x).__module__ == "numpy" and hasattr(x, "item"):
    return packed(x.item())
  raise TypeError(f"value: found {type(x).__name__}, expected one of Python's own")


def unpacked(said: Any) -> Any:
  """The value that was `packed`; raises ValueError, TypeError or KeyError for anything else."""
  if not isinstance(said, list):
    if isinstance(said, dict):
      raise ValueError("value: found an object")
    return said
  name, held = said
  if name in _MANY:
    return _MANY[name](map(unpacked, held))
  if name == "dict":
    return {unpacked(key): unpacked(value) for key, value in held}
  made: dict[str, Callable[[], Any]] = {
    "int": lambda: int(held, 16),
    "complex": lambda: complex(*held),
    "bytes": lambda: bytes.fromhex(held),
    "range": lambda: range(*held),
    "fraction": lambda: fractions.Fraction(*held),
    "decimal": lambda: decimal.Decimal(held),
  }
  return made[name]()


# ---- the two sides


def answer(peer: socket.socket, program: str) -> None:
  """Runs a program, then calls its functions as it is asked to."""
  names: dict[str, Any] = {"__name__": "answer"}
  try:
    exec(compile(program, "answer", "exec"), names)
  except BaseException as error:
    send(peer, ["raised", type(error).__name__, ""])
    return
  send(peer, ["loaded"])
  while True:
    name, args, kwargs = receive(peer)
    try:
      said = ["value", packed(names[name](*unpacked(args), **unpacked(kwargs)))]
    except BaseException as error:
      said = ["raised", type(error).__name__, ""]
    send(peer, said)


def _whole(head: str) -> Any:
  """The code of a head, which may end where the body of its last function would begin."""
  try:
    return compile(head, "head", "exec")
  except SyntaxError:
    return compile(f"{head}\n{' ' * 40}pass\n", "head", "exec")


class Refused(BaseException):
  """The tests hand over what cannot be sent: no test catches this."""


def judge(peer: socket.socket, head: str, test: str, name: str) -> bool:
  """True if the tests pass: `check(candidate)`, whose candidate is the program's function."""

  def candidate(*args: Any, **kwargs: Any) -> Any:
    try:
      asked = [name, packed(args), packed(kwargs)]
    except TypeError as error:
      raise Refused(str(error)) from error
    send(peer, asked)
    what, *said = receive(peer)
    if what == "value":
      return unpacked(said[0])
    kind = getattr(builtins, str(said[0]), None)
    known = isinstance(kind, type) and issubclass(kind, Exception)
    raise kind("of the answer") if known else RuntimeError("of the answer")

  if receive(peer) != ["loaded"]:
    return False
  names: dict[str, Any] = {"__name__": "tests"}
  exec(_whole(head), names)
  names[name] = candidate
  exec(compile(test, "tests", "exec"), names)
  names["check"](candidate)
  return True


def main(role: str, handle: str, root: str, seconds: str, memory: str) -> None:
  texts = json.loads(sys.stdin.buffer.read())
  peer = socket.socket(fileno=int(handle))
  nowhere = os.open(os.devnull, os.O_RDWR)
  if root == "-":
    limit(int(seconds), int(memory), 0)
  else:
    shut_in(root, int(seconds), int(memory))
  verdict = os.dup(1)
  for stream in range(3):
    os.dup2(nowhere, stream)
  if role == "answer":
    os.close(verdict)
    send(peer, "ready")
    answer(peer, **texts)
    return
  said = ""
  try:
    if receive(peer) == "ready":
      said = "failed"
      said = "passed" if judge(peer, **texts) else said
  except Refused as error:
    said = f"tests: {error}"
  except BaseException as error:  # of the tests, or of an answer that has ended
    said = said if isinstance(error, Exception | SystemExit) else ""
  os.write(verdict, said.encode())


if __name__ == "__main__":
  main(*sys.argv[1:])
