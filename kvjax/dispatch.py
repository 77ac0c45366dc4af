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
from kvjax.types import At, Attended, Cache, Plan

# operation -> implementation -> (module, function) of a kernel
KERNELS: dict[str, dict[str, tuple[str, str]]] = {
  "enter_token": {"pallas": ("pallas_kernels.enter_token", "enter_token")},
  "partial_products": {"pallas": ("pallas_kernels.product", "partial_products")},
  "gated_product": {"pallas": ("pallas_kernels.product", "gated_product")},
  "add_norm": {"pallas": ("pallas_kernels.add_norm", "add_norm")},
  "qkv_heads": {"pallas": ("pallas_kernels.qkv_heads", "qkv_heads")},
  "attend_span": {
    "pallas": ("pallas_kernels.decode", "decode_with_output"),
    "jax-triton": ("pallas_kernels.decode_jax_triton", "decode_with_output"),
  },
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

  The kernel does both at once for methods that leave `insert` as it is and keep no statistics per
  slot; for the others `insert` is what they say it is.
  """
  plain = not at.top.overrides("insert") and set(cache.slots) == {"k", "v", "pos"}
  if not plain or choose("enter_token", at.env.impl) != "pallas":
    rope = at.env.rope
    q = rope.rotate(q, cache.seen[:, None, None])
    k = rope.rotate(k, cache.seen[:, None])
    return q, at.top.insert(at, cache, k, v, live)
  victim = at.top.victim(at, cache) if at.top.overrides("victim") else None
  names = ("k", "v", "pos")
  held = [*(cache.slots[name] for name in names), cache.seen, cache.used]
  # A model cuts q, k and v out of one product: put together again they need no copies.
  qkv = jnp.concatenate([q, k[:, :, None], v[:, :, None]], 2)
  run = kernel("enter_token", "pallas")
  q, *held, seen, used = run(qkv, live.astype(jnp.int32), victim, *held, rope=at.env.rope)
  slots = dict(zip(names, held, strict=True))
  return q, cache.put(slots=slots, rows={"seen": seen, "used": used})


def attend(at: At, cache: Cache, plan: Plan, q: Array) -> Attended:
  """Attention of one decode step over a plan, by the implementation that `at.env.impl` names."""
  operation = "attend_span" if plan.table is None else "attend_table"
  impl = choose(operation, at.env.impl)
  beyond = _beyond_kernels(at)
  if beyond and at.env.impl == "auto":
    impl = "reference"
  if impl == "reference":
    return attention.attend(at, cache, plan, q)
  if beyond:
    raise NotImplementedError(f"{operation}: {type(at.top).__name__} {beyond.format(impl=impl)}")
  run = kernel(operation, impl)
  qpos = (cache.seen - 1)[:, None]
  window = at.top.window(at, qpos)
  q_sinks = None
  if window is not None and window.view is not None:
    q_sinks = at.env.rope.shift(q, (window.view - qpos)[:, None])
  span = plan.span
  k, v = cache.slots["k"], cache.slots["v"]
  # Kernels take operands of one dtype: queries are rounded to that of the cache.
  q_sinks = None if q_sinks is None else q_sinks.astype(k.dtype)
  ranges = span.start, span.stop
  state, out = run(q.astype(k.dtype), k, v, *ranges, sinks=span.sinks, q_sinks=q_sinks)
  visited = jnp.broadcast_to(span.length(), q.shape[:2])
  return Attended(state, None, None, visited, out.astype(q.dtype))


def _beyond_kernels(at: At) -> str:
  """What the method needs of attention that no kernel does, in words; empty if nothing."""
  if at.top.wants_logits:
    return "reads logits; the {impl!r} kernel returns none"
  if at.top.overrides("read"):
    return "fetches slots its own way; the {impl!r} kernel walks the cache's own arrays"
  return ""
