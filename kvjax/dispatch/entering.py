"""A new token's way into the cache, and statistics of rows that do not count."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax import ring as in_turn
from kvjax.dispatch.table import choose, kernel
from kvjax.leaves import NORM
from kvjax.ops import context
from kvjax.ops.slots import choose_rows, put
from kvjax.shapes import check_shape
from kvjax.types import At, Attended, Cache


def enter_token(
  at: At, cache: Cache, q: Array, k: Array, v: Array, live: Array
) -> tuple[Array, Cache]:
  """Rotates the new token's q and k and inserts it; returns rotated q [B, K, G, H] and the cache.

  The kernel does both at once, and ‖v‖₁ where the cache keeps it, for methods that leave `insert`
  and `landing` as they are; for the others `insert` is what they say it is.
  """
  own = at.top.overrides("insert") or at.top.overrides("landing")
  if own or choose("enter_token", at.env.impl) != "pallas":
    rope = at.env.rope
    q = rope.rotate(q, cache.seen[:, None, None])
    k = rope.rotate(k, cache.seen[:, None])
    return q, at.top.insert(at, cache, k, v, live)
  turns = at.top.form("victim") is in_turn.victim
  ring = cache.heads["ring"] if turns else None
  chooses = not turns and at.top.overrides("victim")
  victim = at.top.victim(at, cache) if chooses else None
  if victim is not None:
    check_shape(at, "victim", victim, cache.pos.shape[:2])
  # A model cuts q, k and v out of one product: put together again they need no copies.
  qkv = jnp.concatenate([q, k[:, :, None], v[:, :, None]], 2)
  held = {**cache.slots, "seen": cache.seen, "used": cache.used}
  written = ["k", "v", "pos"]
  if "norm" in held and cache.leaf("norm") == NORM.kind():
    written.append("norm")
  operands = [held[name] for name in ("k", "v", "pos", "seen", "used", *written[3:])]
  run = kernel("enter_token", "pallas")
  part = (context.first(at, cache.size), context.size(at, cache)) if at.env.slot_axis else None
  how = {"rope": at.env.rope, "ring": ring, "part": part}
  q, *entered, seen, used = run(qkv, live, victim, *operands, **how)
  stored = dict(zip(written, entered, strict=True))
  others = [n for n in cache.slots if n not in written and not cache.leaf(n).standing]
  stored |= _statistics(at, cache, others, k, v, live)
  return q, cache.put(slots=stored, rows={"seen": seen, "used": used})


def _statistics(
  at: At, cache: Cache, names: list[str], k: Array, v: Array, live: Array
) -> dict[str, Array]:
  """These statistics of the slots with the new token's in its slot."""
  if not names:
    return {}
  slot = at.top.landing(at, cache, live)[:, :, None]
  pos = jnp.broadcast_to(cache.seen[:, None, None], slot.shape)
  k = at.env.rope.rotate(k, cache.seen[:, None])
  new = {"k": k[:, :, None], "v": v[:, :, None], "pos": pos}
  of_new = {name: cache.leaf(name).of_new(new, cache.slots[name]) for name in names}
  return {name: put(cache.slots[name], slot, x) for name, x in of_new.items()}


def keep_rows(
  at: At, attended: Attended, new: dict[Any, Any], old: dict[Any, Any]
) -> dict[Any, Any]:
  """`slots.choose_rows` of statistics by `attended.counted`; of several by one launch."""
  assert attended.counted is not None and attended.live is not None  # filled in after `attend`
  changed = [name for name, x in new.items() if x is not old[name]]
  plain = all(isinstance(new[name], jax.Array) for name in changed)
  if len(changed) < 2 or not plain or choose("keep_rows", at.env.impl) != "pallas":
    return choose_rows(attended.counted, new, old)
  # It looks at the denominators itself, all but those of other devices' heads.
  live = attended.counted if at.env.head_axis else attended.live
  arrays = ([held[name] for name in changed] for held in (new, old))
  kept = kernel("keep_rows", "pallas")(live, attended.state.l, *arrays)
  return new | dict(zip(changed, kept, strict=True))
