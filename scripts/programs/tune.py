"""Measure this device and the best configurations of its kernels.

    kvjax tune                              bandwidths and decode kernels, minutes
    kvjax tune --all                        also decode that leaves logits, and PRR's speculation
    kvjax tune --model qwen                 the heads of a model, at lengths and batches that fit
    kvjax tune decode --only "B8 T32K" --dry-run

The tables are written to the user's cache folder ($KVJAX_CACHE, or ~/.cache/kvjax), where kernels
find them from the next process on. Results of the same versions of the library and of JAX are not
measured again: an interrupted run resumes. Run it after an upgrade.

Three sweeps per shape: tile, warps and stages at two programs per multiprocessor; the number of
programs for the best of them, down to one piece per row, which needs no join; the best one's tiles,
and tiles half as large, dealt out evenly whatever their rows. Every configuration
is checked against the float32 reference. Of those within 3 % of the best, the one is chosen whose
times for rows of one length and for rows of different lengths have the least product.
"""

import dataclasses
import functools
import json
import os
import pathlib
import statistics
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import kvjax
from kvjax.kernels.common import config, devices
from kvjax.kernels.common.config import Config
from kvjax.kernels.common.split_k import columns_of
from kvjax.kernels.decode.dense import decode_with_output
from kvjax.models.io import files
from kvjax.programs import common, shapes, suites
from kvjax.programs.bench import environment
from kvjax.programs.suites import Contender, exhausted, jax_contender, prr
from kvjax.programs.suites.decode import reference, rotation
from kvjax.testing.decode_cases import BOUNDED, TUNED, Shape

TABLES = ("device", "decode", "decode_logits", "prr")
SHAPES: dict[str, Any] = dict(zip(TABLES[1:], (TUNED, BOUNDED, prr.PROFILED), strict=True))
ALWAYS = ("device", "decode")
VERSIONS = ("device", "kvjax", "jax", "jaxlib")  # measurements of others are taken anew


@dataclasses.dataclass(frozen=True)
class Args:
  tables: Annotated[
    tuple[Literal[TABLES], ...],  # type: ignore[valid-type]
    tyro.conf.Positional,
    common.optional("TABLE ..."),
  ] = ()
  """Tables: device (bandwidths), decode, decode_logits, prr; by default the first two."""
  all: bool = False
  """Measure all of them."""
  model: Annotated[str | None, common.optional("MODEL")] = None
  """Tune for the heads of a model: a shape by name (kvjax.models.io.presets), a checkpoint, a
  Hugging Face folder, a .gguf file or a model of the hub (owner/name); only its config is read."""
  only: Annotated[tuple[str, ...], common.optional("TEXT ...")] = ()
  """Only shapes whose name contains one of these."""
  repetitions: Annotated[int, tyro.conf.arg(metavar="N")] = 5
  """Timings of each configuration."""
  again: bool = False
  """Measure again what the tables already have."""
  ship: bool = False
  """Write to the library's folder, for all users, instead of the user's cache folder."""
  out: Annotated[pathlib.Path | None, common.optional("FOLDER")] = None
  """Write <device>/<table>.json there, where kernels do not look."""
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
CALLS = 16  # in one program, at most: what compiles quickly
SLACK = 1.03  # what is within it of the best may be as good
LENGTHS, BATCHES = (4 << 10, 32 << 10, 128 << 10), (1, 8, 32, 128)  # of a model


# ---- what a card is


def facts(repetitions: int) -> dict[str, Any]:
  """The record of the default device: what it says of itself, and its two bandwidths."""
  here, first = devices.this_device(), jax.devices()[0]
  return {
    "cores": here.cores,
    "shared": here.shared,
    "read": _read(repetitions),
    "link": _link(first, repetitions),
    # As its name or driver says, else as much as JAX may take.
    "memory": max(here.memory, float((first.memory_stats() or {}).get("bytes_limit", 0))),
  }


def _read(repetitions: int) -> float:
  """Bytes a second of a streaming read of arrays of a GiB, in turn."""
  sized = [jnp.full(1 << 29, i, jnp.bfloat16) for i in range(2)]
  contender = suites.reading([[x] for x in sized], calls=4)
  contender.seconds()
  seconds = statistics.median(contender.seconds() for _ in range(repetitions))
  return _rounded(sized[0].nbytes / seconds)


def _link(first: jax.Device, repetitions: int) -> float:
  """Bytes a second of a copy from the host's pinned memory."""
  kinds = "device", "pinned_host"
  to, held = (jax.sharding.SingleDeviceSharding(first, memory_kind=kind) for kind in kinds)
  x = jax.block_until_ready(jax.device_put(jnp.ones(1 << 28, jnp.float32), held))
  seconds = [suites.clocked(jax.device_put, x, to)[0] for _ in range(1 + repetitions)]
  return _rounded(x.nbytes / min(seconds[1:]))


def _rounded(rate: float) -> float:
  """Three digits: what is repeatable."""
  return float(f"{rate:.3g}")


# ---- how kernels are cut there


def candidates(shape: Shape, here: devices.Device) -> list[Config]:
  """The first sweep: configurations that fit the device's shared memory."""
  per_slot = 2 * columns_of(shape.head_dim) * jnp.dtype(shape.dtype).itemsize
  made = []
  for size, warps, stages in STAGES:
    tile = size // per_slot
    if tile >= 16 and size * (stages - 1) < 0.9 * here.shared:
      made.append(Config(tile=tile, programs=2 * here.cores, warps=warps, stages=stages))
  return made


def leveled(best: Config, here: devices.Device) -> list[Config]:
  """Configurations whose programs have as many tiles each, of one row or of several."""
  return [
    dataclasses.replace(best, tile=tile, programs=times * here.cores, level=True)
    for tile in (best.tile, max(16, best.tile // 2))
    for times in (2, 3)
  ]


class Sweep:
  """Timings of configurations on the operands of one shape, which may write logits, too."""

  def __init__(self, shape: Shape, repetitions: int, logits: bool):
    copies, calls = rotation(shape)
    self._calls = min(calls, CALLS)
    self._loops = 8 if shape.kv_bytes() < 2 << 30 else 1
    self._inputs = [shape.arrays(seed) for seed in range(copies)]
    self._want = reference(*self._inputs[0])
    self._repetitions, self._logits = repetitions, logits
    self.times: dict[Config, float] = {}

  def add(self, configs: list[Config]) -> None:
    """Times those that are new, compile and are right: median seconds of a call."""
    new = [choice for choice in dict.fromkeys(configs) if choice not in self.times]
    built = suites.together(functools.partial(self._build, choice) for choice in new)
    right = {choice: made for choice, made in zip(new, built, strict=True) if made}
    for contender in right.values():
      contender.seconds()
    taken = suites.in_turn(list(right.values()), self._repetitions)
    self.times |= {choice: statistics.median(taken[str(choice)]) for choice in right}

  def ranking(self) -> list[Config]:
    """The fastest first."""
    return sorted(self.times, key=self.times.__getitem__)

  def good(self) -> list[Config]:
    """Those about as fast as the best, the fastest first."""
    ranking = self.ranking()
    return [choice for choice in ranking if self.times[choice] <= SLACK * self.times[ranking[0]]]

  def _build(self, choice: Config) -> Contender | None:
    try:
      run = functools.partial(decode_with_output, config=choice, logits=self._logits)
      how = {"calls": self._calls, "loops": self._loops}
      made = jax_contender(str(choice), run, self._inputs, output=lambda s: s[0].o, **how)
      return made if self._right(choice, made) else None
    except Exception as error:
      print(f"    {choice}: not run ({str(error).splitlines()[0][:100]})", flush=True)
      return None

  def _right(self, choice: Config, contender: Contender) -> bool:
    error = np.linalg.norm(contender.output() - self._want) / np.linalg.norm(self._want)
    right = bool(error <= 1e-2)  # NaN is not
    if not right:
      print(f"    {choice}: wrong, error {error:.1e}", flush=True)
    return right


def tune(table: str, shape: Shape, repetitions: int) -> dict[str, Any]:
  """The entry of one shape."""
  here, logits = devices.this_device(), table == "decode_logits"
  sweep = Sweep(shape, repetitions, logits)
  sweep.add(candidates(shape, here))
  for choice in sweep.ranking()[:2]:
    cuts = [1, *(max(1, here.cores * quarters // 4) for quarters in PROGRAMS)]
    sweep.add([Config(choice.tile, cut, choice.warps, choice.stages) for cut in cuts])
  best = sweep.ranking()[0]
  if shape.batch > 1 and not logits:
    sweep.add(leveled(best, here))
  # Rows of one batch differ in length wherever several requests are served; caches that evict hold
  # rows of one size, their budget.
  if shape.batch > 1 and not logits:
    ragged = Sweep(dataclasses.replace(shape, ragged=True), repetitions, logits)
    ragged.add(sweep.good())
    best = min(ragged.times, key=lambda choice: sweep.times[choice] * ragged.times[choice])
  for choice in dict.fromkeys([best, *sweep.ranking()[:3]]):
    rate = shape.kv_bytes() / sweep.times[choice] / 1e12
    print(f"    {sweep.times[choice] * 1e6:8.1f} µs {rate:5.2f} TB/s  {choice}", flush=True)
  return {
    "shape": shape.name,
    "us": round(sweep.times[best] * 1e6, 2),
    "bucket": bucket(shape),
    "config": dataclasses.asdict(best),
  }


def bucket(shape: Shape) -> dict[str, int]:
  """The bucket that a shape's measurement stands for."""
  return config.bucket(
    rows=shape.batch * shape.kv_heads,
    groups=shape.groups,
    slots=shape.slots,
    head_dim=shape.head_dim,
    itemsize=jnp.dtype(shape.dtype).itemsize,
  )


def of_model(model: str, room: float) -> list[Shape]:
  """Shapes of a model's heads, two of which fit a fifth of the memory; each bucket once."""
  c = shapes.shape(model)
  made: dict[str, Shape] = {}
  for slots in (n for n in LENGTHS if n <= c.max_context):
    for batch in BATCHES:
      shape = Shape(batch, c.kv_heads, c.heads // c.kv_heads, slots, c.head_dim)
      if 2 * shape.kv_bytes() <= room / 5:
        made.setdefault(json.dumps(bucket(shape)), shape)
  return list(made.values())


# ---- the files


def work(args: Args) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
  """Measurements that the arguments ask for: table, name of the entry, what measures it.

  Raises:
    ValueError: --only is part of no shape's name.
  """
  chosen = TABLES if args.all else args.tables or ALWAYS
  known = {
    name: of_model(args.model, devices.this_device().memory)
    if args.model and name != "prr"
    else SHAPES[name]
    for name in chosen
    if name in SHAPES
  }
  wanted = args.only or ("",)
  listed = [
    (name, x) for name, shapes in known.items() for x in shapes if any(t in x.name for t in wanted)
  ]
  if not listed and known:
    names = ", ".join(dict.fromkeys(x.name for shapes in known.values() for x in shapes))
    raise ValueError(
      f"--only: found {' '.join(args.only)}, in no shape's name, expected a part of one of {names}"
    )
  if "device" in chosen:
    yield "device", "bandwidths", functools.partial(facts, args.repetitions)
  for name, shape in listed:
    make = prr.profile if name == "prr" else functools.partial(tune, name)
    yield name, shape.name, functools.partial(make, shape, args.repetitions)


def held(path: pathlib.Path) -> dict[str, Any]:
  """Content of a table, if it was measured with the versions of now; else nothing."""
  found = files.read_json(path, "a table of kvjax tune") if path.is_file() else {}
  now = versions()
  return found if all(found.get(key) == now.get(key) for key in VERSIONS) else {}


def write(path: pathlib.Path, made: dict[str, Any]) -> None:
  """Writes a record of a device, or adds an entry to a table in place of one of its bucket."""
  if "bucket" in made:
    entries = held(path).get("entries", [])
    made = {"entries": [x for x in entries if x["bucket"] != made["bucket"]] + [made]}
  common.write(path, {**versions(), **made})


def versions() -> dict[str, str]:
  """Versions and command line of this run."""
  return {**environment(), "kvjax": kvjax.__version__}


def main(args: Args) -> int:
  common.check_numbers(args, repetitions=1)
  if jax.default_backend() != "gpu":
    raise ValueError(f"found backend {jax.default_backend()}, expected a GPU to tune for")
  user, shipped = devices.folders()
  folder = (args.out or (shipped if args.ship else user)) / devices.this_device().name
  listed = list(work(args))
  for i, (table, name, measure) in enumerate(listed):
    path = folder / f"{table}.json"
    there = held(path)
    print(f"{i + 1} of {len(listed)}  {table}: {name}", flush=True)
    names = {entry["shape"] for entry in there.get("entries", ())}
    if not args.again and ((table == "device" and there) or name in names):
      print("    there already", flush=True)
      continue
    try:
      made = measure()
    except jax.errors.JaxRuntimeError as error:
      if not exhausted(error):
        raise
      print("    not run, takes more than the device's memory", flush=True)
      continue
    if not args.dry_run:
      write(path, made)
    common.drop_programs()
  if not args.dry_run:
    print(f"written to {folder}" + (", where kernels look" if args.out is None else ""))
  return 0


if __name__ == "__main__":
  common.run(main, Args)
