"""Programs of several processes: what the first one knows, all know; what ends one, ends all.

`jax.distributed` connects them, and collectives of a mesh over all their devices do the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

_ENDED = "kvjax/ended"  # under which the first error is kept
_LOOK, _LAST = 0.5, 1.0  # seconds between two looks at it, and for the others to be gone
_WAIT = 10_000  # milliseconds for all to have seen it


def of_first(make: Callable[[], Any]) -> Any:
  """The result of `make` on the first process, on each of them: prompts, say, or settings.

  All processes have to call it; the others do not call `make`.

  Args:
    make: returns a value that JSON can represent.
  """
  if jax.process_count() == 1:
    return make()
  data = json.dumps(make()).encode() if jax.process_index() == 0 else b""
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
  sent = np.frombuffer(data.ljust(size), np.uint8)
  return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(sent)).tobytes())


@contextlib.contextmanager
def together() -> Iterator[None]:
  """Ends all processes, each with status 1, where the block ends with an error on one of them.

  The error is printed by all. Without it, the others would wait in a collective for the one that is
  gone. To be entered by all of them, after `jax.distributed.initialize`; for a process alone it
  does nothing.
  """
  if jax.process_count() == 1:
    yield
    return
  done = threading.Event()
  watch = threading.Thread(target=_watch, args=(done,), daemon=True)
  watch.start()
  try:
    yield
  except BaseException as error:
    done.set()
    watch.join()
    if isinstance(error, SystemExit) and not error.code:
      raise
    _tell(error)
  done.set()
  watch.join()


def _client() -> Any:
  """JAX's client of the service that connects the processes."""
  from orbax.checkpoint import multihost

  return multihost.get_jax_distributed_client()


def _tell(error: BaseException) -> None:
  """Ends the process by an error, or by another one's, told before, that may be its cause."""
  if isinstance(error, SystemExit):
    said = text = str(error.code)
  else:
    said, text = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
  try:
    _client().key_value_set(_ENDED, f"process {jax.process_index()}: {said}")
  except jax.errors.JaxRuntimeError:
    text = _told() or text
  _end(text)


def _told() -> str | None:
  """The first error that a process reported; None if there is none, or no coordinator."""
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    return _client().key_value_try_get(_ENDED)
  return None


def _watch(done: threading.Event) -> None:
  """Ends the process once another one has told an error."""
  while not done.wait(_LOOK):
    if said := _told():
      _end(said)


def _end(text: str) -> None:
  """Prints and ends, without the exit handlers, which would wait for the other processes."""
  print(text.strip("\n"), file=sys.__stderr__, flush=True)
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    _client().wait_at_barrier(f"{_ENDED}/seen", _WAIT)
  if jax.process_index() == 0:  # the others' connections are its own: it goes last
    time.sleep(_LAST)
  sys.stdout.flush()
  os._exit(1)
