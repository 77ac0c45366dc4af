"""The full cache: nothing leaves, everything is attended to. The yardstick of all others."""

import dataclasses
from typing import Self

from kvjax.method import Method


@dataclasses.dataclass(frozen=True)
class Full(Method):
  """Keeps every token and attends to all of them (exact attention)."""

  @classmethod
  def example(cls, budget: int) -> Self:
    return cls()

  @classmethod
  def neutral(cls, length: int) -> Self:
    return cls()
