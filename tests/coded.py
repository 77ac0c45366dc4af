"""Codes by hand: what they stand for, and which tokens a cache of them holds."""

import numpy as np

from tests.oracles import keys


def own_codes(x, bits):
  """(codes, a, z) of the last axis, in float64."""
  x = np.asarray(x, np.float64)
  most, zero = (127, 0.0) if bits == 8 else (2**bits - 1, x.min(-1, keepdims=True))
  top = np.abs(x - zero).max(-1, keepdims=True)
  return np.rint((x - zero) * most / np.where(top > 0, top, 1)), top / most, zero


def own_rounded(x, bits, group=0):
  x = np.asarray(x, np.float64)
  code, a, zero = own_codes(x.reshape(*x.shape[:-1], -1, group or x.shape[-1]), bits)
  return (code * a + zero).reshape(x.shape)


def kept(stream, b, h, first, positions, bits, group=0):
  """Keys and values at positions, as codes have them, after a first chunk of `first` tokens."""
  mean = keys(stream, b, h, range(first)).mean(0)
  k = own_rounded(keys(stream, b, h, positions) - mean, bits, group) + mean
  return k, own_rounded(stream.v[b, h, positions], bits, group)
