"""Recommend methods for a model, a context and a device, by memory, time and quality.

    kvjax advise --model Llama-3.1-8B --length 131072 --device h100
    kvjax advise --model Qwen/Qwen3-8B --length 32768 --batch 8 --device rtx-4090
    kvjax advise --model Qwen3-8B --methods ltri infllm --budgets 1024 4096 --memory 24
    kvjax advise --model FOLDER --length 32768 --rows run --all
    kvjax advise --model Llama-3.1-70B --devices 4 --hosts 2 --device h100

With --devices and --hosts, the model is split over all of them: what fits is said of each device.

Nothing runs and no weights are read. Bytes come from the shapes of the caches and from a traced
step, milliseconds from bytes and launches (`kvjax.programs.step_time`, launches as on an H200),
quality from stored evaluation rows, possibly of another model, which the notes name.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
import shlex
import sys
import textwrap
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import tyro
from jax.sharding import AbstractMesh

import kvjax
from kvjax.kernels.common import devices
from kvjax.kernels.common.devices import Device
from kvjax.models.io.presets import PRESETS
from kvjax.models.nn.config import ModelConfig
from kvjax.programs import common, console, installed, shapes, step_time
from kvjax.programs.evals import families
from kvjax.programs.evals.advice import SAME, SHARES, Advice, Case, considered, recommended
from kvjax.programs.evals.nearest import Kept, Rows
from kvjax.programs.evals.stats import estimate
from kvjax.runtime import memory, sharding

# A wheel has the rows of one run beside the programs, a checkout the results of all.
_WITH = installed.FOLDER if (installed.FOLDER / "results").is_dir() else installed.FOLDER.parent
ROWS = _WITH / "results" / "nvidia-h200" / "real"
WIDTH = 80
MOST = 64  # devices that are tried

# Where the bandwidth of a device is from (`Device.source`), in words.
NOMINAL = f"{devices.REACHED:g} of the nominal bandwidth"
READS = {"measured": "measured", "driver": NOMINAL, "name": NOMINAL, "given": "as given"}


@dataclasses.dataclass(frozen=True)
class Args:
  model: Annotated[str, tyro.conf.arg(metavar="MODEL")] = "Llama-3.1-8B"
  """A shape by name (kvjax.models.io.presets), a checkpoint, a Hugging Face folder, a .gguf file or
  a model of the hub (owner/name), of which only the config is fetched."""
  length: int = 131072
  """Tokens of the context, prompt and answer together."""
  batch: int = 1
  """Rows that decode together."""
  device: Annotated[str | None, common.optional("NAME")] = None
  """The device, by a part of its name: h100, h200, a100, l40s, l4, a10, rtx-4090, rtx-3090, or one
  that `kvjax tune` measured; by default the GPU of this machine, else an H200."""
  devices: int = 1
  """Such devices on each host."""
  hosts: int = 1
  """Hosts."""
  mesh: Annotated[tuple[int, int] | None, common.optional("HEADS SLOTS")] = None
  """Devices to split key/value heads over, and to split slots over; by default heads, and slots
  where there are more devices than heads."""
  memory: Annotated[float | None, common.optional("GB")] = None
  """Memory, 10⁹ bytes, of which a twentieth is left free; by default the device's."""
  bandwidth: Annotated[float | None, common.optional("TB/S")] = None
  """Bandwidth of a streaming read of the device's memory; by default the device's own."""
  methods: Annotated[tuple[str, ...], common.optional("NAME ...")] = ()
  """Methods to list, as `evaluate` takes them; by default those that have scores are compared."""
  budgets: Annotated[tuple[str, ...], common.optional("N|SHARE ...")] = ()
  """Tokens that a method keeps or reads, or shares of the length; by default those with scores."""
  rows: Annotated[pathlib.Path | None, common.optional("FOLDER")] = None
  """Results of `evaluate`; by default those of Qwen2.5-Coder-1.5B-Instruct on an H200."""
  tasks: Annotated[tuple[str, ...], common.optional("NAME ...")] = ()
  """Tasks whose scores count; by default all of the folder's except given texts."""
  all: bool = False
  """List every method that has scores, which takes longer."""
  json: bool = False
  """Print one JSON object, in bytes and seconds."""


def main(args: Args) -> None:
  common.check_numbers(args, length=1, batch=1, devices=1, hosts=1, mesh=1)
  for name in ("memory", "bandwidth"):
    if (value := getattr(args, name)) is not None and not 0 < value < math.inf:
      raise ValueError(f"--{name}: found {value}, expected a number above 0")
  config = shapes.shape(args.model)
  here, over = device(args), spread(args, config)
  try:
    case = Case(config, args.length, args.batch, here, over, args.hosts)
  except (ValueError, NotImplementedError) as error:
    option = "mesh" if args.mesh else "devices" + " × --hosts" * (args.hosts > 1)
    raise type(error)(f"--{option}{str(error).removeprefix('mesh')}") from None
  full = Advice(case, "full", None, kvjax.Full())
  rows = Rows(args.rows or ROWS, args.tasks)
  found = considered(case, rows, args.methods, args.budgets)  # refuses before a word is said
  found = found if case.fits else [full]
  if not args.json:
    print(beginning(args.model, case, full), flush=True)
  with console.step("tracing steps", sys.stderr, fleeting=True):
    refused = [x for x in found if x.refused]
    found = [x for x in found if not x.refused]
    chosen = recommended(found)
    shown = [found[0], *chosen.values()]
    if args.all or args.methods:
      shown = sorted(found, key=lambda x: (x.over, x.over or x.seconds))
    then = commands(args, list(chosen.values())) if chosen else []
    if args.json:
      asked = {"model": args.model, "devices": args.devices, "hosts": args.hosts}
      numbers = described(case, shown, chosen)
      no = {x.name: x.refused for x in refused}
      said = json.dumps({**asked, **numbers, "refused": no, "commands": then})
    else:
      said = report(shown, rows, ending(found[0], chosen), then, refused) if case.fits else ""
  print(said)


def spread(args: Args, config: ModelConfig) -> AbstractMesh | None:
  """The mesh of all devices; None: one.

  Raises:
    ValueError: --mesh takes more or fewer, or the model cannot be split over so many.
  """
  count = args.devices * args.hosts
  if args.mesh is not None and math.prod(args.mesh) != count:
    found = " × ".join(map(str, args.mesh))
    raise ValueError(f"--mesh: found {found}, expected --devices × --hosts = {count} devices")
  return mesh(config, count, args.mesh) if count > 1 else None


def mesh(config: ModelConfig, count: int, sizes: tuple[int, int] | None = None) -> AbstractMesh:
  """A mesh of so many devices: heads are split over as many of them as divide them evenly."""
  heads = math.gcd(count, config.kv_heads)
  return AbstractMesh(sizes or (heads, count // heads), (sharding.HEADS, sharding.SLOTS))


def device(args: Args) -> Device:
  """The device that the arguments name, with the memory and the bandwidth that they give.

  Raises:
    ValueError: there is no such device.
  """
  if args.device is None and jax.default_backend() == "gpu":
    here = devices.this_device()
  else:
    try:
      here = devices.named(args.device or "h200")
    except ValueError as error:
      raise ValueError(f"--{error}") from None
  if args.memory is not None:
    here = dataclasses.replace(here, memory=args.memory * 1e9)
  if args.bandwidth is not None:
    here = dataclasses.replace(here, read=args.bandwidth * 1e12, source="given")
  return here


# ---- in words


def beginning(model: str, case: Case, full: Advice) -> str:
  """The case, and whether weights and the full cache fit, or by how much they do not."""
  title = f"{model}, {case.length:,} tokens, batch {case.batch}"
  here = f"{case.here.name}: {gb(case.here.memory)}, {case.here.read / 1e12:.2f} TB/s"
  each, one = "", "A device"
  if case.mesh is not None:
    heads, slots = case.mesh.shape.values()
    here = f"{case.mesh.size} × {here}; heads split over {heads}, slots over {slots}"
    each, one = " a device", "Devices"
  caches, usable = gb(full.caches.device), f"the {gb(case.usable)} that may be filled"
  what = f"{gb(case.weights)} of weights" + f" and {caches} of full cache" * case.fits + each
  over = (full.device if case.fits else case.weights) - case.usable
  if over > 0:
    them = "both" if case.fits else f"them and {caches} of full cache"
    whole = gb(full.device / (1 - memory.SPARE))
    said = f"{what} do not fit: {gb(over)} more than {usable}. {one} of {whole} would hold {them}."
    if count := enough(case):
      said += f" So would {count} of these."
  else:
    said = f"{what} fit: {gb(-over)} are left of {usable}."
  return f"{title}\n{here}\n\n{filled(said)}"


def enough(case: Case) -> int | None:
  """The least of twice, four times, … as many devices that hold weights and full cache, if any do.

  Heads are split first, as by default.
  """
  count = 1 if case.mesh is None else case.mesh.size
  while (count := 2 * count) <= MOST:
    with contextlib.suppress(ValueError, NotImplementedError):  # it does not split that way
      made = dataclasses.replace(case, mesh=mesh(case.config, count))
      if not Advice(made, "full", None, kvjax.Full()).over:
        return count
  return None


def report(
  shown: Sequence[Advice],
  rows: Rows,
  advice: str,
  then: Sequence[str],
  refused: Sequence[Advice] = (),
) -> str:
  """The table, what is recommended, the next commands, and notes."""
  case = shown[0].case
  model = " (MODEL: its checkpoint, folder, .gguf file or owner/name of the hub)"
  told = [f"Next{model * ('MODEL' in then[0])}:"] if then else []
  told += [filled(x, "    ", " \\") for x in then]
  said = notes(case, shown, rows, refused)
  parts = table(shown, rows.lengths(case.length)), advice, "\n".join(told), said
  return "\n" + "\n\n".join(filter(None, parts))


def table(shown: Sequence[Advice], lengths: Sequence[int]) -> str:
  """Methods with memory, time, and the share of the full cache's score at each length."""
  hosted = any(x.caches.host for x in shown)
  head = ("method", "budget", "GB", *["on host"] * hosted, "ms a token", *map(tokens, lengths))
  rows = []
  for x in shown:
    budget = "–" if x.budget is None else f"{x.budget:,}"
    sizes = [f"{size / 1e9:.1f}" for size in (x.device, *[x.caches.host] * hosted)]
    rows.append([x.name, budget, *sizes, time(x), *(score(x, kept) for kept in x.scores)])
  return console.table(head, rows)


def gb(size: float) -> str:
  return f"{size / 1e9:.1f} GB"


def tokens(length: int) -> str:
  return f"{length >> 10}K" if length % 1024 == 0 else f"{length:,}"


def time(x: Advice) -> str:
  """Milliseconds of a step: a number, the least and the most, or the most."""
  if x.over:
    return f"{gb(x.over)} over"
  if x.least < x.seconds:
    return f"{x.least * 1e3:.1f} – {x.seconds * 1e3:.1f}"
  return f"{'≤ ' * x.moved.bound}{x.seconds * 1e3:.1f}"


def score(x: Advice, kept: Kept | None) -> str:
  """The share of the full cache's score, with a mark if rows had another share as budget."""
  if kept is None or kept.of_full is None:
    return "–"
  return f"{kept.of_full:.0%}{'*' * (not 1 / SAME <= kept.share / x.share <= SAME)}"


def ending(full: Advice, chosen: dict[str, Advice]) -> str:
  """The recommended methods, or what else to do."""
  keeps = f"keeps {SHARES[-1]:.0%} of the full cache's score"
  if chosen:
    said = (
      f"{x.name}: the {why} tokens. Risk: {families.of(x.name).risk}." for why, x in chosen.items()
    )
  elif full.over:
    said = [f"No method that {keeps} fits. --all says what others lack."]
  else:
    said = [f"Take the full cache: no method that {keeps} is a tenth faster or smaller."]
  return "\n".join(map(filled, said))


def filled(text: str, begin: str = "  ", end: str = "") -> str:
  """The text in lines of at most `WIDTH`, which after the first have a `begin`."""
  width, how = WIDTH - len(end), {"break_on_hyphens": False, "break_long_words": False}
  return f"{end}\n".join(textwrap.wrap(text, width, subsequent_indent=begin, **how))


def commands(args: Args, chosen: Sequence[Advice]) -> list[str]:
  """Commands that try the first of some methods, measure all on the model, and use the scores."""
  model = shlex.quote(args.model)
  loaded = "MODEL" if args.model in PRESETS else model
  names = [shlex.quote(x.name) for x in chosen]
  budgets = [str(x.budget) for x in chosen if x.budget]
  one = f" --budget {chosen[0].budget}" if chosen[0].budget else ""
  many = " ".join(["", "--budgets", *dict.fromkeys(budgets)]) if budgets else ""
  length, over, here = f"--length {args.length}", "", ""
  if (made := chosen[0].case.mesh) is not None:
    over = " --mesh {heads} {slots}".format(**made.shape)
    here = f" --devices {args.devices}" + f" --hosts {args.hosts}" * (args.hosts > 1) + over
    if args.hosts > 1:
      over += f" --coordinator HOST:PORT --processes {args.hosts} --process NUMBER"
  return [
    f"kvjax generate QUESTION --context-file FILE --checkpoint {loaded} --method {names[0]}{one}"
    f"{over}",
    f"kvjax evaluate --checkpoint {loaded} --lengths {args.length} --methods {' '.join(names)}"
    f"{many} --out run{over}",
    f"kvjax advise --model {model} {length} --rows run{here}",
  ]


def notes(case: Case, shown: Sequence[Advice], rows: Rows, refused: Sequence[Advice] = ()) -> str:
  """Notes for readers of the table."""
  lengths = rows.lengths(case.length)
  marked = any(score(x, kept).endswith("*") for x in shown for kept in x.scores)
  said = [
    f"{', '.join(map(tokens, lengths))}: score of {rows.model} at that length over the full "
    f"cache's on the same prompts{'; *: with another share of the length as budget' * marked}.",
    f"ms a token: of each row, in a compiled loop; bandwidth {READS[case.here.source]}, launches "
    "as on an H200. Data decide where it is a range, or ≤.",
  ]
  if case.mesh is not None:
    said.append(
      "GB and ms are of each device; all-reduces, of which every layer has two, come on top."
    )
  if refused:
    names = ", ".join(dict.fromkeys(x.name for x in refused))
    said.append(f"Not split over these devices: {names} (--json says why).")
  if case.length not in lengths:
    said.append(f"No scores are of {case.length:,} tokens.")
  if case.batch > step_time.ROWS:
    said.append(f"Checked at batches up to {step_time.ROWS}; larger ones may take longer.")
  if case.length > case.config.max_context:
    said.append(f"The model was made for {case.config.max_context:,} tokens.")
  return "\n".join(map(filled, said))


def described(case: Case, shown: Sequence[Advice], chosen: dict[str, Advice]) -> dict[str, Any]:
  """The case and the table with all numbers, in bytes and seconds."""
  methods = []
  for x in shown:
    why = [reason for reason, best in chosen.items() if best is x]
    times = {} if x.over else {"seconds": x.seconds, "least": x.least, "moved": x.moved.device}
    scores = [
      {"length": kept.length, "budget": kept.budget, "of_full": kept.of_full}
      | dataclasses.asdict(estimate(kept.values))
      for kept in x.scores
      if kept
    ]
    sizes = {"device": x.device, "host": x.caches.host, "over": x.over}
    named = {"method": x.name, "budget": x.budget, "recommended": why}
    methods.append(named | sizes | times | {"scores": scores, "risk": families.of(x.name).risk})
  asked = {"length": case.length, "batch": case.batch, "device": dataclasses.asdict(case.here)}
  asked |= {"mesh": None if case.mesh is None else dict(case.mesh.shape)}
  return asked | {"weights": case.weights, "usable": case.usable, "methods": methods}


if __name__ == "__main__":
  common.run(main, Args)
