"""Algorithm 1 by a kernel, where there is one; its reference is `splits.joined`."""

import dataclasses
from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Int

from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Attended, Plan
from kvjax.methods.art import certificate, known
from kvjax.methods.art.order import Order
from kvjax.methods.art.splits import Walked, joined, read_by
from kvjax.methods.art.walk import Stop
from kvjax.ops.decode import beyond_codes, beyond_kernel, over_codes
from kvjax.ops.table import choose, declare, kernel

declare("art", pallas="kvjax.kernels.art.walk:walk")
declare("art_quantised", pallas="kvjax.kernels.art.walk:walk")
declare("art_splits", pallas="kvjax.kernels.art.walk:choose_splits")

LARGEST_TILE = 256  # that the kernel takes


def filling_splits(rows: int, length: int, tile: int) -> int:
  """Splits of walks over `length` slots with which `rows` heads fill the default device."""
  quiet = jax.default_backend() != "gpu"
  return kernel("art_splits", "pallas")(rows, length, tile, interpret=quiet)


def walks(
  at: At, cache: Cache, order: Order, q: Float[Array, "B K G H"], splits: int, stop: Stop
) -> Attended:
  """Walks of all splits, joined; notes `Walked`."""
  run = _kernel(at, cache, order.plan, q, order.tile)
  if run is None:
    return joined(at, cache, order, q, splits, stop)
  k, plan, span = cache.slots["k"], order.plan, order.plan.span
  operands, how = (q.astype(k.dtype), k, cache.slots["v"]), dataclasses.asdict(stop)
  if (eps := how.pop("certify")) is not None:
    how["log_ratio"] = certificate.log_ratio(eps)
  if plan.codes is not None:
    operands = plan.codes.q, plan.codes.k, plan.codes.v
    how |= {"per_slot": plan.codes.per_slot, "bits": plan.codes.bits}
  how |= {"ring": order.ring, "seen": None if order.ring is None else cache.seen}
  how |= {"unit": plan.unit, "sinks": span.sinks, "tile": order.tile, "kept": order.kept}
  how |= {"splits": splits, "unread": order.unread, "soft_cap": at.env.soft_cap}
  listed = (None, None) if order.direct else (plan.table, plan.count)
  state, out, walked = run(*operands, *listed, span.start, span.stop, **how)
  if plan.codes is not None:
    state, _ = plan.codes.of_keys(state)
  tiles, visited = read_by(plan, cache.size, walked, order.tile)
  return Attended(state, None, None, visited, out.astype(q.dtype)).noting(Walked(tiles))


def known_walks(
  at: At,
  cache: Cache,
  order: Order,
  q: Float[Array, "B K G H"],
  length: Int[Array, "B K"],
  margin: int,
  stop: Stop,
) -> Attended:
  """`known.read`."""
  return known.read(at, cache, order, q, length, margin, stop)


def _kernel(at: At, cache: Cache, plan: Plan, q: Array, tile: int) -> Callable | None:
  """The kernel, where it does what the method needs; None: the reference."""
  operation = "art" if plan.codes is None else "art_quantised"
  at = at if plan.codes is None else over_codes(at, plan.codes)
  impl = choose(operation, at.env.impl, q, cache.slots["k"])
  if impl == "reference":
    return None
  beyond = beyond_kernel(plan, impl, logits=False, turned=False)
  if plan.codes is not None:
    beyond = beyond or beyond_codes(plan.codes)
  if tile > LARGEST_TILE:
    beyond = f"walks tiles of {tile}; the {impl!r} kernel takes up to {LARGEST_TILE}"
  if beyond and at.env.impl == "auto":
    return None
  run = kernel(operation, impl)
  if beyond:
    raise NotImplementedError(f"{operation}: {at.name} {beyond}")
  return run
