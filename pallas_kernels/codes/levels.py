"""Codes of heads that lie in parts, of channels far apart: a thread has all codes of a word."""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.primitives.codes import LARGEST, nearest


def levels(parts: list[Array], real: Array, bits: int) -> tuple[Any, ...]:
  """`primitives.codes.levels` of heads in parts [K, C]: codes int32 in parts, a [K], z [K]."""
  parts = [x.astype(jnp.float32) for x in parts]
  most = LARGEST if bits == 8 else 2**bits - 1

  def over(combine: Any, each: list[Array], beside: float) -> Array:
    return jnp.where(real, functools.reduce(combine, each), beside)

  # On a GPU a maximum passes over NaN.
  strange = over(jnp.maximum, [jnp.where(x != x, 1, 0) for x in parts], 0).max(axis=1) > 0
  if bits == 8:
    top = over(jnp.maximum, [jnp.abs(x) for x in parts], 0.0).max(axis=1)
  else:
    least = over(jnp.minimum, parts, jnp.inf).min(axis=1)
    top = over(jnp.maximum, parts, -jnp.inf).max(axis=1) - least
    parts = [x - least[:, None] for x in parts]
  finite = ~strange & (jnp.abs(top) < jnp.inf)
  scale = jnp.where(finite, top * (1 / most), jnp.nan)
  some = (~strange & (top > 0))[:, None]
  codes = [jnp.where(some, nearest(x, top[:, None], most), 0.0) for x in parts]
  if bits == 8:
    return [x.astype(jnp.int32) for x in codes], scale
  codes = [jnp.clip(x, 0, most).astype(jnp.int32) for x in codes]
  return codes, scale, jnp.where(strange, jnp.nan, least)


def packed(codes: list[Array], word: Any, bits: int) -> list[Array]:
  """Words in parts [K, C] of codes in parts, of which a word has every `runs`-th."""
  some = 8 * jnp.dtype(word).itemsize // bits  # codes of a word
  runs = len(codes) // some
  words = []
  for i in range(runs):
    shifted = [(x & (2**bits - 1)) << (bits * n) for n, x in enumerate(codes[i::runs])]
    words.append(functools.reduce(jnp.bitwise_or, shifted).astype(word))
  return words
