"""Time a decode step of each method on a real model, after real text.

    kvjax speed --methods quest snapkv --lengths 8192 --batches 1 8 --out run
    kvjax speed --checkpoint FOLDER --methods all --budgets 1024 4096 --out run

No activation is random: the rows are speeches, as in the task `kl` of `evaluate`, and each method
selects, shares or stops on their activations. Each measured method is a line of <out>/speed.jsonl;
methods that are already in the folder are not measured again. A folder of another model, device,
version of jax, implementation or seed is refused:

    us            a greedy step of the whole batch, STEPS steps per dispatch; its quartiles; all
    called_us     the same as `generate` takes it (--called): the least of CALLS calls
    cache_bytes   of the caches on the device, host_bytes on the host
    read_bytes    bytes that a step moves at most, weights and caches
    expected_us   the time that `advise` expects for a step, at this device's bandwidth
    peak_bytes    memory of a step as planned by the compiler, including weights and caches; reading
                  the prompt takes more, less with smaller chunks
    prefill_s     seconds to read the prompt

Before timing, one step is compared with the reference implementation on the same caches: `error` is
the relative difference of the logits, `agreed` the share of rows with the same most likely token.
If the error exceeds TOLERANCE, the line has no time.
"""

import dataclasses
import json
import os
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import kvjax
from kvjax.kernels.common.devices import this_device
from kvjax.models.decode.generate import generate, join, pad, prefill, split
from kvjax.models.decode.step_bytes import step_bytes
from kvjax.models.nn.transformer import Caches, Transformer
from kvjax.programs import bench_files, common, console, step_time
from kvjax.programs.clock import Clock
from kvjax.programs.evals import cells, plan, registry
from kvjax.programs.evals.costs import FILE, KINDS, key, measured
from kvjax.programs.evals.prompt import Reader
from kvjax.programs.suites.e2e import stepping

STEPS = 16  # of a dispatch
TIMES = 10  # dispatches of a measurement
CALLS = 3  # of `generate`, of 2 · STEPS tokens each, after one that compiles
CALLED = 2 * (2 + CALLS) * STEPS  # tokens of all calls
ROUNDS = 3  # measurements at most, where quartiles are wide
FAILURES = ValueError, NotImplementedError, MemoryError
TOLERANCE = 5e-2  # bfloat16 and a selection that two ways to round may settle otherwise


@dataclasses.dataclass(frozen=True)
class Args:
  out: Annotated[pathlib.Path, tyro.conf.arg(metavar="FOLDER")]
  """speed.jsonl is written there, or added to."""
  methods: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = ("all",)
  """Registered methods, also name:field=value,… and outer+inner, as kvjax evaluate takes them; the
  full cache always runs."""
  budgets: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TOKENS ...")] = ("1024",)
  """Tokens that a method keeps or reads: a number, or a share of the length (0.125)."""
  lengths: Annotated[tuple[int, ...], tyro.conf.arg(metavar="TOKENS ...")] = (8192,)
  """Tokens of prompt and answer together."""
  batches: Annotated[tuple[int, ...], tyro.conf.arg(metavar="ROWS ...")] = (8,)
  """Rows that are decoded together."""
  impl: common.Impl = "auto"
  """Implementation of the methods' operations."""
  called: bool = False
  """Also time `generate`; its program is compiled besides."""
  trace: Annotated[pathlib.Path | None, common.optional("FOLDER")] = None
  """With --called: keep a profile of a call of STEPS tokens there, in a folder for each line."""
  seed: int = 0
  """Draws the texts."""
  checkpoint: common.Checkpoint = None


class Bench:
  """Prompts of one length and batch, and a model that reads them."""

  def __init__(self, model: Transformer, prompts: Sequence[list[int]], length: int, args: Args):
    self.model, self.length, self.args = model, length, args
    self.tokens, lengths = pad(prompts, multiple=length)
    room = args.called * CALLED  # for what comes, where every token is kept
    self.lengths = np.minimum(lengths, length - room)
    self.graph, self.leaves = split(model)

  @property
  def batch(self) -> int:
    return len(self.lengths)

  def measure(self, entry: plan.Entry) -> dict[str, Any]:
    """One method's line, without what names it."""
    method = entry.method
    spec = self.model.spec(self.batch, self.length)
    moved = step_bytes(self.model.config, method, self.batch, self.length, self.model.dtype)
    expected = step_time.expected(moved, method.traits.stream is not None, this_device())
    with Clock() as clock:
      logits, caches = prefill(
        self.model, self.tokens, self.lengths, method.init_caches(spec), method, past=0
      )
      token = jax.block_until_ready(jnp.argmax(logits, -1).astype(jnp.int32))
    row: dict[str, Any] = {
      "prefill_s": round(clock.running, 4),
      "cache_bytes": common.bytes_of(caches)[0],
      "host_bytes": common.bytes_of(caches)[1],
      "read_bytes": moved.device,
      "expected_us": round(expected * 1e6, 1),
      **self._compared(method, token, caches),
    }
    if self.args.called and row["error"] <= TOLERANCE:
      row["called_us"], caches = self._called(entry, logits, caches)
    run = stepping(self.graph, method, self.args.impl, STEPS)
    program = jax.jit(run, donate_argnums=1).lower(self.leaves, caches, token).compile()
    plan = program.memory_analysis()
    row["peak_bytes"] = (
      plan.argument_size_in_bytes
      + plan.output_size_in_bytes
      + plan.temp_size_in_bytes
      - plan.alias_size_in_bytes
    )
    return row if row["error"] > TOLERANCE else row | _timed(program, self.leaves, caches, token)

  def _compared(self, method: kvjax.Method, token: jax.Array, caches: Caches) -> dict[str, Any]:
    """Error of a step beside the reference's, and the share of the tokens that it attends to."""

    def step(impl: str) -> Any:
      @jax.jit
      def run(leaves: Any, caches: Any, token: Any) -> Any:
        decoder = join(self.graph, leaves)
        decoder.env = dataclasses.replace(decoder.env, impl=impl)
        logits, _, reports = decoder.decode(token, caches, method, with_aux=True)
        return logits, jnp.stack([report["visited"].mean(-1) for report in reports])

      return run(self.leaves, caches, token)

    (ours, visited), (want, _) = step(self.args.impl), step("reference")
    got, wanted = np.asarray(ours, np.float64), np.asarray(want, np.float64)
    seen = np.asarray(self.lengths) + 1
    return {
      "error": round(float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted)), 6),
      "agreed": float((got.argmax(-1) == wanted.argmax(-1)).mean()),
      "visited": round(float((np.asarray(visited, np.float64) / seen).mean()), 5),
    }

  def _called(self, entry: plan.Entry, logits: jax.Array, caches: Caches) -> tuple[float, Caches]:
    """Microseconds of a token of all rows, as `generate` takes them, and the caches after them."""
    method = entry.method
    out, caches = generate(self.model, logits, caches, method, steps=2 * STEPS)
    seconds = []
    for _ in range(CALLS):
      began = time.perf_counter()
      out, caches = generate(self.model, out.last, caches, method, steps=2 * STEPS)
      seconds.append(time.perf_counter() - began)
    if self.args.trace is not None:
      named = f"{entry.label} {entry.budget} B{self.batch} T{self.length}"
      with jax.profiler.trace(self.args.trace / re.sub(r"[^\w.=,+-]", "_", named)):
        out, caches = generate(self.model, out.last, caches, method, steps=STEPS)
    return round(min(seconds) / (2 * STEPS) * 1e6, 2), caches


def _timed(program: Any, leaves: Any, caches: Caches, token: jax.Array) -> dict[str, Any]:
  """Microseconds of a step; measured again where the quartiles are wide."""
  caches, done = program(leaves, caches, token)
  for _ in range(ROUNDS):
    seconds = []
    for _ in range(TIMES):
      jax.block_until_ready(done)
      began = time.perf_counter()
      caches, done = program(leaves, caches, token)
      jax.block_until_ready(done)
      seconds.append((time.perf_counter() - began) / STEPS)
    low, median, high = statistics.quantiles(seconds, n=4)
    if bench_files.steady(low, median, high):
      break
  return {
    "us": round(median * 1e6, 2),
    "us_quartiles": [round(low * 1e6, 2), round(high * 1e6, 2)],
    "us_all": [round(x * 1e6, 2) for x in seconds],
  }


def lines(args: Args) -> Iterator[dict[str, Any]]:
  """A line for everything that the folder does not have.

  Raises:
    ValueError: its lines are of another model, device, version, implementation or seed.
  """
  labels = list(kvjax.METHODS) if args.methods == ("all",) else args.methods
  entries = {length: plan.entries(labels, args.budgets, length) for length in args.lengths}
  facts = {
    "model": common.model_name(args.checkpoint),
    "device": jax.devices()[0].device_kind,
    "jax": jax.__version__,
    "impl": args.impl,
    "seed": args.seed,
  }
  have = set()
  for row in measured(args.out, repair=True):
    have.add((key(row), row.get("settings")))
    for name, now in facts.items():
      if (before := row.get(name, now)) != now:
        raise ValueError(
          f"{args.out / FILE}: found lines with {name} = {before!r}, and now it is {now!r}: "
          "expected the same, or another --out"
        )
  model, tokenizer = common.load_model(args.checkpoint, args.impl, out=sys.stderr)
  args.out.mkdir(parents=True, exist_ok=True)
  reader = {chat: Reader(tokenizer, chat=chat) for chat in (False, True)}
  for length in args.lengths:
    made = cells.build([registry.TASKS["kl"]], [length], max(args.batches), args.seed, reader)
    cell = next(made)
    if isinstance(cell, str):
      raise ValueError(cell)
    prompts = [prompt.ids for prompt in cell.prompts]
    for batch in args.batches:
      bench = Bench(model, prompts[:batch], length, args)
      for entry in entries[length]:
        named = dict(zip(KINDS, (entry.label, entry.budget, length, batch), strict=True))
        if (mine := (key(named), repr(entry.method))) in have:
          continue
        have.add(mine)
        common.drop_programs()
        with console.step(f"{entry.label}, budget {entry.budget}, B{batch} T{length}") as step:
          try:
            row = named | {"settings": repr(entry.method)} | bench.measure(entry) | facts
          except (*FAILURES, jax.errors.JaxRuntimeError) as error:
            step.note(f"not run: {error}")
            continue
          step.note(f"{row['us']:,.0f} µs" if "us" in row else f"wrong: error {row['error']}")
          yield row


def main(args: Args) -> None:
  common.check_numbers(args, lengths=1, batches=1)
  if args.called and min(args.lengths) <= CALLED:
    raise ValueError(
      f"--lengths: found {min(args.lengths)}, expected more than the {CALLED} tokens of --called"
    )
  if args.trace and not args.called:
    raise ValueError("--trace: found it alone, expected it beside --called")
  for row in lines(args):
    with (args.out / FILE).open("a", encoding="utf-8") as file:
      file.write(json.dumps(row) + "\n")
      file.flush()
      os.fsync(file.fileno())
  if not measured(args.out):
    raise ValueError(f"{args.out / FILE}: found no lines: every method was refused")


if __name__ == "__main__":
  common.run(main, Args)
