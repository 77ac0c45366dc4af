"""Attention to predicted tiles beside the scoring of all, and its repair (PRR)."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool

from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Attended, Plan
from kvjax.ops import attention, foresight
from kvjax.ops.decode import attend, beyond_kernel, over_plan
from kvjax.ops.smoothing import Smoothed
from kvjax.ops.table import kernel, pallas
from kvjax.primitives import softmax_state
from kvjax.primitives.softmax_state import State
from kvjax.primitives.trees import pytree


def attend_tiles(at: At, cache: Cache, plan: Plan, q: Array) -> Attended:
  """As `attend` over a plan with a table, with a state [B, K, G, W] for every entry of it.

  A kernel's own form of these states is in the memo, for `repair`.
  """
  run = over_plan("attend_tiles", at, cache, plan, q)
  if run is None:
    return attention.attend_tiles(at, cache, plan, q)
  span, (k, v) = plan.span, (cache.slots[name] for name in ("k", "v"))
  sizes = {"unit": plan.unit, "sinks": span.sinks, "soft_cap": at.env.soft_cap}
  parts = run(q.astype(k.dtype), k, v, plan.table, span.start, span.stop, **sizes)
  return _of_tiles(cache, plan, q, parts)


@dataclasses.dataclass(frozen=True)
class Pages:
  """Tiles whose scores are `page_bounds` of the cache's "key_min" and "key_max"."""

  group: str
  operation: ClassVar[str] = "speculate"
  summaries: ClassVar[tuple[str, ...]] = ("key_min", "key_max")


@dataclasses.dataclass(frozen=True)
class CompressedKeys:
  """Tiles whose scores are `block_weights` of the cache's "compressed"."""

  width: int
  stride: int
  operation: ClassVar[str] = "speculate_keys"
  summaries: ClassVar[tuple[str, ...]] = ("compressed",)


Scored = Pages | CompressedKeys


@dataclasses.dataclass(frozen=True)
class Beside:
  """What is found beside attention to predicted tiles.

  Attributes:
    both: float32 [B, K, 2, P], scores and forecasts of all tiles.
    state: the predictor's, after the scores.
    stops: int32 [B, K, 2], the occupied slots that scores and forecasts are for, where known.
    early: that attention, where it has been made.
  """

  both: Array
  state: Smoothed
  stops: Array | None = None
  early: Attended | None = None


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


def speculate(
  at: At,
  cache: Cache,
  guess: Plan,
  q: Array,
  scored: Scored,
  state: Smoothed,
  factors: Array,
  *,
  predictor: str,
  apart: bool,
) -> Beside | None:
  """Attention over predicted tiles beside the scoring of all; None where no kernel does both.

  Args:
    at, cache, guess, q: as in `attend`; all cached tokens are visible.
    scored: what the scores are.
    state, factors: the predictor's, of every tile and of every row.
    predictor: "holt" or "ema".
    apart: whether every predicted tile gets a state of its own, as by `attend_tiles`.
  """
  k, v = cache.slots["k"], cache.slots["v"]
  if beyond_kernel(guess, "pallas", logits=False, turned=False):
    return None
  if (run := pallas(at, scored.operation, q, k)) is None:
    return None
  operands = q.astype(k.dtype), k, v, guess.table, cache.used
  summaries = (cache.heads[name] for name in scored.summaries)
  written, (both, level, trend, stops) = run(
    *(*operands, *summaries, state.level, state.trend, factors),
    unit=guess.unit,
    predictor=predictor,
    apart=apart,
    soft_cap=at.env.soft_cap,
    **dataclasses.asdict(scored),
  )
  if apart:
    early = _of_tiles(cache, guess, q, written)
  else:
    merged, memo = softmax_state.merge_all(_states(q, written)), Written(tuple(written), "pieces")
    early = Attended(merged, None, None, guess.visited(cache.size), memo=memo)
  return Beside(both, Smoothed(level, trend), stops, early)


def repair(
  at: At,
  cache: Cache,
  plan: Plan,
  guess: Plan,
  hit: Bool[Array, "B K W"],
  q: Array,
  early: Attended,
  *,
  strict: bool,
) -> Attended:
  """Attention over a selection, given that over a predicted one: what was missed is folded in.

  Args:
    at, cache, plan, q: as in `attend`.
    guess, early: the prediction, and what `attend` or `speculate` gave for it; with `strict` what
      `attend_tiles` did, and tiles that are in the prediction alone are left out.
    hit: which tiles of the plan are in the prediction.
  """
  assert plan.table is not None
  run = over_plan("repair", at, cache, plan, q)
  if run is not None and (early.memo is not None or early.out is not None):  # a kernel attended
    return _repair_by(run, at, cache, plan, guess, q, early)
  if strict:
    early = without_wasted(early, plan, guess)
  missed = dataclasses.replace(plan, table=jnp.where(hit, -1, plan.table), memo=None)
  late = attend(at, cache, missed, q)  # S∖Ŝ
  logits, slot = joined(early, late)
  state = softmax_state.merge(early.state, late.state)  # Eqs. 6–8
  return Attended(state, logits, slot, early.visited + late.visited)


def _repair_by(
  run: Callable, at: At, cache: Cache, plan: Plan, guess: Plan, q: Array, early: Attended
) -> Attended:
  """`repair` by its kernel."""
  k, v, span = cache.slots["k"], cache.slots["v"], plan.span
  if early.memo is None:
    assert early.out is not None
    held = early.state.o, early.state.m, early.state.l, early.out.astype(k.dtype)
    stored, written = "whole", [x.reshape(-1, *x.shape[2:]) for x in held]
  else:
    stored, written = early.memo.stored, list(early.memo.parts)
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


def without_wasted(early: Attended, plan: Plan, guess: Plan) -> Attended:
  """The states of those predicted tiles that the plan lists, merged."""
  assert plan.table is not None and guess.table is not None
  wanted = foresight.among(guess.table, plan.table)
  state, logits = early.state, early.logits
  ok = wanted[:, :, None]
  l, m = jnp.where(ok, state.l, 0), jnp.where(ok, state.m, -jnp.inf)
  state = softmax_state.merge_all(State(jnp.where(ok[..., None], state.o, 0), m, l))
  if logits is not None:
    logits = jnp.where(jnp.repeat(wanted, guess.unit, -1)[:, :, None], logits, -jnp.inf)
  visited = jnp.where(wanted, early.visited, 0).sum(-1, dtype=jnp.int32)
  return Attended(state, logits, early.slot, visited)


def joined(a: Attended, b: Attended) -> tuple[Array | None, Array | None]:
  """Logits and slots of two walks, where both have them."""
  if a.logits is None or b.logits is None:
    return None, None
  assert a.slot is not None and b.slot is not None
  return jnp.concatenate([a.logits, b.logits], -1), jnp.concatenate([a.slot, b.slot], -1)


def speculation_ratio(selector: str, **shape: int) -> float:
  """ρ that was measured to pay on the default device (`kvjax.kernels.prr.ratio`), else 0."""
  return kernel("speculation_ratio", "pallas")(selector, **shape)


def _of_tiles(cache: Cache, plan: Plan, q: Array, parts: Sequence[Array]) -> Attended:
  """What a kernel's states of the tiles of a plan are."""
  memo = Written(tuple(parts), "tiles")
  return Attended(_states(q, parts), None, None, plan.sizes(cache.size), memo=memo)


def _states(q: Array, parts: Sequence[Array]) -> State:
  """A kernel's partial states [B K P, G, …], m in base 2, as states [B, K, G, P]."""
  shape = (*q.shape[:2], -1, *q.shape[2:])
  acc, m, l = (jnp.moveaxis(x.reshape(shape[: x.ndim + 2]), 2, 3) for x in parts)
  return State(acc / jnp.where(l == 0, 1.0, l)[..., None], m * math.log(2), l)
