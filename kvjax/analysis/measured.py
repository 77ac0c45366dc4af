"""A wrapper that reports what each decode step leaves out."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from kvjax.core import slots
from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.fields import expect
from kvjax.core.plan import Attended, Plan
from kvjax.families.coded import Coded
from kvjax.families.method import Aux, Method
from kvjax.families.wrapper import Wrapper
from kvjax.ops import attention


@dataclasses.dataclass(frozen=True)
class Measured(Wrapper):
  """Adds to a method's diagnostics how its attention compares with that over all keys.

  Every decode step reports, in addition to the base's statistics,

      dropped   float32 [B, K, G]   δ, the full cache's attention to keys that were not attended
      overlap   float32 [B, K, G]   share of the oracle's keys that were attended, the oracle taking
                                    each query head's heaviest keys, as many as were attended

  (`kvjax.analysis.certificates` has the bounds that δ enters). It reads all keys to do so: for
  evaluations.

  Attributes:
    base: a method whose cache holds every token (`positional`), as numbers: of a method that stores
      codes, `KIVI(Measured(Quest()))` measures the inner method.
  """

  def __post_init__(self):
    super().__post_init__()
    expect(self, "base", self.base.traits.positional, "a method whose cache holds every token")
    below: Method = self
    while isinstance(below, Wrapper):
      below = below.base
      expect(self, "base", not isinstance(below, Coded), "a method whose cache holds numbers")

  def observe(
    self, at: At, cache: Cache, q: Array, plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    cached = (cache.pos >= 0)[:, :, None]
    cap = at.env.soft_cap
    logits = attention.logits_of(q[:, :, :, None], cache.slots["k"], cap)[:, :, :, 0]
    weight = jax.nn.softmax(logits, -1, where=cached)
    chosen = self._chosen(cache, plan)[:, :, None]
    dropped = jnp.where(chosen, 0.0, weight).sum(-1)
    rank = jnp.argsort(jnp.argsort(jnp.where(cached, -weight, jnp.inf), -1), -1)
    size = chosen.sum(-1, keepdims=True)
    overlap = (chosen & (rank < size)).sum(-1) / size[..., 0]
    cache, aux = self.base.observe(at, cache, q, plan, attended)
    return cache, {**aux, "dropped": dropped, "overlap": overlap}

  def _chosen(self, cache: Cache, plan: Plan) -> Bool[Array, "B K S"]:
    """Slots that the step attended to."""
    view = attention.read(cache, plan)
    slot = jnp.where(attention.seen(plan, view.pos, view.slot), view.slot, cache.size)
    return slots.put(jnp.zeros(cache.pos.shape, bool), slot, jnp.ones_like(slot, bool))
