"""LagKV: tokens that stand out from the partition after theirs (Liang et al., 2025)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.core import settings, slots
from kvjax.core.context import At, Turn
from kvjax.core.fields import expect, least
from kvjax.families.method import Method
from kvjax.families.prompt_scored import PromptScored


@dataclasses.dataclass(frozen=True)
class LagKV(PromptScored):
  """Cuts every partition of a prompt to the tokens that vary most beside the next one (§3).

  After the sinks come partitions of L tokens and a remainder. A partition is judged by the next:
  channels are scaled by their minimum and maximum there, and a token scores the standard deviation
  of its scaled channels, softmax over its partition, for its key plus for its value. No query is
  looked at. The last partition and the remainder have no judge: they are the window.

  The paper keeps the best ⌊r·L⌋ of every partition, more the longer the prompt, and cuts generated
  tokens too. Here the budget is given: the best of every partition stay, then the second best, and
  so on; where they do not divide, the first partitions have one more. Then the budget holds.

  A later turn's partitions are of what is cached and what is new, in order of position.

  Attributes:
    budget: tokens kept per KV head, the sinks and the window included.
    window_size: L, the lag: tokens of a partition (128; the authors' code 1024). The window is at
      least so long.
    sinks: first tokens, which stay (16).
  """

  window_size: int = least(1, 128)
  sinks: int = least(0, 16)

  def __post_init__(self):
    uncut = self.sinks + 2 * self.window_size
    expect(self, "budget", self.budget >= uncut, f"at least sinks + 2 · window_size = {uncut}")

  def score(self, at: At, turn: Turn, past: Bool[Array, "B K S"]) -> Float[Array, "B K S"]:
    staged = turn.staged
    pos, lag = staged["pos"], self.window_size
    order = jnp.argsort(jnp.where(pos >= 0, pos, jnp.iinfo(jnp.int32).max), -1)
    end = pos.shape[2] - (pos.shape[2] - self.sinks) % lag  # of the last whole partition

    def spread(x: Float[Array, "B K S H"]) -> Float[Array, "B K P L"]:
      x = slots.take(x, order[..., self.sinks : end]).astype(jnp.float32)
      x = x.reshape(*x.shape[:2], -1, lag, x.shape[-1])
      low, high = x[:, :, 1:].min(3, keepdims=True), x[:, :, 1:].max(3, keepdims=True)
      width = high - low
      scaled = jnp.where(width > 0, (x[:, :, :-1] - low) / width, 0)
      return jax.nn.softmax(scaled.std(-1, ddof=1), -1)

    best = jnp.argsort(-(spread(staged["k"]) + spread(staged["v"])), -1)
    rank = (lag - 1 - jnp.argsort(best, -1)).astype(jnp.float32) / lag  # below 1
    rank = rank.reshape(*pos.shape[:2], -1)
    by_time = jnp.pad(rank, ((0, 0), (0, 0), (self.sinks, pos.shape[2])), constant_values=1.0)
    whole = ((pos >= 0).sum(-1, keepdims=True) - self.sinks) // lag
    judged = jnp.arange(pos.shape[2]) < self.sinks + jnp.maximum(whole - 1, 0) * lag
    by_time = jnp.where(judged, by_time[..., : pos.shape[2]], jnp.inf)
    return jnp.take_along_axis(by_time, jnp.argsort(order, -1), -1)


def _example(cls: type[LagKV], budget: int) -> Method:
  sinks = min(16, budget // 8)
  return cls(budget=budget, window_size=max(1, min(128, (budget - sinks) // 4)), sinks=sinks)


settings.register(
  LagKV,
  example=_example,
  neutral=lambda cls, length: cls(
    budget=length + 1, window_size=max(1, min(32, length // 2)), sinks=0
  ),
)
