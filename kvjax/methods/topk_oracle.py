"""Top-k oracle: the tokens that really matter to each query, whatever finding them costs."""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float

from kvjax.core import settings
from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.core.fields import expect, least
from kvjax.core.plan import Plan
from kvjax.core.traits import Traits
from kvjax.families.selective import SelectiveTokens
from kvjax.ops import scores


@dataclasses.dataclass(frozen=True)
class TopKOracle(SelectiveTokens):
  """Reads the tokens of largest softmax probability, exactly: what other selections aim at.

  Per KV head, by the mean over its query heads. All keys are read to find them: it saves nothing,
  and bounds from above what a selection of its size can do (PrHS, §II-C, Eq. 5).

  Attributes:
    budget: tokens read per KV head and step, those of `sinks` and `local` included.
    sinks: first tokens, always read.
    local: newest tokens, always read (PrHS, §V-B: 8 and 32 of 128).
  """

  budget: int = 2048
  sinks: int = least(0, 0)
  local: int = least(0, 0)

  anywhere: ClassVar[bool] = True

  def __post_init__(self):
    super().__post_init__()
    fewest = max(self.sinks + self.local, 1)
    expected = f"at least {fewest} (sinks = {self.sinks}, local = {self.local})"
    expect(self, "budget", self.budget >= fewest, expected)

  @property
  def traits(self) -> Traits:
    base = self.base.traits
    return super().traits.but(spreads=base.spreads and base.positional)

  def score(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan
  ) -> Float[Array, "B K S"]:
    return scores.token_weights(at, cache, visible, q)


settings.register(
  TopKOracle,
  example=lambda cls, budget: cls(budget=budget),
  neutral=lambda cls, length: cls(budget=length),
)
