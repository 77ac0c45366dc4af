"""LM-Infinite against a NumPy float64 oracle: the Λ-shaped mask and the bounded distance."""

import numpy as np
import pytest

from kvjax import LMInfinite
from kvjax.testing.layer import Layer, Stream, rotate, softmax_average


def oracle(stream, b, h, g, t, method):
  kept = [j for j in range(t + 1) if j < method.sinks or j > t - (method.budget - method.sinks)]
  limit = t if method.limit is None else method.limit
  logits = []
  for j in kept:
    q = rotate(stream.q[b, h, g, t], min(t, limit) if j < method.sinks else t)
    logits.append(q @ rotate(stream.k[b, h, j], j) / np.sqrt(len(q)))
  return softmax_average(np.array(logits), np.float64(stream.v[b, h, kept]))


@pytest.mark.core(1)
@pytest.mark.parametrize("limit", [None, 12, 30])
def test_prompt_then_decode(limit):
  method = LMInfinite(12, sinks=3, limit=limit)
  stream, lengths = Stream.random(1, tokens=80), [23, 6]
  layer = Layer(method, stream, capacity=80)
  out = layer.prefill(lengths)
  for b, n in enumerate(lengths):
    for t in range(n):
      h, g = divmod(t % 9, 3)
      want = oracle(stream, b, h, g, t, method)
      np.testing.assert_allclose(out[b, h, g, t], want, atol=3e-6)
  for step in range(50):
    at = [n + step for n in lengths]
    out, _ = layer.decode(at)
    for b, t in enumerate(at):
      h, g = divmod(step % 9, 3)
      np.testing.assert_allclose(out[b, h, g], oracle(stream, b, h, g, t, method), atol=3e-6)
