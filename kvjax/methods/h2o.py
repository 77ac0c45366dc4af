"""H2O: heavy hitters and recent tokens (Zhang et al., NeurIPS 2023)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax import softmax_state
from kvjax.method import Aux, Method
from kvjax.ops import attention, slots
from kvjax.types import At, Attended, Cache, CacheSpec, Plan, Prompt


@dataclasses.dataclass(frozen=True)
class H2O(Method):
  """Keeps the newest tokens and those that have gathered most attention (§4.1, Alg. 1).

  Every token accumulates the probability that queries give it, from the prompt on, per KV head as
  the mean over its query heads. Each step of a full cache evicts the token of least accumulated
  probability outside the recent half. Prefill attention is dense; the prompt of a layer is cut to
  the budget once it has been read.

  Attributes:
    budget: tokens kept per KV head.
    recent: newest tokens that are safe; None: half of the budget (the paper's split).
  """

  budget: int = 2048
  recent: int | None = None

  def __post_init__(self):
    if self.budget < 2:
      raise ValueError(f"H2O.budget: found {self.budget}, expected 2 or more")
    if self.recent is not None and not 1 <= self.recent < self.budget:
      raise ValueError(
        f"H2O.recent: found {self.recent}, expected at least 1 and less than budget = {self.budget}"
      )

  @property
  def window_size(self) -> int:
    return self.budget - self.budget // 2 if self.recent is None else self.recent

  @property
  def positional(self) -> bool:
    return False

  @property
  def wants_logits(self) -> bool:
    return True

  @classmethod
  def example(cls, budget: int) -> Method:
    return cls(budget=budget)

  @classmethod
  def neutral(cls, length: int) -> Method:
    return cls(budget=max(length, 2))

  def capacity(self, spec: CacheSpec, layer: int) -> int:
    return self.budget

  def extra(self, spec: CacheSpec, layer: int) -> tuple[dict, dict, dict]:
    mass = jnp.zeros((spec.batch, spec.kv_heads, self.capacity(spec, layer)), jnp.float32)
    return {"mass": mass}, {}, {}

  def victim(self, at: At, cache: Cache) -> Int[Array, "B K"]:
    """The least attended token that is not recent once the new one, position `seen`, is in."""
    score = self.priority(cache.slots["mass"], cache.pos, cache.seen + 1)
    return slots.lowest(score, cache.pos)

  def observe(
    self, at: At, cache: Cache, q: Array, plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    assert attended.logits is not None  # asked for by wants_logits
    p = softmax_state.probabilities(attended.state, attended.logits).mean(2)
    return cache.put(slots={"mass": cache.slots["mass"] + p}), {}

  def rank(
    self,
    at: At,
    staged: slots.Slots,
    q: Array,
    qpos: Array,
    attended: Attended,
    prompt: Prompt,
  ) -> tuple[Float[Array, "B K S"], slots.Slots]:
    window = at.top.window(at, qpos)
    mass = staged["mass"] + attention.column_mass(at, q, qpos, staged, window, attended.state)
    end = staged["pos"][:, 0].max(-1) + 1
    return self.priority(mass, staged["pos"], end), {**staged, "mass": mass}

  def priority(
    self, mass: Float[Array, "B K S"], pos: Int[Array, "B K S"], end: Int[Array, " B"]
  ) -> Float[Array, "B K S"]:
    """Accumulated probability; infinite for the newest tokens before `end`."""
    return jnp.where(pos >= (end - self.window_size)[:, None, None], jnp.inf, mass)
