"""Programs that run in several processes, each with CPU devices of its own: one mesh over all."""

import os
import pathlib
import re
import socket
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[1]
# A variable of a process, and its value: memory of 128 kB and more goes back as soon as it is
# freed, so that a peak is what was held, not what malloc kept of each thread's.
FREED_AT_ONCE = ("MALLOC_MMAP_THRESHOLD_", "131072")
BEGIN = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
rank, count, port, *arguments = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", num_processes=int(count), process_id=int(rank))
"""


def port():
  """A port of this machine that nobody listens on."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    return free.getsockname()[1]


def started(commands, devices=1):
  """Processes of these arguments of Python, each with so many devices."""
  flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
  return [
    subprocess.Popen(
      [sys.executable, *map(str, command)],
      cwd=ROOT,
      env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for command in commands
  ]


def start(program, count, *arguments, devices=1):
  """Starts `program`, which finds its `arguments` under that name, in `count` processes."""
  code, at = BEGIN + textwrap.dedent(program), port()
  return started([["-c", code, rank, count, at, *arguments] for rank in range(count)], devices)


def ended(processes, timeout=300):
  """Status, standard output and standard error of each; none is left running."""
  try:
    said = [process.communicate(timeout=timeout) for process in processes]
    return [(p.returncode, *texts) for p, texts in zip(processes, said, strict=True)]
  finally:
    for process in processes:
      process.kill()


def output(program, count, *arguments, devices=1, timeout=300):
  """What each process of a program that ends well has printed."""
  results = ended(start(program, count, *arguments, devices=devices), timeout)
  assert all(status == 0 for status, *_ in results), "\n".join(x[2][-3000:] for x in results)
  return [out for _, out, _ in results]


def peak(call):
  """Result of a call, and the bytes of memory that it takes at most; of Linux."""

  def status(key):
    text = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"{key}:\s*(\d+)", text)[1]) << 10

  pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
  before = status("VmRSS")
  made = call()
  return made, status("VmHWM") - before
