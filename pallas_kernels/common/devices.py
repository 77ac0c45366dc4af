"""Facts of a device: what was measured on it, else what its driver says, else what its name says.

`tuned/<device>/device.json` holds the facts of a card, written by `kvjax tune` like the tables of
cuts beside it: in the user's cache folder, or in this tree for the cards that the library ships.
Cuts of kernels, floors of benchmarks, `advise` and plans of memory all ask this record.
"""

import ctypes
import dataclasses
import functools
import importlib.resources
import json
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax

LIKE = 0.1  # facts within a tenth are alike
REACHED = 0.92  # of the memory's nominal bandwidth, by a streaming read of Hopper cards


@dataclasses.dataclass(frozen=True)
class Device:
  """Facts of a device.

  Attributes:
    name: as folders of results and of `tuned/` are called.
    cores: multiprocessors.
    shared: bytes of shared memory that one program may take.
    read: bytes a second of a streaming read of its memory.
    link: bytes a second from the host's pinned memory.
    memory: bytes of its memory.
    source: where `read` and `link` are from: "measured", "driver" or "name".
  """

  name: str
  cores: int
  shared: int
  read: float = 0.9e12
  link: float = 20e9
  memory: float = 24e9
  source: str = "name"


# What a name tells: multiprocessors, shared memory of a program, nominal bandwidth, memory.
# Workstation and consumer parts from Ampere to Blackwell give a program 99 KiB.
_KNOWN = {
  "a100-sxm4-40gb": (108, 163 << 10, 1.555e12, 40e9),
  "a100": (108, 163 << 10, 2.039e12, 80e9),
  "h100-nvl": (132, 227 << 10, 3.94e12, 94e9),
  "h100-pcie": (114, 227 << 10, 2.04e12, 80e9),
  "h100": (132, 227 << 10, 3.35e12, 80e9),
  "h200": (132, 227 << 10, 4.8e12, 141e9),
  "l40s": (142, 99 << 10, 0.864e12, 48e9),
  "l4": (58, 99 << 10, 0.3e12, 24e9),
  "a10": (72, 99 << 10, 0.6e12, 24e9),
  "rtx-4090": (128, 99 << 10, 1.008e12, 24e9),
  "rtx-3090": (82, 99 << 10, 0.936e12, 24e9),
}
_OTHER = (108, 99 << 10, 0.9e12 / REACHED, 24e9)

# Attributes of CUDA's cuDeviceGetAttribute.
_CORES, _SHARED, _CLOCK, _BUS = 16, 97, 36, 37


def slug(kind: str) -> str:
  """The name of a JAX device kind in paths: "NVIDIA H200" is nvidia-h200."""
  return "-".join(kind.lower().split())


def device(kind: str, cores: int | None = None, shared: int | None = None) -> Device:
  """The device of a JAX device kind or of a name.

  Args:
    kind: "NVIDIA H200", or nvidia-h200.
    cores, shared: its multiprocessors (a slice of a GPU has fewer) and the bytes that a program may
      take there, where the runtime says so; a record of another size does not count then.
  """
  name = slug(kind)
  usual = next((known for part, known in _KNOWN.items() if part in name), _OTHER)
  cores, shared, read = cores or usual[0], shared or usual[1], REACHED * usual[2]
  held = _recorded(name)
  if held is not None and _near(held.cores, cores):
    return dataclasses.replace(held, cores=cores, shared=shared)
  if cores != usual[0]:  # a slice reads its part
    read *= cores / usual[0]
  return Device(name, cores, shared, read, memory=usual[3])


def this_device(kind: str | None = None) -> Device:
  """The device of a JAX device kind; the default one if None."""
  return _default() if kind is None else device(kind)


def known() -> list[Device]:
  """The devices with measured facts, the user's and those that the library ships, by name."""
  names = {path.name for folder in folders() if folder.is_dir() for path in folder.iterdir()}
  return [held for name in sorted(names) if (held := _recorded(name)) is not None]


def named(text: str) -> Device:
  """The device that a user means: a measured one whose name has `text` in it, else a known kind.

  Raises:
    ValueError: it is part of no name.
  """
  part = slug(text)
  for held in known():
    if part in held.name:
      return held
  if kinds := [name for name in _KNOWN if part in name]:
    return device(min(kinds, key=len))  # the plain one of several
  listed = ", ".join([*(held.name for held in known()), *_KNOWN])
  raise ValueError(f"device: found {text!r}, expected a part of one of {listed}")


def alike(a: Device, b: Device) -> bool:
  """True if a table of one serves the other: multiprocessors, shared memory, bandwidth."""
  return all(_near(getattr(a, x), getattr(b, x)) for x in ("cores", "shared", "read"))


def _near(a: float | int, b: float | int) -> bool:
  return abs(a - b) <= LIKE * max(a, b)


def folders() -> tuple[pathlib.Path, ...]:
  """Where facts and tables are: the user's, then those of the library."""
  kept = pathlib.Path(os.environ.get("KVJAX_CACHE") or "~/.cache/kvjax").expanduser().absolute()
  shipped = importlib.resources.files("kvjax.kernels") / "tuned"
  return kept / "tuned", pathlib.Path(str(shipped))


@functools.cache
def tables(name: str, stem: str, read: Callable[[Any], Any]) -> tuple[Any, ...]:
  """Results of `read` on the files `<stem>.json` of a device; none where nothing was measured.

  The user's are first.

  Raises:
    ValueError: a file is not what `kvjax tune` writes: `read` raised something.
  """
  found = []
  for folder in folders():
    path = folder / name / f"{stem}.json"
    if path.is_file():
      try:
        found.append(read(json.loads(path.read_text("utf-8"))))
      except Exception as error:
        what = "no JSON" if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise ValueError(
          f"{path}: found {what} ({error}), expected what `kvjax tune` writes"
        ) from None
  return tuple(found)


def _recorded(name: str) -> Device | None:
  """The measured facts of a device."""
  held = next(iter(tables(name, "device", _facts)), None)
  return held and Device(name, **held, source="measured")


def _facts(held: Any) -> dict[str, Any]:
  """The facts in a record's file."""
  facts = {"cores": held["cores"], "shared": held["shared"]}  # the others have defaults
  own = {x.name for x in dataclasses.fields(Device)} - {"name", "source"}
  facts |= {name: held[name] for name in own if name in held}
  if wrong := {x: fact for x, fact in facts.items() if not 0 < fact < math.inf}:
    raise ValueError(f"{wrong}, expected numbers above 0")
  return facts


def _default() -> Device:
  first = jax.devices()[0]
  cores = getattr(first, "core_count", None)
  shared = getattr(first, "shared_memory_per_block_optin", None)
  driver = _driver(first.local_hardware_id or 0) if first.platform == "gpu" else None
  if driver is None:
    return device(first.device_kind, cores, shared)
  found = device(first.device_kind, cores or driver[0], shared or driver[1])
  if found.source == "measured" or not driver[2]:
    return found
  return dataclasses.replace(found, read=REACHED * driver[2], source="driver")


@functools.cache
def _driver(ordinal: int) -> tuple[int, int, float] | None:
  """Multiprocessors, shared bytes of a program, nominal bytes a second, as CUDA's driver has them.

  None where there is no such driver, as with other makers' GPUs.
  """
  try:
    cuda = ctypes.CDLL("libcuda.so.1")
  except OSError:
    return None
  handle, value = ctypes.c_int(), ctypes.c_int()
  if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(handle), ordinal):
    return None

  def attribute(which: int) -> int:
    failed = cuda.cuDeviceGetAttribute(ctypes.byref(value), which, handle)
    return 0 if failed else value.value

  # The clock is in kHz, the bus in bits, and there are two transfers to a cycle.
  rate = 2 * attribute(_CLOCK) * 1e3 * attribute(_BUS) / 8
  return attribute(_CORES), attribute(_SHARED), rate
