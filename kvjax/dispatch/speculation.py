"""Attention to predicted tiles beside the scoring of all, and its repair (PRR)."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from kvjax import softmax_state
from kvjax.dispatch.step import beyond_kernel, over_plan
from kvjax.dispatch.table import choose, kernel
from kvjax.ops import attention
from kvjax.softmax_state import State
from kvjax.types import At, Attended, Cache, Plan


def attend_tiles(at: At, cache: Cache, plan: Plan, q: Array) -> Attended:
  """As `attend` over a plan with a table, with a state [B, K, G, W] for every entry of it.

  A kernel's own form of these states is in the memo, for `repair`.
  """
  run = over_plan("attend_tiles", at, cache, plan, q)
  if run is None:
    return attention.attend_tiles(at, cache, plan, q)
  span, (k, v) = plan.span, (cache.slots[name] for name in ("k", "v"))
  sizes = {"unit": plan.unit, "sinks": span.sinks}
  parts = run(q.astype(k.dtype), k, v, plan.table, span.start, span.stop, **sizes)
  return _of_tiles(cache, plan, q, parts)


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
  k, v = cache.slots["k"], cache.slots["v"]
  if beyond or choose(operation, at.env.impl, q, k) != "pallas":
    return None
  operands = q.astype(k.dtype), k, v, guess.table, cache.used, *summaries, *state
  run = kernel(operation, "pallas")
  written, scored = run(*operands, unit=guess.unit, apart=apart, **how)
  if apart:
    return _of_tiles(cache, guess, q, written), scored
  merged, memo = softmax_state.merge_all(_states(q, written)), ("pieces", list(written))
  return Attended(merged, None, None, guess.visited(cache.size), memo=memo), scored


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
  run = over_plan("repair", at, cache, plan, q)
  if run is None or (early.memo is None and early.out is None):  # the reference attended
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


def speculation_ratio(selector: str, **shape: int) -> float:
  """ρ that was measured to pay on the default device (`kvjax.kernels.speculation`), else 0."""
  return kernel("speculation_ratio", "pallas")(selector, **shape)


def _of_tiles(cache: Cache, plan: Plan, q: Array, parts: Sequence[Array]) -> Attended:
  """What a kernel's states of the tiles of a plan are."""
  memo = "tiles", list(parts)
  return Attended(_states(q, parts), None, None, plan.sizes(cache.size), memo=memo)


def _states(q: Array, parts: Sequence[Array]) -> State:
  """A kernel's partial states [B K P, G, …], m in base 2, as states [B, K, G, P]."""
  shape = (*q.shape[:2], -1, *q.shape[2:])
  acc, m, l = (jnp.moveaxis(x.reshape(shape[: x.ndim + 2]), 2, 3) for x in parts)
  return State(acc / jnp.where(l == 0, 1.0, l)[..., None], m * math.log(2), l)
