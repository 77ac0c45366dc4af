"""PyramidKV: SnapKV with less room in every deeper layer (Cai et al., 2024)."""

import dataclasses

from kvjax.method import Method
from kvjax.methods.snapkv import SnapKV
from kvjax.types import CacheSpec


@dataclasses.dataclass(frozen=True)
class PyramidKV(SnapKV):
  """Budgets fall linearly from the lowest layer to the highest, their mean is `budget`.

  With C the budget and w the window, the top layer selects ⌊(C − w) / β⌋ tokens, the lowest
  2(C − w) − ⌊(C − w) / β⌋, each on top of its window; caches really have these sizes. Everything
  else is SnapKV's. Where the lowest layer would select more than a sequence can hold, all layers
  have the budget (the repository's clamp).

  Attributes:
    window_size: last tokens of the prompt, whose queries observe (8; ART measures with 128).
    beta: how steep the pyramid is (20).
  """

  window_size: int = 8
  beta: int = 20

  def __post_init__(self):
    super().__post_init__()
    if self.beta < 1:
      raise ValueError(f"PyramidKV.beta: found {self.beta}, expected 1 or more")

  @classmethod
  def example(cls, budget: int) -> Method:
    return cls(budget=budget, window_size=min(8, max(1, budget // 4)))

  @classmethod
  def neutral(cls, length: int) -> Method:
    return cls(budget=length + 1, window_size=min(8, length))

  @classmethod
  def repo(cls, budget: int) -> Method:
    """The authors' LongBench runs: a window of 8, the largest of 7 neighbours."""
    return cls(budget=budget, window_size=8, pool=7, reduce="max")

  def capacity(self, spec: CacheSpec, layer: int) -> int:
    select = self.budget - self.window_size
    low = select // self.beta
    high = 2 * select - low
    if high >= spec.capacity - self.window_size or spec.layers == 1:
      return self.budget
    return self.window_size + max(1, high - (high - low) * layer // (spec.layers - 1))
