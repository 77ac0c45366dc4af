"""Scores of given continuations under a method: contexts are read, what follows is decoded."""

import itertools
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.families.method import Method
from kvjax.models.decode.generate import generate, pad, prefill
from kvjax.models.nn.transformer import Caches, Transformer
from kvjax.programs.evals.divergence import surprise

Pair = tuple[Sequence[int], Sequence[int]]  # tokens of a context and of its continuation
# A token, its log-probability in nats, the token that greedy decoding would take, and its own.
Score = tuple[int, float, int, float]
PIECE = 32  # tokens that are scored per call: their logits are held at once


def batches(pairs: Sequence[Pair], batch: int) -> Iterator[list[int]]:
  """Indices of the pairs, those of one shape together, at most `batch` at a time."""
  shapes = [(_bucket(len(context)), _bucket(len(rest))) for context, rest in pairs]
  order = sorted(range(len(pairs)), key=lambda i: shapes[i], reverse=True)
  for _, alike in itertools.groupby(order, key=lambda i: shapes[i]):
    listed = list(alike)
    yield from (listed[i : i + batch] for i in range(0, len(listed), batch))


def read(
  model: Transformer, method: Method, pairs: Sequence[Pair], batch: int
) -> tuple[Float[Array, "B V"], Caches]:
  """Logits and caches after the contexts, with room for the rest; rows after the pairs are idle."""
  contexts = [list(context) for context, _ in pairs]
  size = _bucket(max(map(len, contexts)))
  idle: list[list[int]] = [[]] * (batch - len(contexts))
  tokens, lengths = pad([*contexts, *idle], multiple=size)
  capacity = size + _bucket(max(len(rest) for _, rest in pairs))
  caches = method.init_caches(model.spec(batch, capacity))
  return prefill(model, tokens, lengths, caches, method, past=0)


def score(
  model: Transformer, method: Method, pairs: Sequence[Pair], batch: int
) -> list[list[Score]]:
  """Scores of the tokens of at most `batch` continuations, predicted from the method's cache."""
  logits, caches = read(model, method, pairs, batch)
  longest = max(len(rest) for _, rest in pairs)
  forced = np.full((batch, -(-longest // PIECE) * PIECE), -1, np.int32)
  for row, (_, rest) in zip(forced, pairs, strict=False):
    row[: len(rest)] = rest
  scores: list[list[Score]] = [[] for _ in pairs]
  for start in range(0, longest, PIECE):
    wanted = forced[:, start : start + PIECE]
    generation, caches = generate(
      model,
      logits,
      caches,
      method,
      steps=PIECE,
      live=wanted[:, 0] >= 0,
      forced=wanted,
      return_logits=True,
      chunk=PIECE,
    )
    logits, every = generation.last, generation.logits
    assert every is not None  # asked for
    likeliest = every.argmax(-1)
    columns = (
      wanted,
      -np.asarray(surprise(every, jnp.asarray(np.maximum(wanted, 0)))),
      np.asarray(likeliest),
      -np.asarray(surprise(every, likeliest)),
    )
    for row, (known, (_, rest)) in enumerate(zip(scores, pairs, strict=True)):
      left = max(len(rest) - start, 0)
      known += zip(*(column[row, :left].tolist() for column in columns), strict=True)
  return scores


def score_all(
  model: Transformer, method: Method, pairs: Sequence[Pair], batch: int
) -> list[list[Score]]:
  """As `score`, of any number of continuations."""
  found: dict[int, list[Score]] = {}
  for indices in batches(pairs, batch):
    scores = score(model, method, [pairs[i] for i in indices], batch)
    found.update(zip(indices, scores, strict=True))
  return [found[i] for i in range(len(pairs))]


def _bucket(tokens: int) -> int:
  """The next of 32, 64, 128, …: few sizes, few compilations."""
  return max(32, 1 << (max(1, tokens) - 1).bit_length())
