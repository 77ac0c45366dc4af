"""The full cache: nothing leaves, everything is attended to. The yardstick of all others."""

import dataclasses

from kvjax.core import settings
from kvjax.core.traits import Traits
from kvjax.families.method import Method


@dataclasses.dataclass(frozen=True)
class Full(Method):
  """Keeps every token and attends to all of them (exact attention).

  >>> import kvjax
  >>> spec = kvjax.CacheSpec(batch=1, capacity=4096, kv_heads=2, groups=4, head_dim=64, layers=4)
  >>> [cache.size for cache in kvjax.Full().init_caches(spec)]  # slots of each layer
  [4096, 4096, 4096, 4096]
  """

  @property
  def traits(self) -> Traits:
    return super().traits.but(order_independent=True, spreads=True)


settings.register(
  Full,
  example=lambda cls, budget: cls(),
  neutral=lambda cls, length: cls(),
)
