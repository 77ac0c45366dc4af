"""Which implementation an operation runs as; the only place that imports kernels, and lazily.

An operation is looked up by (name, implementation). "reference" always exists; a kernel that is
asked for by name and does not exist, or does not take these operands, raises. "auto" means: the
Pallas kernel on a GPU where there is one that has run there (`UNRUN`) and does all that the method
needs, the reference otherwise; for a prompt, cuDNN's attention before either, where it does.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax import softmax_state
from kvjax.ops import attention, context, tiles
from kvjax.ops.slots import Slots, choose_rows, put
from kvjax.softmax_state import State
from kvjax.types import At, Attended, Cache, Plan, Prompt, Span, Window

# operation -> implementation -> (module, function) of a kernel
KERNELS: dict[str, dict[str, tuple[str, str]]] = {
  "enter_token": {"pallas": ("pallas_kernels.enter_token", "enter_token")},
  "keep_rows": {"pallas": ("pallas_kernels.keep_rows", "keep")},
  "longflow_victim": {"pallas": ("pallas_kernels.longflow", "victim")},
  "product": {"pallas": ("pallas_kernels.product", "product")},
  "partial_products": {"pallas": ("pallas_kernels.product", "partial_products")},
  "gated_product": {"pallas": ("pallas_kernels.product", "gated_product")},
  "add_norm": {"pallas": ("pallas_kernels.add_norm", "add_norm")},
  "qkv_heads": {"pallas": ("pallas_kernels.qkv_heads", "qkv_heads")},
  "attend_span": {
    "pallas": ("pallas_kernels.decode", "decode_with_output"),
    "jax-triton": ("pallas_kernels.decode_jax_triton", "decode_with_output"),
  },
  "append_blocks": {"pallas": ("pallas_kernels.host_blocks", "append")},
  "fetch_blocks": {"pallas": ("pallas_kernels.host_blocks", "fetch")},
  "attend_table": {"pallas": ("pallas_kernels.sparse_decode", "sparse_decode")},
  "attend_prompt": {
    "cudnn": ("kvjax.ops.cudnn", "attend_causal"),
    "pallas": ("pallas_kernels.prefill", "prefill_attention"),
  },
  "attend_prompt_pieces": {"cudnn": ("pallas_kernels.prefill_pieces", "attend_in_pieces")},
  "column_mass": {"pallas": ("pallas_kernels.prefill", "column_mass")},
  "art": {"pallas": ("pallas_kernels.art", "walk")},
  "page_bounds": {"pallas": ("pallas_kernels.quest", "page_bounds")},
  "key_logits": {"pallas": ("pallas_kernels.key_weights", "key_logits")},
  "key_weights": {"pallas": ("pallas_kernels.key_weights", "key_weights")},
  "renew_extremes": {"pallas": ("pallas_kernels.summaries", "renew_extremes")},
  "renew_mean": {"pallas": ("pallas_kernels.summaries", "renew_mean")},
  "cis_anchors": {"pallas": ("pallas_kernels.cis", "anchors")},
  "cis_found_listed": {"pallas": ("pallas_kernels.cis", "found_and_listed")},
  "cis_listed": {"pallas": ("pallas_kernels.cis", "listed")},
  "cis_note": {"pallas": ("pallas_kernels.cis", "note")},
  "hshare_listed": {"pallas": ("pallas_kernels.hshare", "listed")},
  "best_tiles": {"pallas": ("pallas_kernels.top_k", "best")},
  "best_tiles_of_each": {"pallas": ("pallas_kernels.top_k", "best_of_each")},
  "other_tiles": {"pallas": ("pallas_kernels.top_k", "others")},
  "attend_tiles": {"pallas": ("pallas_kernels.speculate", "attend_tiles")},
  "speculate": {"pallas": ("pallas_kernels.speculate", "speculate")},
  "speculate_keys": {"pallas": ("pallas_kernels.speculate", "speculate_keys")},
  "speculation_ratio": {"pallas": ("pallas_kernels.speculation", "ratio")},
  "repair": {"pallas": ("pallas_kernels.repair", "repair")},
}

# Kernels that equal their references in the interpreter, where programs run one after another, and
# compile, but have not run on a GPU in their present form: "auto" leaves them alone.
UNRUN: set[str] = set()


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
  trusted = "pallas" in KERNELS.get(operation, {}) and operation not in UNRUN
  return "pallas" if trusted and jax.default_backend() == "gpu" else "reference"


def choose_for(at: At, operation: str) -> str:
  """As `choose`, for kernels that take a cache's slots for all there are: XLA's where split."""
  return "reference" if at.env.slot_axis else choose(operation, at.env.impl)


def enter_token(
  at: At, cache: Cache, q: Array, k: Array, v: Array, live: Array
) -> tuple[Array, Cache]:
  """Rotates the new token's q and k and inserts it; returns rotated q [B, K, G, H] and the cache.

  The kernel does both at once, and ‖v‖₁ where the cache keeps it, for methods that leave `insert`
  as it is; for the others `insert` is what they say it is. It knows of one device's slots only.
  """
  kernel_fits = not at.top.overrides("insert") and at.env.slot_axis is None
  if not kernel_fits or choose("enter_token", at.env.impl) != "pallas":
    rope = at.env.rope
    q = rope.rotate(q, cache.seen[:, None, None])
    k = rope.rotate(k, cache.seen[:, None])
    return q, at.top.insert(at, cache, k, v, live)
  ring = cache.heads.get("ring")
  chooses = ring is None and at.top.overrides("victim")
  victim = at.top.victim(at, cache) if chooses else None
  # A model cuts q, k and v out of one product: put together again they need no copies.
  qkv = jnp.concatenate([q, k[:, :, None], v[:, :, None]], 2)
  held = {**cache.slots, "seen": cache.seen, "used": cache.used}
  operands = [held[name] for name in ("k", "v", "pos", "seen", "used", "norm") if name in held]
  run = kernel("enter_token", "pallas")
  q, *entered, seen, used = run(qkv, live, victim, *operands, rope=at.env.rope, ring=ring)
  names = [name for name in ("k", "v", "pos", "norm") if name in held]
  stored = dict(zip(names, entered, strict=True))
  others = set(cache.slots) - {*names, *at.top.standing}
  stored |= _statistics(at, cache, others, k, v, live)
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


def keep_rows(
  at: At, attended: Attended, new: dict[Any, Any], old: dict[Any, Any]
) -> dict[Any, Any]:
  """`slots.choose_rows` of statistics by `attended.counted`; of several by one launch."""
  assert attended.counted is not None and attended.live is not None  # filled in behind `attend`
  changed = [name for name, x in new.items() if x is not old[name]]
  plain = all(isinstance(new[name], jax.Array) for name in changed)
  if len(changed) < 2 or not plain or choose("keep_rows", at.env.impl) != "pallas":
    return choose_rows(attended.counted, new, old)
  # It looks at the denominators itself, all but those of other devices' heads.
  live = attended.counted if at.env.head_axis else attended.live
  arrays = ([held[name] for name in changed] for held in (new, old))
  kept = kernel("keep_rows", "pallas")(live, attended.state.l, *arrays)
  return new | dict(zip(changed, kept, strict=True))


def best_tiles(
  at: At,
  scores: Array,
  span: Span,
  *,
  k: int,
  limit: int | None = None,
  dense_below: int = 0,
  **forced: int,
) -> tuple[Array, Array, Array]:
  """`ops.tiles.best`. A kernel lists tiles by index where attention is to all of them anyway.

  Rows of `dense_below` slots and more get `limit` tiles, if it is given; shorter ones get k.
  """
  if choose("best_tiles", at.env.impl) == "pallas":
    run = kernel("best_tiles", "pallas")
    where = scores.astype(jnp.float32), span.start, span.stop
    how: dict[str, Any] = {"span_sinks": span.sinks, "ordered": at.top.ordered, **forced}
    try:
      return run(*where, k=k, limit=limit, dense_below=dense_below, **how)
    except NotImplementedError:  # more than the kernel can hold
      if at.env.impl != "auto":
        raise
  each = None if limit is None else jnp.where(span.stop < dense_below, k, limit)
  return tiles.best(scores, span, k=k, limit=each, **forced)


def best_tiles_of_each(
  at: At, scores: Array, start: Array, stop: Array, **how: Any
) -> Sequence[tuple[Array, Array, Array]] | None:
  """What N calls of `best_tiles` give, by one search; None where no kernel does that.

  scores [B, K, N, P], start [B, #K] or [B, #K, #N], stop [B, #K, #N]; `how` as the kernel takes it.
  """
  if choose("best_tiles_of_each", at.env.impl) != "pallas":
    return None
  run = kernel("best_tiles_of_each", "pallas")
  try:
    return run(scores.astype(jnp.float32), start, stop, ordered=at.top.ordered, **how)
  except NotImplementedError:
    if at.env.impl != "auto":
      raise
    return None


def other_tiles(
  at: At,
  scores: Array,
  span: Span,
  *,
  active: Array | None = None,
  ordered: bool = True,
  first: int = 0,
  **chosen: int,
) -> tuple[Array, Array]:
  """`ops.tiles.others`; heads that are not `active` [B, K] may be given anything.

  Unless they are to be `ordered`, a kernel lists the best `first` of them by index, then the others
  by index.
  """
  if choose("other_tiles", at.env.impl) != "pallas":
    return tiles.others(scores, span, **chosen)
  run = kernel("other_tiles", "pallas")
  active = None if active is None else active.astype(jnp.int32)
  where = scores.astype(jnp.float32), span.start, span.stop
  how: dict[str, Any] = {"span_sinks": span.sinks, "ordered": ordered, "first": first}
  try:
    return run(*where, active=active, **how, **chosen)
  except NotImplementedError:
    if at.env.impl != "auto":
      raise
    best, index = tiles.others(scores, span, **chosen)
    if ordered:
      return best, index
    behind = jnp.where(index < 0, scores.shape[-1], index)
    behind, best = jax.lax.sort((behind, best), num_keys=1)
    return best, jnp.where(behind == scores.shape[-1], -1, behind)


def attend(at: At, cache: Cache, plan: Plan, q: Array) -> Attended:
  """Attention of one decode step over a plan, by the implementation that `at.env.impl` names."""
  run = _over_plan("attend_span" if plan.table is None else "attend_table", at, cache, plan)
  if run is None:
    return attention.attend(at, cache, plan, q)
  attend = _attend_span if plan.table is None else _attend_table
  return attend(at, cache, plan, q, run)


def attend_ranges(
  at: At, q: Array, k: Array, v: Array, ranges: Sequence[tuple[Array, Array]]
) -> tuple[State, Array]:
  """Attention of one query per head [B, K, G, H] over disjoint ranges of slots, and their logits.

  A range is (start, stop), int32 [B, 1]; it is empty where stop ≤ start. Logits [B, K, G, S] are
  −∞ outside.
  """
  impl = choose("attend_span", at.env.impl)
  if impl == "reference":
    return attention.attend_ranges(q, k, v, ranges)
  if impl == "jax-triton":
    raise NotImplementedError(
      f"attend_span: {type(at.top).__name__} reads logits; the {impl!r} kernel returns none"
    )
  run = kernel("attend_span", impl)
  parts = [run(q.astype(k.dtype), k, v, *ends, logits=True) for ends in ranges]
  state = functools.reduce(softmax_state.merge, (state for state, _, _ in parts))
  return state, functools.reduce(jnp.maximum, (logits for _, _, logits in parts))


def attend_entries(at: At, q: Array, k: Array, v: Array, table: Array, unit: int) -> State:
  """Attention of one query per head over the tiles of `unit` slots that a table [B, W] lists.

  Negative entries are holes. All heads of a row have one list.
  """
  impl = choose("attend_table", at.env.impl)
  if impl == "reference":
    return attention.attend_entries(q, k, v, table, unit)
  run = kernel("attend_table", impl)
  table = jnp.broadcast_to(table[:, None], (*k.shape[:2], table.shape[1]))
  count = jnp.full(k.shape[:2], table.shape[2], jnp.int32)
  stop = jnp.full((k.shape[0], 1), k.shape[2], jnp.int32)
  return run(q.astype(k.dtype), k, v, table, count, jnp.zeros_like(stop), stop, unit=unit)[0]


def attend_tiles(at: At, cache: Cache, plan: Plan, q: Array) -> Attended:
  """As `attend` over a plan with a table, with a state [B, K, G, W] for every entry of it.

  A kernel's own form of these states is in the memo, for `repair`.
  """
  run = _over_plan("attend_tiles", at, cache, plan)
  if run is None:
    return attention.attend_tiles(at, cache, plan, q)
  span, (k, v) = plan.span, (cache.slots[name] for name in ("k", "v"))
  sizes = {"unit": plan.unit, "sinks": span.sinks}
  parts = run(q.astype(k.dtype), k, v, plan.table, span.start, span.stop, **sizes)
  return _of_tiles(cache, plan, q, parts)


def _of_tiles(cache: Cache, plan: Plan, q: Array, parts: Sequence[Array]) -> Attended:
  """What a kernel's states of the tiles of a plan are."""
  memo = "tiles", list(parts)
  return Attended(_states(q, parts), None, None, plan.sizes(cache.size), memo=memo)


def _states(q: Array, parts: Sequence[Array]) -> State:
  """A kernel's partial states [B K P, G, …], m in base 2, as states [B, K, G, P]."""
  shape = (*q.shape[:2], -1, *q.shape[2:])
  acc, m, l = (jnp.moveaxis(x.reshape(shape[: x.ndim + 2]), 2, 3) for x in parts)
  return State(acc / jnp.where(l == 0, 1.0, l)[..., None], m * math.log(2), l)


def speculate(
  at: At,
  cache: Cache,
  guess: Plan,
  q: Array,
  operation: str,
  summaries: tuple[Array, ...],
  *state: Array,
  apart: bool = False,
  **how: Any,
) -> tuple[Attended, Sequence[Array]] | None:
  """Attention over predicted tiles beside the scoring of all; None where no kernel does both.

  Args:
    at, cache, guess, q: as in `attend`; all cached tokens are visible.
    operation: "speculate" for pages, "speculate_keys" for compressed keys.
    summaries: minimum and maximum of every page's keys, or the compressed keys.
    state: level and trend of every tile, and the factors of every row.
    apart: whether every predicted tile gets a state of its own, as by `attend_tiles`.
    how: `predictor`; `group` of pages, `stride` and `width` of compressed keys.

  Returns:
    What `repair` takes; and scores and forecasts [B, K, 2, P] of all tiles, their level and trend,
    and the occupied slots that each of the former is for [B, K, 2].
  """
  beyond = beyond_kernel(at, cache, "pallas", logits=False, turned=False)
  if beyond or choose(operation, at.env.impl) != "pallas":
    return None
  k, v = cache.slots["k"], cache.slots["v"]
  operands = q.astype(k.dtype), k, v, guess.table, cache.used, *summaries, *state
  run = kernel(operation, "pallas")
  written, scored = run(*operands, unit=guess.unit, apart=apart, **how)
  if apart:
    return _of_tiles(cache, guess, q, written), scored
  merged, memo = softmax_state.merge_all(_states(q, written)), ("pieces", list(written))
  return Attended(merged, None, None, guess.visited(cache.size), memo=memo), scored


def speculation_ratio(selector: str, **shape: int) -> float:
  """ρ that was measured to be best on the default device (`pallas_kernels.speculation`), else 1."""
  measured = kernel("speculation_ratio", "pallas")(selector, **shape)
  return 1.0 if measured is None else measured


def repair(
  at: At,
  cache: Cache,
  plan: Plan,
  guess: Plan,
  q: Array,
  early: Attended,
) -> Attended | None:
  """Attention over a selection, given that over a predicted one; None where no kernel does it.

  `early` is what `attend` or `speculate` gave for the prediction, or `attend_tiles`: then tiles
  that are in the prediction alone are left out.
  """
  run = _over_plan("repair", at, cache, plan)
  if run is None:
    return None
  k, v, span = cache.slots["k"], cache.slots["v"], plan.span
  stored, written = early.memo or ("whole", [])
  if stored == "whole":
    assert early.out is not None
    held = early.state.o, early.state.m, early.state.l, early.out.astype(k.dtype)
    written = [x.reshape(-1, *x.shape[2:]) for x in held]
  state, out, missed, misses = run(
    *(q.astype(k.dtype), k, v, plan.table),
    *(guess.table, span.start, span.stop),
    written,
    unit=plan.unit,
    sinks=span.sinks,
    stored=stored,
  )
  if stored == "tiles":
    visited = plan.visited(cache.size)
  else:
    late = dataclasses.replace(plan, table=missed, count=misses)
    visited = early.visited + late.visited(cache.size)
  return Attended(state, None, None, visited, out.astype(q.dtype))


def _over_plan(operation: str, at: At, cache: Cache, plan: Plan) -> Callable | None:
  """The kernel of an operation over a plan; None: the reference."""
  impl = choose(operation, at.env.impl)
  if impl == "reference":
    return None
  spans = plan.table is None
  beyond = beyond_kernel(at, cache, impl, logits=spans and impl != "jax-triton", turned=spans)
  if not beyond:
    return kernel(operation, impl)
  if at.env.impl == "auto":
    return None
  raise NotImplementedError(f"{operation}: {type(at.top).__name__} {beyond}")


def attend_prompt(at: At, staged: Slots, q: Array, qpos: Array, prompt: Prompt) -> Attended:
  """Causal attention of a chunk's queries over the staged slots, as `at.env.impl` says.

  Implementations that do not attend to prompts at all stand for the reference here.
  """
  window = at.top.window(at, qpos)
  visited = (staged["pos"] >= 0).sum(-1, dtype=jnp.int32)
  impl, run = _prompt_implementation(at, staged, q, window, prompt)
  before = prompt.past  # slots that can stand before the chunk's own
  if not at.top.positional:
    before = staged["pos"].shape[2] - prompt.tokens
  reach = None
  if before is not None:
    held = staged["pos"].shape[2]
    reach = context.reach(at, before + 1 + prompt.query_index().max(0), held)
  if impl == "reference":
    state = attention.attend_prompt(at, q, qpos, staged, window, reach)
    return Attended(state, None, None, visited)
  k, v = staged["k"], staged["v"]
  if impl == "cudnn":
    state, out = run(q.astype(k.dtype), k, v, prompt.valid)
    return Attended(state, None, None, visited, out.astype(q.dtype))
  first, sinks = (None, 0) if window is None else (window.first, window.sinks)
  options: dict[str, Any] = {"sinks": sinks}
  if impl == "pallas":
    if window is not None and window.view is not None:
      turned = at.env.rope.shift(q, (window.view - qpos)[:, None, None])
      options["q_sinks"] = turned.astype(k.dtype)
    if not _slots_are_positions(at, prompt):
      options |= {"pos": staged["pos"], "reach": reach}
  state, out = run(q.astype(k.dtype), k, v, qpos, first, **options)
  return Attended(state, None, None, visited, out.astype(q.dtype))


def attend_anywhere(at: At, held: Slots, q: Array, qpos: Array) -> State:
  """Attention of a chunk's queries over slots in any order, each up to its own position."""
  impl = choose("attend_prompt", at.env.impl)
  if impl == "cudnn":
    raise NotImplementedError(
      f"attend_prompt: {type(at.top).__name__} attends to slots in no order; {impl!r} takes a "
      "whole prompt"
    )
  # Float32 products of the kernel would leave the matrix units unused.
  narrow = at.env.impl == "auto" and held["k"].dtype.itemsize != 2
  if narrow or impl != "pallas":
    return attention.attend_prompt(at, q, qpos, held, None, None)
  k, v = held["k"], held["v"]
  return kernel("attend_prompt", impl)(q.astype(k.dtype), k, v, qpos, pos=held["pos"])[0]


def _prompt_implementation(
  at: At, staged: Slots, q: Array, window: Window | None, prompt: Prompt
) -> tuple[str, Callable]:
  """What attends to a prompt, by name and as a function; raises where the one asked for cannot.

  Asked for by name, "cudnn" is cuDNN alone or "pieces": cuDNN where it can, and the kernel for what
  is left. "auto" leaves the pieces alone as long as nobody has measured them.
  """
  named, narrow = at.env.impl, staged["k"].dtype.itemsize == 2
  able: tuple[str, ...]
  if named == "auto":
    # Float32 products of the kernels would leave the matrix units unused.
    able = ("cudnn", "pieces", "pallas") if narrow and jax.default_backend() == "gpu" else ()
    able = able if _has_cudnn() else able[2:]
  else:
    asked = {"cudnn": ("cudnn", "pieces"), "pallas": ("pallas",)}
    able = asked.get(named, ())
  beyond = ""
  for impl in able:
    if impl == "pieces":
      blocks, beyond = _pieces(at, staged, q, window, prompt)
      if blocks:
        run = kernel("attend_prompt_pieces", "cudnn")
        return impl, functools.partial(run, blocks=blocks)
    elif not (beyond := _beyond_prompt(at, staged, window, prompt, impl)):
      return impl, kernel("attend_prompt", impl)
  if beyond and named != "auto":
    raise NotImplementedError(f"attend_prompt: {type(at.top).__name__} {beyond}")
  return "reference", attention.attend_prompt


def _has_cudnn() -> bool:
  """Whether the device is one for cuDNN's flash attention: NVIDIA's, from Ampere on."""
  capability = str(getattr(jax.devices()[0], "compute_capability", "8.0"))
  return capability[0].isdigit() and float(capability) >= 8


def _beyond_prompt(at: At, staged: Slots, window: Window | None, prompt: Prompt, impl: str) -> str:
  """What of a prompt's attention the implementation does not do, in words; empty if nothing."""
  head_dim = staged["k"].shape[3]
  if impl == "pallas":
    return f"has heads of {head_dim}; 'pallas' takes up to 256" if head_dim > 256 else ""
  if beyond := _beyond_cudnn(staged):
    return beyond
  if at.env.slot_axis:
    return "has its slots on several devices; 'cudnn' attends to a whole prompt"
  if window is not None:
    return "has a window in this layer; 'cudnn' attends to all that came before"
  if prompt.past != 0 or prompt.index is not None or at.top.overrides("stage"):
    return "attends to more or less than a whole prompt in order, which is what 'cudnn' takes"
  return ""


def _beyond_cudnn(staged: Slots) -> str:
  dtype, head_dim = staged["k"].dtype, staged["k"].shape[3]
  if dtype.itemsize == 2 and head_dim % 8 == 0 and head_dim <= 128:
    return ""
  return (
    f"has heads of {head_dim} {dtype.name}; 'cudnn' takes up to 128 of 16 bits, a multiple of 8"
  )


def _pieces(
  at: At, staged: Slots, q: Array, window: Window | None, prompt: Prompt
) -> tuple[tuple, str]:
  """Blocks of queries that cuDNN can attend to in pieces, or why there are none, in words."""
  if beyond := _beyond_cudnn(staged):
    return (), beyond
  apart, past = at.top.apart(at), prompt.past
  if apart is None or past is None or not _slots_are_positions(at, prompt):
    return (), "attends to slots in no order that is known; 'cudnn' takes neighbours"
  if window is not None and (past or window.view is not None):
    return (), "has a window in this layer that 'cudnn' cannot cut into pieces"
  queries = q.shape[3]
  before = past + prompt.tokens - queries + (apart if prompt.index is not None else 0)
  apart = apart if prompt.index is not None else 0
  first = None
  if window is not None:
    with jax.ensure_compile_time_eval():  # a window is made of positions, and those are known
      every = at.top.window(at, jnp.arange(prompt.tokens, dtype=jnp.int32)[None])
      first = None if every is None else np.asarray(every.first)[0]
  plan = importlib.import_module("pallas_kernels.prefill_pieces").plan
  blocks = plan(queries, apart, before, first, 0 if window is None else window.sinks)
  return blocks, "" if blocks else "has too few queries in a window's reach for 'cudnn'"


def _slots_are_positions(at: At, prompt: Prompt) -> bool:
  """Whether the staged slots of a chunk carry their positions, from 0 on."""
  if at.env.slot_axis:
    return False
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
  # In a ring all that is cached is in sight: first tokens need no loop of their own.
  sinks = 0 if q_sinks is None and "ring" in cache.heads else span.sinks
  k, v = cache.slots["k"], cache.slots["v"]
  # Kernels take operands of one dtype: queries are rounded to that of the cache.
  q_sinks = None if q_sinks is None else q_sinks.astype(k.dtype)
  state, out, logits = run(
    q.astype(k.dtype),
    k,
    v,
    span.start,
    span.stop,
    sinks=sinks,
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
  if window is not None and window.sinks and at.env.slot_axis:
    return f"has first tokens, which one device holds; the {impl!r} kernel finds them on all"
  if window is not None and window.view is not None and not turned:
    return f"turns the query for its sinks; the {impl!r} kernel has one query"
  return ""
