"""For developers: time the loading of a converted checkpoint, and its peak of host memory.

    python -m scripts.tools.load_times FOLDER... --devices 1 2 --out load.txt

Each load is a process of its own, in bfloat16 on CPU devices, and each is repeated: the fastest is
told. The files have been read before, so that the disk takes no part.
"""

import argparse
import os
import pathlib
import subprocess
import sys

LOAD = """
import resource, sys, time
import jax, jax.numpy as jnp, orbax.checkpoint
import kvjax
from flax import nnx
from kvjax.models.io import convert
devices, began = jax.device_count(), time.perf_counter()
mesh = kvjax.make_mesh(heads=devices) if devices > 1 else None
model, _ = convert.load(sys.argv[1], dtype=jnp.bfloat16, mesh=mesh)
jax.block_until_ready(nnx.state(model))
seconds, peak = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(seconds, model.weight_bytes() / 1e9, peak * 1024 / 1e9)
"""


def load(folder: pathlib.Path, devices: int) -> tuple[float, float, float]:
  """Seconds of a load, GB of the weights, and the process's peak of memory in GB."""
  flags = f"--xla_force_host_platform_device_count={devices}"
  env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
  command = [sys.executable, "-c", LOAD, str(folder)]
  done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
  seconds, weights, peak = map(float, done.stdout.split())
  return seconds, weights, peak


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("folders", nargs="+", type=pathlib.Path, metavar="FOLDER")
  parser.add_argument("--devices", nargs="+", type=int, default=[1])
  parser.add_argument("--times", type=int, default=3, help="loads, of which the fastest is told")
  parser.add_argument("--out", type=pathlib.Path, required=True)
  args = parser.parse_args()
  rows = ["checkpoint  devices  seconds  GB of weights  GB at most"]
  for devices in args.devices:
    for folder in args.folders:
      seconds, weights, peak = min(load(folder, devices) for _ in range(args.times))
      rows.append(f"{folder.name}  {devices}  {seconds:.2f}  {weights:.2f}  {peak:.2f}")
      print(rows[-1], flush=True)
  args.out.write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
  main()
