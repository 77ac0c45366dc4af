"""LongFlow: eviction by what a token contributes to the newest output (LongFlow, §3, Alg. 1)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import dispatch
from kvjax.fields import expect, least, one_of
from kvjax.leaves import NORM, Leaf
from kvjax.method import Aux, Method
from kvjax.methods.snapkv import SnapKV
from kvjax.ops import slots
from kvjax.types import At, Attended, Cache, CacheSpec, Plan, Prompt


@dataclasses.dataclass(frozen=True)
class LongFlow(SnapKV):
  """A fixed budget whose next victim is named by each step's own attention (§3.2, Alg. 1).

  One pass over the slots gives the output and every token's score α·‖v‖₁, the size of its
  contribution to it; the token of least score is overwritten by the next one. A prompt beyond the
  budget is first cut by SnapKV; the token that its ranking puts last leaves first.

  Scores are kept as logarithms, log Σ_g exp(s_g − lse_g) + log‖v‖₁ over the query heads of a KV
  head: the paper's sums without a running maximum overflow from logits of 88 on. The newest token
  is never the victim.

  Attributes:
    budget: slots per KV head (the paper measures 3,200).
    window_size, pool, reduce: of the prompt's cut, see SnapKV.
    per: "kv_head", each KV head has a victim of its own, or "layer", all heads of a layer share
      one, named by the sum of their scores (`repo`).
    sinks: first tokens that never leave (the paper protects none).
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
  def wants_logits(self) -> bool:
    return True

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    """‖v‖₁ and the next victim; SnapKV's scores and its ring are not kept."""
    victim = Leaf("heads", dtype=jnp.int32, in_place=True)
    return {**Method.leaves(self, spec, layer), "norm": NORM, "victim": victim}

  def victim(self, at: At, cache: Cache) -> Int[Array, "B K"]:
    return cache.heads["victim"]

  def order(self, at: At, cache: Cache) -> Float[Array, "B K S"] | None:
    return None

  def observe(
    self, at: At, cache: Cache, q: Array, plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    """Names the next victim: arg min of log(α·‖v‖₁) (Alg. 1)."""
    assert attended.logits is not None  # asked for by wants_logits
    old, counted = cache.heads["victim"], attended.counted
    counted = jnp.ones_like(cache.seen, bool) if counted is None else counted
    # A kernel does not see the heads of other shards.
    alone = self.per == "kv_head" or at.env.head_axis is None
    if alone and dispatch.choose("longflow_victim", at.env.impl) == "pallas":
      # It looks at the denominators itself, all but those of other devices' heads.
      live = counted if attended.live is None or at.env.head_axis else attended.live
      victim = dispatch.kernel("longflow_victim", "pallas")(
        *(attended.logits, attended.state.m, attended.state.l),
        *(cache.slots["norm"], cache.pos, cache.used, cache.seen, live, old),
        sinks=self.sinks,
        recent=self.recent,
        per_layer=self.per == "layer",
      )
      return cache.put(heads={"victim": victim}), {}
    share = attended.logits - attended.state.lse[..., None]  # log α, [B, K, G, S]
    score = jax.nn.logsumexp(share, 2) + jnp.log(cache.slots["norm"])
    named = self._name_victim(at, cache, self._over_heads(at, score)).heads["victim"]
    return cache.put(heads={"victim": jnp.where(counted[:, None], named, old)}), {}

  def rank(
    self,
    at: At,
    staged: slots.Slots,
    q: Array,
    qpos: Array,
    attended: Attended,
    prompt: Prompt,
  ) -> tuple[Float[Array, "B K S"], slots.Slots]:
    score, staged = super().rank(at, staged, q, qpos, attended, prompt)
    if self.per == "layer":  # all heads keep the same tokens
      total = at.sum_heads(score.sum(1, keepdims=True))
      score = jnp.broadcast_to(total, score.shape)
    end = staged["pos"][:, 0].max(-1) + 1
    score = jnp.where(self._safe(staged["pos"], end), jnp.inf, score)
    return score, {**staged, "score": score}

  def settle(self, at: At, cache: Cache, prompt: Prompt) -> Cache:
    """After a prompt the token that was ranked last is the first to leave."""
    held = {name: x for name, x in cache.slots.items() if name != "score"}
    return self._name_victim(at, dataclasses.replace(cache, slots=held), cache.slots["score"])

  def _name_victim(self, at: At, cache: Cache, score: Float[Array, "B K S"]) -> Cache:
    """The slot of least score among those that may leave."""
    stays = self._safe(cache.pos, cache.seen) | (cache.pos < 0)
    score = jnp.where(stays, jnp.inf, score)
    return cache.put(heads={"victim": slots.lowest(score, cache.pos)})

  def _safe(self, pos: Int[Array, "B K S"], end: Int[Array, " B"]) -> Bool[Array, "B K S"]:
    """Tokens that may not leave: the first ones, and the newest before `end`."""
    return (pos < self.sinks) | (pos >= (end - self.recent)[:, None, None])

  def _over_heads(self, at: At, score: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
    """With per="layer", log of the sum over all heads, those of other shards included."""
    if self.per == "kv_head":
      return score
    top = at.max_heads(score.max(1, keepdims=True))
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    total = at.sum_heads(jnp.exp(score - top).sum(1, keepdims=True))
    return jnp.broadcast_to(jnp.log(total) + top, score.shape)

  @classmethod
  def repo(cls, budget: int) -> Method:
    """The authors' repository: one victim per layer, named by the scores of all its heads."""
    return cls(budget=budget, per="layer")

  @classmethod
  def example(cls, budget: int) -> Method:
    return cls(budget=budget, window_size=min(32, max(1, budget // 4)))
