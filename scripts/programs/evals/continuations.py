"""Scores of given continuations under a method: contexts are read, what follows is decoded.

Every token is predicted from the cache that the method keeps. The last one is predicted and not
read: a pair takes as many slots as it has other tokens.
"""

import itertools
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Array, Float

from kvjax.families.method import Method
from kvjax.models.decode.generate import generate, pad, prefill
from kvjax.models.decode.prefill import empty
from kvjax.models.nn.transformer import Caches, Transformer
from kvjax.programs.evals.divergence import surprise

Pair = tuple[Sequence[int], Sequence[int]]  # tokens of a context and of its continuation
# A token, its log-probability in nats, the token that greedy decoding would take, and its own.
Score = tuple[int, float, int, float]
PIECE = 32  # tokens that are scored per call, at most: their logits are held at once


def windows(tokens: Sequence[int], prefix: int, length: int) -> Iterator[Pair]:
  """Windows of a text in which each token is predicted once, as lm-evaluation-harness rolls them.

  All predict `length` tokens after a single one, the first after `prefix`, but for the last: its
  context is filled up with tokens that were predicted before.
  """
  read = [prefix, *tokens]
  for start in range(0, len(tokens), length):
    end = min(start + length, len(tokens))
    first = max(0, end - length) if start else 0
    yield read[first : start + 1], read[start + 1 : end + 1]


def batches(pairs: Sequence[Pair], batch: int) -> Iterator[list[int]]:
  """Indices of the pairs, those of one size together, at most `batch` at a time."""
  shapes = [(_room(pair), *map(len, pair)) for pair in pairs]
  order = sorted(range(len(pairs)), key=lambda i: shapes[i], reverse=True)
  for _, alike in itertools.groupby(order, key=lambda i: shapes[i][0]):
    listed = list(alike)
    yield from (listed[i : i + batch] for i in range(0, len(listed), batch))


def read(
  model: Transformer, method: Method, pairs: Sequence[Pair], batch: int
) -> tuple[Float[Array, "B V"], Caches]:
  """Logits and caches after the contexts, with room for the rest; rows after the pairs are idle."""
  contexts = [list(context) for context, _ in pairs]
  idle: list[list[int]] = [[]] * (batch - len(contexts))
  size = max(map(_room, pairs))
  alone = all(len(context) == 1 for context in contexts)
  tokens, lengths = pad([*contexts, *idle], multiple=1 if alone else size)
  caches = empty(model, method, batch, size)
  return prefill(model, tokens, lengths, caches, method, past=0)


def score(
  model: Transformer, method: Method, pairs: Sequence[Pair], batch: int
) -> list[list[Score]]:
  """Scores of the tokens of at most `batch` continuations, predicted from the method's cache."""
  logits, caches = read(model, method, pairs, batch)
  forced = np.full((batch, max(len(rest) for _, rest in pairs)), -1, np.int32)
  for row, (_, rest) in zip(forced, pairs, strict=False):
    row[: len(rest)] = rest
  last = (forced >= 0).sum(1) - 1  # its place in each row; −1: there is none
  scores: list[list[Score]] = [[] for _ in pairs]

  def add(rows: np.ndarray, logits: Array, tokens: np.ndarray) -> None:
    told = tokens, *map(np.asarray, _told(logits, np.maximum(tokens, 0)))
    for row in np.flatnonzero(rows):
      scores[row] += zip(*(x[row].tolist() for x in told), strict=True)

  done = 0
  for end in sorted({*last[last >= 0].tolist(), *range(PIECE, last.max(), PIECE)}):
    if end > done:
      live, tokens = last >= end, forced[:, done:end]
      generation, caches = generate(
        model,
        logits,
        caches,
        method,
        steps=end - done,
        live=live,
        forced=tokens,
        return_logits=True,
      )
      add(live, generation.logits, tokens)
      logits, done = generation.last, end
    if (last == end).any():
      add(last == end, logits[:, None], forced[:, end : end + 1])
  return scores


@jax.jit
def _told(logits: Float[Array, "B n V"], tokens: Array) -> tuple[Array, Array, Array]:
  """Log-probabilities of tokens, the likeliest tokens, and theirs."""
  likeliest = logits.argmax(-1)
  return -surprise(logits, tokens), likeliest, -surprise(logits, likeliest)


def score_all(
  model: Transformer, method: Method, pairs: Sequence[Pair], batch: int
) -> list[list[Score]]:
  """As `score`, of any number of continuations."""
  found: dict[int, list[Score]] = {}
  for indices in batches(pairs, batch):
    scores = score(model, method, [pairs[i] for i in indices], batch)
    found.update(zip(indices, scores, strict=True))
  return [found[i] for i in range(len(pairs))]


def _room(pair: Pair) -> int:
  """Slots that a pair takes: the next of 32, 64, 128, …, for few compilations."""
  used = len(pair[0]) + max(0, len(pair[1]) - 1)
  return max(32, 1 << (used - 1).bit_length())
