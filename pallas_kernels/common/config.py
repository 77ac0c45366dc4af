"""Cuts of a kernel's work, by device and shape: measured where there is a measurement.

`tuned/<device>/<kernel>.json` holds configurations measured on that device, one per shape bucket
(written by `kvjax tune`). They serve devices that are alike too. A device or shape without one gets
a heuristic that fits the device's number of multiprocessors and its shared memory. Shapes that fit
in no way are refused before anything is launched (`least_shared`).
"""

import dataclasses
import functools
import inspect
import json
import math
from typing import Any

from kvjax.kernels.common import devices
from kvjax.kernels.common.devices import Device


@dataclasses.dataclass(frozen=True)
class Config:
  """One way to run a kernel.

  Attributes:
    tile: keys per step of the inner loop, a power of two, at least 16.
    programs: pieces into which the whole batch is cut, about.
    warps: warps per program.
    stages: depth of the software pipeline: tiles in flight per program, and the one in use.
    level: whether every program of dense decode has as many tiles, of one row or of several
      (`split_k.level`); else pieces of one row (`split_k.piece`).
  """

  tile: int
  programs: int
  warps: int
  stages: int
  level: bool = False

  def __post_init__(self):
    if self.tile < 16 or self.tile & (self.tile - 1):
      raise ValueError(f"Config.tile: found {self.tile}, expected a power of two, at least 16")
    for name in ("programs", "warps", "stages"):
      if getattr(self, name) < 1:
        raise ValueError(f"Config.{name}: found {getattr(self, name)}, expected at least 1")

  def __repr__(self) -> str:
    held = ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(self).items() if v is not False)
    return f"Config({held})"


_SCRATCH = 2 << 10  # what reductions over the warps of a program take, at most

# Operations whose shared memory grows with the queries of a program -> stages and arrays (keys, or
# keys and values) of their smallest loop, over tiles of 16 keys. The others' fits every device.
_SMALLEST = {
  "attend_span": (2, 2),
  "attend_shared": (2, 2),
  "attend_table": (2, 2),
  "attend_tiles": (2, 2),
  "art": (2, 2),
  "art_known": (2, 2),
  "speculate": (3, 2),
  "speculate_keys": (3, 2),
  "key_logits": (3, 1),
  "key_weights": (3, 1),
  "cis_logits": (3, 1),
  "cis_read": (2, 2),
}


@functools.cache
def tuned(kernel: str, here: Device) -> tuple[tuple[dict[str, int], Config], ...]:
  """Measured (bucket, configuration) pairs of a kernel for a device; empty if there are none.

  The user's, then those shipped for it, then those of devices that are alike; the first of a bucket
  counts.
  """
  others = (held.name for held in devices.known() if devices.alike(held, here))
  names = dict.fromkeys([here.name, *others])
  found: dict[str, tuple[dict[str, int], Config]] = {}
  for held in (held for name in names for held in devices.tables(name, kernel, _entries)):
    for sizes, cut in held:
      found.setdefault(json.dumps(sizes, sort_keys=True), (sizes, cut))
  return tuple(found.values())


def _entries(held: Any) -> list[tuple[dict[str, int], Config]]:
  """The buckets of a table's file, each with its configuration."""
  names = inspect.signature(bucket).parameters
  return [({x: e["bucket"][x] for x in names}, Config(**e["config"])) for e in held["entries"]]


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
  here = devices.this_device(kind)
  wanted = bucket(rows=rows, groups=groups, slots=slots, head_dim=head_dim, itemsize=itemsize)
  near = [
    (abs(have["rows"] - wanted["rows"]) + abs(have["slots"] - wanted["slots"]), i, config)
    for i, (have, config) in enumerate(tuned(kernel, here))
    if all(have[name] == wanted[name] for name in ("groups", "head_dim", "itemsize"))
  ]
  if near and min(near)[0] <= 2:
    return min(near)[2]
  shape = {"groups": groups, "head_dim": head_dim, "itemsize": itemsize}
  if kernel == "decode":
    cut = streaming(here, rows=rows, slots=slots, **shape)
  else:
    cut = heuristic(here, head_dim=head_dim, itemsize=itemsize)
  return fitted(cut, here, **shape)


STREAMED = 64 << 10  # bytes of keys and values in a stage of `streaming`; half where they are few
FEW = 12  # such stages a multiprocessor
LEVEL = 0.95  # of the multiprocessors that a wave of programs keeps busy
SHORT = 1 << 20  # bytes of a row; where there are MANY such rows a multiprocessor, none is cut
MANY = 3
PIECE = 12  # tiles of a piece, at least, where more than a program a multiprocessor are tried


def streaming(
  here: Device, *, rows: int, groups: int, slots: int, head_dim: int, itemsize: int
) -> Config:
  """Contiguous slots: large tiles, a program on each multiprocessor, or up to four of shorter work.

  As many times the multiprocessors as leave few of them idle in the last wave: rows of one length
  get equal numbers of pieces, `split_k.piece`. For that no piece gets fewer than a dozen tiles: to
  join them takes longer. A program's products fit the registers of four warps. Where keys are few
  and each has one query, two programs share a multiprocessor at least: one alone waits for its
  tiles. Many short rows are a program each, whatever their lengths: among them a program looks for
  its piece longer than it reads the longest. Wide heads take smaller tiles and a stage more, and
  where there is much to read two programs a multiprocessor: one that holds large tiles has fewer
  bytes on their way.
  """
  columns = max(16, 1 << _log2(head_dim))
  per_slot = 2 * columns * itemsize
  few = rows * slots * per_slot < FEW * STREAMED * here.cores
  stage = STREAMED // 2 if few or itemsize == 4 else STREAMED  # float32 fills the registers
  fitting = (2 << (10 if columns > 64 else 11)) // max(16, 1 << _log2(groups))
  tile = max(16, min(stage // per_slot, fitting))
  if slots * per_slot <= SHORT and rows >= MANY * here.cores:
    return Config(tile=tile, programs=1, warps=4, stages=3)

  stages, wide = 3, columns > 128
  if wide:
    tile, stages = min(tile, STREAMED // 2 // per_slot), 4

  def busy(times: int) -> float:
    pieces = rows * max(1, times * here.cores // rows)
    enough = PIECE * pieces <= rows * (slots // tile)
    return pieces / (here.cores * math.ceil(pieces / here.cores)) if enough else 0.0

  tried = (2,) if wide and not few else range(2 if few and groups == 1 else 1, 5)
  times = next((n for n in tried if busy(n) >= LEVEL), max(tried, key=busy))
  return Config(tile=tile, programs=times * here.cores, warps=4, stages=stages)


def heuristic(here: Device, *, head_dim: int, itemsize: int) -> Config:
  """Kernels that wait in the middle of a tile, for a list or to write logits: two programs on each
  multiprocessor, each with as deep a pipeline as half its memory holds.

  Fewer programs than that leave memory idle; more make the softmax states to be joined many.
  """
  columns = max(16, 1 << _log2(head_dim))
  tile = max(16, min(64, (32 << 10) // (2 * columns * itemsize)))
  stage = 2 * tile * columns * itemsize
  stages = max(2, min(4, (here.shared // 2) // stage))
  return Config(tile=tile, programs=2 * here.cores, warps=4, stages=stages)


def shared_bytes(
  tile: int, stages: int, *, groups: int, head_dim: int, itemsize: int, arrays: int = 2
) -> int:
  """Shared memory of a program that goes over keys tile by tile, in bytes: hardly less than this.

  Tiles of `arrays` (keys, or keys and values) on their way, the queries, and the tile's weights or
  logits.
  """
  row, lanes = max(16, 1 << _log2(head_dim)) * itemsize, max(16, 1 << _log2(groups))
  logits = lanes * tile * (itemsize if arrays == 2 else 4)
  return max(stages - 1, 1) * arrays * tile * row + lanes * row + logits + _SCRATCH


def fitted(cut: Config, here: Device, **shape: int) -> Config:
  """`cut` with fewer stages, then smaller tiles, until the device has the shared memory for it."""
  while shared_bytes(cut.tile, cut.stages, **shape) > here.shared:
    if cut.stages > 2:
      cut = dataclasses.replace(cut, stages=cut.stages - 1)
    elif cut.tile > 16:
      cut = dataclasses.replace(cut, tile=cut.tile // 2)
    else:
      break
  return cut


def fitted_tile(most: int, stages: int, **shape: int) -> int:
  """At most so many keys per step of a loop of so many stages; fewer where the device wants it."""
  tile, here = most, devices.this_device()
  while tile > 16 and shared_bytes(tile, stages, **shape) > here.shared:
    tile //= 2
  return tile


def least_shared(operation: str, *, groups: int, head_dim: int, itemsize: int) -> int:
  """Shared memory that an operation takes at the least, in bytes; 0: every device has it."""
  if operation not in _SMALLEST:
    return 0
  stages, arrays = _SMALLEST[operation]
  shape = {"groups": groups, "head_dim": head_dim, "itemsize": itemsize}
  return shared_bytes(16, stages, **shape, arrays=arrays)


def _log2(n: int) -> int:
  return math.ceil(math.log2(n))
