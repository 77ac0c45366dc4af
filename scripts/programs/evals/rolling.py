"""Log-likelihoods of whole texts under a method, in windows, as lm-evaluation-harness rolls them.

A window's context is read as a prompt; what it predicts is then decoded token by token, so that
every token is predicted from the cache that the method keeps.
"""

import itertools
from collections.abc import Iterator, Sequence

import jax
import numpy as np

import kvjax
from kvjax.models.decode.generate import generate, pad, prefill
from kvjax.models.decode.prefill import empty
from kvjax.models.nn.transformer import Caches, Transformer

Window = tuple[list[int], list[int]]  # context, tokens to predict


def windows(tokens: Sequence[int], prefix: int, length: int) -> Iterator[Window]:
  """Windows in which each token is predicted once, from `length` tokens at most.

  All predict `length` tokens after a single one, the first after `prefix`, but for the last: its
  context is filled up with tokens that were predicted before.
  """
  read = [prefix, *tokens]
  for start in range(0, len(tokens), length):
    end = min(start + length, len(tokens))
    first = max(0, end - length) if start else 0
    yield read[first : start + 1], read[start + 1 : end + 1]


def log_likelihoods(
  model: Transformer,
  method: kvjax.Method,
  texts: Sequence[Sequence[int]],
  *,
  prefix: int,
  length: int,
  batch: int,
) -> tuple[np.ndarray, Caches | None]:
  """Log-probability of each text in nats, float64, and the caches of the last window.

  Args:
    model: the decoder.
    method: the KV-cache method.
    texts: token ids.
    prefix: token that the first one is predicted from.
    length: tokens of a window's context and of those predicted but the last.
    batch: windows that are decoded together.

  Raises:
    ValueError, NotImplementedError: the method refuses.
  """
  parts = [(i, window) for i, ids in enumerate(texts) for window in windows(ids, prefix, length)]
  parts.sort(key=lambda part: (len(part[1][0]), -len(part[1][1])))
  total, caches = np.zeros(len(texts)), None
  for alike in itertools.groupby(parts, key=lambda part: len(part[1][0]) > 1):
    listed = list(alike[1])
    for at in range(0, len(listed), batch):
      chosen = listed[at : at + batch]
      values, caches = _score(model, method, [window for _, window in chosen], length, batch)
      np.add.at(total, [i for i, _ in chosen], values)
  return total, caches


def _score(
  model: Transformer, method: kvjax.Method, parts: Sequence[Window], length: int, batch: int
) -> tuple[np.ndarray, Caches]:
  """Log-probability of what each window predicts, and their caches."""
  idle: list[list[int]] = [[]] * (batch - len(parts))
  tokens, lengths = pad([*(context for context, _ in parts), *idle], multiple=1)
  size = 1 if tokens.shape[1] == 1 else length  # two programs, whatever the contexts
  tokens = np.pad(tokens, ((0, 0), (0, size - tokens.shape[1])))
  caches = empty(model, method, batch, length)
  logits, caches = prefill(model, tokens, lengths, caches, method, past=0)
  wanted = [rest for _, rest in parts]
  total = np.zeros(len(parts))
  # The last token of a window is predicted and not read: rows end one after another.
  inserted = np.array([len(rest) - 1 for rest in wanted] + [-1] * len(idle))
  done = 0
  for end in sorted({*inserted[inserted >= 0].tolist()}):
    if end > done:
      live = inserted >= end
      forced = np.full((batch, end - done), -1, np.int32)
      for row in np.flatnonzero(live):
        forced[row] = wanted[row][done:end]
      generation, caches = generate(
        model,
        logits,
        caches,
        method,
        steps=end - done,
        live=live,
        forced=forced,
        return_logprobs=True,
      )
      assert generation.logprobs is not None  # asked for
      total += generation.logprobs[: len(parts)].sum(1, dtype=np.float64)
      logits, done = generation.last, end
    last = np.flatnonzero(inserted == end)
    chosen = jax.nn.log_softmax(logits[last])[np.arange(len(last)), [wanted[i][-1] for i in last]]
    total[last] += np.asarray(chosen, np.float64)
  return total, caches
