"""Evicted blocks outside of the device's memory: stored, appended to, and fetched block by block.

On a GPU they lie in the host's pinned memory, which kernels read and write over the link without a
copy on the way; on a CPU in the backend's own memory. A store is cut into segments, so that no
array grows with the context beyond what one allocation should be.
"""

import contextlib
import contextvars
import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Float, Int

from kvjax.core import leaves, slots
from kvjax.core.context import Env, OwnRows
from kvjax.ops import table
from kvjax.primitives import host_memory

table.declare("append_blocks", pallas="kvjax.kernels.insertion.host_blocks:append")
table.declare("fetch_blocks", pallas="kvjax.kernels.insertion.host_blocks:fetch")
table.declare("move_rows", pallas="kvjax.kernels.insertion.host_blocks:move")

SEGMENT_BYTES = 1 << 30
CHECKED_BYTES = 1 << 26  # of a store; smaller ones are laid out without a look at the system
PINNED = "pinned_host"  # the kind of memory
LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_DEFAULT_LIMIT_GB = 64  # what the GPU backend takes for its pool of pinned memory
_FIRST_REGION = 2 << 20  # bytes of that pool's first region; each one later is twice as large


def empty(batch: int, kv_heads: int, blocks: int, block: int, head_dim: int, dtype: Any) -> OwnRows:
  """A store of `blocks` blocks of keys and values: "k", "v", each a tuple of segments.

  A segment is [B, K, n, U, H] of at most `SEGMENT_BYTES`; the last one may be shorter.

  Raises:
    MemoryError: the host's pool is too small for it, or the host's memory is exhausted.
  """
  of_block = batch * kv_heads * block * head_dim * jnp.dtype(dtype).itemsize
  each = max(1, min(blocks, SEGMENT_BYTES // of_block))
  sizes = [min(each, blocks - first) for first in range(0, blocks, each)]
  shapes = [(batch, kv_heads, n, block, head_dim) for n in sizes]
  if 2 * blocks * of_block >= CHECKED_BYTES and not leaves.traced():
    check_room(2 * blocks * of_block)
  return OwnRows({name: tuple(_zeros(shape, dtype) for shape in shapes) for name in ("k", "v")})


def on_host() -> bool:
  """True if stores lie in the host's memory, apart from the device's."""
  return not _followed.get() and jax.default_backend() == "gpu"


@contextlib.contextmanager
def followed() -> Iterator[None]:
  """Traces the reference wherever stores lie: for what follows its equations, and runs none."""
  token = _followed.set(True)
  try:
    yield
  finally:
    _followed.reset(token)


_followed: contextvars.ContextVar[bool] = contextvars.ContextVar("followed", default=False)


def hosted(caches: Any) -> list[Any]:
  """The arrays of all stores in caches: what lies in the host's memory where there is one apart."""
  return jax.tree.leaves([x for x in jax.tree.leaves(caches, is_leaf=is_store) if is_store(x)])


def beside(where: Any, tree: Any) -> Any:
  """The shardings of caches over devices, with stores in the host's memory if that lies apart.

  Args:
    where: a sharding for every array.
    tree: the caches, or their shapes.
  """
  stores = _apart(tree)

  def one(x: Any, to: jax.sharding.Sharding) -> jax.sharding.Sharding:
    return to.with_memory_kind(PINNED) if id(x) in stores else to

  return jax.tree.map(one, tree, where)


def _apart(tree: Any) -> set[int]:
  """Identities of the arrays that lie in the host's memory, apart from the device's."""
  return {id(x) for x in hosted(tree)} if on_host() else set()


def enlarged(store: OwnRows, to: OwnRows) -> OwnRows:
  """The store with room for more blocks; those of its segments that stay as they are it shares.

  Args:
    store: left as it is.
    to: shapes of the larger one, as `empty` lays it out.

  Raises:
    MemoryError: the host's pool has no room for it.
  """

  def one(segment: Array | None, like: Any) -> Array:
    if segment is None:
      return _zeros(like.shape, like.dtype)
    if segment.shape == like.shape:
      return segment
    # On the host: a store never passes through the device's memory.
    grown = np.zeros(like.shape, like.dtype)
    grown[:, :, : segment.shape[2]] = host_memory.view(segment)
    return _put(grown, segment.sharding)

  return OwnRows(
    {
      name: tuple(map(one, (*old, *[None] * (len(to.of[name]) - len(old))), to.of[name]))
      for name, old in store.of.items()
    }
  )


def _put(x: Any, where: jax.sharding.Sharding) -> Array:
  """An array of a store, at its place in the host's memory if that lies apart."""
  if not on_host():
    return jnp.array(x)
  with _explained(x.nbytes):
    return jax.device_put(x, where).block_until_ready()


def rows_of(tree: Any, rows: Int[np.ndarray, " R"]) -> Any:
  """Copies of some rows of caches, every array where that of the caches lies."""
  stores = _apart(tree)
  if not stores and not any(x.is_deleted() for x in jax.tree.leaves(tree)):
    return _rows(tree, np.asarray(rows, np.int32))

  def one(x: Array) -> Array:
    # A store's rows never pass through the device's memory.
    return _put(host_memory.view(x)[rows], x.sharding) if id(x) in stores else x[rows]

  return jax.tree.map(one, tree)


@jax.jit
def _rows(tree: Any, rows: Int[Array, " R"]) -> Any:
  return jax.tree.map(lambda x: x[rows], tree)


def _zeros(shape: tuple[int, ...], dtype: Any) -> Array:
  if leaves.traced() or not on_host():
    return jnp.zeros(shape, dtype)
  with _explained(math.prod(shape) * jnp.dtype(dtype).itemsize):
    return _pinned(shape, jnp.dtype(dtype))().block_until_ready()


@functools.cache
def _pinned(shape: tuple[int, ...], dtype: Any) -> Callable[[], Array]:
  """Makes zeros in pinned memory; compiled once for all segments of a shape."""
  return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=host())


def host() -> jax.sharding.Sharding:
  """The place of stores that do not lie with the device's arrays."""
  return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=PINNED)


@contextlib.contextmanager
def _explained(size: int) -> Iterator[None]:
  """Says what to do where the host has no room for so many bytes."""
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    raise MemoryError(
      f"offload: found no room for {size / 2**30:.2f} GiB of pinned host memory, expected it; "
      + _advice()
    ) from error


def _advice() -> str:
  return (
    f"the pool holds {os.environ.get(LIMIT, _DEFAULT_LIMIT_GB)} GB: set {LIMIT} before jax is "
    "imported, or shorten the context"
  )


def check_room(size: int) -> None:
  """Raises MemoryError if `size` bytes can not fit in the host's memory, or its pool for a GPU."""
  if lacks := lacking(size):
    raise MemoryError(f"offload: found {size / 2**30:.1f} GiB of caches, {lacks}")


def lacking(size: int) -> str:
  """The reason why so many bytes can not fit, and what to do, as an error says it; or nothing."""
  there, taken = host_memory.available(), size
  if on_host():
    limit = int(float(os.environ.get(LIMIT, _DEFAULT_LIMIT_GB)) * 2**30)
    if size > limit:
      return f"expected less than the pool of pinned memory; {_advice()}"
    taken = min(_pooled(size), limit)
    there += host_memory.resident()  # the pool keeps what it had, and uses it again
  if taken <= there:
    return ""
  expected = f"expected at most the {there / 2**30:.1f} GiB of host memory that are available"
  if size <= there:
    return (
      f"for which the pool of pinned memory takes {taken / 2**30:.1f}, {expected}: set {LIMIT} "
      f"before jax is imported, to {math.ceil(size / 2**30)} at least (half as much again for a "
      "stream that grows), which keeps it from doubling"
    )
  return f"{expected}: take a smaller capacity, or fewer rows"


def _pooled(size: int) -> int:
  """Bytes that a pool takes from the system for so many: regions, each twice the one before."""
  total, region = 0, _FIRST_REGION
  while total < size:
    total, region = total + region, 2 * region
  return total


def blocks_of(store: OwnRows) -> int:
  """Number of blocks that a row's store has room for."""
  return sum(segment.shape[2] for segment in store.of["k"])


def row_of(store: OwnRows) -> tuple[str, tuple[int, ...]]:
  """Dtype and shape of a row's keys, wherever segments are cut."""
  first = store.of["k"][0]
  _, heads, _, tokens, head_dim = first.shape
  return first.dtype.name, (heads, blocks_of(store), tokens, head_dim)


def block_size(store: OwnRows) -> int:
  """U, tokens of a block."""
  return store.of["k"][0].shape[3]


def append(
  store: OwnRows,
  new: dict[str, Array],
  first: Int[Array, " B"],
  count: Int[Array, " B"],
  env: Env,
  after: Float[Array, "*any"],
) -> OwnRows:
  """Writes `count` new blocks of each row after its first `first`; what has no room is dropped.

  Args:
    store: written in place where it is donated.
    new: "k", "v" [B, K, E, U, H], of which the first `count` are real.
    first: int32, blocks that the row has stored.
    count: int32, 0 leaves a row alone.
    env: where this runs.
    after: an array that is computed from all that was read of the store: a write in place has to
      come after the reading, and only a dependence says so.
  """
  each = jnp.arange(new["k"].shape[2], dtype=jnp.int32)
  block = jnp.where(each < count[:, None], first[:, None] + each, blocks_of(store))
  if run := _kernel("append_blocks", env):
    return OwnRows(run(store.of, new, block, after))
  kept: dict[str, tuple[Array, ...]] = {}
  block = slots.after(block, after)
  for name, segments in store.of.items():
    index = jnp.broadcast_to(block[:, None], new[name].shape[:3])
    written, start = [], 0
    for segment in segments:
      # Blocks of earlier segments would count from the end.
      here = jnp.where(index >= start, index - start, segment.shape[2])
      written.append(slots.put(segment, here, new[name]))
      start += segment.shape[2]
    kept[name] = tuple(written)
  return OwnRows(kept)


def fetch(
  store: OwnRows,
  block: Int[Array, "B R"],
  copies: dict[str, Array],
  place: Int[Array, "B R"],
  env: Env,
) -> dict[str, Array]:
  """The copies with the named blocks at `place`; in place where a kernel writes, and they may be.

  Args:
    store: left as it is.
    block: int32; −1: nothing is read or written.
    copies: "k" and "v" [B, K, S, H].
    place: int32, as counted in blocks of U slots, for no two blocks of a row the same.
    env: where this runs.
  """
  if run := _kernel("fetch_blocks", env):
    return run(store.of, block, copies, place)
  kept: dict[str, Array] = {}
  for name, segments in store.of.items():
    batch, heads, _, *size = segments[0].shape
    index = jnp.broadcast_to(block[:, None], (batch, heads, block.shape[1]))
    start, found = 0, jnp.zeros((batch, heads, block.shape[1], *size), segments[0].dtype)
    for segment in segments:
      stop = start + segment.shape[2]
      here = ((index >= start) & (index < stop))[..., None, None]
      found = jnp.where(here, slots.take(segment, index - start), found)
      start = stop
    token = jnp.arange(size[0], dtype=jnp.int32)
    into = (place[..., None] * size[0] + token).reshape(batch, 1, -1)
    into = jnp.where(jnp.repeat(block, size[0], 1)[:, None] >= 0, into, copies[name].shape[2])
    into = jnp.broadcast_to(into, (batch, heads, into.shape[2]))
    kept[name] = slots.put(copies[name], into, found.reshape(batch, heads, -1, size[1]))
  return kept


def moved(
  store: OwnRows, row: Int[Array, " R"], other: OwnRows, source: Int[Array, " R"]
) -> OwnRows:
  """The store with rows of another one in the place of its own.

  Args:
    store: written in place where it is donated.
    row: int32, no number twice.
    other: as many blocks a row, of the same shape and dtype.
    source: int32, its rows.
  """
  if on_host():
    run = table.kernel("move_rows", table.choose("move_rows", "pallas"))
    return OwnRows(run(store.of, row, other.of, source))
  kept = {}
  for name, segments in store.of.items():
    cuts = np.cumsum([segment.shape[2] for segment in segments])[:-1]
    parts = jnp.split(jnp.concatenate(other.of[name], 2), cuts, 2)
    kept[name] = tuple(x.at[row].set(y[source]) for x, y in zip(segments, parts, strict=True))
  return OwnRows(kept)


def is_store(x: Any) -> bool:
  """True for a store of blocks among the leaves of caches."""
  return isinstance(x, OwnRows) and "k" in x.of


def _kernel(operation: str, env: Env) -> Callable | None:
  """The kernel; None: the reference, which cannot reach what lies in the host's memory."""
  if not on_host() and env.impl != "pallas":
    return None
  return table.kernel(operation, table.choose(operation, "pallas"))


def settled(tree: Any) -> Any:
  """The tree at the end of a jitted function, its stores back where they came from.

  To be called on caches that such a function returns, once, outside of loops: what a kernel has
  written counts as an array of the device until its place is said.
  """
  if not on_host():
    return tree

  return _each_store(lambda a: jax.device_put(a, jax.memory.Space.Host), tree)


def loose(tree: Any) -> Any:
  """The tree as a loop may carry it: stores that count as arrays of the device, and stay in place.

  What comes out of a kernel counts as one, and a loop has to give what it takes. `settled` is for
  what the loop has left.
  """
  return _each_store(_loosened, tree) if on_host() else tree


def _loosened(array: Array) -> Array:
  return _loose_p.bind(array)


_loose_p = Primitive("loose")
_loose_p.def_impl(lambda array: array)
_loose_p.def_abstract_eval(lambda aval: aval.update(memory_space=jax.memory.Space.Device))
mlir.register_lowering(_loose_p, lambda context, array: [array])


def _each_store(change: Callable[[Array], Array], tree: Any) -> Any:
  def changed(x: Any) -> Any:
    return jax.tree.map(change, x) if is_store(x) else x

  return jax.tree.map(changed, tree, is_leaf=is_store)
