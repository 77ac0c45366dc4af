"""PRR: attend to a predicted selection while the true one is made, then repair (PRR, §4)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.core import settings, slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Carry, Prompt
from kvjax.core.fields import between, bound, expect, least, one_of
from kvjax.core.leaves import Leaf
from kvjax.core.plan import Attended, Plan, Span
from kvjax.core.traits import Traits
from kvjax.families import forms, sight
from kvjax.families.method import Aux, Method
from kvjax.families.selective import Selective
from kvjax.families.wrapper import Wrapper
from kvjax.methods.prr.predictor import Predictor, state_of
from kvjax.methods.quest import Quest
from kvjax.ops import attention, foresight, selection, smoothing, speculation
from kvjax.ops.smoothing import Smoothed
from kvjax.ops.speculation import Beside
from kvjax.primitives.trees import pytree


def _fits_budget(budget: int | float | str) -> bool:
  return budget == "auto" if isinstance(budget, str) else budget == 0 or 1 <= budget < math.inf


@dataclasses.dataclass(frozen=True)
class PRR(Wrapper):
  """Takes selection off the way to attention: predict, speculate, select, repair, update.

  Before the scores s of a step are known, every tile j has a forecast ŝ_j. Attention over
  Ŝ = the top ⌊ρ·k⌋ of ŝ runs while the base selects S, the top k of s; then the missed tiles S∖Ŝ
  are folded into its softmax state (Eqs. 6–8). First and newest tiles that the base always reads
  are in both sets and outside k. Nothing that follows S comes before attention over Ŝ; the next Ŝ
  is formed once s is known, after this step's attention.

  The output covers S, and Ŝ∖S besides: what was read in vain stays as additional context. With
  `strict` it is left out. Since nothing can be taken out of a merged state, one state per tile of
  Ŝ is kept, and those of Ŝ∩S and S∖Ŝ are merged: the base's own output, to rounding.

  The formulae of Eqs. 2 and 3 are lost in our text of the paper. They are reconstructed from its
  words as Holt's linear smoothing, per KV head and tile, ′ being the value of the last step:

      a tile's first score       a = s, b = 0
      forecast                   ŝ = a′ + γ·b′
      level                      a = α·s + (1 − α)·(a′ + b′)     predictor="holt"
                                 a = α·s + (1 − α)·a′            predictor="ema"
      trend                      b = β·(a − a′) + (1 − β)·b′

  A tile has its first score once it is full; until it has been scored it is predicted to be
  chosen. After a prompt the state is that of its last `history` tokens, which are also what the
  factors are calibrated on, per row and layer (§4.2): of all (α, β, γ) of `smoothing.grid()`, ties
  to the first, those of the highest score-weighted hit rate, the mean over tokens and KV heads of
  Σ_{j∈Ŝ∩S} w_j / Σ_{j∈S} w_j without the tiles that are read anyway; w is the score, or
  exp(s − max s) where scores may be negative. Of the tokens, counted back from the last, each
  `every`-th counts if it has more than k tiles to choose from: all are followed, but the searches
  for the best of 450 forecasts are the cost. A chunk with fewer than 8 that count leaves the
  factors as they were.

  The stages of the paper's ablation (A.8) are variants: "S1" speculates on the last step's
  selection and attends to S anew where a tile is missed, "S2" repairs instead, "S3" predicts. The
  last step's scores are the forecast of α = 1, β = γ = 0.

  Attributes:
    base: a method that scores tiles and selects the best: Quest or InfLLMv2 (§5.1).
    budget: ρ, how many times k are speculated on, 1 or more; 0: never speculate; "auto": what was
      measured to gain 3 % or more on this device for such a cache (`pallas_kernels/tuned`), else
      0: the step is then the base's own.
    predictor: "holt" or "ema".
    variant: "S1", "S2" or "S3".
    strict: leave out what was read in vain.
    alpha, beta, gamma: α, β, γ where they are not, or not yet, calibrated.
    calibrate: whether prompts do so.
    history: last tokens of a prompt (of a chunk of one) that the predictor follows.
    every: of how many of them one counts when hit rates are compared.
  """

  replaces: ClassVar[tuple[str, ...]] = ("attend",)
  base: Method = dataclasses.field(default_factory=Quest)
  budget: int | float | str = bound(_fits_budget, "0, or 1 or more, or 'auto'", "auto")
  predictor: str = one_of(smoothing.PREDICTORS, "holt")
  variant: str = one_of(("S1", "S2", "S3"), "S3")
  strict: bool = False
  alpha: float = between(0, 1, 0.5)
  beta: float = between(0, 1, 0.3)
  gamma: float = least(0, 0.5)
  calibrate: bool = True
  history: int = least(1, 512)
  every: int = least(1, 16)

  def __post_init__(self):
    super().__post_init__()
    usual = forms.form(self.base, "plan") is Selective.plan
    selects = usual and isinstance(self.base, Selective) and self.base.traits.positional
    expect(self, "base", selects, "a method that selects tiles of all tokens")

  @property
  def traits(self) -> Traits:
    """What is predicted depends on how the prompt was cut, and so does what is read in vain."""
    chunkable = self.strict and self.base.traits.chunkable
    return super().traits.but(ordered=False, chunkable=chunkable)

  @property
  def _selector(self) -> Selective:
    """The base, as what it is known to be."""
    assert isinstance(self.base, Selective)
    return self.base

  # ---- shapes

  def _ratio(self, batch: int, capacity: int) -> float:
    """ρ for caches of this shape; 0: no speculation."""
    if self.variant != "S3":
      return float(self.budget != 0)
    if not isinstance(self.budget, str):
      return float(self.budget)
    shape = {"unit": self._selector.tiles.unit, "best": self._selector.tiles.best}
    name = type(self._selector).__name__
    return speculation.speculation_ratio(name, **shape, batch=batch, slots=capacity)

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    """The predictor's state, the sets Ŝ of the next step and S of the last, and the factors."""
    held = self.base.leaves(spec, layer)
    ratio = self._ratio(spec.batch, spec.capacity)
    if layer < self._selector.dense_layers or ratio == 0:
      return held
    count = -(-spec.capacity // self._selector.tiles.unit)
    wide, width = (self._selector._width(count, x) for x in (ratio, 1.0))
    foreseen = (0, *[-1] * (wide - 1))  # the first token's tile
    factors = (self.alpha, self.beta, self.gamma) if self.variant == "S3" else (1.0, 0.0, 0.0)
    return {
      **held,
      "level": Leaf("heads", (count,)),
      "trend": Leaf("heads", (count,)),
      "foreseen": Leaf("heads", (wide,), jnp.int32, foreseen),
      "selected": Leaf("heads", (width,), jnp.int32, -1),
      "factors": Leaf("rows", (3,), jnp.float32, factors),
    }

  # ---- decode

  def plan(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan, carry: Carry
  ) -> tuple[Plan, Carry]:
    """The true selection; its memo is a `Speculation`."""
    if "foreseen" not in cache.heads:
      return self.base.plan(at, cache, q, visible, carry)
    foreseen = cache.heads["foreseen"]
    count = (foreseen >= 0).sum(-1, dtype=jnp.int32)
    guess = visible.listed(foreseen, count, unit=self._selector.tiles.unit)
    known: dict[str, Any] = {}
    if self._together(at):
      # S, and Ŝ of the next step: alone, the second would take as long as the first.
      beside, next_one = (
        self._beside(at, cache, visible, guess, q),
        sight.visible(at, _one_longer(cache)),
      )
      ratios = 1.0, self._ratio(cache.pos.shape[0], cache.size)
      true, ahead = self._selector._select_together(
        at, beside.both, (visible, next_one), ratios, beside.stops
      )
      known |= {"early": beside.early, "state": beside.state, "foreseen": ahead.table}
    else:
      known["scores"] = self._selector._scores(at, cache, q, visible)
      true = self._selector._select(at, cache, known["scores"], visible)
    assert true.table is not None
    hit = foresight.among(true.table, foreseen)
    return dataclasses.replace(true, memo=Speculation(guess, hit, **known)), carry

  def _together(self, at: At) -> bool:
    """Whether the searches for S and for the next Ŝ are made as one."""
    return selection.searches_together(at)

  def _beside(
    self, at: At, cache: Cache, visible: Plan, guess: Plan, q: Float[Array, "B K G H"]
  ) -> Beside:
    """Scores and the predictor's next state, with attention over Ŝ where one launch does all."""
    scored = self._selector._scored if forms.knows(self.base, "_scored", "score") else None
    everything = visible.window is None and not visible.needs.own_span
    # S1 may have to keep what was speculated as it is.
    if scored is not None and everything and self.variant != "S1":
      state, factors = state_of(cache), cache.rows["factors"]
      found = speculation.speculate(
        *(at, cache, guess, q, scored, state, factors),
        predictor=self.predictor,
        apart=self.strict,
      )
      if found is not None:
        return found
    scores = self._selector._scores(at, cache, q, visible)
    state, ahead = self._predictor(cache).advanced(cache, scores)
    return Beside(jnp.stack([scores, ahead], 2), state)

  def attend(self, at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Attended:
    """Attention over Ŝ, and the tiles that it missed folded into its state (Eqs. 6–8)."""
    if plan.memo is None:
      return self.base.attend(at, cache, plan, q)
    guess, hit, early = plan.memo.guess, plan.memo.hit, plan.memo.early
    early = self._speculate(at, cache, guess, q) if early is None else early
    if self.variant != "S1":
      return speculation.repair(at, cache, plan, guess, hit, q, early, strict=self.strict)
    assert plan.table is not None
    if self.strict:
      early = speculation.without_wasted(early, plan, guess)
    return self._attend_anew(at, cache, plan, q, early, (~hit & (plan.table >= 0)).any(-1))

  def _speculate(self, at: At, cache: Cache, guess: Plan, q: Float[Array, "B K G H"]) -> Attended:
    """Attention over Ŝ; with `strict`, one state [B, K, G, W] for each of its tiles."""
    if self.strict:
      return speculation.attend_tiles(at, cache, guess, q)
    return self.base.attend(at, cache, guess, q)

  def _attend_anew(
    self,
    at: At,
    cache: Cache,
    plan: Plan,
    q: Float[Array, "B K G H"],
    early: Attended,
    anew: Bool[Array, "B K"],
  ) -> Attended:
    """What was speculated, or, in the KV heads that missed a tile, attention over all of S."""
    assert plan.count is not None
    count = jnp.where(anew, plan.count, 0)
    late = self.base.attend(at, cache, dataclasses.replace(plan, count=count, memo=None), q)

    def pick(late: Array, early: Array) -> Array:
      return jnp.where(anew.reshape(anew.shape + (1,) * (late.ndim - 2)), late, early)

    logits, slot = early.logits, early.slot
    if logits is not None:
      early = dataclasses.replace(early, logits=pick(jnp.full_like(logits, -jnp.inf), logits))
    logits, slot = speculation.joined(early, late)
    state = jax.tree.map(pick, late.state, early.state)
    return Attended(state, logits, slot, pick(late.visited, early.visited))

  def observe(
    self, at: At, cache: Cache, q: Array, plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    """Updates the predictor and foresees the next step. Reports what `foresight.report` does."""
    before = cache
    cache, aux = self.base.observe(at, cache, q, plan, attended)
    if plan.memo is None:
      return cache, aux
    assert plan.table is not None
    aux |= foresight.report(plan, before.heads["selected"], self._selector.tiles.positive)
    if plan.memo.foreseen is not None:
      return _noted(cache, plan.memo.state, plan.memo.foreseen, plan.table), aux
    new, ahead = self._predictor(cache).advanced(before, plan.memo.scores)
    return self._foresee(at, cache, new, ahead, plan.table), aux

  # ---- the predictor

  def _predictor(self, cache: Cache) -> Predictor:
    wide = self._selector._widened(self._ratio(cache.pos.shape[0], cache.size))
    return Predictor(self.predictor, self._selector.tiles, wide)

  def _foresee(
    self,
    at: At,
    cache: Cache,
    state: Smoothed,
    ahead: Float[Array, "B K P"],
    selected: Int[Array, "B K W"],
  ) -> Cache:
    """The cache with the predictor's state, and with Ŝ of the next step: the best of `ahead`."""
    ratio = self._ratio(cache.pos.shape[0], cache.size)
    longer = _one_longer(cache)
    guess = self._selector._select(at, longer, ahead, sight.visible(at, longer), ratio)
    assert guess.table is not None
    return _noted(cache, state, guess.table, selected)

  # ---- prompt

  def keep(
    self,
    at: At,
    cache: Cache,
    new: slots.Slots,
    q: Float[Array, "B K G A H"],
    qpos: Int[Array, "B A"],
    attended: Attended,
    prompt: Prompt,
  ) -> Cache:
    kept = self.base.keep(at, cache, new, q, qpos, attended, prompt)
    if "foreseen" not in kept.heads:
      return kept
    history = min(self.history, q.shape[3])
    count = -(-history // self.every) * self.every
    q, qpos, _ = attention.last_queries(q, qpos, attended.state, count)
    qpos = jnp.where(jnp.arange(count) < count - history, -1, qpos)
    state, factors = self._follow(at, kept, cache.seen - 1, q, qpos)
    kept = kept.put(rows={"factors": factors})
    visible = sight.visible(at, kept)
    scores = self._selector._scores(at, kept, q[:, :, :, -1], visible)
    selected = self._selector._select(at, kept, scores, visible).table
    assert selected is not None
    ahead = self._predictor(kept).forecast(state, factors[:, 2, None, None], kept.seen - 1)
    return self._foresee(at, kept, state, ahead, selected)

  def _follow(
    self,
    at: At,
    cache: Cache,
    last: Int[Array, " B"],
    q: Float[Array, "B K G T H"],
    qpos: Int[Array, "B T"],
  ) -> tuple[Smoothed, Float[Array, "B 3"]]:
    """The predictor after a prompt's last tokens, and its factors, calibrated on them."""

    def score(now: Cache, q: Float[Array, "B K G H"]) -> tuple[Float[Array, "B K P"], Span]:
      visible = sight.visible(at, now)
      return self._selector._scores(at, now, q, visible), visible.span

    searches = self.calibrate and self.variant == "S3"
    how: dict[str, Any] = {"every": self.every, "searches": searches}
    return self._predictor(cache).follow(at, cache, last, q, qpos, score, **how)


def _example(cls: type[PRR], budget: int) -> Method:
  return cls(settings.example(Quest, budget), budget=1.5)


def _neutral(cls: type[PRR], length: int) -> Method:
  return cls(settings.neutral(Quest, length), budget=1.0)


settings.register(PRR, example=_example, neutral=_neutral)


@pytree()
@dataclasses.dataclass(frozen=True)
class Speculation:
  """What a plan knows beside the true selection.

  Attributes:
    guess: the foreseen selection Ŝ.
    hit: bool [B, K, W], which tiles of the plan are in it.
    scores: float32 [B, K, P], of all tiles, where the next Ŝ is still to be made of them.
    early: attention over Ŝ, where it has been made already.
    state, foreseen: the predictor's next state, and the next Ŝ, where they have been made already.
  """

  guess: Plan
  hit: Array
  scores: Array | None = None
  early: Attended | None = None
  state: Smoothed | None = None
  foreseen: Array | None = None


def _one_longer(cache: Cache) -> Cache:
  """The cache as the next token will find it, but for that token."""
  return cache.put(rows={"seen": cache.seen + 1, "used": cache.used + 1})


def _noted(
  cache: Cache, state: Smoothed, foreseen: Int[Array, "B K V"], selected: Int[Array, "B K W"]
) -> Cache:
  """The cache with what the next step needs."""
  new = {"level": state.level, "trend": state.trend}
  return cache.put(heads={**new, "foreseen": foreseen, "selected": selected})
