"""Which implementation an operation runs as; the only place that imports kernels, and lazily.

An operation is looked up by (name, implementation). "reference" always exists; a kernel that is
asked for by name and does not exist, or does not take these operands, raises. "auto" means: the
Pallas kernel on a GPU where there is one that does all that the method needs, the reference
otherwise.
"""

import importlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.ops import attention
from kvjax.ops.slots import put
from kvjax.types import At, Attended, Cache, Plan

# operation -> implementation -> (module, function) of a kernel
KERNELS: dict[str, dict[str, tuple[str, str]]] = {
  "enter_token": {"pallas": ("pallas_kernels.enter_token", "enter_token")},
  "longflow_victim": {"pallas": ("pallas_kernels.longflow", "victim")},
  "partial_products": {"pallas": ("pallas_kernels.product", "partial_products")},
  "gated_product": {"pallas": ("pallas_kernels.product", "gated_product")},
  "add_norm": {"pallas": ("pallas_kernels.add_norm", "add_norm")},
  "qkv_heads": {"pallas": ("pallas_kernels.qkv_heads", "qkv_heads")},
  "attend_span": {
    "pallas": ("pallas_kernels.decode", "decode_with_output"),
    "jax-triton": ("pallas_kernels.decode_jax_triton", "decode_with_output"),
  },
  "attend_table": {"pallas": ("pallas_kernels.sparse_decode", "sparse_decode")},
  "art": {"pallas": ("pallas_kernels.art", "walk")},
}


def kernel(operation: str, impl: str) -> Callable:
  """The kernel of an operation; NotImplementedError names both if there is none."""
  try:
    module, function = KERNELS[operation][impl]
  except KeyError:
    have = ", ".join(["reference", *KERNELS.get(operation, {})])
    raise NotImplementedError(
      f"{operation}: no {impl!r} implementation (there is: {have})"
    ) from None
  return getattr(importlib.import_module(module), function)


def choose(operation: str, impl: str) -> str:
  """Resolves "auto" for the default backend; other names are returned as they are."""
  if impl != "auto":
    return impl
  on_gpu = jax.default_backend() == "gpu"
  return "pallas" if on_gpu and "pallas" in KERNELS.get(operation, {}) else "reference"


def enter_token(
  at: At, cache: Cache, q: Array, k: Array, v: Array, live: Array
) -> tuple[Array, Cache]:
  """Rotates the new token's q and k and inserts it; returns rotated q [B, K, G, H] and the cache.

  The kernel does both at once, and ‖v‖₁ where the cache keeps it, for methods that leave `insert`
  as it is; for the others `insert` is what they say it is.
  """
  if at.top.overrides("insert") or choose("enter_token", at.env.impl) != "pallas":
    rope = at.env.rope
    q = rope.rotate(q, cache.seen[:, None, None])
    k = rope.rotate(k, cache.seen[:, None])
    return q, at.top.insert(at, cache, k, v, live)
  victim = at.top.victim(at, cache) if at.top.overrides("victim") else None
  # A model cuts q, k and v out of one product: put together again they need no copies.
  qkv = jnp.concatenate([q, k[:, :, None], v[:, :, None]], 2)
  held = {**cache.slots, "seen": cache.seen, "used": cache.used}
  operands = [held[name] for name in ("k", "v", "pos", "seen", "used", "norm") if name in held]
  run = kernel("enter_token", "pallas")
  q, *entered, seen, used = run(qkv, live.astype(jnp.int32), victim, *operands, rope=at.env.rope)
  names = [name for name in ("k", "v", "pos", "norm") if name in held]
  stored = dict(zip(names, entered, strict=True))
  stored |= _statistics(at, cache, set(cache.slots) - set(names), k, v, live)
  return q, cache.put(slots=stored, rows={"seen": seen, "used": used})


def _statistics(
  at: At, cache: Cache, names: set[str], k: Array, v: Array, live: Array
) -> dict[str, Array]:
  """These statistics of the slots with the new token's in its slot."""
  if not names:
    return {}
  slot = at.top.landing(at, cache, live)[:, :, None]
  pos = jnp.broadcast_to(cache.seen[:, None, None], slot.shape)
  k = at.env.rope.rotate(k, cache.seen[:, None])
  new = {"k": k[:, :, None], "v": v[:, :, None], "pos": pos}
  like = {name: jnp.zeros_like(cache.slots[name][:, :, :1]) for name in names}
  return {n: put(cache.slots[n], slot, at.top.fresh(n, like[n], new)) for n in names}


def attend(at: At, cache: Cache, plan: Plan, q: Array) -> Attended:
  """Attention of one decode step over a plan, by the implementation that `at.env.impl` names."""
  operation = "attend_span" if plan.table is None else "attend_table"
  impl = choose(operation, at.env.impl)
  spans = plan.table is None
  beyond = beyond_kernel(at, cache, impl, logits=spans and impl != "jax-triton", turned=spans)
  if beyond and at.env.impl == "auto":
    impl = "reference"
  if impl == "reference":
    return attention.attend(at, cache, plan, q)
  if beyond:
    raise NotImplementedError(f"{operation}: {type(at.top).__name__} {beyond}")
  attend = _attend_span if plan.table is None else _attend_table
  return attend(at, cache, plan, q, kernel(operation, impl))


def attend_tiles(at: At, cache: Cache, plan: Plan, q: Array) -> Attended:
  """As `attend` over a plan with a table, with a state [B, K, G, W] for every entry of it."""
  if choose("attend_tiles", at.env.impl) != "reference":
    kernel("attend_tiles", at.env.impl)
  return attention.attend_tiles(at, cache, plan, q)


def _attend_span(at: At, cache: Cache, plan: Plan, q: Array, run: Callable) -> Attended:
  """A kernel over all slots of the span."""
  qpos = (cache.seen - 1)[:, None]
  window = at.top.window(at, qpos)
  q_sinks = None
  if window is not None and window.view is not None:
    q_sinks = at.env.rope.shift(q, (window.view - qpos)[:, None])
  span = plan.span
  k, v = cache.slots["k"], cache.slots["v"]
  # Kernels take operands of one dtype: queries are rounded to that of the cache.
  q_sinks = None if q_sinks is None else q_sinks.astype(k.dtype)
  state, out, logits = run(
    q.astype(k.dtype),
    k,
    v,
    span.start,
    span.stop,
    sinks=span.sinks,
    q_sinks=q_sinks,
    logits=at.top.wants_logits,
  )
  visited = jnp.broadcast_to(span.length(), q.shape[:2])
  slot = jnp.broadcast_to(jnp.arange(k.shape[2], dtype=jnp.int32), k.shape[:3])
  return Attended(state, logits, slot, visited, out.astype(q.dtype))


def _attend_table(at: At, cache: Cache, plan: Plan, q: Array, run: Callable) -> Attended:
  """A kernel over the listed slots of the span."""
  k, v = cache.slots["k"], cache.slots["v"]
  span = plan.span
  state, out = run(
    q.astype(k.dtype),
    k,
    v,
    plan.table,
    plan.count,
    span.start,
    span.stop,
    unit=plan.unit,
    sinks=span.sinks,
  )
  return Attended(state, None, None, plan.visited(cache.size), out.astype(q.dtype))


def beyond_kernel(at: At, cache: Cache, impl: str, *, logits: bool, turned: bool) -> str:
  """What the method needs of attention that a kernel does not do, in words; empty if nothing.

  `logits`: whether the kernel returns them; `turned`: whether it has another query for sinks.
  """
  if at.top.wants_logits and not logits:
    return f"reads logits; the {impl!r} kernel returns none"
  if at.top.overrides("read"):
    return f"fetches slots its own way; the {impl!r} kernel walks the cache's own arrays"
  window = at.top.window(at, (cache.seen - 1)[:, None])
  if window is not None and window.view is not None and not turned:
    return f"turns the query for its sinks; the {impl!r} kernel has one query"
  return ""
