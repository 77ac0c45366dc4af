"""Benchmarks, one suite per file; `kvjax bench --help` lists and runs them.

A suite is a module with `cases`, made by `suite`, a one-line docstring that the help shows, and
nothing of its own about time: `kvjax.programs.bench` checks, interleaves, times and prints.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Contender:
  """One way to compute a case.

  Attributes:
    name: what the table shows.
    seconds: runs the work once and returns seconds per call.
    output: runs one call and returns what is compared with the case's reference, or None for a
      contender that computes something else (a streaming read, say).
    figures: what else is known of it, for the case's figures.
    steps: runs one call and returns integers that are compared with the case's (tiles walked, say);
      None: there are none.
  """

  name: str
  seconds: Callable[[], float]
  output: Callable[[], np.ndarray] | None = None
  figures: Mapping[str, float] = dataclasses.field(default_factory=dict)
  steps: Callable[[], np.ndarray] | None = None


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
    figures: numbers by their names, made from the median seconds of every contender; not what the
      table shows, ratios of two contenders.
    paired: further figures by their names, percent by which the subject is slower than a contender
      in the same repetition: the median and its interval.
    steps: the reference's integers, computed when called, for contenders that have such.
    slack: largest difference of any of them.
  """

  name: str
  shapes: str
  bytes: int
  reference: Callable[[], np.ndarray]
  tolerance: float
  contenders: Sequence[Contender]
  subject: str = "kvjax"
  figures: Callable[[dict[str, float]], dict[str, Any]] = lambda seconds: {}
  paired: Mapping[str, str] = dataclasses.field(default_factory=dict)
  steps: Callable[[], np.ndarray] | None = None
  slack: int = 0


def suite(declared: Callable[[bool, bool], Iterable[tuple]]) -> Callable[..., Iterator[Case]]:
  """The `cases` of a suite, of a function that says what they are and whether with peers.

  It yields (name, make, *arguments): a case is `make(name, *arguments)`, built when its turn comes
  and only if its name contains `only`. One that takes more than the device's memory is passed over.
  """

  @functools.wraps(declared)
  def cases(quick: bool, peers: bool = True, only: str = "") -> Iterator[Case]:
    for name, make, *arguments in declared(quick, peers and not quick):
      if only in name:
        yield from fitting(name, make, *arguments)

  return cases


def named(tokens: int) -> str:
  """A number of tokens, or of slots, as a case's name has it."""
  return f"{tokens >> 10}K" if tokens >= 1024 else str(tokens)


def clocked(run: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
  """Seconds of a call until its arrays are there, and what it returned."""
  began = time.perf_counter()
  made = jax.block_until_ready(run(*arguments))
  return time.perf_counter() - began, made


def torch_clocked(run: Callable[[], Any]) -> float:
  """Seconds of a call whose work torch does on the GPU."""
  import torch

  torch.cuda.synchronize()
  began = time.perf_counter()
  run()
  torch.cuda.synchronize()
  return time.perf_counter() - began


def together(makers: Iterable[Callable[[], Any]]) -> list[Any]:
  """Runs makers side by side and returns their results: compiling is most of what a case takes."""
  with ThreadPoolExecutor() as pool:
    return [job.result() for job in [pool.submit(make) for make in makers]]


def in_turn(contenders: Sequence[Contender], repetitions: int) -> dict[str, list[float]]:
  """Seconds of every contender, `repetitions` times each, in turn."""
  times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
  for _ in range(repetitions):
    for contender in contenders:
      times[contender.name].append(contender.seconds())
  return times


def fitting(label: str, make: Callable[..., Case], *arguments: Any) -> Iterator[Case]:
  """make(label, *arguments), or on the terminal that the device has too little memory for it."""
  try:
    made = make(label, *arguments)
  except (jax.errors.JaxRuntimeError, MemoryError) as error:
    if not exhausted(error):
      raise
    print(too_large(label), flush=True)
  else:
    yield made


def exhausted(error: Exception) -> bool:
  """True if the device's memory was too small."""
  return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def check_fits(*trees: Any) -> None:
  """Raises MemoryError if these arrays, or shapes of them, take more than the device's memory.

  An allocator that is out of memory waits for each array of a program.
  """
  need = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(trees))
  if need > (held := memory()):
    raise MemoryError(f"found {need / 1e9:.1f} GB of arrays, expected at most {held / 1e9:.1f}")


def memory() -> float:
  """Bytes that the first device has; infinite where it does not say."""
  return (jax.devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)


def too_large(label: str) -> str:
  """A suite's line for a case that does not fit."""
  size = "" if math.isinf(memory()) else f", {memory() / 1e9:.0f} GB"
  here = jax.devices()[0].device_kind
  return f"  {label}: not run, takes more than the memory of {here}{size}"


def optional(name: str, make: Callable[[], Contender]) -> list[Contender]:
  """A peer where it is installed and takes the shape; the reason on the terminal otherwise."""
  try:
    return [make()]
  except Exception as error:
    reason = str(error).strip().splitlines() or [type(error).__name__]
    print(f"  {name}: not run ({type(error).__name__}: {reason[0][:120]})", flush=True)
    return []


def jax_contender(
  name: str, function: Callable[..., Any], arguments: list[tuple], **how: Any
) -> Contender:
  """A contender from a JAX function: `looped_contender` without a state, told as that is."""

  def step(_: None, *rest: Any) -> tuple[None, Any]:
    return None, function(*rest)

  return looped_contender(name, step, [None] * len(arguments), arguments, **how)


def reading(pieces: Iterable[Iterable[jax.Array]], calls: int) -> Contender:
  """A contender that reads arrays, piece by piece in turn, and does next to nothing with them."""

  def read(factor: Any, *arrays: Any) -> Any:
    return sum((x.astype(jnp.float32) * factor).sum() for x in arrays)

  turns = [(jnp.float32(1 + i), *arrays) for i, arrays in enumerate(pieces)]
  return jax_contender("read", read, turns, calls=calls)


def looped_contender(
  name: str,
  step: Callable[..., tuple[Any, Any]],
  states: list[Any],
  arguments: list[tuple],
  *,
  renewed: Callable[[Any, Any], Any] = lambda before, after: after,
  output: Callable[[Any], Any] | None = None,
  steps: Callable[[Any], Any] | None = None,
  calls: int = 8,
  loops: int = 8,
  options: dict[str, str] | None = None,
) -> Contender:
  """A contender from a step that renews a state, often in place: (state, *arguments) to (state, r).

  One jitted program makes `calls` calls, over states and arguments in turn so that a warm L2 cache
  is not in the time, and repeats them `loops` times in a loop on the device: always the same
  buffers, so that nothing is prepared anew. Each call waits for the one before it. Programs are
  enqueued without waiting, first one, then three: the difference is free of the way to the device
  and back. States are copied once and then handed on; `renewed` makes the states that the next turn
  of the loop begins with from those before and after this one. `options` are the compiler's.
  """
  turns = [i % len(arguments) for i in range(calls)]
  # Traced and lowered once however many the calls.
  once = jax.jit(step)

  def program(states: list[Any], arguments: list[tuple]) -> Any:
    def every(_: Any, carry: Any) -> Any:
      old, total = carry
      new, before, seen = list(old), total, []
      for i in turns:
        first, *rest = arguments[i]
        first, _ = lax.optimization_barrier((first, before))
        new[i], made = once(new[i], first, *rest)
        leaves = lax.optimization_barrier(jax.tree.leaves(made))
        before = min(leaves, key=lambda x: x.size)
        # A number of each: no kernel that makes one of them can be left out.
        seen += [x.reshape(-1)[0].astype(jnp.float32) for x in leaves]
      return [renewed(a, b) for a, b in zip(old, new, strict=True)], total + sum(seen)

    return lax.fori_loop(0, loops, every, (states, jnp.zeros((), jnp.float32)))

  jitted = jax.jit(program, donate_argnums=0, compiler_options=options)
  compiled = jitted.lower(states, arguments).compile()
  held = jax.tree.map(jnp.copy, states)

  def enqueue(programs: int) -> float:
    nonlocal held
    began = time.perf_counter()
    for _ in range(programs):
      held, last = compiled(held, arguments)
    jax.block_until_ready(last)
    return time.perf_counter() - began

  enqueue(1)

  def seconds() -> float:
    few, many = enqueue(1), enqueue(3)
    if many <= few:  # too little work to tell apart
      return many / (3 * calls * loops)
    return (many - few) / (2 * calls * loops)

  def first(part: Callable[[Any], Any], dtype: Any) -> np.ndarray:
    return np.asarray(part(once(states[0], *arguments[0])[1]), dtype)

  return Contender(
    *(name, seconds),
    functools.partial(first, output, np.float32) if output else None,
    steps=functools.partial(first, steps, np.int64) if steps else None,
  )


def torch_contender(
  name: str, function: Callable[..., Any], arguments: list[tuple], *, calls: int = 8
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

  return Contender(name, seconds, first)


def torch_sdpa(name: str, *tensors: Any, **how: Any) -> Any:
  """torch's attention by one of its backends: "torch flash" or "torch cuDNN"."""
  import torch
  from torch.nn.attention import SDPBackend, sdpa_kernel

  backend = {"torch flash": SDPBackend.FLASH_ATTENTION, "torch cuDNN": SDPBackend.CUDNN_ATTENTION}
  with sdpa_kernel(backend[name]):
    return torch.nn.functional.scaled_dot_product_attention(*tensors, **how)


def torch_attention(
  name: str, q: tuple[int, ...], kv: tuple[int, ...], *, calls: int = 8, **how: Any
) -> Contender:
  """torch's attention over drawn bfloat16 of these shapes, as "torch flash" says; timed only."""
  import torch

  drawn = [torch.randn(x, dtype=torch.bfloat16, device="cuda") for x in (q, kv, kv)]
  attend = functools.partial(torch_sdpa, name, **how)
  return dataclasses.replace(torch_contender(name, attend, [(*drawn,)], calls=calls), output=None)
