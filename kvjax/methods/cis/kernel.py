"""CIS by kernels: its steps one by one, or several in a launch (references: the other files)."""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Attended, Plan
from kvjax.methods.cis import dilation, retrieval, similarity
from kvjax.methods.cis.retrieval import Budget, Retrieval
from kvjax.methods.cis.similarity import HELD, Choice
from kvjax.ops.scores import KEY_LOGITS, KEY_WEIGHTS
from kvjax.ops.selection import holds, other_tiles
from kvjax.ops.table import declare, kernel, pallas

declare("cis_anchors", pallas="kvjax.kernels.cis.anchors:anchors")
declare("cis_logits", pallas="kvjax.kernels.cis.anchors:anchors")
declare("cis_found_listed", pallas="kvjax.kernels.cis.listed:found_and_listed")
declare("cis_listed", pallas="kvjax.kernels.cis.listed:listed")
declare("cis_read", pallas="kvjax.kernels.cis.read:read")
declare("cis_note", pallas="kvjax.kernels.cis.note:note")

Listed = tuple[Int[Array, "B K X"], Int[Array, "B K"]]


class Step(NamedTuple):
  """A decode step, as the move `plan` is given it, and how many tokens it attends to."""

  at: At
  cache: Cache
  q: Float[Array, "B K G H"]
  visible: Plan
  budget: Budget


class Selected(NamedTuple):
  """Results of the paper's steps; the plan lists C_t and may have holes (−1)."""

  choice: Choice
  own: Retrieval
  plan: Plan
  attended: Attended | None = None


def runs(at: At) -> bool:
  """True where kernels run; a step that has none falls back on its reference."""
  return pallas(at, "cis_anchors") is not None


def select(step: Step, tau: float, plain: bool) -> Selected:
  """`share`, `retrieve`, `critical_set`; and attention over the list, where one launch does all.

  `plain`: what is listed here is all that the step reads, and in no form of its own.
  """
  if plain and (run := _reading(step)):
    return _read(run, step, tau)
  choice, logits, step = _share(step, tau)
  own, listed = _retrieve(step, choice, logits)
  return Selected(choice, own, _plan(step, listed or _listed(step, choice, own)))


def _plan(step: Step, listed: Listed) -> Plan:
  return step.visible.listed(*listed, unit=1, pinned=step.budget.sinks)


# ---- all in one launch


def _reading(step: Step) -> Callable | None:
  """The kernel that chooses and reads, where there are rows enough for it; None: several do."""
  _, cache, q, visible, _ = step
  run = _looking(step, "cis_read", q, cache.slots["k"])
  by_head = visible.window is not None and visible.window.by_head
  if run is None or by_head or visible.needs.logits:
    return None
  takes = importlib.import_module("kvjax.kernels.cis.read").takes
  return run if takes(q.shape[0] * q.shape[1], q.shape[2], cache.size) else None


def _read(run: Callable, step: Step, tau: float) -> Selected:
  """`select` by its kernel."""
  at, cache, q, visible, budget = step
  window = visible.window
  first = None if window is None else _first_of(at)
  held = (*(cache.heads[name] for name in HELD), cache.rows["step"], cache.seen, cache.used)
  how: dict[str, Any] = {"span_sinks": 0 if window is None else window.sinks, "first": first}
  how |= {"soft_cap": at.env.soft_cap, "tau": tau, **budget._asdict()}
  (*chosen, start), found, (state, out) = run(q, cache.slots["k"], cache.slots["v"], *held, **how)
  step = step if window is None else step._replace(visible=_seeing(step, start[:, :1]))
  token, weight, *listed = found
  own, plan = Retrieval(token[:, :, None], weight[:, :, None]), _plan(step, tuple(listed))
  attended = Attended(state, None, None, plan.visited(cache.size), out.astype(q.dtype))
  return Selected(Choice(*chosen), own, plan, attended)


# ---- one by one


def _share(step: Step, tau: float) -> tuple[Choice, Sequence[Array] | None, Step]:
  """`share`; the logits of heads that retrieve, if they are scored on the way; the step.

  The kernel works out the window too, instead of a launch of its own.
  """
  at, cache, q, visible, _ = step
  window, k = visible.window, cache.slots["k"]
  block = cache.heads["queries"], cache.heads["anchor"], cache.rows["step"], cache.seen
  by_head = window is not None and window.by_head
  narrows = window is not None and window.view is None and not by_head
  how: dict[str, Any] = {"tau": tau, "first": _first_of(at) if narrows else None}
  alone = cache.heads["anchor"].shape[3] == q.shape[2]
  looks = not by_head and _looking(step, KEY_LOGITS if alone else "cis_logits", q, k) is not None
  if looks:
    how |= {"keys": (k, cache.used), "span_sinks": 0 if window is None else window.sinks}
    how["soft_cap"] = at.env.soft_cap
  made = kernel("cis_anchors", "pallas")(q, *block, **how)
  if narrows:
    step = step._replace(visible=_seeing(step, made[4][:, None]))
  return Choice(*made[:4]), made[-3:] if looks else None, step


def _retrieve(
  step: Step, choice: Choice, logits: Sequence[Array] | None
) -> tuple[Retrieval, Listed | None]:
  """`retrieve`, and `critical_set` where the launch that finds lists too: of units that decide for
  themselves. No key is read for units that share.
  """
  at, cache, q, visible, budget = step
  keys, span, needed = cache.slots["k"], visible.span, choice.retrieves
  batch, heads, units = needed.shape
  if not _looking(step, KEY_WEIGHTS, q, keys):
    return retrieval.retrieve(at, cache, q, visible, budget), None
  operands = q.astype(keys.dtype), keys, span.start, span.stop, span.stop
  some = {"span_sinks": span.sinks, "active": needed[..., 0], "soft_cap": at.env.soft_cap}
  sizes = budget._replace(k=min(budget.k, cache.size))._asdict()
  # Where every query head decides for itself, its logits have the order of its weights.
  direct = units == q.shape[2]
  if logits is None:  # units are KV heads
    logits = kernel(KEY_LOGITS, "pallas")(*operands, **some)
  if units == 1 and holds(at, cache.size, sizes["k"]):
    best, index, *listed = kernel("cis_found_listed", "pallas")(
      *([logits[0][:, :, 0]] if direct else logits, span.start, span.stop),
      *(cache.heads["retrieved"], choice.anchor, needed, cache.seen),
      **sizes,
      span_sinks=span.sinks,
    )
    return Retrieval(index[:, :, None], best[:, :, None]), tuple(listed)
  weight = logits[0]
  if not direct:
    weight = kernel(KEY_WEIGHTS, "pallas")(*operands, blocks=cache.size, log=True, **some)
  weight, active = weight.reshape(batch, heads * units, -1), needed.reshape(batch, heads * units)
  best, index = other_tiles(at, weight, span, **sizes, unit=1, active=active, ordered=False)
  return Retrieval(*(x.reshape(*needed.shape, -1) for x in (index, best))), None


def _listed(step: Step, choice: Choice, own: Retrieval) -> Listed:
  """`critical_set` of what was found or is shared."""
  _, cache, _, visible, budget = step
  if run := _looking(step, "cis_listed"):
    operands = cache.heads["retrieved"], own.found, choice.anchor, choice.retrieves, cache.seen
    span, sizes = visible.span, {"sinks": budget.sinks, "local": budget.local}
    return run(*operands, span.start, slots=cache.size, span_sinks=span.sinks, **sizes)
  chosen = similarity.chosen(cache, choice, own.found)
  return retrieval.critical_set(cache, chosen, visible.window, budget)


def note(
  at: At, cache: Cache, choice: Choice, own: Retrieval, attended: Attended, **dilated: int
) -> Cache:
  """`dilation.note`. The kernel looks at the denominators of attention itself, all but those of
  other devices' heads.
  """
  run, step = pallas(at, "cis_note"), cache.rows["step"]
  if run is None:
    return dilation.note(cache, choice, own, attended, **dilated)
  counted = jnp.ones_like(step, bool) if attended.counted is None else attended.counted
  live = counted if attended.live is None or at.env.head_axis else attended.live
  mine = choice.query, choice.anchor, choice.retrieves, own.found, own.weight
  held = (*(cache.heads[name] for name in HELD), step)
  *noted, step = run(live, attended.state.l, choice.step, *mine, *held, **dilated)
  return cache.put(heads=dict(zip(HELD, noted, strict=True)), rows={"step": step})


# ---- what kernels see


def _looking(step: Step, operation: str, *attention: Array) -> Callable | None:
  """The kernel of an operation over a window, if it can do it; `attention`: q and k, if any.

  Kernels have one query for all keys, and spans that end at the newest.
  """
  window, needs = step.visible.window, step.visible.needs
  if (window is not None and window.view is not None) or needs.own_span:
    return None
  return pallas(step.at, operation, *attention, whole=True)


def _first_of(at: At) -> Callable[[Array], Array]:
  """The first token in sight beside the sinks, of so many that are seen: int32 scalars."""

  def first(seen: Array) -> Array:
    window = at.top.window(at, jnp.reshape(seen - 1, (1, 1)))
    assert window is not None
    return window.first.reshape(())

  return first


def _seeing(step: Step, first: Int[Array, "B 1"]) -> Plan:
  """The plan of all visible slots where a kernel has worked out the window's first."""
  assert step.visible.window is not None
  window = dataclasses.replace(step.visible.window, first=first)
  span = step.at.top.span(step.at, step.cache, window)
  return dataclasses.replace(step.visible, window=window, span=span)
