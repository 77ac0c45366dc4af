"""The full cache: nothing leaves, everything is attended to. The yardstick of all others."""

import dataclasses

from kvjax.method import Method
from kvjax.traits import Traits


@dataclasses.dataclass(frozen=True)
class Full(Method):
  """Keeps every token and attends to all of them (exact attention)."""

  @property
  def traits(self) -> Traits:
    return super().traits.but(order_independent=True, spreads=True)

  @classmethod
  def example(cls, budget: int) -> Method:
    return cls()

  @classmethod
  def neutral(cls, length: int) -> Method:
    return cls()
