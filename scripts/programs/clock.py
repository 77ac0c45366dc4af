"""Time that a block of work took, and the part of it that JAX spent on compiling."""

import threading
import time
from typing import Any, Self

import jax

from kvjax.models.decode import background

# What JAX reports of each program: making its jaxpr, lowering that, and XLA (or the cache on disk).
_EVENTS = {
  "/jax/core/compile/jaxpr_trace_duration",
  "/jax/core/compile/jaxpr_to_mlir_module_duration",
  "/jax/core/compile/backend_compile_duration",
  background.WAITED,
}
_spans: list[tuple[float, float]] = []


def _listen(event: str, seconds: float, **_: Any) -> None:
  if event in _EVENTS and threading.current_thread().name != background.THREAD:
    now = time.perf_counter()
    _spans.append((now - seconds, now))


jax.monitoring.register_event_duration_secs_listener(_listen)


class Clock:
  """Seconds of a `with` block, compiling apart.

  Compiling is tracing, lowering and XLA's part; where one is inside of another, or beside it, that
  time counts once. What the device computes meanwhile is not missed, only counted there. Of what is
  compiled ahead of a prompt the time counts that a step waits for it.

  Attributes:
    compiling: seconds in which something was compiled.
    running: all other seconds of the block.
  """

  compiling = running = 0.0

  def __enter__(self) -> Self:
    self._first, self._begin = len(_spans), time.perf_counter()
    return self

  def __exit__(self, *error: Any) -> None:
    self.compiling = _covered(_spans[self._first :], self._begin)
    self.running = time.perf_counter() - self._begin - self.compiling


def _covered(spans: list[tuple[float, float]], since: float) -> float:
  """Length of the union of spans, from `since` on."""
  total, end = 0.0, since
  for start, stop in sorted(spans):
    total += max(0.0, stop - max(start, end))
    end = max(end, stop)
  return total
