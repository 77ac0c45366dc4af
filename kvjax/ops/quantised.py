"""Keys and values in a few bits: codes, and what makes numbers of them again.

8 bits are symmetric, as in vLLM's `int8_per_token_head` and MaxText's int8 caches; x is the key or
value of one token and head:

    a = max |x| / 127                  code = round(x / a)             x ≈ code · a

4 and 2 bits have a zero point, as in KIVI (Liu et al., 2024, §3.1):

    z = min x, a = (max x − z) / (2^b − 1)    code = round((x − z) / a)    x ≈ code · a + z

Half is rounded to even (`nearest`). Several codes of a token share a word: word j of W holds the
channels j, j + W, j + 2 W … of a head, the first in its lowest bits. Keys are in words of 8 bits
and values in words of 16: that is how a kernel can hand them to the matrix units.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LARGEST = 127  # of a code of 8 bits
WORDS = {"k": jnp.int8, "v": jnp.int16}


class Codes(NamedTuple):
  """Quantised vectors [..., H].

  Attributes:
    words: integers [..., W], packed.
    scale: a, float32 [...].
    zero: z, float32 [...]; None: symmetric.
  """

  words: Array
  scale: Array
  zero: Array | None = None


def quantise(x: Float[Array, "*some H"], bits: int, word: Any = jnp.int8) -> Codes:
  """Codes of vectors in words of dtype `word`.

  Vectors whose numbers are all alike have scale 0 and codes 0; what is not finite makes the scale
  NaN.
  """
  x, most = x.astype(jnp.float32), LARGEST if bits == 8 else 2**bits - 1
  zero = None if bits == 8 else x.min(-1)
  x = x if zero is None else x - zero[..., None]
  top = jnp.abs(x).max(-1)
  code = nearest(x, top[..., None], most).astype(jnp.int32)
  scale = jnp.where(jnp.isfinite(top), top * (1 / most), jnp.nan)
  return Codes(packed(code, bits, word), scale, zero)


def nearest(x: Array, top: Array, most: int) -> Array:
  """most · x / top as integers in float32, half to even; x and top broadcast, |x| ≤ top, top 0: 0.

  Numbers of 16 bits often lie half-way between two codes. What a division comes to there depends
  on the compiler; products of so few digits and their difference are exact, so they decide.
  """
  code = jnp.floor(x * (most / jnp.where(top > 0, top, 1.0)) + 0.5)
  over = 2 * (x * most - code * top)  # its distance from the code, in units of top / 2
  odd = code != 2 * jnp.floor(code / 2)
  up = (over > top) | ((over == top) & odd & (top > 0))
  down = (over < -top) | ((over == -top) & odd)
  return code + jnp.where(up, 1.0, 0.0) - jnp.where(down, 1.0, 0.0)


def dequantise(codes: Codes, bits: int) -> Float[Array, "*some H"]:
  """The numbers that codes stand for, in float32."""
  x = unpacked(codes.words, bits).astype(jnp.float32) * codes.scale[..., None]
  return x if codes.zero is None else x + codes.zero[..., None]


def rounded_query(q: Float[Array, "*some H"]) -> Float[Array, "*some H"]:
  """Queries as kernels have them, rounded to 8 bits a head, in float32."""
  return dequantise(quantise(q, 8), 8)


def packed(code: Int[Array, "*some H"], bits: int, word: Any) -> Int[Array, "*some W"]:
  """Codes int32 in words of dtype `word`."""
  parts = jnp.split(code & (2**bits - 1), 8 * jnp.dtype(word).itemsize // bits, -1)
  shifted = [part << (bits * i) for i, part in enumerate(parts)]
  return functools.reduce(jnp.bitwise_or, shifted).astype(word)  # it wraps round


def unpacked(words: Int[Array, "*some W"], bits: int) -> Int[Array, "*some H"]:
  """Codes int32 of words: from −127 to 127 of 8 bits, from 0 to 2^bits − 1 of fewer."""
  size = 8 * words.dtype.itemsize
  words, mask = words.astype(jnp.int32), 2**bits - 1
  parts = jnp.concatenate([(words >> shift) & mask for shift in range(0, size, bits)], -1)
  return jnp.where(parts > LARGEST, parts - 256, parts) if bits == 8 else parts
