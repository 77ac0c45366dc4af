"""List the methods that fit a model, a context and a device: memory, time, quality.

    kvjax advise --model Llama-3.1-8B --length 131072 --device h100
    kvjax advise --model run/checkpoint --length 32768 --batch 8 --memory 24 \\
        --bandwidth 0.9 --budgets 1024 4096 --rows run

Nothing runs and no weights are read. Bytes come from the shapes of the caches and from a traced
step, milliseconds from bytes and launches (`kvjax.programs.step_time`, launches as on an H200),
quality from stored rows of evaluations. These may be of another model: each line names it.
"""

import dataclasses
import pathlib
from typing import Annotated

import jax.numpy as jnp
import tyro

import kvjax
from kvjax.kernels.common import devices
from kvjax.kernels.common.devices import Device
from kvjax.models.decode.step_bytes import StepBytes, step_bytes, weight_bytes
from kvjax.models.nn.config import ModelConfig
from kvjax.programs import common, console, installed, shapes, step_time
from kvjax.programs.evals import plan
from kvjax.programs.evals.nearest import Kept, Rows
from kvjax.runtime import memory

# A wheel has the rows of one run beside the programs, a checkout the results of all.
_WITH = installed.FOLDER if (installed.FOLDER / "results").is_dir() else installed.FOLDER.parent
ROWS = _WITH / "results" / "nvidia-h200" / "real"
HEAD = (
  *("method", "budget", "GB device", "GB host", "GB a step", "ms a token"),
  *("score", "95 % interval", "n", "of full", "nearest rows", "risk"),
)

# Where the bandwidth of a device is from (`Device.source`), in words.
NOMINAL = f"{devices.REACHED:g} of the nominal bandwidth"
READS = {"measured": "a measured read", "driver": NOMINAL, "name": NOMINAL, "given": "as given"}


@dataclasses.dataclass(frozen=True)
class Args:
  """Lists the methods that fit a device, fastest first: memory, time a token, quality, risk."""

  model: Annotated[str, tyro.conf.arg(metavar="NAME|FOLDER")] = "Llama-3.1-8B"
  """A shape by name (kvjax.models.nn.presets), a converted checkpoint, or a Hugging Face folder."""
  length: int = 131072
  """Tokens of the context, prompt and answer together."""
  batch: int = 1
  """Rows that decode together."""
  device: Annotated[str, tyro.conf.arg(metavar="NAME")] = "h200"
  """The device, by a part of its name: one that was measured, or h100-pcie, h100-nvl, a100 …"""
  memory: Annotated[float | None, common.optional("GB")] = None
  """Memory, 10⁹ bytes, of which a twentieth is left free; by default the device's."""
  budgets: Annotated[tuple[str, ...], tyro.conf.arg(metavar="N|SHARE ...")] = ("1024", "4096")
  """Tokens that a method keeps or reads, or shares of the length."""
  methods: Annotated[tuple[str, ...], common.optional("NAME ...")] = ()
  """Methods, as `evaluate` takes them; by default all registered ones."""
  bandwidth: Annotated[float | None, common.optional("TB/S")] = None
  """Bandwidth of a streaming read of the device's memory; by default the device's own."""
  rows: Annotated[pathlib.Path | None, common.optional("FOLDER")] = None
  """Results of `evaluate`; by default those of Qwen2.5-Coder-1.5B-Instruct on an H200."""
  tasks: Annotated[tuple[str, ...], common.optional("NAME ...")] = ()
  """Tasks whose scores count; by default all of the folder's except given texts."""


@dataclasses.dataclass(frozen=True)
class Advice:
  """A method with a budget, on one device.

  Attributes:
    name, budget: as the command line names it; no budget where the method has none.
    method: the instance.
    device, host: bytes of weights and caches on the device, of caches on the host.
    moved: what a step moves.
    seconds: of a step, at most where `moved.bound`; a token of each row.
    least: seconds of a step whose retrievals are shared where that is possible, and whose guesses
      hit.
    kept: the nearest rows of evaluations, if there are any.
    risk: what the method does that the full cache does not, in words.
    fits: whether weights and caches leave a twentieth of the device's memory.
  """

  name: str
  budget: int | None
  method: kvjax.Method
  device: int
  host: int
  moved: StepBytes
  seconds: float
  least: float
  kept: Kept | None
  risk: str
  fits: bool


def advise(
  config: ModelConfig,
  length: int,
  batch: int,
  room: int,
  *,
  budgets: tuple[str, ...] = ("1024", "4096"),
  methods: tuple[str, ...] = (),
  here: Device,
  rows: Rows | None = None,
) -> list[Advice]:
  """Every method with every budget: those that fit first, both parts by expected seconds.

  Args:
    config: the model's sizes; weights and caches are bfloat16.
    length: tokens of the context.
    batch: rows.
    room: bytes of the device's memory.
    budgets, methods: as `kvjax.programs.evaluate` takes them; no methods: all registered ones.
    here: the device, of which the bandwidths count.
    rows: of evaluations; None: no quality.

  Raises:
    ValueError: a method, a field or a budget is not one, or a size is below 1.
  """
  spec = config.cache_spec(batch, length, jnp.bfloat16)
  weights, _ = weight_bytes(config, jnp.bfloat16)
  made = []
  for entry in plan.entries(methods or tuple(kvjax.METHODS), budgets, length):
    method = entry.method
    moved = step_bytes(config, method, batch, length)
    caches = kvjax.plan_memory(spec, method, apart=True)
    seconds = step_time.expected(moved, method.traits.by_layer, here)
    made.append(
      Advice(
        name=entry.label,
        budget=entry.budget,
        method=method,
        device=weights + caches.device,
        host=caches.host,
        moved=moved,
        seconds=seconds,
        least=step_time.least(moved, method.traits.by_layer, here),
        kept=rows.nearest(entry.label, length, entry.budget) if rows else None,
        risk=risk(method, moved, caches, length),
        fits=caches.device <= left_for_caches(config, room),
      )
    )
  return sorted(made, key=lambda x: (not x.fits, x.seconds))


def left_for_caches(config: ModelConfig, room: int) -> int:
  """Bytes of a device of `room` bytes that weights leave, less a twentieth."""
  return int(room * (1 - memory.SPARE)) - weight_bytes(config, jnp.bfloat16)[0]


def refused(found: list[Advice], config: ModelConfig, length: int, batch: int, room: int) -> str:
  """Methods that do not fit, a line for each method at its least budget, with what would."""
  spec, left = config.cache_spec(batch, length, jnp.bfloat16), left_for_caches(config, room)
  least: dict[str, Advice] = {}
  for x in sorted(found, key=lambda x: x.budget or 0):
    if not x.fits:
      least.setdefault(x.name, x)
  if left <= 0:
    return "  The weights alone do not fit: take more devices, or a smaller model."
  lines = []
  for x in least.values():
    budget = "" if x.budget is None else f" {x.budget:,}"
    would = memory.fitting(x.method, spec, left, apart=True)
    lines.append(f"  {x.name}{budget}: {x.device / 1e9:.2f} GB do not fit; {would}")
  return "\n".join(lines)


def risk(method: kvjax.Method, moved: StepBytes, caches: kvjax.MemoryPlan, length: int) -> str:
  """Risk of a method beside the full cache, from what it states and what a step reads."""
  unseen = any(not x.chosen and x.attended < length for x in moved.layers)
  if caches.host:
    said = ["keeps all, most on the host", "reads a part"]
  elif not method.traits.positional:
    said = ["drops tokens"]
  elif any(x.chosen for x in moved.layers):
    said = ["keeps all", "reads a part"]
  elif unseen:
    said = ["keeps all", "some layers see a window"]
  elif any(x.bound for x in moved.layers):
    said = ["keeps all", "may stop early"]
  else:
    said = ["keeps and reads all"]
  return ", ".join(
    [*said, *["prompt not exact"] * (not kvjax.families.forms.dense_prefill(method))]
  )


def row(x: Advice) -> list[str]:
  """A line of the table."""
  quality = ["", "", "", "", "none"]
  if x.kept is not None:
    score = x.kept.score
    interval = f"{score.low:.0%} – {score.high:.0%}"
    relative = f"{score.mean / x.kept.full:.0%}" if x.kept.full else ""
    quality = [f"{score.mean:.1%}", interval, f"{score.n:,}", relative, str(x.kept)]
  return [
    x.name,
    "–" if x.budget is None else f"{x.budget:,}",
    f"{x.device / 1e9:.2f}",
    f"{x.host / 1e9:.2f}" if x.host else "",
    f"{x.moved.device / 1e9:.2f}",
    f"{_before(x)}{x.seconds * 1e3:.2f}",
    *quality,
    x.risk,
  ]


def _before(x: Advice) -> str:
  """Text before the milliseconds: nothing, the least, or that they are the most."""
  if x.least < x.seconds:
    return f"{x.least * 1e3:.2f} – "
  return "≤ " if x.moved.bound else ""


def main(args: Args) -> None:
  common.check_numbers(args, length=1, batch=1)
  for name in ("memory", "bandwidth"):
    if (value := getattr(args, name)) is not None and not value > 0:
      raise ValueError(f"--{name}: found {value}, expected more than 0")
  here = device(args)
  config = shapes.shape(args.model)
  rows = Rows(args.rows or ROWS, args.tasks) if args.rows or ROWS.is_dir() else None
  given = {"budgets": args.budgets, "methods": args.methods, "rows": rows}
  room = int(here.memory if args.memory is None else args.memory * 1e9)
  size = args.length, args.batch, room
  with console.step(f"{args.model}: tracing a step of every method"):
    found = advise(config, *size, here=here, **given)  # type: ignore[arg-type]
  fits = [x for x in found if x.fits]
  console.heading(
    f"{args.model}, {args.length:,} tokens, batch {args.batch}, a device of {room / 1e9:g} GB: "
    f"{len(fits)} of {len(found)} fit"
  )
  if fits:
    print(console.table(HEAD, [row(x) for x in fits], left=(0, 10, 11)))
  if len(fits) < len(found):
    print(refused(found, config, *size))
  print("\n" + "\n".join(f"  {note}" for note in notes(args, here, found)))


def device(args: Args) -> Device:
  """The device that the arguments name, with the bandwidth that they give.

  Raises:
    ValueError: there is no such device.
  """
  try:
    here = devices.named(args.device)
  except ValueError as error:
    raise ValueError(f"--{error}") from None
  if args.bandwidth is None:
    return here
  return dataclasses.replace(here, read=args.bandwidth * 1e12, source="given")


def notes(args: Args, here: Device, found: list[Advice]) -> list[str]:
  """Notes for readers of the table."""
  said = [
    f"ms a token: of each row, in a compiled loop; bytes at {here.read / 1e12:.2f} TB/s, "
    f"{READS[here.source]} of {here.name}; launches as on an H200",
    "a – b: as queries share what was retrieved; ≤: at most, data decide (stops, hits, what the "
    "device has already)",
    "score: mean over the tasks of the nearest rows, which differ between methods; of full: over "
    "the full cache's on the same rows",
  ]
  if args.batch > step_time.ROWS:
    said.append(
      f"checked at batches up to {step_time.ROWS}; products of larger ones may take longer"
    )
  kept = [x.kept.length for x in found if x.kept]
  if kept and args.length > 2 * max(kept):
    said.append(f"no rows are near {args.length:,} tokens: scores are of shorter contexts")
  return said


if __name__ == "__main__":
  common.run(main, Args)
