"""LongFlow: eviction by what a token contributes to the newest output (LongFlow, §3, Alg. 1)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core import settings, slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Carry, Prompt, Turn
from kvjax.core.fields import expect, least, one_of
from kvjax.core.leaves import NORM, Leaf
from kvjax.core.plan import Attended, Plan
from kvjax.core.traits import Traits
from kvjax.families import forms
from kvjax.families.method import Aux, Method
from kvjax.methods.longflow import contribution, kernel
from kvjax.methods.snapkv import SnapKV


@dataclasses.dataclass(frozen=True)
class LongFlow(SnapKV):
  """A fixed budget whose next victim is named by each step's own attention (§3.2, Alg. 1).

  One pass over the slots gives the output and every token's score α·‖v‖₁, the size of its
  contribution to it; the token of least score is overwritten by the next one. A prompt beyond the
  budget is first cut by SnapKV; the token that its ranking puts last leaves first.

  Scores are kept as logarithms, log Σ_g exp(s_g − lse_g) + log‖v‖₁ over the query heads of a KV
  head: the paper's sums without a running maximum overflow from logits of 88 on. The newest token
  is never the victim.

  >>> import kvjax
  >>> spec = kvjax.CacheSpec(batch=1, capacity=4096, kv_heads=2, groups=4, head_dim=64, layers=4)
  >>> [cache.size for cache in kvjax.LongFlow(budget=1024).init_caches(spec)]  # slots of each layer
  [1024, 1024, 1024, 1024]

  Attributes:
    budget: slots per KV head (the paper measures 3,200).
    window_size, pool, reduce: of the prompt's cut, see SnapKV.
    per: "kv_head", each KV head has a victim of its own, or "layer", all heads of a layer share
      one, named by the sum of their scores (`repo`).
    sinks: first tokens that never leave (the paper protects none; of a model that leans on them,
      answers longer than a small budget do not end without a few).
    recent: newest tokens that are not evicted, the newest itself among them.
  """

  budget: int = 3200
  per: str = one_of(("kv_head", "layer"), "kv_head")
  sinks: int = least(0, 0)
  recent: int = least(1, 1)

  def __post_init__(self):
    super().__post_init__()
    sinks, recent = self.sinks, self.recent
    expected = f"more than sinks + recent = {sinks} + {recent}"
    expect(self, "budget", self.budget > sinks + recent, expected)

  @property
  def traits(self) -> Traits:
    return super().traits.but(wants_logits=True)

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    """‖v‖₁ and the next victim; SnapKV's scores and its ring are not kept."""
    victim = Leaf("heads", dtype=jnp.int32, in_place=True)
    return {**Method.leaves(self, spec, layer), "norm": NORM, "victim": victim}

  def victim(self, at: At, cache: Cache) -> Int[Array, "B K"]:
    return cache.heads["victim"]

  def order(self, at: At, cache: Cache) -> Float[Array, "B K S"] | None:
    return None

  def plan_and_attend(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan, carry: Carry
  ) -> tuple[Plan, Attended, Carry]:
    """Names the next victim on the way, where one launch does both and nobody asks for logits."""
    own = forms.overrides(at.top, "observe", LongFlow)
    own |= any(forms.overrides(at.top, move) for move in ("plan", "attend"))
    separate = own or self.per == "layer"
    named = None if separate else kernel.attend_and_name(at, cache, visible, q, **self._safe)
    if named is None:
      return super().plan_and_attend(at, cache, q, visible, carry)
    return visible, named, carry

  def observe(
    self, at: At, cache: Cache, q: Array, plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    """Names the next victim: arg min of log(α·‖v‖₁) (Alg. 1)."""
    old, per_layer = cache.heads["victim"], self.per == "layer"
    victim = kernel.least_contributor(at, cache, attended, old, **self._safe, per_layer=per_layer)
    return cache.put(heads={"victim": victim}), {}

  def rank(self, at: At, turn: Turn) -> tuple[Float[Array, "B K S"], slots.Slots]:
    score, staged = super().rank(at, turn)
    if self.per == "layer":  # all heads keep the same tokens
      total = at.sum_heads(score.sum(1, keepdims=True))
      score = jnp.broadcast_to(total, score.shape)
    end = staged["pos"][:, 0].max(-1) + 1
    stays = contribution.stays(staged["pos"], end, **self._safe)
    score = jnp.where(stays, jnp.inf, score)
    return score, {**staged, "score": score}

  def settle(self, at: At, cache: Cache, prompt: Prompt) -> Cache:
    """After a prompt the token that was ranked last is the first to leave."""
    held = {name: x for name, x in cache.slots.items() if name != "score"}
    victim = contribution.least(cache, cache.slots["score"], **self._safe)
    return dataclasses.replace(cache, slots=held).put(heads={"victim": victim})

  @property
  def _safe(self) -> dict[str, int]:
    """Tokens that may not leave."""
    return {"sinks": self.sinks, "recent": self.recent}


settings.register(
  LongFlow,
  # The authors' repository: one victim per layer, named by the scores of all its heads.
  repo=lambda cls, budget: cls(budget=budget, per="layer"),
  example=lambda cls, budget: cls(budget=budget, window_size=min(32, max(1, budget // 4))),
)
