"""CIS: queries that resemble an earlier one share what it retrieved (PrHS, §IV-A)."""

import dataclasses
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.core import settings
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Carry, Prompt
from kvjax.core.fields import expect, least, number, one_of
from kvjax.core.leaves import Leaf
from kvjax.core.plan import Attended, Plan
from kvjax.core.traits import Traits
from kvjax.families import forms, sight
from kvjax.families.method import Aux, Method
from kvjax.methods.cis import dilation, kernel, retrieval, similarity

# Tokens in all -> first tokens, newest tokens, retrieved ones, retrieved ones of CIS* (§V-B, §V-C).
BUDGETS = {128: (8, 32, 88, 72), 512: (16, 64, 432, 388)}


@dataclasses.dataclass(frozen=True)
class CIS(Method):
  """Attends to the first tokens, the newest ones, and the heaviest of the middle, often shared.

  With n tokens cached the middle is [C_sink, n − C_local). Decoded tokens are counted in blocks of
  s from the first one on. A head's first query of a block retrieves: the k tokens of the middle
  with the largest attention weight, exactly. A later one looks for earlier queries of its block
  whose cosine with it exceeds τ (Eq. 12; both rotated); if there is one, it shares what the most
  recent of them used, otherwise it retrieves.

  What is shared is always a retrieval as it was made, dilated once (Eq. 13): its m heaviest tokens
  gain their neighbours up to r away, as far as those lie in the middle of now. Prompts are read
  densely.

  LLaMA-2-7B, on which the paper measures sharing, has no query groups. Here, with per="kv_head",
  the weights of a KV head are averaged over its query heads, and it shares only if the cosines of
  all of them with the same earlier query exceed τ. With agree="mean" one cosine decides, that of
  the group's mean query, the mean of its queries at norm 1: a head that has turned away alone
  does not make its group retrieve. With per="query_head" every query head retrieves and shares on
  its own, as in the paper; but a KV head reads one list of slots for all its query heads, so each
  of them attends to the union of what they chose, and the list is up to G times as long. With G = 1
  all of these are one.

  Attributes:
    k: tokens retrieved from the middle.
    sinks: C_sink, first tokens that are always attended to.
    local: C_local, newest tokens that are always attended to, the query's own among them.
    block: s, decoded tokens within which queries share; 1 never shares.
    tau: τ, the cosine that must be exceeded; 1 or more never shares.
    radius: r, distance up to which neighbours are added.
    m: heaviest tokens of a shared retrieval that gain neighbours; None: ⌊k/3⌋.
    per: "kv_head" or "query_head".
    agree: what decides for a group: the cosines of "all" its queries, or that of their "mean".
  """

  k: int = least(1, 432)
  sinks: int = least(0, 16)
  local: int = least(1, 64)
  block: int = least(1, 16)
  tau: float = number(0.8)
  radius: int = least(0, 1)
  m: int | None = None
  per: str = one_of(("kv_head", "query_head"), "kv_head")
  agree: str = one_of(("all", "mean"), "all")

  def __post_init__(self):
    expect(self, "m", self.m is None or 0 <= self.m <= self.k, f"0 to k = {self.k}")
    alone = self.per == "query_head"
    expect(self, "agree", not alone or self.agree == "all", "'all' where per is 'query_head'")

  @classmethod
  def preset(cls, budget: int, matched: bool = False, **changes: Any) -> "CIS":
    """The paper's split of 128 or 512 tokens; matched=True is CIS*, whose average is the budget.

    Retrieving steps attend to `budget` tokens and sharing ones to a few more; CIS* retrieves less,
    so that both together come to `budget`.
    """
    return cls(**{**split(budget, matched), **changes})

  @property
  def traits(self) -> Traits:
    return super().traits.but(spreads=True, scans=self._scans)

  @property
  def _dilated(self) -> int:
    """m, how many tokens of a shared retrieval gain neighbours."""
    return self.k // 3 if self.m is None else self.m

  def _scans(self, spec: CacheSpec) -> tuple[float, float]:
    """Once a block where all queries share, in every step where none does."""
    return (1 / self.block if self.tau < 1 else 1.0), (1 / self.block if self.tau <= -1 else 1.0)

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    """Queries of the current block, whose retrieval each used, and the retrievals.

    U = 1 decision per KV head, or one per query head; of a group whose mean decides, the mean alone
    is held. Retrievals are dilated, as they are shared; steps that shared have none of their own,
    and hold anything.
    """
    units = 1 if self.per == "kv_head" else spec.groups
    judged = 1 if self.agree == "mean" else spec.groups
    of = partial(Leaf, in_place=True)
    # Of a dilated retrieval: no more than there are tokens, and neighbours after the newest.
    widest = min(self.k + 2 * self.radius * self._dilated, spec.capacity + self.radius)
    wide = self.block, units, widest
    return {
      **super().leaves(spec, layer),
      "queries": of("heads", (self.block, judged, spec.head_dim)),  # of norm 1
      "anchor": of("heads", (self.block, units), jnp.int32),  # step of the block
      "retrieved": of("heads", wide, jnp.int32, -1),  # −1 = none, at the end
      "step": of("rows", (), jnp.int32),  # step within the block
    }

  def settle(self, at: At, cache: Cache, prompt: Prompt) -> Cache:
    """After a prompt the next token begins a block."""
    return cache.put(rows={"step": jnp.zeros_like(cache.rows["step"])})

  def plan(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan, carry: Carry
  ) -> tuple[Plan, Carry]:
    """First tokens, then the newest backwards, then the chosen ones by position, neighbours last.

    Chosen are the tokens that the latest query alike used (Eq. 12), dilated, as far as they are in
    the middle of now; or, where none is alike, the k heaviest of the middle.
    """
    return self._selected(at, cache, q, visible).plan, carry

  def plan_and_attend(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan, carry: Carry
  ) -> tuple[Plan, Attended, Carry]:
    """The two in turn, or in one launch; notes `kernel.Selected`."""
    if forms.overrides(at.top, "plan", CIS):
      return super().plan_and_attend(at, cache, q, visible, carry)
    found = self._selected(at, cache, q, visible, not forms.overrides(at.top, "attend"))
    attended = found.attended or at.top.attend(at, cache, found.plan, q)
    return found.plan, attended.noting(found), carry

  def _selected(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan, plain: bool = False
  ) -> kernel.Selected:
    """The paper's steps; `plain` as in `kernel.select`."""
    budget = retrieval.Budget(self.sinks, self.k, self.local)
    if kernel.runs(at):
      return kernel.select(kernel.Step(at, cache, q, visible, budget), self.tau, plain)
    choice = similarity.share(cache, q, self.tau)  # Eq. 12
    own = retrieval.retrieve(at, cache, q, visible, budget)  # S*_t, by Eq. 2
    chosen = similarity.chosen(cache, choice, own.found)  # S*_t, or Ŝ of the query alike
    critical = retrieval.critical_set(cache, chosen, visible.window, budget)  # C_t
    return kernel.Selected(choice, own, visible.listed(*critical, unit=1, pinned=self.sinks))

  def observe(
    self, at: At, cache: Cache, q: Array, plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    """Notes query, anchor and retrieval of the step, dilated. Reports `retrieved`, bool [B, K].

    With per="query_head" it is [B, K, G].
    """
    found = attended.noted(kernel.Selected)
    if found is None:  # the plan was another's
      found = self._selected(at, cache, q, sight.visible(at, cache))
    choice, own = found.choice, found.own
    retrieved = choice.retrieves > 0
    retrieved = retrieved[..., 0] if self.per == "kv_head" else retrieved
    how = {"sinks": self.sinks, "heaviest": self._dilated, "radius": self.radius}
    if kernel.runs(at):
      cache = kernel.note(at, cache, choice, own, attended, **how)
    else:
      cache = dilation.note(cache, choice, own, attended, **how)  # Ŝ_t, Eq. 13
    return cache, {"retrieved": retrieved}


def _example(cls: type[CIS], budget: int) -> "CIS":
  if budget in BUDGETS:
    return cls.preset(budget)
  sinks, local = max(1, budget // 32), max(1, budget // 8)
  return cls(k=max(1, budget - sinks - local), sinks=sinks, local=local)


settings.register(
  CIS,
  example=_example,
  neutral=lambda cls, length: cls(k=1, sinks=0, local=length),
)


def split(budget: int, matched: bool = False) -> dict[str, int]:
  """The paper's k, sinks and local for 128 or 512 tokens."""
  if budget not in BUDGETS:
    raise ValueError(f"budget: found {budget}, expected one of {list(BUDGETS)}")
  sinks, local, k, k_matched = BUDGETS[budget]
  return {"k": k_matched if matched else k, "sinks": sinks, "local": local}
