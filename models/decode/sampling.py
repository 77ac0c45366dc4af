"""Drawing of a token from logits: temperature, top-k, top-p, min-p, one key per row and token."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.core import fields

Knobs = tuple[Any, Any, Any, Any]  # temperature, top_k, top_p, min_p: scalars, or [B]
# Devices take numbers below float32's normal ones as 0, and so the inverse of the largest.
COLDEST = float(np.finfo(np.float32).tiny)  # the temperature that stands for 0


@dataclasses.dataclass(frozen=True)
class Sampling:
  """Distribution from which a token is drawn; the default takes the likeliest one.

  The order is that of Hugging Face transformers. Logits are divided by the temperature, then each
  filter acts on what the one before it left, renormalised: top-k, top-p, min-p. A token that ties
  with the last one kept is kept, and the likeliest token always stays.

  >>> from kvjax.models.decode.sampling import Sampling
  >>> Sampling(temperature=0.8, top_p=0.95).top_p
  0.95
  >>> Sampling(top_p=2.0)
  Traceback (most recent call last):
  ...
  ValueError: Sampling.top_p: found 2.0, expected a number in (0, 1]

  Attributes:
    temperature: 0 takes the likeliest token (the first of equals); otherwise the logits' divisor.
    top_k: the k likeliest tokens stay; None: all.
    top_p: the fewest likeliest tokens whose probabilities sum to at least p stay (Holtzman et al.,
      ICLR 2020, "nucleus"); 1: all.
    min_p: tokens at least p times as probable as the likeliest one stay (Nguyen et al., ICLR
      2025); 0: all.

  Raises:
    TypeError: a value is no number; `top_k` takes integers only.
    ValueError: a value is out of range.
  """

  temperature: float = fields.bound(
    lambda x: 0 <= x < math.inf, "a finite number of at least 0", 0.0
  )
  top_k: int | None = fields.bound(lambda x: x >= 1, "an integer ≥ 1, or None", None)
  top_p: float = fields.bound(lambda x: 0 < x <= 1, "a number in (0, 1]", 1.0)
  min_p: float = fields.bound(lambda x: 0 <= x <= 1, "a number in [0, 1]", 0.0)

  def __post_init__(self):
    fields.check(type(self), vars(self))

  @property
  def greedy(self) -> bool:
    """True if the likeliest token is taken."""
    return self.temperature == 0

  def knobs(self, vocab: int) -> Knobs:
    """The settings as arrays: traced, so that changing them does not compile anything again."""
    top_k = vocab if self.top_k is None else min(self.top_k, vocab)
    temperature = np.float32(min(max(self.temperature, COLDEST), 1 / COLDEST))
    top_p = np.float32(max(self.top_p, COLDEST))
    return temperature, np.int32(top_k), top_p, np.float32(self.min_p)


def filtered(logits: Float[Array, "B V"], knobs: Knobs) -> Float[Array, "B V"]:
  """Logits below the greatest one, over the temperature; −inf where a filter drops the token.

  Every filter keeps a prefix of the tokens in order of likelihood, so that all three together are
  one threshold per row.
  """
  of_each = [jnp.broadcast_to(x, logits.shape[:1])[:, None] for x in knobs]
  temperature, top_k, top_p, min_p = of_each
  # The likeliest token's is 0, and stays that by whatever it is divided.
  x = logits.astype(jnp.float32)
  x = (x - x.max(-1, keepdims=True)) / temperature

  def ranked(x: Array) -> Array:
    order = -jnp.sort(-x, -1)  # likeliest first
    kth = jnp.take_along_axis(order, top_k - 1, -1)
    first = order >= kth
    p = jax.nn.softmax(jnp.where(first, order, -jnp.inf), -1)
    before = jnp.cumsum(p, -1) - p  # probability of all likelier tokens
    # Rounded sums can reach 1 before the last token: 1 means all.
    stays = first & ((before < top_p) | (top_p >= 1))
    return jnp.where(stays, order, jnp.inf).min(-1, keepdims=True)

  # Sorting a vocabulary is most of the work: nothing is sorted while both filters are off.
  sorts = ((top_k < x.shape[-1]) | (top_p < 1)).any()
  least = jax.lax.cond(sorts, ranked, lambda x: jnp.full_like(x[:, :1], -jnp.inf), x)
  # p ≥ min_p · max p, on logits; renormalising changes neither side's ratio.
  least = jnp.maximum(least, jnp.log(min_p))
  return jnp.where(x >= least, x, -jnp.inf)


def draw(
  logits: Float[Array, "B V"],
  knobs: Knobs,
  seed: Array,
  rows: Int[Array, " B"],
  at: Int[Array, " B"],
) -> Int[Array, " B"]:
  """One token per row; its random key is made of (seed, row, position) and nothing else.

  Args:
    logits: [B, V].
    knobs: of `Sampling.knobs`, with a temperature above 0.
    seed: uint32.
    rows: int32 [B], the rows' numbers.
    at: int32 [B], position of the token to draw in its row's text.
  """

  def one(row: Array, position: Array, x: Array) -> Array:
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), position)
    return jax.random.categorical(key, x)

  return jax.vmap(one)(rows, at, filtered(logits, knobs)).astype(jnp.int32)
