"""Attention of a decode step: over a span, over a plan's table, over ranges and lists."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Attended, CodedSlots, Plan
from kvjax.ops import attention, shared_slots
from kvjax.ops.table import choose, declare, kernel
from kvjax.primitives.softmax_state import State

declare(
  "attend_span",
  pallas="kvjax.kernels.decode.dense:decode_with_output",
  jax_triton="kvjax.kernels.decode.jax_triton:decode_with_output",
)
declare("attend_shared", pallas="kvjax.kernels.decode.dense:decode_with_output")
declare("attend_table", pallas="kvjax.kernels.decode.sparse:sparse_decode")
declare("attend_quantised", pallas="kvjax.kernels.decode.dense:decode_with_output")
declare("attend_quantised_table", pallas="kvjax.kernels.decode.sparse:sparse_decode")


def attend(at: At, cache: Cache, plan: Plan, q: Array) -> Attended:
  """Attention of one decode step over a plan, by the implementation that `at.env.impl` names.

  Raises:
    NotImplementedError: a plan lists tiles of slots that heads share.
  """
  shared, listed = shared_slots.sharers(cache) > 1, plan.table is not None
  if shared and listed:
    raise NotImplementedError(
      f"attend: {at.name} lists tiles of slots that heads share, expected a plan of all that the "
      "query may see"
    )
  if not shared and (attended := _attend_codes(at, cache, plan)) is not None:
    return attended
  operation = "attend_shared" if shared else "attend_table" if listed else "attend_span"
  run = over_plan(operation, at, cache, plan, q)
  if run is None:
    return (attention.attend_shared if shared else attention.attend)(at, cache, plan, q)
  return _attended(at, cache, plan, q, run)


def _attend_codes(at: At, cache: Cache, plan: Plan) -> Attended | None:
  """By a kernel over codes; None: none runs that does what is needed.

  Raises:
    NotImplementedError: a kernel is asked for by name that does not take these codes.
  """
  codes, listed = plan.codes, plan.table is not None
  if codes is None or beyond_kernel(plan, "", logits=not listed, turned=False):
    return None
  operation = "attend_quantised_table" if listed else "attend_quantised"
  run = over_plan(operation, over_codes(at, codes), cache, plan, codes.q)
  if run is not None and (beyond := beyond_codes(codes)):
    if codes.impl != "auto":
      raise NotImplementedError(f"{operation}: {at.name} {beyond}")
    run = None
  if run is None:
    return None
  attended = _attended(at, cache, plan, codes.q, run, codes)
  state, logits = codes.of_keys(attended.state, attended.logits)
  return dataclasses.replace(attended, state=state, logits=logits)


def with_codes(
  at: At, cache: Cache, plan: Plan, q: Array, per_slot: Sequence[str], bits: int
) -> Plan:
  """A plan for operations that may read codes in place of the numbers that they stand for.

  Args:
    at, plan: as of `attend`.
    cache: with words for keys and values, and "k_mean".
    q: the query as it is, not rounded.
    per_slot: names of scales of keys and values, then of their zero points if there are any.
    bits: of a code.
  """
  words, mean = (cache.slots["k"], cache.slots["v"]), cache.heads["k_mean"]
  parts = tuple(cache.slots[name] for name in per_slot)
  return dataclasses.replace(plan, codes=CodedSlots(q, *words, parts, mean, bits, at.env.impl))


def beyond_codes(codes: CodedSlots) -> str:
  """The reason why kernels do not take these codes, in words; empty if they do."""
  takes = "the kernel takes 8 or 4 bits and one scale for each token and head"
  if codes.bits not in (8, 4):
    return f"has bits = {codes.bits}; {takes}"
  grouped = codes.per_slot[0].ndim > 3
  return f"has a scale for each group of channels (group); {takes}" if grouped else ""


def over_codes(at: At, codes: CodedSlots) -> At:
  """Site of operations that read codes (`sparing` is that of the others)."""
  return at.by(codes.impl)


def rounded(attended: Attended, dtype: Any) -> Attended:
  """The same with its output in this dtype, where it has one beside the state's."""
  if attended.out is None:
    return attended
  return dataclasses.replace(attended, out=attended.out.astype(dtype))


def sparing(at: At) -> At:
  """Site where arrays are made for one operation alone: "auto" is the reference there.

  A kernel takes arrays that lie in memory, all of them; XLA makes what is read as it reads it.
  """
  return at.by("reference") if at.env.impl == "auto" else at


def _attended(
  at: At, cache: Cache, plan: Plan, q: Array, run: Callable, codes: CodedSlots | None = None
) -> Attended:
  """A kernel over the slots of the span, all of them or those that the plan lists."""
  span, window = plan.span, plan.window
  how: dict[str, Any] = {"sinks": span.sinks}
  if at.env.soft_cap is not None:  # not all kernels know them
    how["soft_cap"] = at.env.soft_cap
  if codes is None:
    k, v = cache.slots["k"], cache.slots["v"]
    asked = q.astype(k.dtype)  # kernels take operands of one dtype: that of the cache
  else:
    k, v, asked = codes.k, codes.v, q
    how |= {"per_slot": codes.per_slot, "bits": codes.bits}
  if plan.table is not None:
    where = plan.table, plan.count, span.start, span.stop
    state, out = run(asked, k, v, *where, unit=plan.unit, **how)
    return Attended(state, None, None, plan.visited(cache.size), out.astype(q.dtype))
  if window is not None and window.view is not None:
    turned = at.env.rope.shift(q, (window.view - (cache.seen - 1)[:, None])[:, None])
    how["q_sinks"] = turned.astype(k.dtype)
  how["logits"] = plan.needs.logits
  state, out, logits = run(asked, k, v, span.start, span.stop, **how)
  visited = jnp.broadcast_to(span.length(), q.shape[:2])
  slot = jnp.broadcast_to(jnp.arange(k.shape[2], dtype=jnp.int32), (*q.shape[:2], k.shape[2]))
  return Attended(state, logits, slot, visited, out.astype(q.dtype))


def attend_ring(
  at: At, q: Array, k: Array, v: Array, start: Array, stop: Array, ring: int
) -> tuple[State, Array]:
  """Attention of one query per head [B, K, G, H] over a range of slots, and its logits.

  The range is [start, stop), int32 [B, 1]; it is empty where stop ≤ start. What of it is beyond the
  last slot goes on at slot `ring`. Logits [B, K, G, S] are −∞ outside.
  """
  impl, slots = choose("attend_span", at.env.impl, q, k), k.shape[2]
  if impl == "reference":
    again = jnp.full_like(start, ring), stop - slots + ring
    return attention.attend_ranges(at, q, k, v, [(start, jnp.minimum(stop, slots)), again])
  if impl == "jax-triton":
    raise NotImplementedError(
      f"attend_span: {at.name} reads logits (wants_logits); the {impl!r} kernel returns none"
    )
  run = kernel("attend_span", impl)
  how = {"logits": True, "soft_cap": at.env.soft_cap, "ring": ring}
  state, _, logits = run(q.astype(k.dtype), k, v, start, stop, **how)
  return state, logits


def attend_entries(at: At, q: Array, k: Array, v: Array, table: Array, unit: int) -> State:
  """Attention of one query per head over the tiles of `unit` slots that a table [B, W] lists.

  Negative entries are holes. All heads of a row have one list.
  """
  impl = choose("attend_table", at.env.impl, q, k)
  if impl == "reference":
    return attention.attend_entries(at, q, k, v, table, unit)
  run = kernel("attend_table", impl)
  table = jnp.broadcast_to(table[:, None], (*k.shape[:2], table.shape[1]))
  count = jnp.full(k.shape[:2], table.shape[2], jnp.int32)
  stop = jnp.full((k.shape[0], 1), k.shape[2], jnp.int32)
  where, how = (jnp.zeros_like(stop), stop), {"unit": unit, "soft_cap": at.env.soft_cap}
  return run(q.astype(k.dtype), k, v, table, count, *where, **how)[0]


def over_plan(operation: str, at: At, cache: Cache, plan: Plan, q: Array) -> Callable | None:
  """The kernel of an operation over a plan; None: the reference."""
  impl = choose(operation, at.env.impl, q, cache.slots["k"])
  if impl == "reference":
    return None
  spans = plan.table is None
  beyond = beyond_kernel(plan, impl, logits=spans and impl != "jax-triton", turned=spans)
  window = plan.window
  if window is not None and window.view is not None and window.sinks != plan.span.sinks:
    beyond = (
      f"turns the query for its sinks alone (window); the {impl!r} kernel does for all of its "
      "span's"
    )
  if at.env.soft_cap is not None and impl == "jax-triton":
    beyond = f"caps its logits (soft_cap = {at.env.soft_cap}); the {impl!r} kernel does not"
  if plan.span.sinks and plan.span.before is not None:
    beyond = f"has first tokens, which one device holds; the {impl!r} kernel finds them on all"
  if not beyond:
    return kernel(operation, impl)
  if at.env.impl == "auto":
    return None
  raise NotImplementedError(f"{operation}: {at.name} {beyond}")


def beyond_kernel(plan: Plan, impl: str, *, logits: bool, turned: bool) -> str:
  """The need of a method that a kernel's attention does not meet, in words; empty if none.

  `logits`: whether the kernel returns them; `turned`: whether it has another query for sinks.
  """
  if plan.needs.logits and not logits:
    return f"reads logits (wants_logits); the {impl!r} kernel returns none"
  if plan.window is not None and plan.window.view is not None and not turned:
    return f"turns the query for its sinks (window); the {impl!r} kernel has one query"
  if plan.needs.hidden:
    own = ", ".join(plan.needs.hidden)
    return (
      f"has its own {own}, which its span may not know; the {impl!r} kernel sees the span alone"
    )
  return ""
