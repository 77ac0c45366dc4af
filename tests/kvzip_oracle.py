"""KVzip's scores by hand: a softmax over the repetition, from the decoder in loops."""

import functools

import numpy as np

from kvjax.models.decode.reconstruct import Instructions
from kvjax.testing import tiny
from tests import decoder_oracle
from tests.oracles import softmax

model = functools.partial(tiny.model, layers=2)  # that they are several is enough


ASK = Instructions(first=(7, 8, 9), again=(10, 11), suffix=(12,))


LENGTHS = np.array([30, 19])


def by_hand(row, n, chunk, sinks):
  """Scores [L, K, n] in NumPy float64, from the decoder in loops: a softmax over few keys a query.

  Positions count from 1 there.
  """
  decoder = model()
  out = np.zeros((len(decoder.layers), 2, n))
  for start in range(sinks, n, chunk):
    of_chunk = row[start : min(start + chunk, n)]
    said = [*ASK.first] if start == sinks else [*ASK.again, *row[max(sinks, start - 8) : start]]
    ids = [*row[:n], *said, *ASK.suffix, *of_chunk]
    mine = [*range(sinks), *range(start, start + len(of_chunk))]

    def look(number, head, t, q, k, start=start, mine=mine):
      if t > n:
        at = np.array([*mine, *range(n, t)])
        for each in q:
          share = softmax(k[at] @ each / np.sqrt(len(each)))[: len(mine)]
          for j, x in zip(mine, share, strict=True):
            if j >= start:
              out[number - 1, head, j] = max(out[number - 1, head, j], x)
      return range(1, t + 1)

    decoder_oracle.logits(ids, len(ids), sees=look, decoder=decoder)
  out[:, :, :sinks] = 2
  return out
