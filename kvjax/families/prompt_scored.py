"""Base of methods whose tokens stay by a score that they are given once."""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.core import settings, slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Prompt, Turn
from kvjax.core.fields import expect, least
from kvjax.core.leaves import Leaf
from kvjax.families.bounded import InTurn


@dataclasses.dataclass(frozen=True)
class Scored(InTurn):
  """Tokens with a score stay; the others, which nothing has ranked yet, score ∞ and take turns."""

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    """Tokens that nothing has ranked yet score ∞."""
    score = Leaf("slots", fill=math.inf, standing=True)
    return {**super().leaves(spec, layer), "score": score}

  def settle(self, at: At, cache: Cache, prompt: Prompt) -> Cache:
    """Those that were selected stay; empty slots score what the tokens will that take them."""
    score = jnp.where(cache.pos >= 0, cache.slots["score"], jnp.inf)
    staying = (~jnp.isinf(score)).sum(-1, dtype=jnp.int32)
    return self._closed(cache.put(slots={"score": score}), staying)


@dataclasses.dataclass(frozen=True)
class PromptScored(Scored, moves=("score",)):
  """Cuts a prompt to its last `window_size` tokens and the best of those before them.

  A subclass scores the tokens (`score`). The prompt of a layer is staged whole and cut once; a
  later turn ranks what is cached together with what is new. Then the budget holds: the selected
  tokens stay, and once the cache is full the oldest of the others, the window's and the generated
  ones, leaves.

  Attributes:
    budget: tokens kept per KV head, the window included.
    window_size: last tokens of the prompt, which stay until generated ones take their slots (32).
  """

  window_size: int = least(1, 32)

  def __post_init__(self):
    window = self.window_size
    expect(self, "budget", self.budget > window, f"more than window_size = {window}")

  def score(self, at: At, turn: Turn, past: Bool[Array, "B K S"]) -> Float[Array, "B K S"]:
    """Scores of the staged tokens, 0 or more; those before the window (`past`) compete, the
    others' scores are not looked at. ∞, for the newest of them, makes them the window's too.
    """
    raise NotImplementedError(f"{at.top!r} cuts prompts but does not score their tokens")

  def order(self, at: At, cache: Cache) -> Float[Array, "B K S"] | None:
    """Tokens that were not ranked, newest first, then the selected ones by score."""
    score = cache.slots["score"]
    ranked = score / (1 + score)  # at most 1
    return jnp.where(jnp.isinf(score), 1.0 + cache.pos, ranked)

  def rank(self, at: At, turn: Turn) -> tuple[Float[Array, "B K S"], slots.Slots]:
    pos = turn.staged["pos"]
    first = pos[:, 0].max(-1) + 1 - self.window_size  # of the window
    past = (pos >= 0) & (pos < first[:, None, None])
    score = self.score(at, turn, past)
    score = jnp.where(past, score, jnp.inf)
    return score, {**turn.staged, "score": score}


settings.register(
  PromptScored,
  example=lambda cls, budget: cls(budget=budget, window_size=min(32, max(1, budget // 4))),
  neutral=lambda cls, length: cls(budget=length + 1, window_size=min(32, length)),
)
