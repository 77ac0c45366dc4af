"""Extremes of pages' keys in 8 bits, rounded outward: what they bound they still bound.

A page's step is 2^e, the smallest power of two with max |x| ≤ 127·2^e over all channels. Codes
times it are exact, so that the same keys have the same codes wherever they are made.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from kvjax.primitives import outward


def coded(
  low: Float[Array, "*pages H"], high: Float[Array, "*pages H"]
) -> tuple[Int8[Array, "*pages H"], Int8[Array, "*pages H"], Int8[Array, " *pages"]]:
  """⌊low / 2^e⌋, ⌈high / 2^e⌉, and e of every page."""
  low, high = low.astype(jnp.float32), high.astype(jnp.float32)
  largest = jnp.maximum(jnp.abs(low), jnp.abs(high)).max(-1)
  bad = ~(jnp.isfinite(low) & jnp.isfinite(high)).all(-1)  # a maximum may pass over NaN
  exponent = outward.exponent_of(largest, bad)
  step = exponent[..., None]
  found = outward.floor(low, step), outward.ceil(high, step), exponent
  below, above, exponent = (x.astype(jnp.int8) for x in found)
  return below, above, exponent


def steps(exponent: Int8[Array, "*pages"]) -> Float[Array, "*pages"]:
  """2^e; NaN for a page with keys that are not finite, which is chosen first, and heard of."""
  return jnp.where(exponent == outward.BAD, jnp.nan, outward.power(exponent.astype(jnp.int32)))
