"""Slots that queries may see: asked of the method once a step, and handed to operations."""

from __future__ import annotations

from jaxtyping import Array, Int

from kvjax.core.cache import Cache
from kvjax.core.context import At, Prompt
from kvjax.core.plan import Needs, Plan, Window
from kvjax.families import forms
from kvjax.ops.prefill import Chunk


def visible(at: At, cache: Cache) -> Plan:
  """The plan of all slots that the newest token's queries may see, and what the method needs."""
  window = at.top.window(at, (cache.seen - 1)[:, None])
  span = at.top.span(at, cache, window)
  traits, own = at.top.traits, forms.overrides(at.top, "span")
  hidden = _hidden(at, window) if own else ()
  needs = Needs(traits.wants_logits, traits.ordered, own, hidden)
  return Plan(span, unit=at.env.tile, window=window, needs=needs)


def narrowed(at: At, visible: Plan, plan: Plan) -> Plan:
  """The plan that the move `plan` made of all visible slots; ValueError for one made anew."""
  window = (visible.window is None) == (plan.window is None)
  codes = (visible.codes is None) == (plan.codes is None)
  if not (window and codes and plan.needs == visible.needs):
    raise ValueError(
      f"{at.name}.plan: found a plan without the window, needs or codes of the visible one, "
      "expected visible.listed(...)"
    )
  return plan


def of(at: At, qpos: Int[Array, "B A"], prompt: Prompt) -> Chunk:
  """Slots that the queries of a chunk, at these positions, may see."""
  return Chunk(
    prompt,
    at.top.window(at, qpos),
    aligned=(prompt.past == 0 or at.top.traits.positional) and not forms.overrides(at.top, "stage"),
  )


def _hidden(at: At, window: Window | None) -> tuple[str, ...]:
  """Moves for which a window may hide slots of a method's own span.

  Where slots are no positions, such a span says that nothing is cached but what the window holds:
  of windows and evictions that came later it does not know.
  """
  if window is None:
    return ()
  if at.top.traits.positional:
    return ("window",)
  covers = at.top._covers
  return covers.moves if isinstance(covers, forms.Void) else ()
