"""A new token's way into the cache, and statistics of rows that do not count."""

import enum
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.leaves import NORM, Layout
from kvjax.core.plan import Attended
from kvjax.core.slots import choose_rows
from kvjax.ops import shared_slots, slot_shards
from kvjax.ops.table import choose, declare, kernel

declare("enter_token", pallas="kvjax.kernels.insertion.enter_token:enter_token")
declare("enter_codes", pallas="kvjax.kernels.insertion.enter_token:enter_token")
ENTER_PAGE = declare("enter_page", pallas="kvjax.kernels.insertion.enter_token:enter_token")
declare("enter_shared", pallas="kvjax.kernels.insertion.enter_token:enter_token")
declare("keep_rows", pallas="kvjax.kernels.insertion.keep_rows:keep")


FEW = 64  # denominators of a row that are looked at one by one


class Placement(enum.Enum):
  """The slot that a full cache gives up for a token, as far as that is known beforehand."""

  APPEND = "none: the new token is dropped"
  RING = "the next one in turn (`kvjax.primitives.ring`)"


def enters(at: At, cache: Cache, operation: str) -> bool:
  """True if a kernel takes a new token in, as `enter_token` or `enter_codes`, or `enter_shared`."""
  if operation == "enter_codes" and not _takes_codes(at, cache):
    return False
  operation = "enter_shared" if cache.layout is Layout.SHARED else operation
  return choose(operation, at.env.impl) == "pallas"


def _takes_codes(at: At, cache: Cache) -> bool:
  """True if the kernel takes such codes: of 8 or 4 bits and whole heads, all slots on one device.

  Statistics of tokens are made of the numbers that codes stand for, which it does not return.
  """
  shared = cache.layout is Layout.SHARED
  if cache.leaf("k").bits not in (8, 4) or shared or at.env.slot_axis:
    return False
  whole = cache.slots["k_scale"].ndim == cache.slots["pos"].ndim
  statistics = [cache.leaf(name) for name in cache.slots]
  plain = all(leaf.new is None or leaf.standing for leaf in statistics)
  return whole and plain


def enter_token(
  at: At,
  cache: Cache,
  q: Array,
  k: Array,
  v: Array,
  live: Array,
  slot: Int[Array, "B K"],
  operation: str,
  *,
  victim: Int[Array, "B K"] | None,
  ring: Int[Array, "B K 2"] | None,
  renewal: Any = None,
) -> tuple[Array, Cache]:
  """Rotates the new token's q and k and writes it; returns rotated q [B, K, G, H] and the cache.

  Args:
    at, cache, q, k, v, live: of a decode step, as they come.
    slot: where the token goes; S: nowhere.
    operation: "enter_token", or "enter_codes" where k and v are words, with scales, zero points and
      `k_mean` beside them.
    victim: the slot that a full cache gives up; None: none.
    ring: the slots that are used in turn, which say the victim by themselves; None: none are.
    renewal: the summaries of the token's page that its entry brings up to date (`ops.summaries`).
  """
  how: dict[str, Any]
  beside: list[str]
  if operation == "enter_codes":
    how = {"bits": cache.leaf("k").bits, "mean": cache.heads["k_mean"]}
    beside = [name for name in ("k_scale", "v_scale", "k_zero", "v_zero") if name in cache.slots]
  else:
    part = (
      (slot_shards.first(at, cache.size), slot_shards.size(at, cache)) if at.env.slot_axis else None
    )
    how, beside = {"part": part}, _norm(cache)
  if renewal is not None:
    how |= {"pages": tuple(cache.heads[x] for x in renewal.summaries), "unit": renewal.unit}
  run = functools.partial(kernel(operation, "pallas"), ring=ring, **how)
  q, cache, pages = _entered(at, cache, q, k, v, live, slot, run, victim, beside)
  return q, cache.put(heads=dict(zip(renewal.summaries, pages, strict=True))) if pages else cache


def enter_shared(
  at: At, cache: Cache, q: Array, k: Array, v: Array, live: Array, slot: Int[Array, "B K"]
) -> tuple[Array, Cache]:
  """`enter_token` where heads share slots: each head's token goes to its `slot`."""
  run = functools.partial(kernel("enter_shared", "pallas"), room=slot_shards.size(at, cache))
  return _entered(at, cache, q, k, v, live, slot, run, slot, _norm(cache))[:2]


def _norm(cache: Cache) -> list[str]:
  """The statistic of values that the kernel of numbers keeps, where there is one."""
  return ["norm"] if "norm" in cache.slots and cache.leaf("norm") == NORM.kind() else []


def _entered(
  at: At,
  cache: Cache,
  q: Array,
  k: Array,
  v: Array,
  live: Array,
  slot: Int[Array, "B K"],
  run: Callable,
  given: Int[Array, "B K"] | None,
  beside: list[str],
) -> tuple[Array, Cache, list[Array]]:
  """Rotated q, the cache and extremes by a kernel, which is given a slot for each head, or None.

  `beside`: what it writes of the slots beside k, v and pos.
  """
  # A model cuts q, k and v out of one product: put together again they need no copies.
  qkv = jnp.concatenate([q, k[:, :, None], v[:, :, None]], 2)
  held = {**cache.slots, "seen": cache.seen, "used": cache.used}
  written = ["k", "v", "pos", *beside]
  operands = [held[name] for name in ("k", "v", "pos", "seen", "used", *beside)]
  q, *entered = run(qkv, live, given, *operands, rope=at.env.rope)
  stored = dict(zip(written, entered[: len(written)], strict=True))
  seen, used, *pages = entered[len(written) :]
  others = [n for n in cache.slots if n not in written and not cache.leaf(n).standing]
  new = cache.put(slots=stored, rows={"seen": seen, "used": used})
  return q, new.put(slots=_statistics(at, new, others, k, v, live, slot)), pages


def _statistics(
  at: At, cache: Cache, names: list[str], k: Array, v: Array, live: Array, slot: Array
) -> dict[str, Array]:
  """These statistics of the slots with the new token's in its slot, which is found by position.

  From what the kernel has written: it writes in place, so what reads the cache as it was may cost a
  copy of it.
  """
  if not names:
    return {}
  last = cache.seen - 1
  pos = jnp.broadcast_to(last[:, None, None], (*slot.shape, 1))
  k = at.env.rope.rotate(k, last[:, None])
  new = {"k": k[:, :, None], "v": v[:, :, None], "pos": pos}
  of_new = {name: cache.leaf(name).of_new(new, cache.slots[name]) for name in names}
  if cache.layout is Layout.SHARED:
    heads = shared_slots.sharers(cache)
    return {n: shared_slots.put(cache.slots[n], slot, x, heads) for n, x in of_new.items()}
  here = (cache.pos == pos) & live[:, None, None]

  def put(x: Array, of: Array) -> Array:
    return jnp.where(here.reshape(*here.shape, *[1] * (x.ndim - 3)), x, of)

  return {n: put(x, cache.slots[n]) for n, x in of_new.items()}


def finite_rows(at: At, x: Array, *, one_by_one: bool = False) -> Bool[Array, " B"]:
  """Rows of x that are finite on every head, those of other shards included.

  `one_by_one`: by comparisons, which become a part of what asks for the rows; a reduction is a
  launch of its own on a GPU.
  """
  fine = jnp.isfinite(x).reshape(x.shape[0], -1)
  if one_by_one:
    every = functools.reduce(jnp.logical_and, jnp.unstack(fine, axis=1))
  else:
    every = fine.all(1)
  return at.sum_heads((~every).astype(jnp.int32)) == 0


def counted_rows(at: At, attended: Attended, *changed: Array) -> Bool[Array, " B"]:
  """`attended.counted`, to choose rows of these arrays by; of small ones each number asks anew."""
  counted, live, l = attended.counted, attended.live, attended.state.l
  assert counted is not None
  few = l[0].size <= FEW and all(x.size <= l.size for x in changed)
  if live is None or counted is live or at.env.head_axis or not few:
    return counted
  return live & finite_rows(at, l, one_by_one=True)


def keep_rows(
  at: At, attended: Attended, new: dict[Any, Any], old: dict[Any, Any]
) -> dict[Any, Any]:
  """`slots.choose_rows` of statistics by `attended.counted`; of several by one launch."""
  assert attended.counted is not None and attended.live is not None  # filled in after `attend`
  changed = [name for name, x in new.items() if x is not old[name]]
  plain = all(isinstance(new[name], jax.Array) for name in changed)
  if len(changed) < 2 or not plain or choose("keep_rows", at.env.impl) != "pallas":
    ok = counted_rows(at, attended, *(new[name] for name in changed)) if plain else attended.counted
    return choose_rows(ok, new, old)
  # It looks at the denominators itself, all but those of other devices' heads.
  live = attended.counted if at.env.head_axis else attended.live
  arrays = ([held[name] for name in changed] for held in (new, old))
  kept = kernel("keep_rows", "pallas")(live, attended.state.l, *arrays)
  return new | dict(zip(changed, kept, strict=True))
