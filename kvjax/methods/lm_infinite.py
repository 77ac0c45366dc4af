"""LM-Infinite: a Λ-shaped window and bounded distances (Han et al., NAACL 2024)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.core import settings
from kvjax.core.context import At
from kvjax.core.fields import expect
from kvjax.core.plan import Window
from kvjax.core.traits import Traits
from kvjax.methods.streaming_llm import StreamingLLM


@dataclasses.dataclass(frozen=True)
class LMInfinite(StreamingLLM):
  """Sees the first tokens and the newest ones, and no distance beyond the training length.

  The mask is StreamingLLM's. Distances within the window are true; the first tokens are scored as
  from `limit` at most, so that they never look farther away than the model has learnt.

  Attributes:
    budget: tokens kept per KV head, the first ones included.
    sinks: first tokens that never leave (10).
    limit: largest position from which the first tokens are looked at, the training length (4096
      for Llama 2); None: their true distance.
  """

  budget: int = 4096
  sinks: int = 10
  rope: str = dataclasses.field(default="original", init=False)
  limit: int | None = 4096

  span = StreamingLLM.span  # the window is the same: its view is another

  def __post_init__(self):
    super().__post_init__()
    reaches = self.limit is None or self.limit >= self.budget
    expect(self, "limit", reaches, f"at least budget = {self.budget}")

  @property
  def traits(self) -> Traits:
    return super().traits.but(endless=self.limit is not None)

  def window(self, at: At, qpos: Int[Array, "B T"]) -> Window | None:
    seen = super().window(at, qpos)
    if seen is None or self.limit is None:
      return seen
    return dataclasses.replace(seen, view=jnp.minimum(qpos, self.limit))


settings.register(
  LMInfinite,
  example=lambda cls, budget: cls(budget=budget, sinks=min(10, budget // 4), limit=budget),
  neutral=lambda cls, length: cls(budget=length, limit=length),
)
