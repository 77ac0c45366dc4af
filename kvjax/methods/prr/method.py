"""PRR: attend to a predicted selection while the true one is made, then repair (PRR, §4)."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.core import settings, slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Carry, Turn
from kvjax.core.fields import between, bound, expect, least, one_of
from kvjax.core.leaves import Leaf
from kvjax.core.plan import Attended, Plan
from kvjax.core.traits import Traits
from kvjax.families import forms, sight
from kvjax.families.method import Aux, Method
from kvjax.families.selective import Selective
from kvjax.families.wrapper import Wrapper
from kvjax.methods.prr import hit_rates, kernel, repair, speculation
from kvjax.methods.prr.calibration import Calibration
from kvjax.methods.prr.forecast import Predictor, Smoothed
from kvjax.methods.prr.speculation import Beside, Foreseen
from kvjax.methods.quest import Quest
from kvjax.ops import attention, selection


def _fits(budget: int | float | str) -> bool:
  """True for a ρ, and for "auto", which has it looked up."""
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
  `strict` it is left out: the base's own output, to rounding (`repair`).

  Forecasts are by linear smoothing (`forecast`). After a prompt the state is that of its last
  `history` tokens, which are also what the factors are calibrated on, per row and layer
  (`calibration`). Of the tokens, counted back from the last, each `every`-th counts if it has more
  than k tiles to choose from: all are followed, but the searches for the best of 450 forecasts are
  the cost. A chunk with fewer than 8 that count leaves the factors as they were.

  The stages of the paper's ablation (A.8) are variants: "S1" speculates on the last step's
  selection and attends to S anew where a tile is missed, "S2" repairs instead, "S3" predicts.

  >>> import kvjax
  >>> kvjax.PRR(kvjax.Quest(1024), budget=1.25).base.budget  # speculates on 1.25 times its pages
  1024
  >>> kvjax.PRR(kvjax.SnapKV(1024))  # selects nothing in a step
  Traceback (most recent call last):
  ...
  ValueError: PRR.base: found SnapKV(...), expected a method that selects tiles of all tokens

  Attributes:
    base: a method that scores tiles and selects the best: Quest or InfLLMv2 (§5.1).
    budget: ρ, how many times k are speculated on, 1 or more; 0: never speculate; "auto": what was
      measured to gain 3 % or more on this device for such a cache (`pallas_kernels/tuned`), else
      0: the step is then the base's own.
    predictor: "holt"; "ema", without the trend; or "last", the last step's scores as they are:
      nothing is calibrated, and no state is kept.
    variant: "S1", "S2" or "S3".
    strict: leave out what was read in vain.
    alpha, beta, gamma: α, β, γ where they are not, or not yet, calibrated.
    calibrate: whether prompts do so.
    history: last tokens of a prompt (of a chunk of one) that the predictor follows.
    every: of how many of them one counts when hit rates are compared.
  """

  replaces: ClassVar[tuple[str, ...]] = ("attend",)
  base: Method = dataclasses.field(default_factory=Quest)
  budget: int | float | str = bound(_fits, "0, or 1 or more, or 'auto'", "auto")
  predictor: str = one_of(("holt", "ema", "last"), "holt")
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
    usual = not forms.overrides(self.base, "plan", Selective)
    selects = usual and isinstance(self.base, Selective) and self.base.traits.positional
    expect(self, "base", selects, "a method that selects tiles of all tokens")

  @property
  def traits(self) -> Traits:
    """Forecasts depend on how the prompt was cut, and so does what is read in vain."""
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
    tiles, name = self._selector.tiles, type(self.base).__name__
    return kernel.ratio(name, unit=tiles.unit, best=tiles.best, batch=batch, slots=capacity)

  def _ratio_of(self, cache: Cache) -> float:
    return self._ratio(cache.pos.shape[0], cache.size)

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    """The predictor's state, the sets Ŝ of the next step and S of the last, and the factors."""
    held = self.base.leaves(spec, layer)
    rho = self._ratio(spec.batch, spec.capacity)
    if layer < self._selector.dense_layers or rho == 0:
      return held
    count = -(-spec.capacity // self._selector.tiles.unit)
    wide, width = (self._selector._width(count, x) for x in (rho, 1.0))
    foreseen = (0, *[-1] * (wide - 1))  # the first token's tile
    held |= {
      "foreseen": Leaf("heads", (wide,), jnp.int32, foreseen),
      "selected": Leaf("heads", (width,), jnp.int32, -1),
    }
    if not self._predictor.smooths:
      return held
    factors = self.alpha, self.beta, self.gamma
    state = dict.fromkeys(("level", "trend"), Leaf("heads", (count,)))
    return {**held, **state, "factors": Leaf("rows", (3,), jnp.float32, factors)}

  # ---- decode

  def plan_and_attend(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan, carry: Carry
  ) -> tuple[Plan, Attended, Carry]:
    """The two in turn, or attention over Ŝ beside the scores of S; notes `Foreseen`."""
    if "foreseen" not in cache.heads or forms.overrides(at.top, "plan", Selective):
      return super().plan_and_attend(at, cache, q, visible, carry)
    guess = speculation.guessed(cache, visible, self._selector.tiles.unit)
    mine = not forms.overrides(at.top, "attend", PRR)
    true, foreseen, early = self._selected(at, cache, q, visible, guess if mine else None)
    if early is None:
      attended = at.top.attend(at, cache, true, q)
    else:
      attended = self._repaired(at, cache, true, guess, q, early)
    return true, attended.noting(foreseen), carry

  def attend(self, at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Attended:
    """Attention over Ŝ, and the tiles that it missed folded into its state (Eqs. 6–8)."""
    if not self._speculates(cache, plan):
      return self.base.attend(at, cache, plan, q)
    guess = speculation.guessed(cache, plan, self._selector.tiles.unit)
    # With `strict`, one state [B, K, G, W] for each tile of Ŝ.
    early = (kernel.attend_tiles if self.strict else self.base.attend)(at, cache, guess, q)
    return self._repaired(at, cache, plan, guess, q, early)

  def observe(
    self, at: At, cache: Cache, q: Array, plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    """Updates the predictor and foresees the next step. Reports what `hit_rates.report` does."""
    before = cache
    cache, aux = self.base.observe(at, cache, q, plan, attended)
    if not self._speculates(before, plan):
      return cache, aux
    guess = speculation.guessed(before, plan, self._selector.tiles.unit)
    aux |= hit_rates.report(plan, guess, before.heads["selected"], self._selector.tiles.positive)
    foreseen = attended.noted(Foreseen)
    if foreseen is None:  # the plan was another's
      foreseen = self._selected(at, before, q, sight.visible(at, before))[1]
    assert plan.table is not None
    return speculation.noted(cache, foreseen, plan.table), aux

  def _speculates(self, cache: Cache, plan: Plan) -> bool:
    """True of tiles that were selected by score, in layers that do."""
    return "foreseen" in cache.heads and plan.scores is not None

  def _selected(
    self,
    at: At,
    cache: Cache,
    q: Float[Array, "B K G H"],
    visible: Plan,
    guess: Plan | None = None,
  ) -> tuple[Plan, Foreseen, Attended | None]:
    """S, the next Ŝ, and attention over this one (`guess`) where the launch that scores does it."""
    if self._together(at):
      beside, rho = self._beside(at, cache, visible, guess, q), self._ratio_of(cache)
      true, ahead = speculation.select_both(at, cache, self._selector, beside, visible, rho)
      assert ahead.table is not None
      return true, Foreseen(beside.state, ahead.table), beside.early
    scores = self._selector._scores(at, cache, q, visible)
    true = self._selector._select(at, cache, scores, visible)
    state, forecast = self._predictor.advanced(cache, scores)
    return true, self._foreseen(at, cache, state, forecast), None

  def _together(self, at: At) -> bool:
    """True where the searches for S and the next Ŝ are made as one; a bench tells them apart."""
    return selection.searches_together(at)

  def _beside(
    self, at: At, cache: Cache, visible: Plan, guess: Plan | None, q: Float[Array, "B K G H"]
  ) -> Beside:
    """Scores and the predictor's next state, with attention over Ŝ where one launch does all."""
    scored = self._selector._scored or None
    everything = visible.window is None and not visible.needs.own_span
    # S1 may have to keep what was speculated as it is.
    if guess and scored is not None and everything and self.variant != "S1":
      found = kernel.speculate(at, cache, guess, q, scored, self._predictor, strict=self.strict)
      if found is not None:
        return found
    scores = self._selector._scores(at, cache, q, visible)
    state, ahead = self._predictor.advanced(cache, scores)
    return Beside(jnp.stack([scores, ahead], 2), state)

  def _repaired(
    self, at: At, cache: Cache, plan: Plan, guess: Plan, q: Array, early: Attended
  ) -> Attended:
    """Attention over Ŝ with what it missed of the plan, or that over the plan anew (S1)."""
    if self.variant != "S1":
      return kernel.repair(at, cache, plan, guess, q, early, strict=self.strict)
    if self.strict:
      early = repair.without_wasted(early, plan, guess)
    assert plan.table is not None and plan.count is not None and guess.table is not None
    anew = (~hit_rates.among(plan.table, guess.table) & (plan.table >= 0)).any(-1)
    late = dataclasses.replace(plan, count=jnp.where(anew, plan.count, 0))
    return repair.either(early, self.base.attend(at, cache, late, q), anew)

  # ---- the predictor

  @property
  def _predictor(self) -> Predictor:
    kind = self.predictor if self.variant == "S3" else "last"
    return Predictor(kind, self._selector.tiles.unit)

  @property
  def _calibration(self) -> Calibration:
    return Calibration(self._predictor, self._selector, self.every, self.calibrate)

  def _foreseen(self, at: At, cache: Cache, state: Smoothed | None, ahead: Array) -> Foreseen:
    """The predictor's state and Ŝ of the next step, the best of its forecasts."""
    rho = self._ratio_of(cache)
    return Foreseen(state, speculation.foresee(at, cache, self._selector, ahead, rho))

  # ---- prompt

  def keep(self, at: At, cache: Cache, turn: Turn, new: slots.Slots) -> Cache:
    kept = self.base.keep(at, cache, turn, new)
    if "foreseen" not in kept.heads:
      return kept
    history = min(self.history if self._predictor.smooths else 1, turn.q.shape[3])
    count = -(-history // self.every) * self.every
    q, qpos, _ = attention.last_queries(turn, count)
    qpos = jnp.where(jnp.arange(count) < count - history, -1, qpos)
    visible = sight.visible(at, kept)
    scores = self._selector._scores(at, kept, q[:, :, :, -1], visible)
    selected = self._selector._select(at, kept, scores, visible).table
    assert selected is not None
    if not self._predictor.smooths:
      foreseen = self._foreseen(at, kept, *self._predictor.advanced(kept, scores))
      return speculation.noted(kept, foreseen, selected)
    rho, last = self._ratio_of(kept), cache.seen - 1
    state, factors = self._calibration.follow(at, kept, last, q, qpos, rho)
    kept = kept.put(rows={"factors": factors})
    ahead = self._predictor.forecast(state, factors[:, 2, None, None], kept.seen - 1)
    return speculation.noted(kept, self._foreseen(at, kept, state, ahead), selected)


settings.register(
  PRR,
  example=lambda cls, budget: cls(settings.example(Quest, budget), budget=1.5),
  neutral=lambda cls, length: cls(settings.neutral(Quest, length), budget=1.0),
)
