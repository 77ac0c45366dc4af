"""How a kernel's work is cut, by device and shape: measured where there is a measurement.

`tuned/<device>/<kernel>.json` holds configurations measured on that device, one per shape bucket
(written by `scripts/tune.py`). A device or shape without one gets a heuristic that fits the
device's number of multiprocessors and its shared memory.
"""

import dataclasses
import functools
import importlib.resources
import json
import math

import jax


@dataclasses.dataclass(frozen=True)
class Config:
  """One way to run a kernel.

  Attributes:
    tile: keys per step of the inner loop, a power of two, at least 16.
    programs: pieces into which the whole batch is cut, about.
    warps: warps per program.
    stages: depth of the software pipeline: tiles in flight per program, and the one in use.
  """

  tile: int
  programs: int
  warps: int
  stages: int

  def __post_init__(self):
    if self.tile < 16 or self.tile & (self.tile - 1):
      raise ValueError(f"Config.tile: found {self.tile}, expected a power of two, at least 16")
    for name in ("programs", "warps", "stages"):
      if getattr(self, name) < 1:
        raise ValueError(f"Config.{name}: found {getattr(self, name)}, expected at least 1")


@dataclasses.dataclass(frozen=True)
class Device:
  """What the heuristics know of a device: name as in tuned/, multiprocessors, shared bytes each."""

  name: str
  cores: int
  shared: int


# Shared memory that one program may take on a multiprocessor: A100 163 KiB, Hopper 227 KiB,
# consumer parts of both generations 99 KiB.
_KNOWN = {
  "a100": (108, 163 << 10),
  "h100": (132, 227 << 10),
  "h200": (132, 227 << 10),
}
_OTHER = (108, 99 << 10)


def device(kind: str, cores: int | None = None) -> Device:
  """The device of a JAX device kind, "NVIDIA H200" say; unknown ones are taken to be modest.

  `cores`: its multiprocessors, where the runtime says so (a slice of a GPU has fewer).
  """
  name = "-".join(kind.lower().split())
  usual, shared = next((known for part, known in _KNOWN.items() if part in name), _OTHER)
  return Device(name, cores or usual, shared)


def this_device(kind: str | None = None) -> Device:
  """The device of a JAX device kind; the default one if None."""
  if kind is not None:
    return device(kind)
  first = jax.devices()[0]
  return device(first.device_kind, getattr(first, "core_count", None))


@functools.cache
def tuned(kernel: str, name: str) -> tuple[tuple[dict, Config], ...]:
  """Measured (bucket, configuration) pairs of a kernel on a device; empty if there are none."""
  path = importlib.resources.files("pallas_kernels") / "tuned" / name / f"{kernel}.json"
  if not path.is_file():
    return ()
  entries = json.loads(path.read_text())["entries"]
  return tuple((entry["bucket"], Config(**entry["config"])) for entry in entries)


def bucket(*, rows: int, groups: int, slots: int, head_dim: int, itemsize: int) -> dict[str, int]:
  """The shape bucket that a measurement stands for: sizes in powers of two, rounded up."""
  return {
    "rows": _log2(rows),
    "groups": _log2(max(groups, 16)),
    "slots": _log2(slots),
    "head_dim": head_dim,
    "itemsize": itemsize,
  }


def choose(
  kernel: str,
  *,
  rows: int,
  groups: int,
  slots: int,
  head_dim: int,
  itemsize: int,
  interpret: bool = False,
  kind: str | None = None,
) -> Config:
  """The configuration for a shape: the nearest measured bucket, else the heuristic.

  A measured bucket stands for its neighbours: rows and slots up to four times more or fewer in all.

  Args:
    kernel: file name of its measurements.
    rows: batch rows times KV heads.
    groups: query heads per KV head.
    slots: S.
    head_dim: H.
    itemsize: bytes per element of K and V.
    interpret: the interpreter runs programs one by one; it gets few.
    kind: JAX device kind; the default device's if None.
  """
  if interpret:
    return Config(tile=64, programs=2 * rows + 3, warps=4, stages=1)
  here = this_device(kind)
  wanted = bucket(rows=rows, groups=groups, slots=slots, head_dim=head_dim, itemsize=itemsize)
  near = [
    (abs(have["rows"] - wanted["rows"]) + abs(have["slots"] - wanted["slots"]), i, config)
    for i, (have, config) in enumerate(tuned(kernel, here.name))
    if all(have[name] == wanted[name] for name in ("groups", "head_dim", "itemsize"))
  ]
  if near and min(near)[0] <= 2:
    return min(near)[2]
  return heuristic(here, rows=rows, slots=slots, head_dim=head_dim, itemsize=itemsize)


def heuristic(here: Device, *, rows: int, slots: int, head_dim: int, itemsize: int) -> Config:
  """Two programs per multiprocessor, each with as deep a pipeline as half its memory holds.

  Fewer programs than that leave memory idle; more make the softmax states to be joined many.
  """
  columns = max(16, 1 << _log2(head_dim))
  tile = max(16, min(64, (32 << 10) // (2 * columns * itemsize)))
  stage = 2 * tile * columns * itemsize
  stages = max(2, min(4, (here.shared // 2) // stage))
  return Config(tile=tile, programs=2 * here.cores, warps=4, stages=stages)


def _log2(n: int) -> int:
  return math.ceil(math.log2(n))
