"""Steps of the decode loop, as they are compiled: a token is chosen and predicts the next."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jaxtyping import Array, Bool, Float, Int

from kvjax.families.method import Method
from kvjax.models.decode import checks
from kvjax.models.decode.by_layer import ByLayer
from kvjax.models.decode.sampling import COLDEST, Knobs, draw
from kvjax.models.nn import flat
from kvjax.models.nn.transformer import Caches
from kvjax.ops import offload

UNSOUND = -2  # in the place of a token after which the row's logits are not finite


class Always(NamedTuple):
  """Inputs of every step: stop tokens [E] of all rows or [B, E], the rows' numbers [B], how to draw
  (scalars, or [B]), the seed.
  """

  stop: Any
  rows: Any
  knobs: Knobs
  seed: Any


def ends(stop: Sequence[int]) -> np.ndarray:
  """Stop tokens int32 [E], filled up with −1, which no token is: few sizes, few compilations."""
  ends = sorted(set(stop))
  size = 8 * max(1, -(-len(ends) // 8))
  return np.array(ends + [-1] * (size - len(ends)), np.int32)


def decode(
  form: flat.Form,
  method: Method,
  greedy: bool,
  keep_logprobs: bool,
  leaves: list[Array],
  caches: Caches,
  logits: Float[Array, "B V"],
  live: Bool[Array, " B"],
  want: Int[Array, " B"],
  always: Always,
) -> Any:
  """One token per row: caches, logits [B, V], live rows [B], tokens int32 [B], and their
  log-probabilities [B] or None.
  """
  model = flat.join(form, leaves)
  token = _chosen(greedy, logits, caches[0].seen, want, always)
  new, caches = model.decode(token, caches, method, live)
  return offload.settled(caches), *_taken(keep_logprobs, logits, live, token, want, new, always)


def decode_some(
  form: flat.Form,
  method: Method,
  greedy: bool,
  keep_logprobs: bool,
  leaves: list[Array],
  caches: Caches,
  logits: Float[Array, "B V"],
  live: Bool[Array, " B"],
  want: Int[Array, "N B"],
  always: Always,
  count: Int[Array, ""],
) -> Any:
  """The first `count` of N times `decode`, in a loop that ends where no row is live.

  Returns:
    As `decode`, with tokens [N, B] and log-probabilities [N, B]: −1 and 0 where no step was.
  """
  model = flat.join(form, leaves)
  tokens = jnp.full_like(want, -1)
  logprobs = jnp.zeros(want.shape, jnp.float32) if keep_logprobs else None

  def goes_on(held: Any) -> Array:
    i, _, _, live, *_ = held
    return (i < count) & live.any()

  def step(held: Any) -> Any:
    i, caches, logits, live, tokens, logprobs = held
    token = _chosen(greedy, logits, caches[0].seen, want[i], always)
    new, caches = model.decode(token, caches, method, live)
    taken = _taken(keep_logprobs, logits, live, token, want[i], new, always)
    logits, live, token, logprob = taken
    tokens = tokens.at[i].set(token)
    logprobs = None if logprobs is None else logprobs.at[i].set(logprob)
    return i + 1, offload.loose(caches), logits, live, tokens, logprobs

  held = jnp.int32(0), offload.loose(caches), logits, live, tokens, logprobs
  _, caches, *made = jax.lax.while_loop(goes_on, step, held)
  return offload.settled(caches), *made


def decode_checked(
  form: flat.Form, method: Method, greedy: bool, keep_logprobs: bool, *given: Any
) -> Any:
  """`decode` of a model that checks for NaN, behind an error (checkify)."""
  run = functools.partial(decode, form, method, greedy, keep_logprobs)
  return checkify.checkify(run)(*given)


def decode_by_layer(
  model: ByLayer,
  method: Method,
  greedy: bool,
  keep_logprobs: bool,
  caches: Caches,
  logits: Array,
  live: Array,
  want: Array,
  always: Always,
) -> Any:
  """`decode` from programs of a layer."""
  token = _choose(greedy, logits, caches[0].seen, want, always)
  new, caches = model.decode(token, caches, method, live)
  return caches, *_take(keep_logprobs, logits, live, token, want, new, always)


def _chosen(
  greedy: bool,
  logits: Float[Array, "B V"],
  seen: Int[Array, " B"],
  want: Int[Array, " B"],
  always: Always,
) -> Int[Array, " B"]:
  """The token that goes in: the wanted one, or where that is negative, the model's."""
  token = jnp.argmax(logits, -1).astype(jnp.int32)
  if not greedy:
    drawn = draw(logits, always.knobs, always.seed, always.rows, seen)
    token = jnp.where(always.knobs[0] > COLDEST, drawn, token)
  return jnp.where(want >= 0, want, token)


def _taken(
  keep_logprobs: bool,
  logits: Float[Array, "B V"],
  live: Bool[Array, " B"],
  token: Int[Array, " B"],
  want: Int[Array, " B"],
  new: Float[Array, "B V"],
  always: Always,
) -> tuple[Array, Array, Array, Array | None]:
  """Logits, live rows, tokens and log-probabilities, once a token is in and gave `new` logits."""
  logprobs = None
  if keep_logprobs:
    chosen = jnp.take_along_axis(logits, token[:, None], 1)[:, 0]
    logprobs = chosen - jax.nn.logsumexp(logits, -1)
  after = live & ((want >= 0) | ~(token[:, None] == always.stop).any(-1))
  shown = jnp.where(checks.sound(new), token, UNSOUND)
  return jnp.where(live[:, None], new, logits), after, jnp.where(live, shown, -1), logprobs


_choose, _take = (flat.own(jax.jit(function, static_argnums=0)) for function in (_chosen, _taken))
