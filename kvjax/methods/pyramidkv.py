"""PyramidKV: SnapKV with less room in every deeper layer (Cai et al., 2024)."""

import dataclasses

from kvjax import settings
from kvjax.fields import least
from kvjax.method import Method
from kvjax.methods.snapkv import SnapKV
from kvjax.types import CacheSpec


@dataclasses.dataclass(frozen=True)
class PyramidKV(SnapKV):
  """Budgets fall linearly from the lowest layer to the highest, their mean is about `budget`.

  With C the budget, w the window and T the length of the prompt, layer ℓ of L selects

      M − ℓ·⌊(M − m) / (L − 1)⌋,    M = min(2(C − w) − ⌊(C − w) / β⌋, T − w),    m = 2(C − w) − M

  tokens on top of its window, as the authors' code does; if T < 2(C − w), every layer has the
  budget. The floor of the step leaves the upper layers more than their share. Everything else is
  SnapKV's.

  Slots are allocated before a prompt is known, and must do for the longest: T is the cache's
  `spec.capacity`, and caches really have these sizes. A shorter prompt is kept whole wherever it
  fits, and cut to the layer's slots elsewhere; the authors' code would work out its sizes from its
  own length, and keep a prompt below the budget whole in the upper layers too.

  Attributes:
    window_size: last tokens of the prompt, whose queries observe (8; ART measures with 128).
    beta: how steep the pyramid is (20).
  """

  window_size: int = 8
  beta: int = least(1, 20)

  def capacity(self, spec: CacheSpec, layer: int) -> int:
    select, longest = self.budget - self.window_size, spec.capacity
    if longest < 2 * select or spec.layers == 1:
      return self.budget
    high = min(2 * select - select // self.beta, longest - self.window_size)
    step = 2 * (high - select) // (spec.layers - 1)
    return self.window_size + high - layer * step


def _example(cls: type[PyramidKV], budget: int) -> Method:
  return cls(budget=budget, window_size=min(8, max(1, budget // 4)))


def _neutral(cls: type[PyramidKV], length: int) -> Method:
  return cls(budget=length + 1, window_size=min(8, length))


def _repo(cls: type[PyramidKV], budget: int) -> Method:
  """The authors' LongBench runs: a window of 8, the largest of 7 neighbours."""
  return cls(budget=budget, window_size=8, pool=7, reduce="max")


settings.register(PyramidKV, example=_example, neutral=_neutral, repo=_repo)
