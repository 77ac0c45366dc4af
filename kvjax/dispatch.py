"""Which implementation an operation runs as; the only place that imports kernels, and lazily.

An operation is looked up by (name, implementation). "reference" always exists; a kernel that is
asked for by name and does not exist, or does not take these operands, raises. "auto" means: the
Pallas kernel on a GPU where there is one that does all that the method needs, the reference
otherwise; for a prompt, cuDNN's attention before either, where it does.
"""

import importlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.ops import attention
from kvjax.ops.slots import Slots, put
from kvjax.softmax_state import State
from kvjax.types import At, Attended, Cache, Plan, Prompt, Window

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
  "attend_prompt": {
    "cudnn": ("kvjax.ops.cudnn", "attend_causal"),
    "pallas": ("pallas_kernels.prefill", "prefill_attention"),
  },
  "column_mass": {"pallas": ("pallas_kernels.prefill", "column_mass")},
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
  beyond = _beyond_kernel(at, cache, plan, impl)
  if beyond and at.env.impl == "auto":
    impl = "reference"
  if impl == "reference":
    return attention.attend(at, cache, plan, q)
  if beyond:
    raise NotImplementedError(f"{operation}: {type(at.top).__name__} {beyond}")
  attend = _attend_span if plan.table is None else _attend_table
  return attend(at, cache, plan, q, kernel(operation, impl))


def attend_prompt(at: At, staged: Slots, q: Array, qpos: Array, prompt: Prompt) -> Attended:
  """Causal attention of a chunk's queries over the staged slots, as `at.env.impl` says.

  Implementations that do not attend to prompts at all stand for the reference here.
  """
  window = at.top.window(at, qpos)
  visited = (staged["pos"] >= 0).sum(-1, dtype=jnp.int32)
  impl = _prompt_implementation(at, staged, window, prompt)
  before = prompt.past  # slots that can stand before the chunk's own
  if not at.top.positional:
    before = staged["pos"].shape[2] - prompt.tokens
  reach = None if before is None else before + 1 + prompt.query_index().max(0)
  if impl == "reference":
    state = attention.attend_prompt(at, q, qpos, staged, window, reach)
    return Attended(state, None, None, visited)
  k, v = staged["k"], staged["v"]
  run = kernel("attend_prompt", impl)
  if impl == "cudnn":
    state, out = run(q.astype(k.dtype), k, v, prompt.valid)
    return Attended(state, None, None, visited, out.astype(q.dtype))
  q_sinks = None
  if window is not None and window.view is not None:
    q_sinks = at.env.rope.shift(q, (window.view - qpos)[:, None, None]).astype(k.dtype)
  in_order = _slots_are_positions(at, prompt)
  state, out = run(
    q.astype(k.dtype),
    k,
    v,
    qpos,
    None if window is None else window.first,
    sinks=0 if window is None else window.sinks,
    q_sinks=q_sinks,
    pos=None if in_order else staged["pos"],
    reach=None if in_order else reach,
  )
  return Attended(state, None, None, visited, out.astype(q.dtype))


def _prompt_implementation(at: At, staged: Slots, window: Window | None, prompt: Prompt) -> str:
  """Which implementation attends to a prompt; raises where the one that is asked for cannot."""
  named = at.env.impl
  if named == "auto":
    kernels = KERNELS["attend_prompt"] if jax.default_backend() == "gpu" else ()
    able = (x for x in kernels if not _beyond_prompt(at, staged, window, prompt, x))
    # Float32 products of the kernels would leave the matrix units unused.
    return next(able, "reference") if staged["k"].dtype.itemsize == 2 else "reference"
  if named not in KERNELS["attend_prompt"]:
    return "reference"
  if beyond := _beyond_prompt(at, staged, window, prompt, named):
    raise NotImplementedError(f"attend_prompt: {type(at.top).__name__} {beyond}")
  return named


def _beyond_prompt(at: At, staged: Slots, window: Window | None, prompt: Prompt, impl: str) -> str:
  """What of a prompt's attention the implementation does not do, in words; empty if nothing."""
  dtype, head_dim = staged["k"].dtype.name, staged["k"].shape[3]
  if impl == "cudnn":
    if dtype == "float32" or head_dim % 8 or head_dim > 128:
      return f"has heads of {head_dim} {dtype}; 'cudnn' takes up to 128 of 16 bits, a multiple of 8"
    if window is not None:
      return "has a window in this layer; 'cudnn' attends to all that came before"
    if prompt.past != 0 or prompt.index is not None or at.top.overrides("stage"):
      return "attends to more or less than a whole prompt in order, which is what 'cudnn' takes"
  elif head_dim > 256:
    return f"has heads of {head_dim}; {impl!r} takes up to 256"
  return ""


def _slots_are_positions(at: At, prompt: Prompt) -> bool:
  """Whether the staged slots of a chunk carry their positions, from 0 on."""
  return (prompt.past == 0 or at.top.positional) and not at.top.overrides("stage")


def column_mass(
  at: At, q: Array, qpos: Array, staged: Slots, window: Window | None, state: State
) -> Array:
  """Probability that queries give to every slot; see `kvjax.ops.attention.column_mass`."""
  turned = window is not None and window.view is not None
  narrow = at.env.impl == "auto" and staged["k"].dtype.itemsize != 2
  if turned or narrow or choose("column_mass", at.env.impl) != "pallas":
    return attention.column_mass(at, q, qpos, staged, window, state)
  k, pos = staged["k"], staged["pos"]
  first, sinks = (None, 0) if window is None else (window.first, window.sinks)
  run = kernel("column_mass", "pallas")
  return run(q.astype(k.dtype), k, pos, qpos, state.m, state.l, first, sinks=sinks)


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


def _beyond_kernel(at: At, cache: Cache, plan: Plan, impl: str) -> str:
  """What the method needs of attention that the kernel does not do, in words; empty if nothing."""
  if at.top.wants_logits and (impl == "jax-triton" or plan.table is not None):
    return f"reads logits; the {impl!r} kernel returns none"
  if at.top.overrides("read"):
    return f"fetches slots its own way; the {impl!r} kernel walks the cache's own arrays"
  window = at.top.window(at, (cache.seen - 1)[:, None])
  if plan.table is not None and window is not None and window.view is not None:
    return f"turns the query for its sinks; the {impl!r} kernel has one query"
  return ""
