"""Time the first prompt of a fresh process, with and without compiled programs.

    kvjax cold --out scripts/results                  Llama-3.1-8B's shape, on a GPU
    kvjax cold --model tiny --length 256              a quick look, on any device

Each row is a separate process. Weights are drawn and caches allocated before the clock starts; it
stops when the prompt's logits are on the host, which say the first token, and again when `generate`
has returned that token: its step is compiled while the prompt is read, or with --afterwards then.
The first process of a method starts with an empty compilation cache, the second with the programs
of the first.
"""

import collections
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Annotated, Any

import jax
import numpy as np
import tyro

import kvjax
from kvjax.kernels.common.devices import slug
from kvjax.models.decode.generate import compile_ahead, generate, prefill
from kvjax.programs import bench, common, console
from kvjax.programs.suites import e2e

STAGES = {
  "jaxpr_trace_duration": "trace",
  "jaxpr_to_mlir_module_duration": "lower",
  "backend_compile_duration": "compile",
}
FOUND = "/jax/compilation_cache/cache_hits"
HEADS = (
  *("method", "cache", "first token", "generated", "again", "programs", "found"),
  *("trace", "lower", "compile"),
)


@dataclasses.dataclass(frozen=True)
class Args:
  methods: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = (
    *("full", "snapkv", "longflow", "quest", "prr", "cpe"),
  )
  """Registered methods, or module:Class."""
  model: str = "Llama-3.1-8B"
  """A preset, or "tiny"; weights are random."""
  length: int = 32768
  """Tokens of the prompt."""
  budget: int = 2048
  """Tokens that a method keeps or reads."""
  out: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FOLDER")] = None
  """Write <device>/cold.json there, scripts/results say."""
  afterwards: bool = False
  """Compile the step of generate after the prompt, not meanwhile."""


def measure(
  name: str, model_name: str, length: int, budget: int, afterwards: bool
) -> dict[str, Any]:
  """One prompt in this process, then the same again: seconds, and what JAX did meanwhile."""
  spent: dict[str, float] = collections.defaultdict(float)
  counts = {"programs": 0, "found": 0}

  def listen(event: str, seconds: float = 0.0, **_: Any) -> None:
    counts["found"] += event == FOUND
    stage = STAGES.get(event.rsplit("/", 1)[-1])
    if stage:
      spent[stage] += seconds
      counts["programs"] += stage == "compile"

  method, model = kvjax.settings.usual(kvjax.find_method(name), budget), e2e.weights(model_name)
  tokens = np.random.default_rng(0).integers(0, model.config.vocab, (1, length))
  lengths, room = np.array([length]), length + e2e.STEPS

  def first_token() -> dict[str, float]:
    caches = jax.block_until_ready(model.init_caches(method, 1, room))
    began = time.perf_counter()
    if not afterwards:
      compile_ahead(model, method, caches)
    logits, caches = prefill(model, tokens, lengths, caches, method)
    np.asarray(logits)
    read = time.perf_counter() - began
    generate(model, logits, caches, method, steps=1)
    return {"first_token": read, "generated": time.perf_counter() - began}

  jax.block_until_ready(model.init_caches(method, 1, room))
  jax.monitoring.register_event_listener(listen)
  jax.monitoring.register_event_duration_secs_listener(listen)
  row = {"method": name, **first_token(), **counts, **spent}
  return {**row, "again": first_token()["first_token"]}


def row(found: dict[str, Any]) -> tuple[str, ...]:
  """A line of the table."""
  times = [f"{found[key]:.2f}" for key in ("first_token", "generated", "again")]
  stages = [f"{found.get(stage, 0):.2f}" for stage in STAGES.values()]
  counts = [str(found[key]) for key in ("programs", "found")]
  return found["method"], found["cache"], *times, *counts, *stages


def main(args: Args) -> None:
  common.check_numbers(args, length=1, budget=1)
  for name in args.methods:
    kvjax.find_method(name, "--methods")
  rows, facts = [], bench.environment()
  for name in args.methods:
    with tempfile.TemporaryDirectory() as folder:
      for cache in ("empty", "warm"):
        with console.step(f"{name}, {cache} cache") as step:
          how = name, args.model, args.length, args.budget, args.afterwards
          found = in_a_process(folder, *how)
          rows.append({**found, "cache": cache})
          step.note(f"{rows[-1]['generated']:.1f} s to the first token")
  print("\n" + console.table(HEADS, [row(found) for found in rows], left=(0, 1)))
  print("\n  found: what the compilation cache had. The rest are seconds; trace, lower and compile")
  print("  are summed over programs and threads.")
  if args.out is not None:
    path = args.out / slug(facts["device"]) / "cold.json"
    common.write(path, {**facts, "length": args.length, "rows": rows})


def in_a_process(folder: str, *arguments: Any) -> dict[str, Any]:
  """`measure` in a fresh process that keeps its programs in a folder."""
  code = f"from {__package__} import cold; cold.report{arguments!r}"
  variables = {**os.environ, "JAX_COMPILATION_CACHE_DIR": folder}
  command = [sys.executable, "-c", code]
  done = subprocess.run(command, env=variables, capture_output=True, text=True)
  if done.returncode:
    raise OSError(f"{arguments[0]}: the process ended with {done.returncode}: {done.stderr[-500:]}")
  return json.loads(done.stdout.splitlines()[-1])


def report(*arguments: Any) -> None:
  """Prints what `measure` finds, as the last line of the output."""
  common.keep_programs()
  print(json.dumps(measure(*arguments)))


if __name__ == "__main__":
  common.run(main, Args)
