"""Measure how kernels are best cut on this device, and write it where they look.

    kvjax tune decode                       on a GPU; minutes
    kvjax tune decode --only "B8 T32K" --dry-run
    kvjax tune decode_logits                decode that leaves its logits, for eviction
    kvjax tune prr                          how much PRR speculates, by length

Two sweeps per shape: tile, warps and stages at two programs per multiprocessor; then the number of
programs for the best of them, down to one piece per row, which needs no join. Every configuration
is checked against the float32 reference.
"""

import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import statistics
from typing import Annotated, Any, Literal

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np
import tyro

from kvjax.kernels.common import config
from kvjax.kernels.common.config import Config
from kvjax.kernels.common.split_k import columns_of
from kvjax.kernels.decode.dense import decode_with_output
from kvjax.programs import common
from kvjax.programs.bench import environment
from kvjax.programs.suites import Contender, jax_contender, prr
from kvjax.programs.suites.decode import reference, rotation
from kvjax.testing.decode_cases import BOUNDED, TUNED, Shape

KERNELS: dict[str, Any] = {"decode": TUNED, "decode_logits": BOUNDED, "prr": prr.PROFILED}
TUNED_FOLDER = pathlib.Path(config.__file__).resolve().parents[1] / "tuned"


@dataclasses.dataclass(frozen=True)
class Args:
  """Measures how kernels are best cut on this device."""

  kernel: Annotated[Literal[tuple(KERNELS)], tyro.conf.Positional]  # type: ignore[valid-type]
  """The kernel to tune."""
  only: Annotated[tuple[str, ...], common.optional("TEXT ...")] = ()
  """Only shapes whose name contains one of these."""
  repetitions: Annotated[int, tyro.conf.arg(metavar="N")] = 5
  """Timings of each configuration."""
  out: Annotated[pathlib.Path, tyro.conf.arg(metavar="FOLDER")] = TUNED_FOLDER
  """Write <device>/<kernel>.json there; by default where kernels look (pallas_kernels/tuned)."""
  dry_run: bool = False
  """Print, write nothing."""


# Bytes of keys and values in one pipeline stage, with the warps and stages that go with them.
STAGES = (
  (64 << 10, 4, 3),
  (64 << 10, 8, 2),
  (32 << 10, 4, 3),
  (32 << 10, 4, 4),
  (32 << 10, 8, 4),
  (16 << 10, 4, 4),
  (16 << 10, 4, 6),
)
# Programs per multiprocessor, in quarters.
PROGRAMS = (1, 2, 4, 8, 12, 16)


def candidates(shape: Shape, device: config.Device) -> list[Config]:
  """The first sweep: configurations that fit the device's shared memory."""
  per_slot = 2 * columns_of(shape.head_dim) * jax.numpy.dtype(shape.dtype).itemsize
  made = []
  for size, warps, stages in STAGES:
    tile = size // per_slot
    if tile >= 16 and size * (stages - 1) < 0.9 * device.shared:
      made.append(Config(tile=tile, programs=2 * device.cores, warps=warps, stages=stages))
  return made


def sweep(
  configs: list[Config],
  inputs: list[tuple],
  calls: int,
  want: np.ndarray,
  repetitions: int,
  logits: bool,
) -> dict[Config, float]:
  """Median seconds per call of every configuration that compiles and is right."""

  def build(choice: Config) -> Contender | None:
    try:
      run = functools.partial(decode_with_output, config=choice, logits=logits)
      return jax_contender(str(choice), run, inputs, output=lambda s: s[0].o, calls=calls)
    except Exception as error:
      print(f"    {choice}: not run ({str(error).splitlines()[0][:100]})", flush=True)
      return None

  # Compiling is most of the time, and not Python's.
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    built = dict(zip(configs, pool.map(build, configs), strict=True))
  times: dict[Config, list[float]] = {}
  for choice, contender in built.items():
    if contender is None or contender.output is None:
      continue
    error = np.linalg.norm(contender.output() - want) / np.linalg.norm(want)
    if error <= 1e-2:
      times[choice] = []
      contender.seconds()
    else:
      print(f"    {choice}: wrong, error {error:.1e}", flush=True)
  for _ in range(repetitions):
    for choice, seconds in times.items():
      contender = built[choice]
      assert contender is not None
      seconds.append(contender.seconds())
  return {choice: statistics.median(seconds) for choice, seconds in times.items()}


def tune(kernel: str, shape: Shape, device: config.Device, repetitions: int) -> dict[str, Any]:
  """The entry of one shape."""
  copies, calls = rotation(shape)
  inputs = [shape.arrays(seed) for seed in range(copies)]
  want = reference(*inputs[0])
  run = functools.partial(
    sweep,
    inputs=inputs,
    calls=calls,
    want=want,
    repetitions=repetitions,
    logits=kernel == "decode_logits",
  )
  times = run(candidates(shape, device))
  for choice in sorted(times, key=times.__getitem__)[:2]:
    cuts = [1, *(max(1, device.cores * quarters // 4) for quarters in PROGRAMS)]
    more = [Config(choice.tile, cut, choice.warps, choice.stages) for cut in cuts]
    times |= run([choice for choice in more if choice not in times])
  ranking = sorted(times, key=times.__getitem__)
  print(f"  {shape.name}: {shape.kv_bytes() / 2**20:.0f} MiB")
  for choice in ranking[:6]:
    rate = shape.kv_bytes() / times[choice] / 1e12
    print(f"    {times[choice] * 1e6:8.1f} µs {rate:5.2f} TB/s  {choice}", flush=True)
  # Of those as good as the best, the finest cut: it is the one that balances ragged rows. Caches
  # that evict hold rows of one size, their budget: there it is the fastest.
  slack = 1.0 if kernel == "decode_logits" else 1.01
  good = [choice for choice in ranking if times[choice] <= slack * times[ranking[0]]]
  best = max(good, key=lambda choice: choice.programs)
  return {
    "shape": shape.name,
    "us": round(times[best] * 1e6, 2),
    "bucket": config.bucket(
      rows=shape.batch * shape.kv_heads,
      groups=shape.groups,
      slots=shape.slots,
      head_dim=shape.head_dim,
      itemsize=jax.numpy.dtype(shape.dtype).itemsize,
    ),
    "config": {
      "tile": best.tile,
      "programs": best.programs,
      "warps": best.warps,
      "stages": best.stages,
    },
  }


def write(path: pathlib.Path, entry: dict[str, Any]) -> None:
  """Adds an entry to a file of measurements, in place of an earlier one of the same bucket."""
  entries = json.loads(path.read_text())["entries"] if path.is_file() else []
  entries = [other for other in entries if other["bucket"] != entry["bucket"]] + [entry]
  with common.written_aside(path) as aside:
    aside.write_text(json.dumps({**environment(), "entries": entries}, indent=1) + "\n")


def main(args: Args) -> int:
  if jax.default_backend() != "gpu":
    raise ValueError(f"found backend {jax.default_backend()}, expected a GPU to tune for")
  device = config.device(jax.devices()[0].device_kind)
  known = KERNELS[args.kernel]
  shapes = [shape for shape in known if any(text in shape.name for text in args.only or ("",))]
  if not shapes:
    raise ValueError(
      f"--only: found {' '.join(args.only)}, in no shape's name, expected a part of one of "
      f"{', '.join(shape.name for shape in known)}"
    )
  path = args.out / device.name / f"{args.kernel}.json"
  for shape in shapes:
    if args.kernel == "prr":
      entry = prr.profile(shape, args.repetitions)
    else:
      entry = tune(args.kernel, shape, device, args.repetitions)
    if not args.dry_run:
      write(path, entry)
  return 0


if __name__ == "__main__":
  common.run(main, Args)
