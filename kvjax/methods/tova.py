"""TOVA: evict what the newest query attends to least (Oren et al., 2024)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core import settings, slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Turn
from kvjax.core.fields import least
from kvjax.core.leaves import Leaf
from kvjax.core.plan import Attended, Plan
from kvjax.core.traits import Traits
from kvjax.families.bounded import Bounded
from kvjax.families.method import Aux
from kvjax.ops import attention, prefill
from kvjax.primitives import softmax_state


@dataclasses.dataclass(frozen=True)
class TOVA(Bounded):
  """Each step of a full cache evicts the token of lowest probability under the newest query.

  The probability is the mean over all heads of the layer, so all heads keep the same tokens;
  no token is protected. A prompt is cut to the tokens that its last query attends to most. The
  token that leaves is named after attention and overwritten by the next one: `budget` tokens are
  attended to in every step.

  Attributes:
    budget: tokens kept per layer.
  """

  budget: int = least(2, 2048)

  @property
  def traits(self) -> Traits:
    return super().traits.but(wants_logits=True)

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    score = Leaf("slots", standing=True)  # made anew in each step
    return {**super().leaves(spec, layer), "score": score}

  def victim(self, at: At, cache: Cache) -> Int[Array, "B K"]:
    return slots.lowest(cache.slots["score"], cache.pos)

  def observe(
    self, at: At, cache: Cache, q: Array, plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    assert attended.logits is not None  # asked for by wants_logits
    p = softmax_state.probabilities(attended.state, attended.logits).mean(2)
    return cache.put(slots={"score": self._over_heads(at, p)}), {}

  def rank(self, at: At, turn: Turn) -> tuple[Float[Array, "B K S"], slots.Slots]:
    last, last_pos, state = attention.last_queries(turn, 1)
    window = at.top.window(at, last_pos)
    p = prefill.column_mass(at, last, last_pos, turn.staged, window, state)
    score = self._over_heads(at, p)
    return score, {**turn.staged, "score": score}

  def _over_heads(self, at: At, p: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
    """Mean over all heads of the layer, those of other shards included."""
    heads = at.sum_heads(jnp.float32(p.shape[1]))
    return jnp.broadcast_to(at.sum_heads(p.sum(1, keepdims=True)) / heads, p.shape)


settings.register(TOVA, neutral=lambda cls, length: cls(budget=max(length, 2)))
