"""SnapKV: what the end of a prompt attends to is what its answer needs (Li et al., 2024)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax import dispatch
from kvjax.bounded import InTurn
from kvjax.method import Method
from kvjax.ops import attention, slots
from kvjax.types import At, Attended, Cache, CacheSpec, Prompt


@dataclasses.dataclass(frozen=True)
class SnapKV(InTurn):
  """Cuts a prompt to its last `window` tokens and those that they attend to (Listing 1).

  The window's softmax probabilities are summed over its queries, averaged over the query heads of
  a KV head (the authors' repository caches per query head, at G times the memory), pooled over
  neighbouring positions, and the budget − window best tokens stay with the window. The prompt of a
  layer is staged whole and cut once; a later turn ranks what is cached together with what is new.

  The paper lets the cache grow from there. Here the budget holds: the selected tokens stay, and
  once the cache is full the oldest of the others, the window's and the generated ones, leaves.

  Attributes:
    budget: tokens kept per KV head, the window included.
    window_size: last tokens of the prompt, whose queries observe (32).
    pool: width of the pooling over positions, odd (5).
    reduce: "avg" or "max" pooling.
  """

  window_size: int = 32
  pool: int = 5
  reduce: str = "avg"

  def __post_init__(self):
    name = type(self).__name__
    if self.window_size < 1:
      raise ValueError(f"{name}.window_size: found {self.window_size}, expected 1 or more")
    if self.budget <= self.window_size:
      raise ValueError(
        f"{name}.budget: found {self.budget}, expected more than window_size = {self.window_size}"
      )
    if self.pool < 1 or self.pool % 2 == 0:
      raise ValueError(f"{name}.pool: found {self.pool}, expected an odd number")
    if self.reduce not in ("avg", "max"):
      raise ValueError(f"{name}.reduce: found {self.reduce!r}, expected 'avg' or 'max'")

  @property
  def standing(self) -> tuple[str, ...]:
    return ("score",)

  @classmethod
  def example(cls, budget: int) -> Method:
    return cls(budget=budget, window_size=min(32, max(1, budget // 4)))

  @classmethod
  def neutral(cls, length: int) -> Method:
    return cls(budget=length + 1, window_size=min(32, length))

  @classmethod
  def repo(cls, budget: int) -> Method:
    """The LongBench runs of the authors' repository: the largest of 7 neighbours.

    Its cache per query head is not offered.
    """
    return cls(budget=budget, window_size=32, pool=7, reduce="max")

  def extra(self, spec: CacheSpec, layer: int) -> tuple[dict, dict, dict]:
    shape = spec.batch, spec.kv_heads, self.capacity(spec, layer)
    return {"score": jnp.full(shape, jnp.inf, jnp.float32)}, *super().extra(spec, layer)[1:]

  def fresh(self, name: str, like: Array, new: slots.Slots) -> Array:
    """Tokens that no window has ranked yet score ∞."""
    return jnp.full_like(like, jnp.inf) if name == "score" else super().fresh(name, like, new)

  def staying(self, cache: Cache) -> Int[Array, "B K"]:
    """Those that were selected."""
    selected = (cache.pos >= 0) & ~jnp.isinf(cache.slots["score"])
    return selected.sum(-1, dtype=jnp.int32)

  def settle(self, at: At, cache: Cache, prompt: Prompt) -> Cache:
    """Empty slots score what the tokens will that take them."""
    score = jnp.where(cache.pos >= 0, cache.slots["score"], jnp.inf)
    return super().settle(at, cache.put(slots={"score": score}), prompt)

  def order(self, at: At, cache: Cache) -> Float[Array, "B K S"] | None:
    """Tokens that were not ranked, newest first, then the selected ones by score."""
    score = cache.slots["score"]
    ranked = score / (1 + score)  # below 1
    return jnp.where(jnp.isinf(score), 1.0 + cache.pos, ranked)

  def rank(
    self,
    at: At,
    staged: slots.Slots,
    q: Array,
    qpos: Array,
    attended: Attended,
    prompt: Prompt,
  ) -> tuple[Float[Array, "B K S"], slots.Slots]:
    last, last_pos, state = attention.last_queries(q, qpos, attended.state, self.window_size)
    seen = at.top.window(at, last_pos)
    mass = dispatch.column_mass(at, last, last_pos, staged, seen, state)
    pos = staged["pos"]
    first = pos[:, 0].max(-1) + 1 - self.window_size  # of the window
    past = (pos >= 0) & (pos < first[:, None, None])
    score = jnp.where(past, slots.pool(mass, pos, past, self.pool, self.reduce), jnp.inf)
    return score, {**staged, "score": score}
