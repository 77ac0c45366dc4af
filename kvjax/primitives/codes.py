"""Keys and values in a few bits: codes, and what makes numbers of them again.

x are the numbers of a group: those of one token and head, or a part of them, or, as KIVI has keys,
those of some tokens in one channel. 8 bits are symmetric, as in vLLM's `int8_per_token_head` and
MaxText's int8 caches:

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
    scale: a, [...], or [..., N] of the N groups of a vector's channels.
    zero: z, of the same shape; None: symmetric.
  """

  words: Array
  scale: Array
  zero: Array | None = None


def quantise(x: Float[Array, "*some H"], bits: int, word: Any = jnp.int8, group: int = 0) -> Codes:
  """Codes of vectors in words of dtype `word`, with scales in float32.

  Groups whose numbers are all alike have scale 0 and codes 0; what is not finite makes the scale
  NaN.

  Args:
    x: the vectors.
    bits: of a code, 8, 4 or 2.
    word: what codes are packed into.
    group: channels that share a scale, a divisor of H; 0 or H: all, and scales have no axis more.
  """
  parted = x if group in (0, x.shape[-1]) else x.reshape(*x.shape[:-1], -1, group)
  code, parts = levels(parted, bits)
  return Codes(packed(code.reshape(x.shape), bits, word), *parts)


def levels(
  x: Float[Array, "*some X"], bits: int, dtype: Any = jnp.float32
) -> tuple[Int[Array, "*some X"], list[Float[Array, "*some"]]]:
  """Codes int32 of groups along the last axis, and a of each, and z if there is one, in `dtype`.

  Codes are those nearest to x by a and z as they are stored.
  """
  x, most = x.astype(jnp.float32), LARGEST if bits == 8 else 2**bits - 1
  zero = None if bits == 8 else x.min(-1).astype(dtype)
  top = jnp.abs(x).max(-1) if zero is None else x.max(-1) - x.min(-1)
  scale = jnp.where(jnp.isfinite(top), top * (1 / most), jnp.nan).astype(dtype)
  if dtype != jnp.float32:
    top = scale.astype(jnp.float32) * most
  x = x if zero is None else x - zero.astype(jnp.float32)[..., None]
  code = jnp.where(top[..., None] > 0, nearest(x, top[..., None], most), 0)
  code = code if zero is None else jnp.clip(code, 0, most)  # what rounding z and a left outside
  return code.astype(jnp.int32), [scale] if zero is None else [scale, zero]


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
  x = unpacked(codes.words, bits)
  grouped = codes.scale.ndim == x.ndim
  parted = x.reshape(*codes.scale.shape, -1) if grouped else x
  return of_levels(parted, codes.scale, codes.zero).reshape(x.shape)


def of_levels(
  code: Int[Array, "*some X"],
  scale: Float[Array, "*some"],
  zero: Float[Array, "*some"] | None = None,
) -> Float[Array, "*some X"]:
  """code · a + z of groups along the last axis, in float32."""
  x = code.astype(jnp.float32) * scale.astype(jnp.float32)[..., None]
  return x if zero is None else x + zero.astype(jnp.float32)[..., None]


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
