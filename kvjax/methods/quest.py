"""Quest: pages whose keys could score high for this query (Tang et al., ICML 2024)."""

import dataclasses
import functools
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core import settings
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At
from kvjax.core.fields import expect, least, one_of
from kvjax.core.leaves import Leaf
from kvjax.core.plan import Plan
from kvjax.core.traits import Traits
from kvjax.families.selective import Selective, Tiles
from kvjax.ops import scores, tiles
from kvjax.ops import summaries as summaries_ops


@dataclasses.dataclass(frozen=True)
class Quest(Selective):
  """Query-aware page selection (§3.2, Alg. 1).

  Each page keeps the minimum and maximum of its keys, channel by channel. They bound q·k from
  above for every key of the page; the pages of largest bound are read, the newest page always.

  Pages are chosen per KV head. The paper has one query head per KV head; under GQA the group's mean
  query stands for it (PRR, App. A.1). The authors' accuracy code chooses per query head, which a
  cache read per KV head cannot do; group="max" comes nearest: a page counts as much as it can to
  any head of the group (`repo`). (That code does not force the newest page; their kernels do.)

  >>> import kvjax
  >>> method = kvjax.Quest(256, base=kvjax.SnapKV(1024))  # reads 256 of 1,024 that are kept
  >>> spec = kvjax.CacheSpec(batch=1, capacity=4096, kv_heads=2, groups=4, head_dim=64, layers=4)
  >>> [cache.size for cache in method.init_caches(spec)]  # slots of each layer
  [1024, 1024, 1024, 1024]

  Attributes:
    budget: tokens read per KV head and step, the newest page's included.
    page: tokens per page.
    group: "mean", the group's mean query bounds a page, or "max", the head whose bound is largest.
    extremes: "exact", or "int8": rounded outward to codes of a page's power of two
      (`kvjax.ops.extremes`), half the bytes. Bounds hold, but are wider: other pages may be chosen.
    dense_layers: first layers that attend to everything (§4.1: 2).
  """

  budget: int = 1024
  page: int = least(1, 16)
  group: str = one_of(("mean", "max"), "mean")
  extremes: str = one_of(("exact", "int8"), "exact")
  dense_layers: int = dataclasses.field(default=2, kw_only=True)

  anywhere: ClassVar[bool] = True  # the bounds of a page hold for any keys

  def __post_init__(self):
    super().__post_init__()
    expect(self, "budget", self.budget >= self.page, f"at least one page of {self.page} tokens")

  @property
  def traits(self) -> Traits:
    base = self.base.traits
    return super().traits.but(spreads=base.spreads and base.positional)

  @property
  def tiles(self) -> Tiles:
    return Tiles(unit=self.page, best=self.budget // self.page - 1, newest=1)

  def summaries(self, spec: CacheSpec) -> dict[str, Leaf]:
    shape = -(-spec.capacity // self.page), spec.head_dim
    coded = self.extremes == "int8"
    # Functions of the keys.
    leaf = functools.partial(Leaf, "heads", in_place=True, along_slots=True)
    extremes = leaf(shape, jnp.int8 if coded else spec.dtype)
    exponent = {"key_exponent": leaf(shape[:1], jnp.int8)} if coded else {}
    return {"key_min": extremes, "key_max": extremes, **exponent}

  def summarise(self, cache: Cache, start: Int[Array, "B *K"], tokens: int) -> Cache:
    return tiles.with_extremes(cache, start, tokens, page=self.page)

  @property
  def _renewal(self) -> summaries_ops.Renewal:
    exact = self.extremes == "exact"
    return (summaries_ops.Extremes if exact else summaries_ops.CodedExtremes)(self.page)

  @property
  def _scored(self) -> scores.Pages | None:
    return scores.Pages(self.group) if self.extremes == "exact" else None

  def score(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan
  ) -> Float[Array, "B K P"]:
    """Σ_d max(q_d·min_d, q_d·max_d) ≥ q·k for all keys of a page (Alg. 1)."""
    pages, exponent = (
      (cache.heads["key_min"], cache.heads["key_max"]),
      cache.heads.get("key_exponent"),
    )
    return scores.page_bounds(at, visible, q, *pages, exponent, unit=self.page, group=self.group)


settings.register(
  Quest,
  example=lambda cls, budget: cls(budget=budget, page=max(1, min(16, budget // 3))),
  neutral=lambda cls, length: cls(budget=length + 16),
  # The authors' accuracy code, as near as a cache per KV head comes: three pages at least.
  repo=lambda cls, budget: cls(budget=max(budget, 3 * 16), group="max"),
)
