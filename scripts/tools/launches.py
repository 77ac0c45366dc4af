"""For developers: what a layer's decode step launches on a GPU, and the time of each launch.

    python -m scripts.tools.launches                        every layer of the list
    python -m scripts.tools.launches --only CIS --out scripts/results
    python -m scripts.tools.launches --of FOLDER   profiles of `kvjax speed --called --trace FOLDER`

A step is traced by the profiler, launch by launch, without CUDA graphs: times are those of the
kernels alone, not of what passes between them. Each step begins from the same caches, which other
arrays have driven out of the L2 cache. In the table stands the median of STEPS steps.
"""

import dataclasses
import functools
import os
import pathlib
import statistics
import tempfile
from collections.abc import Iterable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro

import kvjax
from kvjax.kernels.common.devices import slug
from kvjax.programs import bench, common, console
from scripts.benches._layer import holding, projected, step_of

STEPS = 9
SHOWN = 25  # names of a profile
FLUSH = 128 << 20  # bytes, more than an L2 cache holds
LAYERS = 32  # of which the first is traced
HEADS = {"8x4": (8, 4, 128), "2x6": (2, 6, 128), "32x1": (32, 1, 128), "3x2": (3, 2, 16)}
NO_GRAPHS = "--xla_gpu_enable_command_buffer="  # whose launches are one to the profiler


@dataclasses.dataclass(frozen=True)
class Args:
  only: str = ""
  """Only layers whose name contains it."""
  of: Annotated[pathlib.Path | None, common.optional("FOLDER")] = None
  """Account for the profiles in a folder instead: how long, how busy, of which launches."""
  out: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FOLDER")] = None
  """Write <device>/launches.json there, such as scripts/results."""


@dataclasses.dataclass(frozen=True)
class Layer:
  """One layer of one method.

  Attributes:
    method: its method.
    heads: KV heads × query heads of each, of `HEADS`.
    batch, tokens: rows, and what each has seen.
    full: the cache has no room left, so that the token takes the place of another.
    before: steps taken before, so that there is something to share.
  """

  method: kvjax.Method
  heads: str
  batch: int
  tokens: int
  full: bool = False
  before: int = 0

  @property
  def spec(self) -> kvjax.CacheSpec:
    kv_heads, groups, head_dim = HEADS[self.heads]
    dtype = jnp.float32 if head_dim < 64 else jnp.bfloat16
    capacity = self.tokens + (0 if self.full else 1 + self.before)
    return kvjax.CacheSpec(self.batch, capacity, kv_heads, groups, head_dim, LAYERS, dtype)


def layers() -> dict[str, Layer]:
  """The list by name. Of CIS, all heads share what the step before retrieved, or none does."""
  quest, infllm = kvjax.Quest(1024, dense_layers=0), kvjax.InfLLMv2(dense_below=0)
  sharing = kvjax.settings.example(kvjax.CIS, 1024)
  alone = dataclasses.replace(sharing, tau=1.0)
  paper, many = (kvjax.settings.example(kvjax.CIS, budget) for budget in (512, 4096))
  return {
    "Full, B1 T32K 8x4": Layer(kvjax.Full(), "8x4", 1, 32 << 10),
    "Quest, B1 T32K 8x4": Layer(quest, "8x4", 1, 32 << 10),
    "Quest, B1 T128K 8x4": Layer(quest, "8x4", 1, 128 << 10),
    "InfLLM-v2, B1 T32K 8x4": Layer(infllm, "8x4", 1, 32 << 10),
    "InfLLM-v2, B1 T128K 8x4": Layer(infllm, "8x4", 1, 128 << 10),
    "PRR over Quest, B1 T32K 8x4": Layer(kvjax.PRR(quest, budget=1.25), "8x4", 1, 32 << 10),
    "PRR over Quest, B1 T128K 8x4": Layer(kvjax.PRR(quest, budget=1.25), "8x4", 1, 128 << 10),
    "LongFlow, B16 S3200 8x4": Layer(kvjax.LongFlow(3200), "8x4", 16, 3200, full=True),
    "LongFlow, B128 S3200 8x4": Layer(kvjax.LongFlow(3200), "8x4", 128, 3200, full=True),
    "CIS sharing, B8 T4K 32x1": Layer(paper, "32x1", 8, 4 << 10, before=2),
    "CIS sharing, B8 T8K 2x6": Layer(sharing, "2x6", 8, 8 << 10, before=2),
    "CIS retrieving, B8 T8K 2x6": Layer(alone, "2x6", 8, 8 << 10),
    "CIS retrieving, B8 T32K 2x6": Layer(alone, "2x6", 8, 32 << 10),
    "CIS sharing, B8 T32K 2x6, 4,096 tokens": Layer(many, "2x6", 8, 32 << 10, before=2),
    "CIS retrieving, B8 T32K 2x6, 4,096 tokens": Layer(
      dataclasses.replace(many, tau=1.0), "2x6", 8, 32 << 10
    ),
  }


@functools.partial(jax.jit, static_argnums=(0, 1))
def start(layer: Layer, impl: str) -> tuple[Any, tuple[Any, Any]]:
  """A cache of random tokens after the steps that come before, and what enters it next."""
  spec = layer.spec
  inputs = projected(spec)
  cache = holding(layer.method, spec, jnp.int32(layer.tokens))
  keys = jax.random.normal(jax.random.key(1), cache.slots["k"].shape, jnp.float32)
  cache = cache.put(slots={"k": keys.astype(spec.dtype)})
  for _ in range(layer.before):
    cache, _ = step_of(layer.method, impl, LAYERS)(cache, *inputs)
  return cache, inputs


def launches(layer: Layer, impl: str = "auto") -> list[tuple[str, float]]:
  """Names of a step's launches, and their median µs; copies and what XLA makes are among them."""
  cache, inputs = start(layer, impl)
  step = jax.jit(step_of(layer.method, impl, LAYERS), donate_argnums=0)
  flush = jax.jit(lambda x: x + 1, donate_argnums=0)
  rows, others, found = cache.rows, jnp.zeros(FLUSH // 4), []
  with tempfile.TemporaryDirectory() as folder:
    for i in range(STEPS + 1):
      others = flush(others)
      cache = cache.put(rows=jax.tree.map(jnp.copy, rows))
      jax.block_until_ready((others, cache))
      with jax.profiler.trace(folder):
        cache, _ = jax.block_until_ready(step(cache, *inputs))
      (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
      if i:  # the first one compiles
        found.append(listed(jax.profiler.ProfileData.from_file(str(file)).planes))
      file.unlink()
  return medians(found)


def timeline(planes: Iterable[Any]) -> list[tuple[float, str, float]]:
  """Launches on the GPU's streams in order of their beginning: when, in ns, names and µs."""
  return sorted(
    (event.start_ns, event.name, event.duration_ns / 1e3)
    for plane in planes
    if plane.name.startswith("/device:GPU")
    for line in plane.lines
    if line.name.startswith("Stream")
    for event in line.events
  )


def listed(planes: Iterable[Any]) -> list[tuple[str, float]]:
  """Launches on the GPU's streams, in order of their beginning: names and µs."""
  return [(name, time) for _, name, time in timeline(planes)]


def accounted(planes: Iterable[Any]) -> tuple[float, float, dict[str, tuple[int, float]]]:
  """Milliseconds from the first launch to the end of the last, those of them in which launches ran,
  and of each name, most time first, launches and µs.
  """
  events, names = timeline(planes), dict[str, tuple[int, float]]()
  if not events:
    raise ValueError("the profile: found no launch on a GPU, expected some")
  for _, name, time in events:
    count, spent = names.get(name, (0, 0.0))
    names[name] = count + 1, spent + time
  end = max(start + 1e3 * time for start, _, time in events)
  busy = sum(time for _, _, time in events) / 1e3
  ordered = sorted(names.items(), key=lambda item: -item[1][1])
  return (end - events[0][0]) / 1e6, busy, dict(ordered)


def medians(found: list[list[tuple[str, float]]]) -> list[tuple[str, float]]:
  """The median time of each launch over steps that launch the same."""
  names = [name for name, _ in found[0]]
  if not names:
    raise ValueError("the profiler: found no launch on a GPU, expected some; is there a GPU?")
  alike = [step for step in found if [name for name, _ in step] == names]
  return [(name, statistics.median(step[i][1] for step in alike)) for i, name in enumerate(names)]


def account(folder: pathlib.Path) -> None:
  """Prints where the time of each profile in a folder went."""
  for file in sorted(folder.rglob("*.xplane.pb")):
    whole, busy, names = accounted(jax.profiler.ProfileData.from_file(str(file)).planes)
    title, count = file.relative_to(folder).parts[0], sum(n for n, _ in names.values())
    print(f"\n{title}: {whole:.2f} ms, {busy:.2f} of them busy, {count:,} launches")
    rows = [[name, str(n), f"{time:,.0f}"] for name, (n, time) in [*names.items()][:SHOWN]]
    print(console.table(("launch", "times", "µs"), rows), flush=True)


def main(args: Args) -> None:
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {NO_GRAPHS}"
  if args.of is not None:
    account(args.of)
    return
  about, found = bench.environment(), {}
  for name, layer in layers().items():
    if args.only not in name:
      continue
    found[name] = launches(layer)
    rows = [[launch, f"{time:.1f}"] for launch, time in found[name]]
    total = sum(time for _, time in found[name])
    print(f"\n{name}: {layer.method!r}")
    print(console.table(("launch", "µs"), [*rows, ["all", f"{total:.1f}"]]), flush=True)
    if args.out is not None:
      path = args.out / slug(about["device"]) / "launches.json"
      common.write(path, {"about": about, "layers": found})


if __name__ == "__main__":
  common.run(main, Args)
