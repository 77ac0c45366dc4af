"""Several devices: where arrays lie, and how a function runs on the parts of them.

A mesh has two axes. Over "heads", key/value heads are split with all that belongs to them (tensor
parallelism): caches, projections, and the slots' statistics; the MLP and the vocabulary are split
over both axes. Over "slots", the slots of every cache are split (context parallelism).

What is split is said by logical axes: `RULES` gives the mesh axes of each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import checkify
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import Env
from kvjax.ops import offload
from kvjax.runtime import arguments

if TYPE_CHECKING:
  from kvjax.families.method import Method

HEADS, SLOTS = "heads", "slots"

# Logical axis -> the mesh axes that it is split over; what is not named here is whole everywhere.
RULES: dict[str, tuple[str, ...]] = {
  "kv_heads": (HEADS,),
  "slots": (SLOTS,),
  "ffn": (HEADS, SLOTS),
  "vocab": (HEADS, SLOTS),
}


def make_mesh(heads: int = 1, slots: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
  """A mesh of heads × slots devices, by default the first ones of all processes.

  Raises:
    TypeError, ValueError: a size is no integer of at least 1, or there are fewer devices.
  """
  for name, value in (("heads", heads), ("slots", slots)):
    arguments.integer(f"make_mesh.{name}", value, 1)
  devices = jax.devices() if devices is None else devices
  if len(devices) < heads * slots:
    raise ValueError(
      f"make_mesh: found {len(devices)} devices, expected heads × slots = {heads * slots}"
    )
  # Auto axes: the compiler places what no shard_map does. New versions of JAX default to others.
  grid = np.array(devices[: heads * slots]).reshape(heads, slots)
  return Mesh(grid, (HEADS, SLOTS), axis_types=(AxisType.Auto, AxisType.Auto))


def check_mesh(mesh: Mesh | AbstractMesh) -> None:
  """Raises ValueError or TypeError for a mesh that is not one of `make_mesh`'s kind."""
  if not isinstance(mesh, Mesh | AbstractMesh):
    raise TypeError(f"mesh: found {mesh!r}, expected one of kvjax.make_mesh, or None")
  explicit = isinstance(mesh, Mesh) and set(mesh.axis_types) != {AxisType.Auto}
  if explicit or mesh.axis_names != (HEADS, SLOTS):  # nothing runs on an abstract one
    raise ValueError(
      f"mesh: found axes {mesh.axis_names} of {mesh.axis_types}, expected ({HEADS!r}, {SLOTS!r}) "
      "of AxisType.Auto, as kvjax.make_mesh makes them"
    )


def compiler_options(mesh: Mesh | None) -> dict[str, str]:
  """Options to compile a step over a mesh with: `jax.jit(step, compiler_options=...)`.

  On several GPUs all-reduces come from NCCL. XLA (jax 0.11) has a kernel of its own for small ones,
  around which more time passes than in it: the results have both. Elsewhere nothing is asked for.
  """
  if mesh is None or mesh.size == 1 or mesh.devices.flat[0].platform != "gpu":
    return {}
  return _by_nccl()


@functools.cache
def _by_nccl() -> dict[str, str]:
  """No kernels for collectives, if this XLA has any."""
  options = {"xla_gpu_experimental_use_collective_kernels": ""}
  with contextlib.suppress(jax.errors.JaxRuntimeError):  # no such option
    jax.jit(lambda: 0, compiler_options=options).lower().compile()
    return options
  return {}


def spec_of(axes: Sequence[str | None]) -> PartitionSpec:
  """The placement of an array of these logical axes."""
  return PartitionSpec(*(RULES.get(axis) if axis else None for axis in axes))


def shards(mesh: Mesh | AbstractMesh, axis: str) -> int:
  """Into how many parts a logical axis is split."""
  return int(np.prod([mesh.shape[name] for name in RULES.get(axis, ())], dtype=int))


def on_mesh(env: Env, mesh: Mesh) -> Env:
  """The environment of moves inside `shard_map`: axes of one device need no collectives."""
  heads, slots = (name if mesh.shape[name] > 1 else None for name in (HEADS, SLOTS))
  return dataclasses.replace(env, head_axis=heads, slot_axis=slots)


def cache_specs(caches: Any, method: Method) -> Any:
  """The placement of a method's caches, leaf by leaf.

  Slots and heads are split by key/value head; slots, and what follows them, by slot too; rows are
  whole.

  Raises:
    NotImplementedError: a layer's cache holds arrays outside a `kvjax.Cache`.
  """

  def of(part: Any) -> Any:
    if not isinstance(part, Cache):
      raise NotImplementedError(
        f"caches: found {type(part).__name__}, expected kvjax.Cache, whose shelves define how it "
        "is split over devices"
      )
    by_head = spec_of(("batch", "kv_heads"))
    by_slot = spec_of(("batch", "kv_heads", "slots"))
    placed = {name: by_slot if part.leaf(name).along_slots else by_head for name in part.heads}
    return dataclasses.replace(
      part,
      slots=dict.fromkeys(part.slots, by_slot),
      heads={
        name: jax.tree.map(lambda _, to=placed[name]: to, x) for name, x in part.heads.items()
      },
      rows=jax.tree.map(lambda _: PartitionSpec(), part.rows),
    )

  return jax.tree.map(of, caches, is_leaf=lambda x: isinstance(x, Cache))


def named(mesh: Mesh | AbstractMesh, specs: Any) -> Any:
  """Shardings of a tree of specs."""
  is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
  return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def shard_map(f: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
  """f on every device's part of its arguments; results that are not split must be equal everywhere.

  The check for the latter is off: Pallas kernels do not take part in it.
  """
  return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def checked_shard_map(f: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
  """`shard_map` of an f whose checks (`jax.experimental.checkify`) are equal on all devices.

  What they find is an ordinary result of f, and one check outside. Left to itself, checkify would
  collect an error from each device, and carry none of them out of a loop.
  """

  def run(*args: Any) -> Any:
    return checkify.checkify(f)(*args)

  # Checkify does not look into a function with a batching rule of its own.
  opaque = jax.custom_batching.custom_vmap(
    shard_map(run, mesh, in_specs, (PartitionSpec(), out_specs))
  )

  @opaque.def_vmap
  def refuse(*_: Any) -> Any:
    raise NotImplementedError("Env.check_nan: found vmap over a mesh, expected no vmap")

  def call(*args: Any) -> Any:
    error, result = opaque(*args)
    checkify.check_error(error)
    return result

  return call


def check_supported(method: Method, mesh: Mesh | AbstractMesh) -> None:
  """Raises NotImplementedError where a method does not run with its slots split over devices."""
  if mesh.shape[SLOTS] > 1 and not method.traits.spreads:
    raise NotImplementedError(
      f"mesh: found slots split over devices for {method!r}, which needs a row's slots on one: "
      "split its key/value heads only (make_mesh(heads=...))"
    )


def check_heads(method: Method, spec: CacheSpec, mesh: Mesh | AbstractMesh) -> None:
  """Raises ValueError where a method's heads cannot be split over the devices of the mesh."""
  uneven, parts = method.traits.uneven, shards(mesh, "kv_heads")
  if uneven is not None and parts > 1 and (why := uneven(spec, parts)):
    raise ValueError(f"mesh: found heads split over {parts} devices for {method!r}, {why}")


def check_windows(windows: Sequence[int | None], mesh: Mesh | AbstractMesh) -> None:
  """Raises NotImplementedError for layers with a window where slots are split over devices."""
  if mesh.shape[SLOTS] > 1 and any(windows):
    raise NotImplementedError(
      f"mesh: found slots split over {mesh.shape[SLOTS]} devices for a model with windows of "
      f"{sorted(set(filter(None, windows)))} tokens, expected 1: a ring of slots is not split "
      "(make_mesh(heads=...) splits key/value heads)"
    )


def check_store(method: Method, processes: int) -> None:
  """Raises NotImplementedError if several processes would have parts of a method's store."""
  if processes > 1:
    raise NotImplementedError(
      f"mesh: found devices of {processes} processes for {method!r}, which keeps blocks in the "
      "host's memory, expected devices of one"
    )


def init_caches(method: Method, spec: CacheSpec, mesh: Mesh) -> Any:
  """Empty caches made where they belong: no device holds more than its part.

  Raises:
    ValueError: key/value heads, or a layer's slots, are no multiple of the devices of their axis.
    NotImplementedError: the method does not run on such a mesh.
  """
  return maker(method, spec, mesh)()


@functools.lru_cache(64)  # programs: a batch makes caches for every prompt
def maker(method: Method, spec: CacheSpec, mesh: Mesh) -> Any:
  """The jitted function of `init_caches`; raises as it does."""
  make = functools.partial(method.init_caches, spec)
  return jax.jit(make, out_shardings=placement(method, spec, mesh, jax.eval_shape(make)))


def placement(method: Method, spec: CacheSpec, mesh: Mesh, shapes: Any) -> Any:
  """The shardings of caches, of which there are the shapes.

  Raises:
    ValueError, NotImplementedError: of `init_caches`.
  """
  where, _ = divided(method, spec, mesh, shapes)
  if offload.on_host() and offload.hosted(shapes):
    check_store(method, len({device.process_index for device in mesh.devices.flat}))
  return offload.beside(where, shapes)


def divided(
  method: Method, spec: CacheSpec, mesh: Mesh | AbstractMesh, shapes: Any
) -> tuple[Any, list[tuple[int, ...]]]:
  """The shardings of caches of these shapes on any host, and the shape of each leaf's parts.

  Raises:
    TypeError, ValueError, NotImplementedError: the mesh is none, or not one for these caches.
  """
  check_mesh(mesh)
  check_supported(method, mesh)
  check_windows(spec.windows, mesh)
  check_heads(method, spec, mesh)
  where, parts = named(mesh, cache_specs(shapes, method)), []
  for x, to in zip(jax.tree.leaves(shapes), jax.tree.leaves(where), strict=True):
    try:
      parts.append(to.shard_shape(x.shape))
    except ValueError as error:
      raise ValueError(
        f"mesh: found {dict(mesh.shape)} for a cache array of {x.shape} (batch, key/value heads, "
        "slots, ...), expected divisors of its heads and slots"
      ) from error
  return where, parts
