"""Benchmarks, one suite per file; `python -m scripts.bench --help` lists and runs them.

A suite is a module with `cases(quick) -> iterable of Case`, a one-line docstring that the help
shows, and nothing of its own about time: `scripts.bench` checks, interleaves, times and prints.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Contender:
  """One way to compute a case.

  Attributes:
    name: what the table shows.
    seconds: runs the work once and returns seconds per call.
    output: runs one call and returns what is compared with the case's reference, or None for a
      contender that computes something else (a streaming read, say).
    note: shown beside the time.
  """

  name: str
  seconds: Callable[[], float]
  output: Callable[[], np.ndarray] | None
  note: str = ""


@dataclasses.dataclass(frozen=True)
class Case:
  """One shape of a suite.

  Attributes:
    name: short, unique in the suite.
    shapes: shapes and dtypes in words.
    bytes: bytes that any implementation has to move.
    reference: the float32 result, computed when called.
    tolerance: largest ‖output − reference‖ / ‖reference‖.
    contenders: everything that is timed; one named "read" gives the bandwidth of the floor.
    subject: name of the contender that the table is about.
    remarks: lines below the table, made from the median seconds of every contender.
  """

  name: str
  shapes: str
  bytes: int
  reference: Callable[[], np.ndarray]
  tolerance: float
  contenders: tuple[Contender, ...]
  subject: str
  remarks: Callable[[dict[str, float]], list[str]] = lambda seconds: []


def optional(name: str, make: Callable[[], Contender]) -> list[Contender]:
  """A peer where it is installed and takes the shape; the reason on the terminal otherwise."""
  try:
    return [make()]
  except Exception as error:
    reason = str(error).strip().splitlines() or [type(error).__name__]
    print(f"  {name}: not run ({type(error).__name__}: {reason[0][:120]})", flush=True)
    return []


def jax_contender(
  name: str,
  function: Callable[..., Any],
  arguments: list[tuple],
  *,
  output: Callable[[Any], Any] | None = None,
  calls: int = 8,
  dispatches: int = 10,
  note: str = "",
) -> Contender:
  """A contender from a JAX function.

  `calls` calls run inside one jitted program, over `arguments` in turn, so that neither Python's
  dispatch nor a warm L2 cache is in the time. Programs are enqueued without waiting, first a few,
  then `dispatches` more: the difference is free of the way to the device and back.
  """
  turns = [arguments[i % len(arguments)] for i in range(calls)]

  # Traced and lowered once however many the calls.
  once = jax.jit(function)

  # One small result that needs every call: making many arrays would be in the time.
  def program(turns):
    return sum(min(jax.tree.leaves(once(*turn)), key=lambda x: x.size) for turn in turns)

  # Every call has a first operand of its own: equal calls would be computed once.
  if calls > len(arguments):
    turns = [(turn[0] * (1 + i // len(arguments)), *turn[1:]) for i, turn in enumerate(turns)]
  compiled = jax.jit(program).lower(turns).compile()
  jax.block_until_ready(compiled(turns))

  def enqueue(programs: int) -> float:
    began = time.perf_counter()
    for _ in range(programs):
      last = compiled(turns)
    jax.block_until_ready(last)
    return time.perf_counter() - began

  def seconds() -> float:
    few, many = enqueue(2), enqueue(2 + dispatches)
    if many <= few:  # too little work to tell apart
      return many / (calls * (2 + dispatches))
    return (many - few) / (calls * dispatches)

  def first() -> np.ndarray:
    assert output is not None
    return np.asarray(output(once(*arguments[0])), np.float32)

  return Contender(name, seconds, first if output else None, note)


def torch_contender(
  name: str, function: Callable[..., Any], arguments: list[tuple], *, calls: int = 8, note: str = ""
) -> Contender:
  """A contender from a function of torch tensors on the GPU: `calls` calls in one CUDA graph."""
  import torch

  turns = [arguments[i % len(arguments)] for i in range(calls)]
  stream = torch.cuda.Stream()
  stream.wait_stream(torch.cuda.current_stream())
  with torch.cuda.stream(stream):
    for turn in turns[:3]:
      function(*turn)
  torch.cuda.current_stream().wait_stream(stream)
  graph = torch.cuda.CUDAGraph()
  with torch.cuda.graph(graph):
    for turn in turns:
      function(*turn)

  def seconds() -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(4):
      graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / (4 * calls)

  def first() -> np.ndarray:
    torch.cuda.synchronize()
    return function(*arguments[0]).float().cpu().numpy()

  return Contender(name, seconds, first, note)
