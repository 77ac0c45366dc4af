"""Programs that run in several processes, each with CPU devices of its own: one mesh over all."""

import os
import pathlib
import socket
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[1]
BEGIN = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
rank, count, port, *arguments = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", num_processes=int(count), process_id=int(rank))
"""


def start(program, count, *arguments, devices=1):
  """Starts `program`, which finds its `arguments` under that name, in `count` processes."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
  return [
    subprocess.Popen(
      [sys.executable, "-c", BEGIN + textwrap.dedent(program), *map(str, (rank, count, port))]
      + [str(x) for x in arguments],
      cwd=ROOT,
      env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for rank in range(count)
  ]


def ended(processes, timeout=300):
  """Status, standard output and standard error of each; none is left running."""
  try:
    said = [process.communicate(timeout=timeout) for process in processes]
    return [(p.returncode, *texts) for p, texts in zip(processes, said, strict=True)]
  finally:
    for process in processes:
      process.kill()


def output(program, count, *arguments, **how):
  """What each process of a program that ends well has printed."""
  results = ended(start(program, count, *arguments, **how))
  assert all(status == 0 for status, *_ in results), "\n".join(x[2][-3000:] for x in results)
  return [out for _, out, _ in results]
