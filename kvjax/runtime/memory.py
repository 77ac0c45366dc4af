"""Memory of caches, computed in advance, and the sizes that would fit if they do not."""

from __future__ import annotations

import bisect
import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from kvjax.core.cache import CacheSpec
from kvjax.families.method import Method
from kvjax.methods.registry import check_method
from kvjax.ops import offload
from kvjax.runtime import sharding

_UNITS = {"B": 0, "bytes": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
_REQUEST = re.compile(r"allocat\w*\s+(?:of\s+)?([\d.]+)\s*(bytes|B|[KMGT]iB)", re.IGNORECASE)
COUNTED = 1 << 20  # tokens up to which a cache's arrays are counted one by one
SPARE = 0.05  # of a device's memory, left for what is not counted


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
  """Bytes that a method's caches take.

  Attributes:
    device: on each device.
    host: in the host's memory, for all devices together.
  """

  device: int
  host: int


def plan_memory(
  spec: CacheSpec,
  method: Method,
  mesh: Mesh | AbstractMesh | None = None,
  *,
  apart: bool | None = None,
) -> MemoryPlan:
  """Bytes that `method.init_caches(spec)` will take. Nothing is allocated.

  >>> import kvjax
  >>> spec = kvjax.CacheSpec(batch=1, capacity=4096, kv_heads=2, groups=4, head_dim=64, layers=4)
  >>> kvjax.plan_memory(spec, kvjax.SnapKV(budget=1024))
  MemoryPlan(device=2162784, host=0)

  Args:
    spec: sizes, as `Transformer.spec` gives them.
    method: the KV-cache method.
    mesh: the devices that the caches are split over (None: one). For some that are not here,
      `jax.sharding.AbstractMesh((heads, slots), ("heads", "slots"))` will do.
    apart: whether the host's memory is apart from the devices', as a GPU's is (None: as it is
      here).

  Raises:
    TypeError: `method` is no method, or `mesh` no mesh.
    ValueError, NotImplementedError: such caches cannot be split over the mesh.
  """
  check_method("method", method)
  caches = jax.eval_shape(lambda: method.init_caches(spec))
  leaves = jax.tree.leaves(caches)
  shapes = [x.shape for x in leaves]
  apart = offload.on_host() if apart is None else apart
  if mesh is not None:
    _, shapes = sharding.divided(method, spec, mesh, caches)
  hosted = {id(x) for x in offload.hosted(caches)} if apart else set()
  device = host = 0
  for x, part in zip(leaves, shapes, strict=True):
    if id(x) in hosted:
      host += math.prod(x.shape) * x.dtype.itemsize
    else:
      device += math.prod(part) * x.dtype.itemsize
  return MemoryPlan(device, host)


def check_host(method: Method, spec: CacheSpec, name: str = "spec.capacity") -> None:
  """Raises if the host's memory can not hold a method's caches: its stores, on a CPU all of them.

  Args:
    method: the KV-cache method.
    spec: sizes of the caches.
    name: what sets the capacity, in the message.

  Raises:
    MemoryError: the message says what they take, and what there is.
  """

  def size(capacity: int) -> int:
    held = dataclasses.replace(spec, capacity=capacity)
    caches = jax.eval_shape(lambda: method.init_caches(held))
    counted = offload.hosted(caches) if offload.on_host() else jax.tree.leaves(caches)
    return sum(x.size * x.dtype.itemsize for x in counted)

  need = _affine(size, spec.capacity)
  if lacks := offload.lacking(need):
    raise MemoryError(
      f"{name}: found {spec.capacity:,} tokens, whose caches take {readable(need)} of the host's "
      f"memory under {method!r}, {lacks}"
    )


def _affine(size: Callable[[int], int], capacity: int) -> int:
  """size(capacity); beyond `COUNTED` tokens by its growth up to there, as a store of billions of
  tokens has millions of segments.
  """
  if capacity <= COUNTED:
    return size(capacity)
  half, whole = size(COUNTED // 2), size(COUNTED)
  return whole + (whole - half) * (capacity - COUNTED) // (COUNTED // 2)


def device_limit() -> int:
  """Bytes that a program may take on a device; a CPU's are the machine's."""
  limits = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
  known = [limit for limit in limits if limit]
  return min(known) if known else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def explained(
  what: str,
  method: Method,
  spec: CacheSpec,
  mesh: Mesh | None = None,
  weights: Callable[[], int] = lambda: 0,
) -> Iterator[None]:
  """Raises a MemoryError that names the sizes and what would fit when a device is full.

  A ValueError where NumPy has seen an array of the host's memory (from jax 0.11 on).

  Args:
    what: a description of the operation.
    method: the KV-cache method.
    spec: sizes of the caches.
    mesh: the devices that they are split over.
    weights: counts the bytes of the model's weights on a device.
  """
  try:
    yield
  except (jax.errors.JaxRuntimeError, MemoryError) as error:
    text = str(error)
    if "external reference" in text:
      raise ValueError(
        "caches: found an array in the host's memory that NumPy has been shown, which can not be "
        "donated; expected it to be read by a copy: "
        'jax.device_put(x, x.sharding.with_memory_kind("device"))'
      ) from error
    # Kernels run out of other memories, which no budget mends.
    known = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text
    if not known or "shared memory" in text.lower() or "kvjax" in text:
      raise
    raise MemoryError(_explanation(what, text, method, spec, mesh, weights())) from error


def _explanation(
  what: str, text: str, method: Method, spec: CacheSpec, mesh: Mesh | None, weights: int
) -> str:
  need, limit = plan_memory(spec, method, mesh), device_limit()
  asked = sum(_bytes(*found) for found in _REQUEST.findall(text)[:1])
  room = int(limit * (1 - SPARE)) - weights
  if asked + need.device <= room:  # it was not the caches alone: leave room for it
    room -= asked
  parts = [f"{readable(need.device)} of caches"]
  parts += [f"{readable(weights)} of weights"] if weights else []
  parts += [f"an allocation of {readable(asked)} failed"] if asked else []
  shape = f"batch {spec.batch}, capacity {spec.capacity}, {spec.depth} layers"
  return (
    f"kvjax: out of memory in {what} with {method!r} ({shape}): {', '.join(parts)}, on a device "
    f"of {readable(limit)}; {fitting(method, spec, room, mesh)}"
  )


def fitting(
  method: Method, spec: CacheSpec, room: int, mesh: Mesh | AbstractMesh | None = None
) -> str:
  """In words, the largest setting whose caches fit in `room` bytes of each device."""
  budget = None if method.traits.positional else _budget(method)
  if budget is None:
    parts = sharding.shards(mesh, "slots") if mesh is not None else 1

    def with_capacity(n: int) -> Any:
      return dataclasses.replace(spec, capacity=n * parts), method

    most = _largest(with_capacity, spec.capacity // parts, room, mesh) * parts
    name, have = "capacity", spec.capacity
  else:
    most = _largest(lambda n: (spec, _with_budget(method, n)), budget, room, mesh)
    name, have = "budget", budget
  if most >= have:
    return "the caches would fit, what a prompt takes does not: read it in chunks, or in fewer rows"
  if most < 1:
    return f"no {name} fits: take fewer rows, or more devices"
  return f"a {name} of {most} would fit, or fewer rows"


def _largest(
  make: Callable[[int], tuple[CacheSpec, Method]],
  most: int,
  room: int,
  mesh: Mesh | AbstractMesh | None,
) -> int:
  """The largest n up to `most` whose caches fit; 0 if none does."""

  def bytes_of(n: int) -> int | None:
    try:
      spec, method = make(n)
    except (ValueError, TypeError):  # methods refuse budgets that are too small for them
      return None
    return plan_memory(spec, method, mesh).device

  # How many fit or are refused, from 1 on.
  fit = bisect.bisect(range(1, most + 1), False, key=lambda n: (bytes_of(n) or 0) > room)
  return fit if fit and bytes_of(fit) is not None else 0


def _budget(method: Method) -> int | None:
  """The budget of what is kept: of what a method wraps, where that drops slots, or its own."""
  if (base := _dropping_base(method)) is not None:
    return _budget(base)
  named = any(f.name == "budget" for f in dataclasses.fields(method))
  return method.budget if named else None  # type: ignore[attr-defined]


def _with_budget(method: Method, budget: int) -> Method:
  """The method with another such budget."""
  if (base := _dropping_base(method)) is not None:
    return dataclasses.replace(method, base=_with_budget(base, budget))  # type: ignore[call-arg]
  return dataclasses.replace(method, budget=budget)  # type: ignore[call-arg]


def _dropping_base(method: Method) -> Method | None:
  """The base of a method, if that keeps a part of the tokens: a budget around it is of reads."""
  base = getattr(method, "base", None)
  return base if isinstance(base, Method) and not base.traits.positional else None


def readable(size: int) -> str:
  """Bytes in the largest unit that leaves a whole part."""
  for unit in ("TiB", "GiB", "MiB", "KiB"):
    if size >= 1 << _UNITS[unit]:
      return f"{size / (1 << _UNITS[unit]):.2f} {unit}"
  return f"{size} bytes"


def _bytes(number: str, unit: str) -> int:
  return int(float(number) * (1 << _UNITS.get(unit, 0)))
