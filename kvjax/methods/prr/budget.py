"""The speculation budget: ρ, how many times k are speculated on (PRR, §4.4)."""

import math

from kvjax.families.selective import Selective
from kvjax.methods.prr import kernel


def fits(budget: int | float | str) -> bool:
  """True for a ρ, and for "auto", which has it looked up."""
  return budget == "auto" if isinstance(budget, str) else budget == 0 or 1 <= budget < math.inf


def ratio(budget: int | float | str, base: Selective, batch: int, capacity: int) -> float:
  """ρ for caches of this shape: as given, or of what was profiled for such a base; 0: none."""
  if not isinstance(budget, str):
    return float(budget)
  shape = {"unit": base.tiles.unit, "best": base.tiles.best}
  return kernel.ratio(type(base).__name__, **shape, batch=batch, slots=capacity)
