"""Base of methods that keep a fixed number of tokens."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.core import settings
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Prompt
from kvjax.core.fields import least
from kvjax.core.leaves import Layout, Leaf
from kvjax.core.traits import Traits
from kvjax.families.method import Method
from kvjax.ops.insertion import Placement
from kvjax.primitives import ring


@dataclasses.dataclass(frozen=True)
class Bounded(Method):
  """Keeps at most `budget` tokens per KV head: slots are reused, so slot ≠ position.

  A subclass defines which tokens of a prompt stay (`rank`), and which one a full cache gives up for
  the next (`victim`).

  A budget above the capacity allocates the capacity, and rows of more tokens are refused.

  Attributes:
    budget: tokens kept per KV head.
  """

  budget: int = least(1, 2048)

  def __new__(cls, *args: Any, **values: Any) -> Any:
    moves = "victim", "insert"
    if all(getattr(cls, move) is getattr(Method, move) for move in moves):
      raise TypeError(
        f"{cls.__name__}.victim: found none, expected the slot that a full cache gives up for the "
        "next token, which it would drop"
      )
    return super().__new__(cls, *args, **values)

  @property
  def traits(self) -> Traits:
    return super().traits.but(positional=False, chunkable=False)

  def capacity(self, spec: CacheSpec, layer: int) -> int:
    """The tokens that a layer keeps, and no more than a row will ever have."""
    return min(self._most(spec, layer), spec.capacity)

  def _most(self, spec: CacheSpec, layer: int) -> int:
    """Slots of a layer, however long its rows are: what it keeps never hangs on the capacity."""
    return self.budget


settings.register(Bounded, example=lambda cls, budget: cls(budget=budget))


@dataclasses.dataclass(frozen=True)
class InTurn(Bounded):
  """Gives up the oldest token that may leave, where those that stay are older than all that may.

  A prompt leaves its slots in that order: tokens that stay, then the others, the oldest first. So
  decode goes round the slots after the former, and which one is next is a matter of the position
  alone (`kvjax.primitives.ring`): nothing is searched, and only the token is written.
  """

  @property
  def _always(self) -> int:
    """Number of first slots that are never evicted."""
    return 0

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    turn = self._always, self.capacity(spec, layer)
    ring = Leaf("heads", (2,), jnp.int32, turn, layout=Layout.RING)
    return {**super().leaves(spec, layer), "ring": ring}

  def settle(self, at: At, cache: Cache, prompt: Prompt) -> Cache:
    return self._closed(cache, jnp.full(cache.pos.shape[:2], self._always, jnp.int32))

  def _closed(self, cache: Cache, staying: Int[Array, "B K"]) -> Cache:
    """The ring after the slots that stay: it closes once the empty ones are taken."""
    since = (cache.seen + cache.size - cache.used)[:, None]
    since = jnp.broadcast_to(since, staying.shape)
    return cache.put(heads={"ring": jnp.stack([staying, since], -1)})

  victim = ring.victim
  placement: ClassVar[Placement] = Placement.RING
