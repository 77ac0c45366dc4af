"""Reading, writing and compacting cache slots; slot arrays are [B, K, S, ...]."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.core.context import OwnRows

Slots = dict[str, Array]
Tree = TypeVar("Tree")


def take(
  x: Shaped[Array, "B K S *rest"], slot: Int[Array, "B K W"]
) -> Shaped[Array, "B K W *rest"]:
  """x at `slot`; out-of-range indices clip (mask them with their position)."""
  index = slot.reshape(slot.shape + (1,) * (x.ndim - 3))
  return jnp.take_along_axis(x, index, 2, mode="clip")


def put(
  x: Shaped[Array, "B K S *rest"],
  slot: Int[Array, "B K W"],
  value: Shaped[Array, "B K W *rest"],
) -> Shaped[Array, "B K S *rest"]:
  """x with `value` written at `slot`; slots ≥ S are dropped. In place when x is donated."""
  b = jnp.arange(x.shape[0])[:, None, None]
  h = jnp.arange(x.shape[1])[None, :, None]
  return x.at[b, h, slot].set(value.astype(x.dtype), mode="drop")


def after(index: Int[Array, "*any"], *made: Float[Array, "..."]) -> Int[Array, "*any"]:
  """`index`, below 2³¹ − 1, which is known after the arrays are.

  A write in place has to come after what reads the array, and for XLA only a dependence says so:
  else it copies the array first. An index that depends on what was made of it makes one.
  """
  for x in made:
    first = jax.lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
    index = jnp.minimum(index, index + jnp.isnan(first))  # the same, which XLA does not know
  return index


def quotient(x: Int[Array, "*any"], by: int) -> Int[Array, "*any"]:
  """x / by rounded towards zero: a tenth of the instructions of what rounds down."""
  return jax.lax.div(x, jnp.full_like(x, by))


def remainder(x: Int[Array, "*any"], by: int) -> Int[Array, "*any"]:
  """x − by · quotient(x, by): of the sign of x."""
  return jax.lax.rem(x, jnp.full_like(x, by))


def overlaid(
  x: Shaped[Array, "B S *rest"], into: Int[Array, "B W"], value: Shaped[Array, "B W *rest"]
) -> Shaped[Array, "B S *rest"]:
  """x with `value` at `into`; entries beyond x are dropped.

  Reads and writes the whole of x: for small arrays, or where a copy is made anyway. It compiles to
  one pass, a scatter to more.
  """
  entry = jnp.arange(into.shape[1], dtype=jnp.int32)[:, None]
  here = into[:, :, None] == jnp.arange(x.shape[1], dtype=jnp.int32)
  source = jnp.expand_dims(jnp.where(here, entry, -1).max(1), range(2, x.ndim))
  chosen = jnp.take_along_axis(value, jnp.maximum(source, 0), 1, mode="clip")
  return jnp.where(source >= 0, chosen.astype(x.dtype), x)


def append(slots: Slots, new: Slots, seen: Int[Array, " B"], past: int | None) -> Slots:
  """Writes tokens into the slots that carry their positions (slot = position).

  `new` holds T right-padded tokens (position −1 = padding); they follow `seen`, and those below
  slot 0 are dropped. `past` = 0 says that every row is empty: the write is one static slice.
  """
  size, tokens = slots["pos"].shape[2], new["pos"].shape[2]
  if past == 0:
    n = min(size, tokens)
    fresh = new["pos"][:, :, :n] >= 0

    def write(old: Array, x: Array) -> Array:
      ok = fresh.reshape(fresh.shape + (1,) * (old.ndim - 3))
      first = jnp.where(ok, x[:, :, :n].astype(old.dtype), old[:, :, :n])
      # Not `old.at[:, :, :n].set`: with n = S that is a scatter of no indices, on which jax 0.11.2
      # dies where heads are split over devices.
      return jax.lax.dynamic_update_slice_in_dim(old, first, 0, 2)

    return {name: write(old, new[name]) for name, old in slots.items()}
  at = seen[:, None, None] + jnp.arange(tokens, dtype=jnp.int32)
  at = jnp.where((new["pos"] >= 0) & (at >= 0), at, size)
  return {name: put(old, at, new[name]) for name, old in slots.items()}


def join(a: Slots, b: Slots) -> Slots:
  """Two sets of slots side by side, [a ‖ b]; statistics keep a's dtype."""
  return {name: jnp.concatenate([x, b[name].astype(x.dtype)], 2) for name, x in a.items()}


def best(
  pos: Int[Array, "B K S"], priority: Float[Array, "B K S"], size: int
) -> tuple[Int[Array, "B K N"], Int[Array, "B K N"]]:
  """The `size` occupied slots of highest priority, in order of position; ties to the lowest one.

  A priority of NaN is the lowest. Returns their indices and their positions; where fewer are
  occupied, position −1 comes last.
  """
  last = jnp.iinfo(jnp.int32).max
  rank = jnp.where((pos >= 0) & ~jnp.isnan(priority), -priority, jnp.inf)
  order = jnp.broadcast_to(jnp.arange(pos.shape[2], dtype=jnp.int32), pos.shape)
  by_time = jnp.where(pos >= 0, pos, last)
  _, by_time, order = jax.lax.sort((rank, by_time, order), num_keys=2)
  if by_time.shape[2] < size:
    pad = ((0, 0), (0, 0), (0, size - by_time.shape[2]))
    by_time = jnp.pad(by_time, pad, constant_values=last)
    order = jnp.pad(order, pad, constant_values=0)
  by_time, order = jax.lax.sort((by_time[..., :size], order[..., :size]), num_keys=1)
  return order, jnp.where(by_time < last, by_time, -1)


def keep_best(slots: Slots, priority: Float[Array, "B K S"], size: int) -> Slots:
  """The `size` occupied slots of highest priority, as `best` orders them.

  The result's first min(occupied, size) slots are filled; the rest have position −1.
  """
  order, pos = best(slots["pos"], priority, size)
  return {**{name: take(x, order) for name, x in slots.items()}, "pos": pos}


def resize(slots: Slots, size: int) -> Slots:
  """Cut to `size` slots, or lengthened by empty ones."""

  def fit(x: Array, fill: int) -> Array:
    width = [(0, max(0, size - x.shape[2]) if axis == 2 else 0) for axis in range(x.ndim)]
    return jnp.pad(x[:, :, :size], width, constant_values=fill)

  return {name: fit(x, -1 if name == "pos" else 0) for name, x in slots.items()}


def sparing(
  score: Float[Array, "B K S"], pos: Int[Array, "B K S"], end: Int[Array, " B"], recent: int
) -> Float[Array, "B K S"]:
  """The scores, infinite for the `recent` newest tokens before position `end`."""
  return jnp.where(pos >= (end - recent)[:, None, None], jnp.inf, score) if recent else score


def lowest(score: Float[Array, "B K S"], pos: Int[Array, "B K S"]) -> Int[Array, "B K"]:
  """The slot of smallest score; ties to the lowest position. A score of NaN is the smallest.

  A single reduction, instead of a minimum followed by a search for its index.
  """
  number, slot = ~jnp.isnan(score), jax.lax.broadcasted_iota(jnp.int32, score.shape, 2)
  held = number, jnp.where(number, score, 0), pos, slot
  last = jnp.iinfo(jnp.int32).max
  ends = True, jnp.asarray(jnp.inf, score.dtype), jnp.int32(last), jnp.int32(last)

  def first(a: tuple, b: tuple) -> tuple:
    comes, equal = jnp.zeros((), bool), jnp.ones((), bool)
    for x, y in zip(a, b, strict=True):
      comes, equal = comes | (equal & (x < y)), equal & (x == y)
    return tuple(jnp.where(comes, x, y) for x, y in zip(a, b, strict=True))

  return jax.lax.reduce(held, ends, first, (2,))[3]


def pool(
  x: Float[Array, "B K S"], pos: Int[Array, "B K S"], ok: Bool[Array, "B K S"], width: int, how: str
) -> Float[Array, "B K S"]:
  """Each slot's "avg" or "max" over `width` neighbours in order of position, its own in the middle.

  Slots that are not ok count as padding (0 of an average); their contents are undefined.
  """
  order = jnp.argsort(jnp.where(ok, pos, jnp.iinfo(jnp.int32).max), -1)
  empty, add = (0.0, jax.lax.add) if how == "avg" else (-jnp.inf, jax.lax.max)
  y = jnp.take_along_axis(jnp.where(ok, x, empty), order, -1)
  y = jax.lax.reduce_window(y, empty, add, (1, 1, width), (1, 1, 1), "SAME")
  y = y / width if how == "avg" else y
  return jnp.take_along_axis(y, jnp.argsort(order, -1), -1)


def choose_rows(ok: Bool[Array, " B"], new: Tree, old: Tree) -> Tree:
  """Leaf by leaf: `new` where the row is ok, else `old`, whose dtype it is; all lead with B.

  `OwnRows` are new: they have been written row by row.
  """

  def pick(a: Any, b: Any) -> Any:
    if a is b or isinstance(a, OwnRows):
      return a
    return jnp.where(ok.reshape(ok.shape + (1,) * (a.ndim - 1)), a.astype(b.dtype), b)

  return jax.tree.map(pick, new, old, is_leaf=lambda x: isinstance(x, OwnRows))
