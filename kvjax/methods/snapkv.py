"""SnapKV: what the end of a prompt attends to is what its answer needs (Li et al., 2024)."""

import dataclasses

from jaxtyping import Array, Bool, Float

from kvjax.core import settings, slots
from kvjax.core.context import At, Turn
from kvjax.core.fields import odd, one_of
from kvjax.families.prompt_scored import PromptScored
from kvjax.ops import attention, prefill


@dataclasses.dataclass(frozen=True)
class SnapKV(PromptScored):
  """Cuts a prompt to its last `window` tokens and those that they attend to (Listing 1).

  The window's softmax probabilities are summed over its queries, averaged over the query heads of
  a KV head (the authors' repository caches per query head, at G times the memory), pooled over
  neighbouring positions, and the budget − window best tokens stay with the window.

  The paper lets the cache grow from there. Here the budget holds, as `PromptScored` says.

  >>> import kvjax
  >>> spec = kvjax.CacheSpec(batch=1, capacity=4096, kv_heads=2, groups=4, head_dim=64, layers=4)
  >>> [cache.size for cache in kvjax.SnapKV(budget=1024).init_caches(spec)]  # slots of each layer
  [1024, 1024, 1024, 1024]

  Attributes:
    budget: tokens kept per KV head, the window included.
    window_size: last tokens of the prompt, whose queries observe (32).
    pool: width of the pooling over positions, odd (5).
    reduce: "avg" or "max" pooling.
  """

  pool: int = odd(5)
  reduce: str = one_of(("avg", "max"), "avg")

  def score(self, at: At, turn: Turn, past: Bool[Array, "B K S"]) -> Float[Array, "B K S"]:
    last, last_pos, state = attention.last_queries(turn, self.window_size)
    seen = at.top.window(at, last_pos)
    mass = prefill.column_mass(at, last, last_pos, turn.staged, seen, state)
    return slots.pool(mass, turn.staged["pos"], past, self.pool, self.reduce)


settings.register(
  SnapKV,
  # The LongBench runs of the authors' repository: the largest of 7 neighbours. Its cache per query
  # head is not offered.
  repo=lambda cls, budget: cls(budget=budget, window_size=32, pool=7, reduce="max"),
)
