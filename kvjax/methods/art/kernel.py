"""Algorithm 1 by a kernel, where there is one; its reference is `splits.joined`."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Attended
from kvjax.methods.art import certificate, known
from kvjax.methods.art.order import Order
from kvjax.methods.art.splits import Walked, joined, read_by
from kvjax.methods.art.walk import NEVER, Stop
from kvjax.ops.decode import beyond_codes, beyond_kernel, over_codes
from kvjax.ops.table import choose, declare, kernel

declare("art", pallas="kvjax.kernels.art.walk:walk")
declare("art_quantised", pallas="kvjax.kernels.art.walk:walk")
declare("art_known", pallas="kvjax.kernels.art.known:read")
declare("art_splits", pallas="kvjax.kernels.art.walk:choose_splits")

LARGEST_TILE = 256  # that the kernel takes
LONGEST_TAIL = 62  # tiles that the kernel looks at of a known length


def filling_splits(rows: int, length: int, tile: int) -> int:
  """Splits of walks over `length` slots with which `rows` heads fill the default device."""
  quiet = jax.default_backend() != "gpu"
  return kernel("art_splits", "pallas")(rows, length, tile, interpret=quiet)


def walks(
  at: At, cache: Cache, order: Order, q: Float[Array, "B K G H"], splits: int, stop: Stop
) -> Attended:
  """Walks of all splits, joined; notes `Walked`."""
  run = _kernel(at, cache, order, q)
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
  """`known.read`, by a kernel where there is one."""
  run = _kernel(at, cache, order, q, margin, stop.patience)
  if run is None:
    return known.read(at, cache, order, q, length, margin, stop)
  k, span, how = cache.slots["k"], order.plan.span, dataclasses.asdict(stop)
  for name in ("certify", "per_head"):
    how.pop(name)
  how |= {
    "tail": known.tail(stop.patience, margin),
    "sinks": span.sinks,
    "tile": order.tile,
    "kept": order.kept,
  }
  if order.moved is not None:
    how["moved"] = order.moved
  elif not order.direct:
    how |= {"table": order.plan.table, "count": order.plan.count, "unit": order.plan.unit}
  operands = q.astype(k.dtype), k, cache.slots["v"], span.start, span.stop, length
  how["following"] = functools.partial(known.following, margin=margin)
  state, out, walked, after = run(*operands, **how, soft_cap=at.env.soft_cap)
  groups = jnp.broadcast_to(walked[:, :, None, None], (*walked.shape, 1, q.shape[2]))
  keys = read_by(order.plan, cache.size, groups, order.tile)[1]
  attended = Attended(state, None, None, keys, out.astype(q.dtype))
  return known.reported(attended, walked, after)


def _kernel(
  at: At,
  cache: Cache,
  order: Order,
  q: Array,
  margin: int | None = None,
  patience: float | int = 0,
) -> Callable | None:
  """The kernel, where it does what the method needs; None: the reference."""
  plan, tile = order.plan, order.tile
  operation = "art" if plan.codes is None else "art_quantised"
  operation = operation if margin is None else "art_known"
  at = at if plan.codes is None else over_codes(at, plan.codes)
  impl = choose(operation, at.env.impl, q, cache.slots["k"])
  if impl == "reference":
    return None
  beyond = beyond_kernel(plan, impl, logits=False, turned=False)
  if plan.codes is not None:
    beyond = beyond or beyond_codes(plan.codes)
  if margin is not None:
    if plan.codes is not None:
      beyond = f"reads codes to a known length; the {impl!r} kernel reads numbers"
    elif patience < NEVER and known.tail(patience, margin) > LONGEST_TAIL:
      beyond = (
        f"looks at {known.tail(patience, margin)} tiles for its patience and margin; the "
        f"{impl!r} kernel looks at up to {LONGEST_TAIL}"
      )
  if order.whole is not None:
    beyond = f"asks for the mass of tiles (by_mass); the {impl!r} kernel returns none"
  if tile > LARGEST_TILE:
    beyond = f"walks tiles of {tile}; the {impl!r} kernel takes up to {LARGEST_TILE}"
  if beyond and at.env.impl == "auto":
    return None
  run = kernel(operation, impl)
  if beyond:
    raise NotImplementedError(f"{operation}: {at.name} {beyond}")
  return run
