"""What every method that keeps a fixed number of tokens has in common."""

import dataclasses

from kvjax.method import Method
from kvjax.types import CacheSpec


@dataclasses.dataclass(frozen=True)
class Bounded(Method):
  """Keeps at most `budget` tokens per KV head: slots are reused, so slot ≠ position.

  A subclass says which tokens of a prompt stay (`rank`), and which one a full cache gives up for
  the next (`victim`).

  Attributes:
    budget: tokens kept per KV head.
  """

  budget: int = 2048

  @property
  def positional(self) -> bool:
    return False

  @classmethod
  def example(cls, budget: int) -> Method:
    return cls(budget=budget)

  def capacity(self, spec: CacheSpec, layer: int) -> int:
    return self.budget
