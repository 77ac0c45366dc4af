"""The largest of a program's values, exactly: a search for a bound, and then their places.

Values become integers of the same order. Each pass of the search divides the window that holds the
bound into eight, counts what lies in and below each part, and goes on with one; it ends as soon as
as many as are asked for lie above. A running sum then gives each of them its place, in order of
index, which also settles ties.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

EACH = 4  # neighbours counted together: their number fits four bits
LEAST = -(2**31)  # below the key of every float


def keys(value: Array) -> Array:
  """int32 keys in the order of floats that are not NaN; 0 and −0 are equal."""
  bits = lax.bitcast_convert_type(jnp.where(value == 0, 0.0, value), jnp.int32)
  return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def threshold(key: Array, low: Array, held: Array, want: Array, room: Array) -> tuple[Array, Array]:
  """A bound at or above which lie the `want` largest keys, and how many lie there.

  That is at most `room`, unless more are equal to the bound.

  Args:
    key: [E, T], E ≤ 15; `LEAST` is none.
    low, held: a bound, and how many keys lie at or above it.
    want, room: at least `want` are asked for, at most `held`; up to `room` will do.
  """
  high = key.max()
  width = high - low  # below 0 where it is past int32
  exponent = lax.bitcast_convert_type(width.astype(jnp.float32), jnp.int32) >> 23
  bits = jnp.where(width < 0, 32, jnp.maximum(exponent - 126, 0))
  # Nothing is above the largest key.
  low, held = jnp.where(want > 0, low, high), jnp.where(want > 0, held, want)
  quarter = jnp.arange(4, dtype=jnp.int32)

  def unsettled(state: tuple[Array, Array, Array]) -> Array:
    _, bits, held = state
    return (held > room) & (bits > 0)

  def narrow(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """The window [low, low + 2^bits) holds the bound; its eight parts are 2^shift wide."""
    low, bits, held = state
    shift = jnp.maximum(bits - 3, 0)
    at = lax.shift_right_logical(key - low, shift)
    inside = (key >= low) & (at >= 0) & (at < (1 << (bits - shift)))
    counts = jnp.where(inside, jnp.int32(1) << ((at & 7) * 4), 0).sum(axis=1)
    below = counts * jnp.int32(0x11111111)  # each four bits: those of this part and lower ones
    # Parts n and n + 4 side by side, 16 bits each.
    pairs = lax.shift_right_logical(below[:, None], quarter[None, :] * 4) & 0x000F000F
    pairs = pairs.sum(axis=0)

    def passing(below: Array, part: Array) -> Array:
      """Number of keys above a part where enough lie, and of parts above it, in one number."""
      above = held - below
      return jnp.where(above >= want, above * 16 + (7 - part), held * 16 + 8)

    upper = passing(lax.shift_right_logical(pairs, 16), quarter + 4)
    best = jnp.minimum(passing(pairs & 0xFFFF, quarter), upper).min()
    return low + ((8 - (best & 15)) << shift), shift, best >> 4

  low, _, held = lax.while_loop(unsettled, narrow, (low, bits, held))
  return low, held


def places(key: Array, low: Array, want: Array) -> tuple[Array, Array]:
  """Marks the `want` largest of keys [T], and counts those that lie before each lane.

  Those are all keys above the bound, and of its equals the first ones.
  """
  above, equal = key > low, key == low
  short = want - above.astype(jnp.int32).sum()
  # How many lanes before each are above, and in the upper 16 bits how many are equal.
  both = above.astype(jnp.int32) + (equal.astype(jnp.int32) << 16)
  before = jnp.cumsum(both) - both
  above_before, equal_before = before & 0xFFFF, before >> 16
  keep = above | (equal & (equal_before < short))
  return keep, above_before + jnp.minimum(equal_before, short)
