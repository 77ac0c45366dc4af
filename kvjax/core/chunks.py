"""The tokens of a chunk that a layer computes: taken out of an array, and put back into it.

First tokens and one piece (`kvjax.Active.ends`) are slices: each row is copied as a whole, and put
back in place. Any other set is gathered and scattered.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Shaped

from kvjax.core.context import Prompt


def take(x: Shaped[Array, "B *rest"], prompt: Prompt, axis: int) -> Shaped[Array, "B *some"]:
  """Of x, whose `axis` has all T tokens, the computed ones; of padding anything."""
  if prompt.index is None:
    return x
  if prompt.start is None or prompt.apart is None:
    index = jnp.expand_dims(prompt.index, [i for i in range(1, x.ndim) if i != axis])
    return jnp.take_along_axis(x, index, axis, mode="clip")
  first = lax.slice_in_dim(x, 0, prompt.apart, axis=axis)
  size = prompt.index.shape[1] - prompt.apart
  cut = jax.vmap(lambda y, at: lax.dynamic_slice_in_dim(y, at, size, axis - 1))
  piece = cut(x, prompt.start)
  return lax.concatenate([first, piece], axis)


def put(
  x: Shaped[Array, "B *rest"], prompt: Prompt, value: Shaped[Array, "B *some"], axis: int
) -> Shaped[Array, "B *rest"]:
  """x with `value` at the computed tokens; in place where x is not needed any more.

  A piece is written as a whole, with what lies past a row's end: nothing sees that.
  """
  if prompt.index is None:
    return value
  value = value.astype(x.dtype)
  if prompt.start is None or prompt.apart is None:
    rows = jnp.arange(x.shape[0])[:, None]
    x, value = jnp.moveaxis(x, axis, 1), jnp.moveaxis(value, axis, 1)
    return jnp.moveaxis(x.at[rows, prompt.index].set(value, mode="drop"), 1, axis)
  first = lax.slice_in_dim(value, 0, prompt.apart, axis=axis)
  piece = lax.slice_in_dim(value, prompt.apart, None, axis=axis)
  x = lax.dynamic_update_slice_in_dim(x, first, 0, axis)
  for row in range(x.shape[0]):  # one write for all rows would be a scatter
    at: list[Any] = [np.int32(0)] * x.ndim
    at[0], at[axis] = np.int32(row), prompt.start[row]
    x = lax.dynamic_update_slice(x, piece[row : row + 1], at)
  return x
