"""how decode is cut without a table: twenty shapes drawn by a seed, against a sweep of cuts

`kvjax bench cuts --only "seed 3"` draws others.
"""

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.kernels.common import config, devices
from kvjax.kernels.common.config import Config
from kvjax.kernels.common.split_k import columns_of
from kvjax.kernels.decode.dense import decode_attention
from kvjax.programs.suites import Case, Contender, jax_contender, together
from kvjax.programs.suites.decode import reference, rotated
from kvjax.testing.decode_cases import QUICK, Shape

REPETITIONS = 15  # of some sixteen cuts the fastest by luck is not to count
SHAPES, SEED = 20, 1
STAGES = (64, 4, 3), (64, 8, 2), (32, 4, 3), (32, 4, 4)  # KiB, warps, stages
TIMES = 1, 2, 3  # programs on each multiprocessor


def cases(quick: bool, peers: bool = True, only: str = "") -> Iterator[Case]:
  """The shapes of a seed, one after another."""
  asked = re.match(r"seed (\d+)", only)
  seed = int(asked.group(1)) if asked else SEED
  for shape in QUICK[:1] if quick else drawn(seed):
    name = f"seed {seed}: {shape.name}"
    if only in name:
      yield case(name, shape, quick)


def drawn(seed: int) -> list[Shape]:
  """Shapes of 8 MiB to 2 GiB of keys and values."""
  rng, made = np.random.default_rng(seed), []
  while len(made) < SHAPES:
    batch, slots = (int(2 ** rng.uniform(0, high)) for high in (7, 7))
    heads, groups = (int(rng.choice(x)) for x in ((1, 2, 3, 4, 8, 16, 32), (1, 2, 3, 4, 5, 7, 8)))
    shape = Shape(batch, heads, groups, 1000 * slots, int(rng.choice((64, 96, 128, 128, 256))))
    if 8 << 20 <= shape.kv_bytes() <= 2 << 30:
      made.append(shape)
  return made


def case(name: str, shape: Shape, quick: bool) -> Case:
  """One shape: the heuristic's cut, and what else may be fastest."""
  inputs, calls = rotated(shape, quick)
  here, itemsize = devices.this_device(), jnp.dtype(shape.dtype).itemsize
  rows, ours = shape.batch * shape.kv_heads, ruled(shape, here)
  loops = 8 if shape.kv_bytes() < 256 << 20 else 1  # milliseconds of work, at least

  def contender(cut: Config) -> Contender:
    run = functools.partial(decode_attention, config=cut)
    label = "heuristic" if cut == ours else str(cut)
    output = (lambda s: s.o) if cut == ours else None  # the same kernel
    return jax_contender(label, run, inputs, output=output, calls=min(calls, 16), loops=loops)

  cuts = {ours: None} | dict.fromkeys(sweep(shape, here.cores, itemsize, quick))
  contenders = together(functools.partial(contender, cut) for cut in cuts)

  def figures(seconds: dict[str, float]) -> dict[str, float]:
    return {"over the fastest": seconds["heuristic"] / min(seconds.values())}

  return Case(
    name=name,
    shapes=f"{rows} rows of {shape.slots} slots, heuristic {ours}",
    bytes=shape.kv_bytes(),
    reference=lambda: reference(*inputs[0]),
    tolerance={"float32": 1e-5}.get(shape.dtype, 1e-2),
    contenders=contenders,
    subject="heuristic",
    figures=figures,
  )


def ruled(shape: Shape, here: devices.Device) -> Config:
  """The heuristic's cut of a shape on a device."""
  size = {
    "groups": shape.groups,
    "head_dim": shape.head_dim,
    "itemsize": jnp.dtype(shape.dtype).itemsize,
  }
  rows = shape.batch * shape.kv_heads
  return config.fitted(config.streaming(here, rows=rows, slots=shape.slots, **size), here, **size)


def contender_of(case: Mapping[str, Any]) -> str | None:
  """The contender that is today's cut in a kept case; None: it was not timed."""
  seed, name = re.fullmatch(r"seed (\d+): (.*)", case["case"]).groups()  # type: ignore[union-attr]
  (shape,) = (shape for shape in drawn(int(seed)) if shape.name == name)
  cut = str(ruled(shape, devices.device(case["heuristic"].card)))
  then = f"{case['shapes']} {case['remarks']}"
  return cut if cut in case else "heuristic" if cut in then else None


def sweep(shape: Shape, cores: int, itemsize: int, quick: bool) -> Iterator[Config]:
  """The cuts beside the heuristic's, and a program for each row."""
  per_slot = 2 * columns_of(shape.head_dim) * itemsize
  for (kib, warps, stages), times in itertools.product(
    STAGES[:1] if quick else STAGES, (0, *TIMES)
  ):
    tile = (kib << 10) // per_slot
    if tile >= 16 and (times or 4 * shape.batch * shape.kv_heads >= cores):
      yield Config(tile, times * cores or 1, warps, stages)
