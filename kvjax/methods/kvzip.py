"""KVzip: keep what a model needs to repeat its context (Kim et al., NeurIPS 2025)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.core import settings, slots
from kvjax.core.cache import CacheSpec
from kvjax.core.context import At, Turn
from kvjax.core.fields import expect, least
from kvjax.core.traits import Traits
from kvjax.families.prompt_scored import Scored


@dataclasses.dataclass(frozen=True)
class KVzip(Scored):
  """Keeps a context for many questions: of its tokens the best, whatever is asked later (§3).

  A token is worth the largest probability that any query gives it while the model repeats the
  context. No prompt's own attention says that: `kvjax.models.decode.reconstruct.read` has the model
  repeat the context, scores it, and cuts the cache. Every KV head keeps as many tokens (the paper's
  `pair-uniform`). Under `AdaKV(KVzip(…), safeguard=0)` the heads of a layer compete, and with
  `over_layers` all of them, the paper's default (`pair`): the one to use where little is kept. Few
  layers look up what is asked, and they need a large part of the context (`scripts/results`, KVzip
  beside kvpress). What is read or generated afterwards takes the `room` in turn, and never a slot
  of the context.

  A context that is read without scores, as any prompt is, keeps its newest tokens.

  Attributes:
    budget: tokens kept per KV head, the room included.
    room: of them, for questions and answers (256).
    budgets: of each layer, in place of `budget`; (): alike.
    over_layers: has `kvjax.models.decode.reconstruct.read` work out `budgets` from the scores of
      all layers, under `AdaKV`.
  """

  room: int = least(1, 256)
  budgets: tuple[int, ...] = ()
  over_layers: bool = False

  def __post_init__(self):
    for name, least_of in (("budget", self.budget), ("budgets", min(self.budgets, default=None))):
      more = least_of is None or least_of > self.room
      expect(self, name, more, f"more than room = {self.room}")

  @property
  def traits(self) -> Traits:
    return super().traits.but(repeats=True)

  def _most(self, spec: CacheSpec, layer: int) -> int:
    """Slots of each head, on average under `AdaKV`.

    Raises:
      ValueError: there are other budgets than layers.
    """
    if not self.budgets:
      return self.budget
    if len(self.budgets) != spec.layers:
      raise ValueError(
        f"{type(self).__name__}.budgets: found {len(self.budgets)}, expected one for each of the "
        f"{spec.layers} layers"
      )
    return self.budgets[layer]

  def rank(self, at: At, turn: Turn) -> tuple[Float[Array, "B K S"], slots.Slots]:
    """Tokens of the context, then the newest of the others."""
    pos, score = turn.staged["pos"], turn.staged["score"]
    newest = (pos + 1) / (pos.max(-1, keepdims=True) + 2)  # below 1
    return jnp.where(jnp.isinf(score), newest, 1 + score), turn.staged


settings.register(
  KVzip,
  example=lambda cls, budget: cls(budget=budget, room=max(1, min(256, budget // 4))),
  neutral=lambda cls, length: cls(budget=length + 1, room=min(256, length)),
)
