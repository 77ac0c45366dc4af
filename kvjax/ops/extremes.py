"""Extremes of pages' keys in 8 bits, rounded outward: what they bound they still bound.

A page's step is 2^e, the smallest power of two with max |x| ≤ 127·2^e over all channels. Codes
times it are exact, so that the same keys have the same codes wherever they are made.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

LEAST, BAD = -126, 127  # exponents: of the smallest step; of a page with keys that are not finite


def coded(
  low: Float[Array, "*pages H"], high: Float[Array, "*pages H"]
) -> tuple[Int8[Array, "*pages H"], Int8[Array, "*pages H"], Int8[Array, " *pages"]]:
  """⌊low / 2^e⌋, ⌈high / 2^e⌉, and e of every page."""
  low, high = low.astype(jnp.float32), high.astype(jnp.float32)
  largest = jnp.maximum(jnp.abs(low), jnp.abs(high)).max(-1)
  bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
  # largest = 1.m · 2^x, and 127 = 1.984375 · 2⁶.
  exponent = (bits >> 23) - 127 - 6 + ((bits & 0x7FFFFF) > 0x7E0000)
  bad = ~(jnp.isfinite(low) & jnp.isfinite(high)).all(-1)  # a maximum may pass over NaN
  exponent = jnp.where(bad, BAD, jnp.maximum(exponent, LEAST))
  inverse = jax.lax.bitcast_convert_type((127 - exponent) << 23, jnp.float32)[..., None]
  codes = jnp.floor(low * inverse), jnp.ceil(high * inverse)
  below, above = (jnp.where(bad[..., None], 0, x).astype(jnp.int8) for x in codes)
  return below, above, exponent.astype(jnp.int8)


def steps(exponent: Int8[Array, "*pages"]) -> Float[Array, "*pages"]:
  """2^e; NaN for a page with keys that are not finite, which is chosen first, and heard of."""
  power = jax.lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)
  return jnp.where(exponent == BAD, jnp.nan, power)
