"""The full cache: nothing leaves, everything is attended to. The yardstick of all others."""

import dataclasses

from kvjax.method import Method


@dataclasses.dataclass(frozen=True)
class Full(Method):
  """Keeps every token and attends to all of them (exact attention)."""

  @property
  def order_independent(self) -> bool:
    return True

  @property
  def spreads(self) -> bool:
    return True

  @classmethod
  def example(cls, budget: int) -> Method:
    return cls()

  @classmethod
  def neutral(cls, length: int) -> Method:
    return cls()
