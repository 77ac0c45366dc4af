"""Operands of kernels over codes, and attention over what they stand for in float64."""

import math

import numpy as np

from kvjax.primitives import codes as quantised
from kvjax.primitives.codes import WORDS
from kvjax.testing.layer import capped
from tests.compiled import compiled
from tests.kernels.listed import codes

quantise = compiled(quantised.quantise)


def coded(rng, shape, bits):
  """Words of random keys and values [B, K, S, H], and the scales (and zeros) of their slots."""
  k, v = (
    quantise(np.float32(rng.normal(size=shape) * size + shift), bits, WORDS[name])
    for name, size, shift in (("k", 1, 0.3), ("v", 3, -1))
  )
  return k.words, v.words, [k.scale, v.scale] + ([] if bits == 8 else [k.zero, v.zero])


def oracle(q, k, v, per_slot, slots, bits, weights=np.float64, cap=None):
  """(o, m, l, logits) in float64, one query head at a time; p · a_v rounded to `weights`."""
  q, k, v = np.asarray(q).astype(np.float64), codes(k, bits), codes(v, bits)
  scales = [np.asarray(x, np.float64) for x in per_slot]
  zeros = scales[2:] or [np.zeros_like(x) for x in scales]
  o, m, l = np.zeros(q.shape), np.full(q.shape[:3], -np.inf), np.zeros(q.shape[:3])
  x = np.full((*q.shape[:3], k.shape[2]), -np.inf)
  for b, h, g in np.ndindex(*q.shape[:3]):
    if not (listed := slots(b, h)):
      continue
    at = b, h, listed
    top = np.abs(q[b, h, g]).max()
    query = np.rint(127 * q[b, h, g] / top) * top / 127
    keys = k[at] * scales[0][at][:, None] + zeros[0][at][:, None]
    logits = capped(keys @ query / math.sqrt(q.shape[3]), cap)
    x[b, h, g, listed], m[b, h, g] = logits, logits.max()
    p = np.exp(logits - m[b, h, g])
    l[b, h, g] = p.sum()
    w = (p * scales[1][at]).astype(weights).astype(np.float64)
    o[b, h, g] = (w @ v[at] + p @ zeros[1][at]) / l[b, h, g]
  return o, m, l, x
