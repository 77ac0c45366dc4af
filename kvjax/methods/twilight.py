"""Twilight: the fewest selected tokens that hold a share of the mass (Lin et al., NeurIPS 2025)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.core import settings
from kvjax.core.cache import Cache
from kvjax.core.context import At, Carry
from kvjax.core.fields import between, expect
from kvjax.core.plan import Plan
from kvjax.core.traits import Traits
from kvjax.families.method import Method
from kvjax.families.selective import Selective
from kvjax.families.wrapper import Wrapper
from kvjax.methods.quest import Quest
from kvjax.ops import attention


@dataclasses.dataclass(frozen=True)
class Twilight(Wrapper):
  """Over a method that selects by a score: top-p of what it selected (§4, Alg. 1).

  The base selects candidates generously. Their softmax is estimated with keys of `bits` bits, per
  query head and over the candidates alone; a head keeps the fewest tokens, the heaviest first, that
  have the share p of it. A KV head reads the union over its query heads, token by token, and
  attends to it exactly. No token is forced; mass that the base did not select is not seen.

  The paper stores the keys of 4 bits beside the cache, and finds the set by bisection, under which
  equal weights stay together. Here they are rounded from the cached keys in each step, which gives
  the same estimate and saves no bytes, and of equal weights the base's order decides.

  Attributes:
    base: selects the candidates; layers in which it attends to everything are left alone.
    p: the share of mass, more than 0; 1 keeps every candidate (§5: 0.95 for Llama 2 and 3).
    bits: of an estimated key's channels, with a minimum and a scale for each token (§4.2: 4).
  """

  base: Method = dataclasses.field(default_factory=lambda: Quest(8192))
  p: float = between(0, 1, 0.95, "(]")
  bits: int = between(1, 16, 4)

  def __post_init__(self):
    super().__post_init__()
    selects = isinstance(self.base, Selective) and type(self.base).plan is Selective.plan
    expect(self, "base", selects, "a method that selects by `score`, such as Quest()")

  @property
  def traits(self) -> Traits:
    return super().traits.but(prunes=self.p < 1)

  def plan(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan, carry: Carry
  ) -> tuple[Plan, Carry]:
    chosen, carry = self.base.plan(at, cache, q, visible, carry)
    if chosen.table is None:
      return chosen, carry
    view = attention.read(cache, chosen)
    ok = attention.seen(chosen, view.pos, view.slot)
    keys = _rounded(view.k, self.bits)
    logits = attention.logits_of(q[:, :, :, None], keys, at.env.soft_cap)[:, :, :, 0]
    keep = ok
    if self.p < 1:
      weights = jax.nn.softmax(jnp.where(ok[:, :, None], logits, -jnp.inf), -1)
      keep &= _heaviest(weights, self.p).any(2)
    order = jnp.argsort(~keep, -1, stable=True)  # as the base lists them
    count = keep.sum(-1, dtype=jnp.int32)
    slot = jnp.take_along_axis(view.slot, order, -1)
    table = jnp.where(jnp.arange(slot.shape[-1]) < count[..., None], slot, -1)
    return visible.listed(table, count, unit=1), carry


def _rounded(x: Float[Array, "*any H"], bits: int) -> Float[Array, "*any H"]:
  """x as codes of so many bits say it: each token's channels between their least and largest."""
  x = x.astype(jnp.float32)
  low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
  step = (high - low) / (2**bits - 1)
  return low + step * jnp.round((x - low) / jnp.where(step > 0, step, 1))


def _heaviest(weights: Float[Array, "*batch W"], p: float) -> Bool[Array, "*batch W"]:
  """The fewest entries, the largest first, whose sum reaches p."""
  order = jnp.argsort(-weights, -1, stable=True)
  falling = jnp.take_along_axis(weights, order, -1)
  before = jnp.cumsum(falling, -1) - falling
  kept = ~(before >= p)  # all where one is NaN, which is then heard of
  return jnp.take_along_axis(kept, jnp.argsort(order, -1), -1)


settings.register(
  Twilight,
  example=lambda cls, budget: cls(settings.example(Quest, budget)),
  neutral=lambda cls, length: cls(settings.neutral(Quest, length), p=1.0),
)
