"""H2O: heavy hitters and recent tokens (Zhang et al., NeurIPS 2023)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core import settings, slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Turn
from kvjax.core.fields import expect, least
from kvjax.core.leaves import Leaf
from kvjax.core.plan import Attended, Plan
from kvjax.core.traits import Traits
from kvjax.families.bounded import Bounded
from kvjax.families.method import Aux
from kvjax.ops import prefill
from kvjax.primitives import softmax_state


@dataclasses.dataclass(frozen=True)
class H2O(Bounded):
  """Keeps the newest tokens and those that have gathered most attention (Alg. 1).

  Every token accumulates the probability that queries give it, from the prompt on, per KV head as
  the mean over its query heads. Each step of a full cache evicts the token of least accumulated
  probability outside the recent half. Prefill attention is dense; the prompt of a layer is cut to
  the budget once it has been read.

  Attributes:
    budget: tokens kept per KV head.
    recent: newest tokens that are safe; None: half of the budget (the paper's split).
  """

  budget: int = least(2, 2048)
  recent: int | None = None

  def __post_init__(self):
    expected = f"at least 1 and less than budget = {self.budget}"
    expect(self, "recent", self.recent is None or 1 <= self.recent < self.budget, expected)

  @property
  def _window_size(self) -> int:
    return self.budget - self.budget // 2 if self.recent is None else self.recent

  @property
  def traits(self) -> Traits:
    return super().traits.but(wants_logits=True)

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    mass = Leaf("slots", standing=True)  # `observe` knows that a new token has gathered nothing
    return {**super().leaves(spec, layer), "mass": mass}

  def victim(self, at: At, cache: Cache) -> Int[Array, "B K"]:
    """The least attended token that is not recent once the new one, position `seen`, is in."""
    return slots.lowest(self._priority(cache.slots, cache.seen + 1), cache.pos)

  def order(self, at: At, cache: Cache) -> Float[Array, "B K S"] | None:
    """Recent tokens, newest first, then the others by what they are kept for."""
    kept = self._importance(cache.slots)
    recent = cache.pos >= (cache.seen - self._window_size)[:, None, None]
    kept = jnp.where(jnp.isinf(kept), 1.0, kept / (1 + kept))  # at most 1
    return jnp.where(recent, 1.0 + cache.pos, kept)

  def observe(
    self, at: At, cache: Cache, q: Array, plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    assert attended.logits is not None  # asked for by wants_logits
    p = softmax_state.probabilities(attended.state, attended.logits).mean(2)
    older = cache.pos < (cache.seen - 1)[:, None, None]
    return cache.put(slots={"mass": jnp.where(older, cache.slots["mass"], 0) + p}), {}

  def rank(self, at: At, turn: Turn) -> tuple[Float[Array, "B K S"], slots.Slots]:
    window, staged = at.top.window(at, turn.qpos), turn.staged
    mass = prefill.column_mass(at, turn.q, turn.qpos, staged, window, turn.attended.state)
    staged = {**staged, "mass": staged["mass"] + mass}
    return self._priority(staged, staged["pos"][:, 0].max(-1) + 1), staged

  def _priority(self, held: slots.Slots, end: Int[Array, " B"]) -> Float[Array, "B K S"]:
    """Importance of the older tokens; infinite for the newest ones before `end`."""
    return slots.sparing(self._importance(held), held["pos"], end, self._window_size)

  def _importance(self, held: slots.Slots) -> Float[Array, "B K S"]:
    """Worth of each token: the probability that it has gathered."""
    return held["mass"]


settings.register(H2O, neutral=lambda cls, length: cls(budget=max(length, 2)))
