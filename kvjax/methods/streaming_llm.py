"""StreamingLLM: attention sinks and a window of recent tokens (Xiao et al., ICLR 2024)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.bounded import Bounded
from kvjax.method import Method
from kvjax.ops import slots
from kvjax.types import At, Attended, Cache, Prompt, Span, Window


@dataclasses.dataclass(frozen=True)
class StreamingLLM(Bounded):
  """Keeps the first `sinks` tokens and the newest budget − sinks (§3.2), in prefill and decode.

  Positions are those within the cache (§3.2): with rope="slot" the sinks move along with the
  window, so that no distance exceeds the budget. Keys are cached rotated at their true position;
  among tokens of the window distances are true anyway, and the sinks are scored by a query moved
  to its own place within the cache. rope="original" keeps true distances for the sinks too.

  Attributes:
    budget: tokens kept per KV head, sinks included.
    sinks: first tokens that never leave (§3.1: 4).
    rope: "slot" (the paper's) or "original".
  """

  sinks: int = 4
  rope: str = "slot"

  def __post_init__(self):
    if self.sinks < 0:
      raise ValueError(f"StreamingLLM.sinks: found {self.sinks}, expected 0 or more")
    if self.budget <= self.sinks:
      raise ValueError(
        f"StreamingLLM.budget: found {self.budget}, expected more than sinks = {self.sinks}"
      )
    if self.rope not in ("slot", "original"):
      raise ValueError(f"StreamingLLM.rope: found {self.rope!r}, expected 'slot' or 'original'")

  @property
  def chunkable(self) -> bool:
    return True

  @property
  def order_independent(self) -> bool:
    return True

  @classmethod
  def example(cls, budget: int) -> Method:
    return cls(budget=budget, sinks=min(4, budget // 2))

  @classmethod
  def neutral(cls, length: int) -> Method:
    return cls(budget=length)

  def window(self, at: At, qpos: Int[Array, "B T"]) -> Window:
    """The newest budget − sinks tokens, the query's own among them."""
    first = qpos - (self.budget - self.sinks) + 1
    view = jnp.minimum(qpos, self.budget - 1) if self.rope == "slot" else None
    return Window(self.sinks, first, view)

  def span(self, at: At, cache: Cache, window: Window | None) -> Span:
    """All occupied slots: what left the window has been overwritten."""
    stop = cache.used[:, None]
    return Span(jnp.zeros_like(stop), stop, self.sinks)

  def victim(self, at: At, cache: Cache) -> Int[Array, "B K"]:
    """The oldest token that is not a sink."""
    pos = cache.pos[:, 0]  # alike on all heads
    behind = jnp.arange(cache.size) >= self.sinks
    oldest = jnp.argmin(jnp.where(behind, pos, jnp.iinfo(jnp.int32).max), -1)
    return jnp.broadcast_to(oldest[:, None].astype(jnp.int32), cache.pos.shape[:2])

  def rank(
    self,
    at: At,
    staged: slots.Slots,
    q: Array,
    qpos: Array,
    attended: Attended,
    prompt: Prompt,
  ) -> tuple[Float[Array, "B K S"], slots.Slots]:
    """Sinks first, then the newest."""
    pos = staged["pos"]
    return jnp.where(pos < self.sinks, jnp.inf, pos.astype(jnp.float32)), staged
