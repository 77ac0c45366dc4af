"""RocketKV: a cut for good, and a choice within it at each step (Behnam et al., ICML 2025)."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core import settings
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At
from kvjax.core.fields import least
from kvjax.core.leaves import Leaf
from kvjax.core.plan import Plan
from kvjax.families.bounded import Bounded
from kvjax.families.method import Method
from kvjax.families.selective import Selective, Tiles
from kvjax.methods.snapkv import SnapKV
from kvjax.ops import attention, tiles
from kvjax.primitives import softmax_state


@dataclasses.dataclass(frozen=True)
class RocketKV(Selective):
  """Keeps what SnapKV does, and reads the tokens of the pages that promise most (§3).

  Stage 1 is the base. Of S kept slots a step costs as much as t slots do, S/t = r: half of it for
  the search, half for attention to t/2 tokens. Stage 2 (hybrid sparse attention) has pages of
  g = ⌈√r⌉ slots, 1 if that exceeds r, with minimum and maximum of their keys. Of H channels the
  ⌊H·g/r⌋ of largest Σ|q| over the group are looked at; where Σq is positive the maximum stands for
  a page, else the minimum: a bound for the group, not for its heads of the other sign. Every token
  carries its page's score into the softmax, which is summed over the group; the best tokens are
  read. Of the last page taken these are the first ones. A row of up to t slots is attended to as a
  whole, which costs no more.

  The paper splits the saving for a context of known length (`kept`), and keeps all generated
  tokens in reserved slots. Here S is the base's budget, which holds, whatever the capacity; of a
  base that keeps every token it is the capacity. No kernel skips the bytes of the channels that do
  not count.

  Attributes:
    budget: t, slots per KV head whose bytes a step may read; of more, half as many are attended to.
    base: stage 1; SnapKV with a window of 32, pooled over 63, in the paper.
    dense_below: rows of fewer slots are attended to as a whole; None: rows of up to `budget`.
  """

  budget: int = least(2, 512)
  _: dataclasses.KW_ONLY
  base: Method = dataclasses.field(default_factory=lambda: SnapKV(4096, pool=63))
  dense_below: int | None = least(0, None)

  anywhere: ClassVar[bool] = True  # the bounds of a page hold for any keys

  @property
  def tiles(self) -> Tiles:
    below = self.budget + 1 if self.dense_below is None else self.dense_below
    return Tiles(unit=1, best=self.budget // 2, dense_below=below)

  def summaries(self, spec: CacheSpec) -> dict[str, Leaf]:
    pages = -(-spec.capacity // self._page(spec.capacity))  # here the capacity is the base's
    extremes = Leaf("heads", (pages, spec.head_dim), spec.dtype, in_place=True, along_slots=True)
    return {"key_min": extremes, "key_max": extremes}

  def summarise(self, cache: Cache, start: Int[Array, "B *K"], tokens: int) -> Cache:
    return tiles.with_extremes(cache, start, tokens, page=self._page(cache.size))

  def _renewed(self, at: At, cache: Cache, *after: Array) -> Cache:
    """Whatever comes first: `score` renews them too, and XLA runs what is equal once."""
    return super()._renewed(at, cache)

  def score(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan
  ) -> Float[Array, "B K S"]:
    page, size = self._page(cache.size), q.shape[-1]
    cache, q = self._renewed(at, cache), q.astype(jnp.float32)  # the newest token's page, too
    weight, order = jnp.abs(q).sum(2), jnp.arange(size)
    heavier, lighter = weight[:, :, None], weight[..., None]
    above = (heavier > lighter) | ((heavier == lighter) & (order < order[:, None]))
    chosen = above.sum(-1) < size * page * self.budget // self._kept(cache.size)
    part = jnp.where(chosen[:, :, None], q, 0)
    bound = jnp.where((q.sum(2) > 0)[:, :, None], cache.heads["key_max"], cache.heads["key_min"])
    logits = jnp.einsum("bkgh,bkph->bkgp", part, bound.astype(jnp.float32))
    share = jnp.abs(part).sum(-1) / jnp.abs(q).sum(-1)
    logits *= jnp.where(share > 0, (size * share) ** -0.5, 1.0)[..., None]
    logits = softmax_state.capped(jnp.repeat(logits, page, -1), at.env.soft_cap)[..., : cache.size]
    ok = attention.seen(visible, cache.pos, jnp.arange(cache.size, dtype=jnp.int32))
    bad = jnp.isnan(logits)  # it stays where it is, to be chosen and heard of
    logits = jnp.where(ok[:, :, None] & ~bad, logits, -jnp.inf)
    total = jax.nn.logsumexp(jax.nn.log_softmax(logits, -1), 2)  # ln Σ keeps the order of Σ
    return jnp.where(bad.any(2), jnp.nan, total)

  def _kept(self, slots: int) -> int:
    """S, of a base with so many slots, which are fewer where the capacity is below its budget."""
    return self.base.budget if isinstance(self.base, Bounded) else slots

  def _page(self, slots: int) -> int:
    """g, of a base with so many slots: √r rounded up, exactly."""
    kept = self._kept(slots)
    if slots <= self.budget:
      return max(1, slots)  # nobody searches
    root = math.isqrt(max(0, kept - 1) // self.budget) + 1  # the least whose square is r or more
    return root if root * self.budget <= kept else 1


def kept(context: int, budget: int) -> int:
  """Slots that stage 1 keeps of a context of T tokens: T/c^ρ, c = T/t (§3.4).

  ρ = min(0.2 + 0.06 log₂ c, 0.8) of the saving, in powers of c, is the first stage's.
  """
  saving = max(1.0, context / budget)
  return round(context / saving ** min(0.2 + 0.06 * math.log2(saving), 0.8))


settings.register(
  RocketKV,
  example=lambda cls, budget: cls(
    budget, base=SnapKV(2 * budget, min(32, max(1, budget // 4)), pool=63)
  ),
  neutral=lambda cls, length: cls(2 * length + 2, base=settings.neutral(SnapKV, length)),
)
