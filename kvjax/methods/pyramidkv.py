"""PyramidKV: SnapKV with less room in every deeper layer (Cai et al., 2024)."""

import dataclasses

from kvjax.core import settings
from kvjax.core.cache import CacheSpec
from kvjax.core.fields import least
from kvjax.families.method import Method
from kvjax.methods.snapkv import SnapKV


@dataclasses.dataclass(frozen=True)
class PyramidKV(SnapKV):
  """Budgets fall linearly from the lowest layer to the highest; their mean is `budget` (§4.2).

  With C the budget and w the window, layer ℓ of L selects

      M − ⌊ℓ·(M − m) / (L − 1)⌋,    M = 2(C − w) − m,    m = ⌊(C − w) / β⌋

  tokens on top of its window: an arithmetic sequence whose mean is C − w, or up to half a token
  more. Where a layer's share is more than the capacity, it has the capacity. Everything else is
  SnapKV's.

  Slots are allocated before a prompt is known, and caches really have these sizes, whatever the
  capacity: a prompt gives the same answer wherever it has room. The authors' code takes the
  prompt's length into account, and cuts no layer below the budget where the prompt is shorter than
  2(C − w). It floors the step (M − m) / (L − 1) instead of the product, which leaves the upper
  layers more than their share: 1.79 times the budget on average for C = 48 and 80 layers.

  >>> import kvjax
  >>> spec = kvjax.CacheSpec(batch=1, capacity=4096, kv_heads=2, groups=4, head_dim=64, layers=4)
  >>> [
  ...   cache.size for cache in kvjax.PyramidKV(budget=1024).init_caches(spec)
  ... ]  # slots of each layer
  [1990, 1346, 702, 58]

  Attributes:
    window_size: last tokens of the prompt, whose queries observe (8; ART measures with 128).
    beta: how steep the pyramid is (20).
  """

  window_size: int = 8
  beta: int = least(1, 20)

  def _most(self, spec: CacheSpec, layer: int) -> int:
    if spec.layers == 1:
      return self.budget
    select = self.budget - self.window_size
    low = select // self.beta
    high = 2 * select - low
    return self.window_size + high - layer * (high - low) // (spec.layers - 1)


def _neutral(cls: type[PyramidKV], length: int) -> Method:
  """A top layer that keeps so many tokens."""
  window = min(8, length)
  return cls(budget=window + 20 * (length + 1 - window), window_size=window)


settings.register(
  PyramidKV,
  example=lambda cls, budget: cls(budget=budget, window_size=min(8, max(1, budget // 4))),
  neutral=_neutral,
  # The authors' LongBench runs: a window of 8, the largest of 7 neighbours.
  repo=lambda cls, budget: cls(budget=budget, window_size=8, pool=7, reduce="max"),
)
