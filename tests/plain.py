"""Logits of a plain forward pass, which other ways to read a text are held against."""

import numpy as np

import kvjax
from kvjax.models.decode.generate import prefill

FULL = kvjax.Full()


def logits(model, tokens, lengths=None):
  """Of every token of prompts, [B, T, V]: of rows of one length, unless `lengths` says more."""
  tokens = np.asarray(tokens, np.int32)
  rows, size = tokens.shape
  lengths = np.full(rows, size) if lengths is None else np.asarray(lengths)
  caches = FULL.init_caches(model.spec(rows, size))
  return np.asarray(prefill(model, tokens, lengths, caches, FULL, all_logits=True)[0])
