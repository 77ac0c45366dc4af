"""ChunkKV: whole chunks of a prompt stay or leave (Liu et al., NeurIPS 2025)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.core import settings, slots
from kvjax.core.context import At, Turn
from kvjax.core.fields import expect, least
from kvjax.families.method import Method
from kvjax.families.prompt_scored import PromptScored
from kvjax.families.wrapper import Wrapper
from kvjax.methods.snapkv import SnapKV


@dataclasses.dataclass(frozen=True)
class ChunkKV(Wrapper):
  """Over a method that scores a prompt's tokens: the chunks of best mean score stay (Alg. 1).

  A chunk is `chunk` consecutive tokens, the last one before the window perhaps fewer. Its score is
  the mean over its own tokens of their scores by the base, summed over all KV heads of the layer,
  which so keep the same tokens. The window stays beside them, as the base has it.

  The paper sums over a chunk's tokens, under which a short one loses by its length, and leaves the
  slots empty that no whole chunk fills: here they go to the first tokens of the next best one.
  That layers share a choice is not offered. Decoding is the base's.

  A later turn's chunks are of what is cached and what is new, in order of position.

  Attributes:
    base: says how many tokens stay, and scores them; SnapKV in the paper.
    chunk: c, tokens of a chunk (10).
  """

  base: Method = dataclasses.field(default_factory=SnapKV)
  chunk: int = least(1, 10)

  def __post_init__(self):
    super().__post_init__()
    base = self.base
    scores = isinstance(base, PromptScored) and type(base).rank is PromptScored.rank
    expect(self, "base", scores, "a method that cuts a prompt by `score`, such as SnapKV()")

  def rank(self, at: At, turn: Turn) -> tuple[Float[Array, "B K S"], slots.Slots]:
    score, staged = self.base.rank(at, turn)
    past = (staged["pos"] >= 0) & ~jnp.isinf(score)
    order = jnp.argsort(jnp.where(past, staged["pos"], jnp.iinfo(jnp.int32).max), -1)

    def in_chunks(x: Array) -> Float[Array, "B K C 1"]:
      """Sums over the tokens of each chunk."""
      x = jnp.take_along_axis(jnp.where(past, x, 0), order, -1)
      x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[-1] % self.chunk)))
      return x.reshape(*x.shape[:2], -1, self.chunk).sum(-1, keepdims=True)

    mean = in_chunks(score) / jnp.maximum(in_chunks(jnp.ones_like(score)), 1)
    every = at.sum_heads(mean.sum(1, keepdims=True))
    by_time = jnp.broadcast_to(every, (*mean.shape[:3], self.chunk)).reshape(*mean.shape[:2], -1)
    score = jnp.where(past, jnp.take_along_axis(by_time, jnp.argsort(order, -1), -1), score)
    return score, {**staged, "score": score}


settings.register(
  ChunkKV,
  example=lambda cls, budget: cls(
    settings.example(SnapKV, budget), chunk=max(1, min(10, budget // 4))
  ),
  neutral=lambda cls, length: cls(settings.neutral(SnapKV, length)),
)
