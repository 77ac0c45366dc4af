"""Scores of keys, or of what stands for them, for a step's queries."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int8, Num

from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.plan import Plan
from kvjax.ops import attention, extremes, slot_shards, tiles
from kvjax.ops.table import declare, pallas

PAGE_BOUNDS = declare("page_bounds", pallas="kvjax.kernels.selection.page_bounds:page_bounds")
CODED_BOUNDS = declare(
  "coded_page_bounds", pallas="kvjax.kernels.selection.page_bounds:page_bounds"
)
KEY_LOGITS = declare("key_logits", pallas="kvjax.kernels.selection.key_weights:key_logits")
KEY_WEIGHTS = declare("key_weights", pallas="kvjax.kernels.selection.key_weights:key_weights")


@dataclasses.dataclass(frozen=True)
class Pages:
  """Tiles whose scores are `page_bounds` of the cache's "key_min" and "key_max"."""

  group: str
  summaries: ClassVar[tuple[str, ...]] = ("key_min", "key_max")


@dataclasses.dataclass(frozen=True)
class CompressedKeys:
  """Tiles whose scores are `block_weights` of the cache's "compressed"."""

  width: int
  stride: int
  summaries: ClassVar[tuple[str, ...]] = ("compressed",)


Scored = Pages | CompressedKeys


def page_bounds(
  at: At,
  visible: Plan,
  q: Float[Array, "B K G H"],
  low: Num[Array, "B K P H"],
  high: Num[Array, "B K P H"],
  exponent: Int8[Array, "B K P"] | None = None,
  *,
  unit: int,
  group: str,
) -> Float[Array, "B K P"]:
  """Σ_d max(q_d·low_d, q_d·high_d), scaled as logits are: no key of the page scores higher.

  A soft cap is not applied: it is monotone, and so would leave the order of pages as it is.

  Args:
    at, visible, q: of a decode step; the plan of all visible slots.
    low, high: minimum and maximum of every page's keys, channel by channel.
    exponent: of the steps that they count, where they are codes (`ops.extremes`).
    unit: tokens per page.
    group: "mean", the group's mean query, or "max", the query whose bound is largest.
  """
  if run := pallas(at, PAGE_BOUNDS if exponent is None else CODED_BOUNDS, whole=True):
    span = visible.span
    sizes = {"unit": unit, "span_sinks": span.sinks}
    return run(q, low, high, span.start, span.stop, exponent, group=group, **sizes)

  def bound(q: Float[Array, "B K H"]) -> Float[Array, "B K P"]:
    q = q[:, :, None] * q.shape[-1] ** -0.5
    sums = jnp.maximum(q * low, q * high).sum(-1)
    return sums if exponent is None else sums * extremes.steps(exponent)

  q = q.astype(jnp.float32)
  if group == "mean":
    return bound(q.mean(2))
  return jnp.stack([bound(q[:, :, g]) for g in range(q.shape[2])]).max(0)


def block_weights(
  at: At,
  cache: Cache,
  visible: Plan,
  q: Float[Array, "B K G H"],
  compressed: Float[Array, "B K M H"],
  *,
  width: int,
  stride: int,
  block: int,
) -> Float[Array, "B K P"]:
  """Shares of blocks of `block` tokens in the attention to compressed keys, as `pooled`.

  Query heads attend to the compressed keys, and their probabilities are summed over the group. A
  compressed key stands for `width` tokens, one every `stride`, and takes part from the step after
  its last token on.
  """
  span, blocks = visible.span, -(-cache.size // block)
  if run := pallas(at, KEY_WEIGHTS, q, compressed):
    return run(
      *(q.astype(compressed.dtype), compressed),
      *(span.start, span.stop, jnp.broadcast_to(cache.seen[:, None], span.stop.shape)),
      newest=1,
      blocks=blocks,
      stride=stride,
      width=width,
      block=block,
      span_sinks=span.sinks,
      soft_cap=at.env.soft_cap,
    )
  start = jnp.arange(compressed.shape[2], dtype=jnp.int32) * stride
  before = (cache.seen - 1)[:, None, None]  # the newest token
  ok = (start + width <= before) & tiles.visible(span, start, width)
  logits = attention.logits_of(q[:, :, :, None], compressed, at.env.soft_cap)[:, :, :, 0]
  p = jax.nn.softmax(logits, -1, where=ok[:, :, None]).sum(2)
  return pooled(jnp.where(ok, p, 0.0), blocks, width=width, stride=stride, block=block)


def pooled(
  p: Float[Array, "B K M"], blocks: int, *, width: int, stride: int, block: int
) -> Float[Array, "B K P"]:
  """The largest of all compressed keys that share a token with the block; 0 where none does."""
  ahead, each = width // stride - 1, block // stride
  padding = ((0, 0), (0, 0), (ahead, blocks * each - p.shape[2]))
  window = (1, 1, ahead + each)
  return jax.lax.reduce_window(p, p.dtype.type(0), jax.lax.max, window, (1, 1, each), padding)


def token_weights(
  at: At,
  cache: Cache,
  visible: Plan,
  q: Float[Array, "B K G H"],
  active: Bool[Array, "B K"] | None = None,
) -> Float[Array, "B K S"]:
  """ln of every slot's exact softmax probability under the newest token's queries.

  The probability is the mean over the group. Logarithms keep the order of small ones that float32
  would round to 0. Slots that the query may not see get −∞. For heads that are not `active` the
  kernel reads no key, and gives anything.
  """
  window, span, k = visible.window, visible.span, cache.slots["k"]
  # The kernel has one query for all keys, and sees those of the span.
  one = (window is None or window.view is None) and not visible.needs.hidden
  if one and (run := pallas(at, KEY_WEIGHTS, q, k, whole=True)):
    needed = {} if active is None else {"active": active.astype(jnp.int32)}
    where, sizes = (span.start, span.stop, span.stop), {"blocks": cache.size, "log": True}
    how = {"span_sinks": span.sinks, "soft_cap": at.env.soft_cap, **sizes, **needed}
    return run(q.astype(k.dtype), k, *where, **how)
  here, qpos = slot_shards.part(at, cache, visible), (cache.seen - 1)[:, None]
  ok = attention.seen(here, cache.pos, jnp.arange(cache.size, dtype=jnp.int32))
  logits = attention.windowed_logits(at, q[:, :, :, None], qpos, k, cache.pos, window)[:, :, :, 0]
  # A NaN stays where it is, to be chosen and heard of: in the denominator it would be everywhere.
  bad = jnp.isnan(logits)
  logits = jnp.where(ok[:, :, None] & ~bad, logits, -jnp.inf)
  weights = jax.nn.logsumexp(slot_shards.log_softmax(at, logits), 2) - math.log(q.shape[2])
  weights = jnp.where(bad.any(2), jnp.nan, weights)
  return jnp.where(ok, weights, -jnp.inf)
