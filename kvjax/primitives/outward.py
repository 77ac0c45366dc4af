"""Rounding outward to multiples of a power of two, of which 127 reach; for kernels, too."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

LEAST, BAD = -126, 127  # exponents: of the smallest step; of keys that are not finite


def exponent_of(largest: Array, bad: Array) -> Array:
  """e of the smallest 2^e with largest ≤ 127·2^e, each of an array; `BAD` where it is bad."""
  # largest = 1.m · 2^x, and 127 = 1.984375 · 2⁶.
  bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
  exponent = (bits >> 23) - 127 - 6 + ((bits & 0x7FFFFF) > 0x7E0000).astype(jnp.int32)
  return jnp.where(bad, BAD, jnp.maximum(exponent, LEAST))


def power(exponent: Array) -> Array:
  """2^exponent, from −126 to 127; 0 for −127, anything for others."""
  return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def floor(x: Array, exponent: Array) -> Array:
  """⌊x / 2^exponent⌋, int32; 0 where the exponent is `BAD`."""
  return _code(jnp.floor(x * power(-exponent)), exponent)


def ceil(x: Array, exponent: Array) -> Array:
  """⌈x / 2^exponent⌉, int32; 0 where the exponent is `BAD`."""
  return _code(jnp.ceil(x * power(-exponent)), exponent)


def _code(x: Array, exponent: Array) -> Array:
  return jnp.where(exponent == BAD, 0, x.astype(jnp.int32))
