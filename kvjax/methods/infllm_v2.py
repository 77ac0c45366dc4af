"""InfLLM-v2: blocks by the attention that their compressed keys get (Zhao et al., 2025)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core import settings
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At
from kvjax.core.fields import expect, least
from kvjax.core.leaves import Leaf
from kvjax.core.plan import Plan
from kvjax.families.method import Method
from kvjax.families.selective import Selective, Tiles
from kvjax.ops import scores, tiles
from kvjax.ops import summaries as summaries_ops


@dataclasses.dataclass(frozen=True)
class InfLLMv2(Selective):
  """Reads the first block, a local window, and the blocks whose compressed keys score best.

  A compressed key is the mean of `kernel` keys, one every `stride` tokens. Query heads attend to
  the compressed keys; their probabilities are summed over the group, so that a KV head reads one
  set of blocks, and a block scores as its best compressed key. A compressed key takes part from the
  step after its last token on: until then that token is in the local window anyway.

  Contexts below `dense_below` tokens are attended to as a whole, and so are prompts (the model that
  the paper trains reads prompts by blocks too).

  The authors' kernel takes one local block more (`repo`).

  Attributes:
    top: blocks chosen by score, beside the first and the local ones.
    block: tokens per block.
    sinks: first blocks, always read.
    local: newest tokens, always read, in whole blocks with the newest one among them.
    kernel, stride: tokens in a compressed key, and between the starts of two.
    dense_below: rows of fewer tokens attend to everything.
  """

  top: int = least(0, 64)
  block: int = 64
  sinks: int = least(0, 1)
  local: int = least(1, 2048)
  kernel: int = 32
  stride: int = least(1, 16)
  dense_below: int = least(0, 8192)

  def __post_init__(self):
    super().__post_init__()
    for name in ("block", "kernel"):
      size = getattr(self, name)
      whole = size >= 1 and size % self.stride == 0
      expect(self, name, whole, f"a multiple of stride = {self.stride}")

  @property
  def tiles(self) -> Tiles:
    newest, below = -(-self.local // self.block), self.dense_below
    return Tiles(self.block, self.top, self.sinks, newest, dense_below=below, positive=True)

  @property
  def _windows(self) -> dict[str, int]:
    """The tokens of compressed keys, in the words of `ops.tiles`."""
    return {"width": self.kernel, "stride": self.stride}

  def summaries(self, spec: CacheSpec) -> dict[str, Leaf]:
    count = max((spec.capacity - self.kernel) // self.stride + 1, 1)
    # A function of the keys.
    return {"compressed": Leaf("heads", (count, spec.head_dim), spec.dtype, in_place=True)}

  def summarise(self, cache: Cache, start: Int[Array, " B"], tokens: int) -> Cache:
    window = tiles.touched(start, tokens, **self._windows)
    k, _ = tiles.keys(cache, window, **self._windows)
    mean = k.astype(jnp.float32).mean(3)
    complete = window * self.stride + self.kernel <= cache.used[:, None]
    compressed = tiles.write(cache.heads["compressed"], window, complete, mean)
    return cache.put(heads={"compressed": compressed})

  @property
  def _renewal(self) -> summaries_ops.Means:
    return summaries_ops.Means(**self._windows)

  @property
  def _scored(self) -> scores.CompressedKeys:
    return scores.CompressedKeys(**self._windows)

  def score(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan
  ) -> Float[Array, "B K P"]:
    """The best of the block's compressed keys by their probabilities, summed over the group."""
    how = {"block": self.block, **self._windows}
    return scores.block_weights(at, cache, visible, q, cache.heads["compressed"], **how)


def _example(cls: type[InfLLMv2], budget: int) -> Method:
  """About `budget` tokens in blocks of up to 64: the first, a third of the others local."""
  block = 64
  while block > 4 and budget < 3 * block:
    block //= 2
  others = max(2, budget // block - 1)
  local = max(1, others // 3)
  compressed: dict[str, Any] = {"kernel": block // 2, "stride": block // 4}
  return cls(others - local, block, 1, local * block, **compressed, dense_below=0)


def _repo(cls: type[InfLLMv2], budget: int) -> Method:
  """The authors' kernel, whose local window has one block more, over `budget` tokens in all."""
  local = 33
  return cls(top=max(budget // 64 - 1 - local, 0), local=local * 64)


settings.register(
  InfLLMv2,
  example=_example,
  neutral=lambda cls, length: cls(dense_below=length + 1),
  repo=_repo,
)
