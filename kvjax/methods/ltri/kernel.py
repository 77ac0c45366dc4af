"""Division of maps into spans by kernels; the references are `spans` and `vectors`."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core.context import At
from kvjax.ops.table import declare, pallas

declare("ltri_between", pallas="kvjax.kernels.ltri.divide:between")
declare("ltri_divide", pallas="kvjax.kernels.ltri.divide:divide")
LARGEST = 128  # tokens of a block whose map a kernel holds in registers


def between(
  at: At,
  maps: Float[Array, "*batch U U"],
  length: Int[Array, "*batch"],
  place: Int[Array, "*batch"],
  following: Int[Array, "*batch"],
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]] | None:
  """Entries `place` and `following` of each map's lower triangle in order; None: no kernel runs."""
  run = pallas(at, "ltri_between")
  if run is None or maps.shape[-1] > LARGEST:
    return None
  flat = (x.reshape(-1) for x in (length, place, following))
  low, high = run(maps.reshape(-1, *maps.shape[-2:]), *flat)
  return low.reshape(length.shape), high.reshape(length.shape)


def divide(
  at: At,
  maps: Float[Array, "*batch U U"],
  theta: Float[Array, "*batch"],
  length: Int[Array, "*batch"] | None,
  overlap: Float[Array, "*#batch"],
  count: int,
  mode: str,
) -> tuple[Int[Array, "*batch C"], Int[Array, "*batch C"], Float[Array, "*batch C"]] | None:
  """`spans.divide` and `vectors.ratios` together; None: no kernel runs."""
  run = pallas(at, "ltri_divide")
  if run is None or maps.shape[-1] > LARGEST:
    return None
  length = jnp.int32(maps.shape[-1]) if length is None else length
  rows = (jnp.broadcast_to(x, theta.shape).reshape(-1) for x in (theta, length, overlap))
  found = run(maps.reshape(-1, *maps.shape[-2:]), *rows, count, mode)
  start, stop, ratio = (x.reshape(*theta.shape, count) for x in found)
  return start, stop, ratio
