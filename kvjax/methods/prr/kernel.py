"""PRR's kernels: attention to predicted tiles beside the scoring of all, and its repair."""

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Attended, Plan
from kvjax.methods.prr.forecast import Predictor, Smoothed, state_of
from kvjax.methods.prr.repair import repaired
from kvjax.methods.prr.speculation import Beside
from kvjax.ops import attention
from kvjax.ops.decode import beyond_kernel, over_plan
from kvjax.ops.scores import CompressedKeys, Pages, Scored
from kvjax.ops.table import declare, kernel, pallas
from kvjax.primitives import softmax_state
from kvjax.primitives.softmax_state import State
from kvjax.primitives.trees import pytree

declare("attend_tiles", pallas="kvjax.kernels.prr.speculate:attend_tiles")
declare("speculate", pallas="kvjax.kernels.prr.speculate:speculate")
declare("speculate_keys", pallas="kvjax.kernels.prr.speculate:speculate_keys")
declare("speculation_ratio", pallas="kvjax.kernels.prr.ratio:ratio")
declare("repair", pallas="kvjax.kernels.prr.repair:repair")

# The kernel that speculates beside the scoring of such tiles.
SPECULATE = {Pages: "speculate", CompressedKeys: "speculate_keys"}


@pytree("stored")
@dataclasses.dataclass(frozen=True)
class Written:
  """A kernel's own form of the states of predicted tiles, for `repair`.

  Attributes:
    parts: acc, m in base 2, and l of every part of a row.
    stored: what a part is, one of "tiles", or any "pieces".
  """

  parts: tuple[Array, ...]
  stored: str


def ratio(selector: str, **shape: int) -> float:
  """ρ that was measured to pay on the default device (`kvjax.kernels.prr.ratio`), else 0."""
  return kernel("speculation_ratio", "pallas")(selector, **shape)


def attend_tiles(at: At, cache: Cache, plan: Plan, q: Array) -> Attended:
  """As `attend` over a plan with a table, with a state [B, K, G, W] for every entry of it.

  A kernel notes its own form of these states (`Written`), for `repair`.
  """
  run = over_plan("attend_tiles", at, cache, plan, q)
  if run is None:
    return attention.attend_tiles(at, cache, plan, q)
  span, (k, v) = plan.span, (cache.slots[name] for name in ("k", "v"))
  sizes = {"unit": plan.unit, "sinks": span.sinks, "soft_cap": at.env.soft_cap}
  parts = run(q.astype(k.dtype), k, v, plan.table, span.start, span.stop, **sizes)
  return _of_tiles(cache, plan, q, parts)


def speculate(
  at: At, cache: Cache, guess: Plan, q: Array, scored: Scored, predictor: Predictor, *, strict: bool
) -> Beside | None:
  """Attention over predicted tiles beside the scoring of all; None where no kernel does both.

  Args:
    at, cache, guess, q: as in `attend`; all cached tokens are visible.
    scored: what the scores are.
    predictor: of the next ones; its state and factors are in the cache.
    strict: whether every predicted tile gets a state of its own, as by `attend_tiles`.
  """
  k, v = cache.slots["k"], cache.slots["v"]
  if beyond_kernel(guess, "pallas", logits=False, turned=False):
    return None
  if (run := pallas(at, SPECULATE[type(scored)], q, k)) is None:
    return None
  operands = q.astype(k.dtype), k, v, guess.table, cache.used
  summaries = (cache.heads[name] for name in scored.summaries)
  state = state_of(cache) if predictor.smooths else None
  held = () if state is None else (state.level, state.trend, cache.rows["factors"])
  written, (both, stops, *after) = run(
    *(*operands, *summaries, *held),
    unit=guess.unit,
    predictor=predictor.kind,
    apart=strict,
    soft_cap=at.env.soft_cap,
    **dataclasses.asdict(scored),
  )
  if strict:
    early = _of_tiles(cache, guess, q, written)
  else:
    merged = softmax_state.merge_all(_states(q, written))
    early = Attended(merged, None, None, guess.visited(cache.size))
    early = early.noting(Written(tuple(written), "pieces"))
  return Beside(both, Smoothed(*after) if after else None, stops, early)


def repair(
  at: At, cache: Cache, plan: Plan, guess: Plan, q: Array, early: Attended, *, strict: bool
) -> Attended:
  """`repaired`, by its kernel where one attended early: `attend_tiles`, `speculate`, `attend`."""
  run, by_kernel = over_plan("repair", at, cache, plan, q), early.noted(Written)
  if run is None or (by_kernel is None and early.out is None):
    return repaired(at, cache, plan, guess, q, early, strict=strict)
  k, v, span = cache.slots["k"], cache.slots["v"], plan.span
  if by_kernel is None:
    assert early.out is not None
    held = early.state.o, early.state.m, early.state.l, early.out.astype(k.dtype)
    stored, written = "whole", [x.reshape(-1, *x.shape[2:]) for x in held]
  else:
    stored, written = by_kernel.stored, list(by_kernel.parts)
  state, out, missed, misses = run(
    *(q.astype(k.dtype), k, v, plan.table),
    *(guess.table, span.start, span.stop),
    written,
    unit=plan.unit,
    sinks=span.sinks,
    stored=stored,
    soft_cap=at.env.soft_cap,
  )
  if stored == "tiles":
    visited = plan.visited(cache.size)
  else:
    late = dataclasses.replace(plan, table=missed, count=misses)
    visited = early.visited + late.visited(cache.size)
  return Attended(state, None, None, visited, out.astype(q.dtype))


def _of_tiles(cache: Cache, plan: Plan, q: Array, parts: Sequence[Array]) -> Attended:
  """Attention whose states are a kernel's, of the tiles of a plan."""
  attended = Attended(_states(q, parts), None, None, plan.sizes(cache.size))
  return attended.noting(Written(tuple(parts), "tiles"))


def _states(q: Array, parts: Sequence[Array]) -> State:
  """A kernel's partial states [B K P, G, …], m in base 2, as states [B, K, G, P]."""
  shape = (*q.shape[:2], -1, *q.shape[2:])
  acc, m, l = (jnp.moveaxis(x.reshape(shape[: x.ndim + 2]), 2, 3) for x in parts)
  return State(acc / jnp.where(l == 0, 1.0, l)[..., None], m * math.log(2), l)
