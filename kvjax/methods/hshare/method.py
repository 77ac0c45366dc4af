"""HShare: critical tokens shared between steps, heads and layers (Wu et al., ICLR 2025)."""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.core import settings, slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Carry, Env, Turn
from kvjax.core.fields import between, expect, least
from kvjax.core.leaves import Leaf
from kvjax.core.plan import Attended, Plan
from kvjax.core.traits import Traits
from kvjax.families import forms, sight
from kvjax.families.method import Aux
from kvjax.families.selective import SelectiveTokens
from kvjax.methods.hshare import kernel, sharing
from kvjax.ops import attention, selection
from kvjax.ops import scores as scores_ops


@dataclasses.dataclass(frozen=True)
class HShare(SelectiveTokens):
  """Reads first, newest and heavy tokens; the heavy ones are mostly another's.

  Heavy tokens are the ones of largest probability between the first and the newest. On three levels
  a set of them is used as it is, instead of being retrieved:

  - steps: a row retrieves when its length is a multiple of `steps`, and uses the same set until the
    next time; the prompt's last query gives the first set;
  - heads: of a layer's KV heads ⌈heads·K⌉ retrieve, each other one uses the set of one of them;
  - layers: of L layers ⌈layers·L⌉ retrieve, each other one uses the sets of one below it, head by
    head.

  Who shares with whom is decided for every prompt by a greedy algorithm (Alg. 1) over the overlap
  of the sets that the prompt's last query would retrieve: the pair that overlaps most is joined
  first, the higher one using the set of the lower, until enough of them share. Pairs without a
  common token are not joined.

  A retrieval then happens for a share `layers`·`heads`/`steps` of all (layer, head, step): 1/8 by
  default, which PrHS calls HShare(1/2-1/2-1/2); its other setting is 3/4-3/4-1/2, ρ̂ = 0.281.

  The authors retrieve by the approximate scores of Double Sparsity and average overlaps over all
  of the prompt's queries; here scores are exact and the last query speaks for the prompt. Rows that
  are no longer than the budget read everything. Caches whose prompt did not pass through
  `conclude`, as those of single layers, share between steps and heads only.

  Attributes:
    budget: tokens read per KV head and step, those of `sinks` and `local` included.
    sinks: first tokens, always read.
    local: newest tokens, always read.
    layers: share of the layers that retrieve.
    heads: share of a layer's KV heads that retrieve.
    steps: tokens between two retrievals of a row; 1 retrieves every time.
  """

  minds_depth: ClassVar[bool] = True

  budget: int = 128
  sinks: int = least(0, 8)
  local: int = least(1, 32)
  layers: float = between(0, 1, 0.5, "(]")
  heads: float = between(0, 1, 0.5, "(]")
  steps: int = least(1, 2)

  def __post_init__(self):
    super().__post_init__()
    sinks, local = self.sinks, self.local
    expected = f"more than sinks + local = {sinks} + {local}"
    expect(self, "budget", self.budget > sinks + local, expected)

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    """The set in use (heaviest first where asked for; −1 = none), and whose it is."""
    held, own = super().leaves(spec, layer), layer - self.dense_layers
    if own < 0:
      return held
    width = min(self.tiles.best, spec.capacity)
    return {
      **held,
      "heavy": Leaf("heads", (width,), jnp.int32, -1),
      "from_head": Leaf("heads", (), jnp.int32, tuple(range(spec.kv_heads))),
      "from_layer": Leaf("rows", (), jnp.int32, own),
    }

  @property
  def traits(self) -> Traits:
    return super().traits.but(scans=self._scans)

  def _scans(self, spec: CacheSpec) -> tuple[float, float]:
    """The share of the settings; members that no other resembles keep their own set beyond it."""
    counts = spec.layers - self.dense_layers, spec.kv_heads
    shares = zip((self.layers, self.heads), counts, strict=True)
    least = math.prod(math.ceil(share * n - 1e-9) / n for share, n in shares if n)
    return least / self.steps, 1 / self.steps

  # ---- decode

  def score(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan
  ) -> Float[Array, "B K S"]:
    """Of the heads that retrieve in this step; those of the others are not used."""
    return scores_ops.token_weights(at, cache, visible, q, self._retrieves(at, cache))

  def plan(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan, carry: Carry
  ) -> tuple[Plan, Carry]:
    """The selected tokens. The carry holds all layers' sets."""
    return (visible, carry) if self._dense(at) else self._shared(at, cache, q, visible, carry)[:2]

  def plan_and_attend(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan, carry: Carry
  ) -> tuple[Plan, Attended, Carry]:
    """The two in turn; notes `InUse`, which the carry holds where the plan is another's."""
    if not self._dense(at) and not forms.overrides(at.top, "plan", HShare):
      plan, carry, used = self._shared(at, cache, q, visible, carry)
      return plan, at.top.attend(at, cache, plan, q).noting(used), carry
    plan, attended, carry = super().plan_and_attend(at, cache, q, visible, carry)
    if not self._dense(at) and (sets := carry.heads.get("heavy")) is not None:
      heavy = sets[:, :, at.layer - self.dense_layers]
      attended = attended.noting(InUse(heavy, self._retrieves(at, cache)))
    return plan, attended, carry

  def _shared(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan, carry: Carry
  ) -> tuple[Plan, Carry, "InUse"]:
    """The result of `plan` in layers that select, and the sets that it uses."""
    scores, retrieves = self._scores(at, cache, q, visible), self._retrieves(at, cache)
    retrieved = at.all_heads(self._heaviest(at, scores, visible, retrieves))
    sets = carry.heads.get("heavy")  # [B, K, L, k]
    if sets is None:
      heads, k = cache.heads["heavy"].shape[:2], cache.heads["heavy"].shape[2]
      sets = jnp.full((*heads, at.env.layers - self.dense_layers, k), -1, jnp.int32)
    how = {"own": at.layer - self.dense_layers, "steps": self.steps, "budget": self.budget}
    how |= dict(zip(("sinks", "local"), self.tiles.forced, strict=True))
    read = kernel.share_sets(at, cache, visible, retrieved, sets, **how)
    carry = dataclasses.replace(carry, heads={**carry.heads, "heavy": read.of_layers})
    plan = visible.listed(read.table, read.count, unit=1, pinned=self.sinks)
    return plan, carry, InUse(read.heavy, retrieves)

  def _heaviest(
    self,
    at: At,
    scores: Float[Array, "B K S"],
    visible: Plan,
    active: Bool[Array, "B K"] | None = None,
  ) -> Int[Array, "B K k"]:
    """Best tokens that are neither first nor newest, which a retrieval gives."""
    sinks, local = self.tiles.forced
    how: dict[str, Any] = {"sinks": sinks, "local": local, "ordered": visible.needs.order}
    how |= {"unit": 1, "k": self.tiles.best, "active": active}
    return selection.other_tiles(at, scores, visible.span, **how)[1]

  def _retrieves(self, at: At, cache: Cache) -> Bool[Array, "B K"]:
    """Heads that use their own retrieval, in layers that do, where one is due."""
    own = cache.heads["from_head"] == at.head_index(cache.pos.shape[1])
    layer = cache.rows["from_layer"] == at.layer - self.dense_layers
    return own & (layer & sharing.due(cache, self.steps, self.budget))[:, None]

  def observe(
    self, at: At, cache: Cache, q: Array, plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    """Keeps the set for the next steps. Reports `retrieved`, bool [B, K]."""
    used = attended.noted(InUse)
    if used is None:
      return cache, {"retrieved": jnp.zeros(cache.pos.shape[:2], bool)}
    return cache.put(heads={"heavy": used.heavy}), {"retrieved": used.retrieves}

  # ---- prompt

  def keep(self, at: At, cache: Cache, turn: Turn, new: slots.Slots) -> Cache:
    """Retrieves for the prompt's last query, and decides which heads share."""
    kept = super().keep(at, cache, turn, new)
    if self._dense(at):
      return kept
    last, _, _ = attention.last_queries(turn, 1)
    visible = sight.visible(at, kept)
    scores = scores_ops.token_weights(at, kept, visible, last[:, :, :, 0])
    heavy = self._heaviest(at, scores, visible)
    every = at.all_heads(heavy)
    sources = sharing.shared_sources(sharing.overlaps(every), self.heads)
    own = at.head_index(heavy.shape[1])
    return kept.put(heads={"heavy": heavy, "from_head": sources[:, own]})

  def conclude(self, env: Env, caches: tuple[Any, ...], valid: Int[Array, " B"]) -> tuple[Any, ...]:
    """Decides which layers share, by the sets of all heads together."""
    dense, sparse = caches[: self.dense_layers], caches[self.dense_layers :]
    if not sparse:
      return caches
    heavy = jnp.stack([cache.heads["heavy"] for cache in sparse], 2)  # [B, K, L, k]
    alike = self.at(env, 0).sum_heads(jax.vmap(sharing.overlaps, 1, 1)(heavy).sum(1))
    sources = sharing.shared_sources(alike, self.layers)
    return dense + tuple(
      slots.choose_rows(valid > 0, cache.put(rows={"from_layer": sources[:, i]}), cache)
      for i, cache in enumerate(sparse)
    )


class InUse(NamedTuple):
  """Note of a step: the sets in use, int32 [B, K, k], and who retrieves, bool [B, K]."""

  heavy: Array
  retrieves: Array


settings.register(
  HShare,
  example=lambda cls, budget: cls(budget=budget, sinks=budget // 16, local=max(1, budget // 4)),
  neutral=lambda cls, length: cls(budget=length + 40),
)
