"""Timing that has its GPUs to itself, where several processes share them (`scripts.tools.on_gpu`).

They meet in a folder, named by the environment variable KVJAX_QUIET: an empty file
`<gpu>.<process group>` for each, and a lock for each GPU, which a process holds while it times. It
stops the other groups on its GPUs first, and waits until what they have enqueued has ended: a long
prompt takes seconds.
"""

import contextlib
import fcntl
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

FOLDER = "KVJAX_QUIET"
SETTLED = 0.3  # seconds between looks at a GPU
IDLE = 2  # per cent of the last moments in which an idle GPU may have run something
PATIENCE = 60.0  # seconds in which what stopped processes have enqueued ends


@contextlib.contextmanager
def alone() -> Iterator[None]:
  """Nothing else that shares this process's GPUs runs meanwhile. Nested, or unshared: no effect.

  Raises:
    TimeoutError: a GPU is busy though its other processes are stopped.
  """
  folder, gpus = os.environ.get(FOLDER), os.environ.get("CUDA_VISIBLE_DEVICES")
  if not folder or not gpus:
    yield
    return
  path, named = pathlib.Path(folder), gpus.split(",")
  with _locked(path, named):
    del os.environ[FOLDER]  # a nested call, which would wait for this one's locks, does nothing
    try:
      _send(path, named, signal.SIGSTOP)
      _settled(named)
      yield
    finally:
      os.environ[FOLDER] = folder
      _send(path, named, signal.SIGCONT)


@contextlib.contextmanager
def sharing(
  folder: pathlib.Path, gpus: Sequence[str], start: Callable[[], subprocess.Popen]
) -> Iterator[subprocess.Popen]:
  """A process in a group of its own, started on some GPUs once no timing runs there.

  It ends with the block, and what it may have stopped goes on.
  """
  folder.mkdir(parents=True, exist_ok=True)
  with _locked(folder, gpus):
    process = start()
    names = [folder / f"{gpu}.{process.pid}" for gpu in gpus]
    for name in names:
      name.touch()
  try:
    yield process
  finally:
    if process.poll() is None:
      os.killpg(process.pid, signal.SIGKILL)
      process.wait()
    for name in names:
      name.unlink()
    with contextlib.suppress(BlockingIOError), _locked(folder, gpus, fcntl.LOCK_NB):
      _send(folder, gpus, signal.SIGCONT)


def _settled(gpus: Sequence[str]) -> None:
  """Waits until the GPUs are idle; where nothing tells how busy they are, SETTLED seconds."""
  began = time.monotonic()
  time.sleep(SETTLED)
  for gpu in gpus:
    while (busy := _busy(gpu)) > IDLE:
      if time.monotonic() - began > PATIENCE:
        raise TimeoutError(
          f"GPU {gpu}: found it {busy} % busy, expected nothing beside what is timed"
        )
      time.sleep(SETTLED)


def _busy(gpu: str) -> int:
  """Per cent of the last moments in which a GPU ran something; 0 where the driver does not say."""
  ask = (
    "nvidia-smi",
    f"--id={gpu}",
    "--query-gpu=utilization.gpu",
    "--format=csv,noheader,nounits",
  )
  try:
    said = subprocess.run(ask, capture_output=True, text=True, timeout=10).stdout.strip()
  except (OSError, subprocess.TimeoutExpired):
    return 0
  return int(said) if said.isdigit() else 0


@contextlib.contextmanager
def _locked(folder: pathlib.Path, gpus: Sequence[str], how: int = 0) -> Iterator[None]:
  """Holds the locks of some GPUs, taken in one order, or two would wait for each other."""
  with contextlib.ExitStack() as stack:
    for gpu in sorted(gpus):
      file = stack.enter_context(open(folder / f"{gpu}.lock", "w"))
      fcntl.flock(file, fcntl.LOCK_EX | how)
    yield


def _send(folder: pathlib.Path, gpus: Sequence[str], what: signal.Signals) -> None:
  """Signals all groups on the GPUs but the own one."""
  names = {path.suffix[1:] for gpu in gpus for path in folder.glob(f"{gpu}.*")} - {"lock"}
  for group in {int(name) for name in names} - {os.getpgrp()}:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(group, what)
