"""StreamingLLM: attention sinks and a window of recent tokens (Xiao et al., ICLR 2024)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core import settings, slots
from kvjax.core.cache import Cache
from kvjax.core.context import At, Carry, Prompt, Turn
from kvjax.core.fields import expect, least, one_of
from kvjax.core.plan import Span, Window
from kvjax.core.traits import Traits
from kvjax.families.bounded import InTurn


@dataclasses.dataclass(frozen=True)
class StreamingLLM(InTurn):
  """Keeps the first `sinks` tokens and the newest budget − sinks (§3.2), in prefill and decode.

  Positions are those within the cache (§3.2): with rope="slot" the sinks move along with the
  window, so that no distance exceeds the budget. Keys are cached rotated at their true position;
  among tokens of the window distances are true anyway, and the sinks are scored by a query moved
  to its own place within the cache. rope="original" keeps true distances for the sinks too.

  >>> import jax.numpy as jnp
  >>> import kvjax
  >>> sizes = {"batch": 1, "capacity": 32, "heads": 2, "kv_heads": 1, "head_dim": 8}
  >>> method = kvjax.StreamingLLM(budget=6, sinks=2)
  >>> (empty,) = kvjax.empty_caches(method, **sizes, rope=kvjax.Rope())
  >>> q, k = jnp.ones((1, 12, 2, 8)), jnp.ones((1, 12, 1, 8))
  >>> out, cache = kvjax.prefill(empty, q, k, k)
  >>> cache.cache.pos[0, 0].tolist()  # positions that are cached
  [0, 1, 8, 9, 10, 11]

  Attributes:
    budget: tokens kept per KV head, sinks included.
    sinks: first tokens that never leave (§3.1: 4).
    rope: "slot" (the paper's) or "original".
  """

  sinks: int = least(0, 4)
  rope: str = one_of(("slot", "original"), "slot")

  def __post_init__(self):
    expect(self, "budget", self.budget > self.sinks, f"more than sinks = {self.sinks}")

  @property
  def traits(self) -> Traits:
    return super().traits.but(chunkable=True, order_independent=True, endless=self.rope == "slot")

  @property
  def _always(self) -> int:
    return self.sinks

  def window(self, at: At, qpos: Int[Array, "B T"]) -> Window | None:
    """The newest budget − sinks tokens, the query's own among them."""
    first = qpos - (self.budget - self.sinks) + 1
    view = jnp.minimum(qpos, self.budget - 1) if self.rope == "slot" else None
    return Window(self.sinks, first, view)

  def span(self, at: At, cache: Cache, window: Window | None) -> Span:
    """All occupied slots: what left the window has been overwritten."""
    stop = cache.used[:, None]
    return Span(jnp.zeros_like(stop), stop, self.sinks)

  def rank(self, at: At, turn: Turn) -> tuple[Float[Array, "B K S"], slots.Slots]:
    """Sinks first, then the newest."""
    pos = turn.staged["pos"]
    return jnp.where(pos < self.sinks, jnp.inf, pos.astype(jnp.float32)), turn.staged


settings.register(
  StreamingLLM,
  example=lambda cls, budget: cls(budget=budget, sinks=min(4, budget // 2)),
  neutral=lambda cls, length: cls(budget=length),
  # The authors' repository: evicts between turns, with room for answers of 1,000 tokens. Where the
  # budget is small, half of it is for the answer.
  repo=lambda cls, budget: StreamingLLMByTurn(budget, reserve=min(1000, budget // 2)),
)


@dataclasses.dataclass(frozen=True)
class StreamingLLMByTurn(StreamingLLM):
  """StreamingLLM as its authors' repository runs it: nothing leaves while a turn lasts.

  Before a further turn is read, the oldest tokens after the sinks make room for all of it and
  for `reserve` tokens of answer. Within the turn every query sees all that is cached. Positions
  within the cache change between turns only: the sinks' keys are turned on by as many positions
  as have left. A turn or an answer beyond the room drops the oldest as it comes, at its true
  distance; the repository does not go so far.

  Attributes:
    budget, sinks, rope: as above.
    reserve: tokens of answer that room is made for.
  """

  reserve: int = 1000

  def __post_init__(self):
    super().__post_init__()
    most = self.budget - self.sinks
    expect(self, "reserve", 0 <= self.reserve <= most, f"0 to budget - sinks = {most}")

  @property
  def traits(self) -> Traits:
    return super().traits.but(chunkable=False, order_independent=False)

  def window(self, at: At, qpos: Int[Array, "B T"]) -> Window | None:
    return None

  def stage(
    self, at: At, cache: Cache, new: slots.Slots, q: Array, prompt: Prompt, carry: Carry
  ) -> tuple[slots.Slots, Cache, Carry]:
    """Evicts for the whole turn, then shows it all that is left."""
    if prompt.past == 0:
      return new, cache, carry
    coming = prompt.total + self.reserve
    room = jnp.maximum(self.budget - self.sinks - coming, 0)
    first = jnp.where(cache.used + coming > self.budget, cache.seen - room, 0)
    pos = cache.pos
    stays = (pos >= 0) & ((pos < self.sinks) | (pos >= first[:, None, None]))
    left = slots.keep_best(
      {**cache.slots, "pos": jnp.where(stays, pos, -1)}, pos.astype(jnp.float32), cache.size
    )
    gone = cache.used - stays[:, 0].sum(-1, dtype=jnp.int32)
    if self.rope == "slot":
      sinks = at.env.rope.shift(left["k"][:, :, : self.sinks], gone[:, None, None])
      left = {**left, "k": left["k"].at[:, :, : self.sinks].set(sinks)}
    cache = dataclasses.replace(cache, slots=left).put(rows={"used": cache.used - gone})
    return slots.join(left, new), cache, carry
