"""InfLLM: a context memory of blocks, looked up by representative tokens (Xiao et al., 2024)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core import slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, OwnRows
from kvjax.core.fields import least
from kvjax.core.leaves import Leaf
from kvjax.core.traits import Stream, Traits
from kvjax.families import retrieval
from kvjax.families.streamed import Streamed


@dataclasses.dataclass(frozen=True)
class InfLLM(Streamed):
  """Retrieves the blocks whose representative tokens are most like the current queries.

  A token's votes are the probability that window queries give it, per KV head as the mean over its
  query heads. When a block leaves the window, its `representatives` tokens of most votes stand for
  it: Σ q·k over the chunk's queries, the block's representatives and all heads says how much the
  chunk wants the block (§3.2). The sum has the same order as the product of their means, so a block
  is kept as one vector per head. Decoding retrieves anew for every token.

  Differs from the authors' repository: representatives are chosen per KV head, not per query head;
  tokens of the window have true distances also where they are a little farther than `local`; what
  left it is seen at `local`, there at one less.

  Attributes:
    init_tokens, local, block, retrieved, chunk, held, inject: as in `Streamed`.
    representatives: tokens that stand for a block.
  """

  representatives: int = least(1, 4)

  @property
  def traits(self) -> Traits:
    return super().traits.but(stream=Stream(self.chunk, alike=_first))

  def summaries(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    """One vector per block and KV head: the mean of the representatives' keys, not rotated."""
    sizes = spec.batch, spec.kv_heads, self._stored_blocks(spec), spec.head_dim
    return {"index": Leaf("heads", made=lambda: OwnRows({"mean": jnp.zeros(sizes)}))}

  def summarise(
    self,
    at: At,
    cache: Cache,
    k: Float[Array, "B K E U H"],
    votes: Float[Array, "B K E U"],
    block: Int[Array, "B E"],
  ) -> Cache:
    count = jnp.full((*votes.shape[:-1], 1), self.representatives)
    chosen = retrieval.elect(votes, jnp.ones((*votes.shape[:-1], 1, votes.shape[-1]), bool), count)
    mean = jnp.einsum("bkeu,bkeuh->bkeh", chosen[..., 0, :].astype(jnp.float32), k)
    mean = mean / min(self.representatives, self.block)
    index = cache.heads["index"].of["mean"]
    place = jnp.broadcast_to(block[:, None], mean.shape[:3])
    return cache.put(heads={"index": OwnRows({"mean": slots.put(index, place, mean)})})

  def similarity(
    self,
    at: At,
    cache: Cache,
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K T H"] | None,
    qpos: Int[Array, "B T"],
  ) -> Float[Array, "B N"]:
    """Σ over heads of the chunk's mean query times the block's vector."""
    real = (qpos >= 0)[:, None, None, :, None]
    turned = jnp.where(real, self._turned(at, q, qpos), 0).astype(jnp.float32)
    mean = turned.sum((2, 3)) / jnp.maximum(real.sum(3), 1)[:, :, 0]
    index = cache.heads["index"].of["mean"]
    return at.sum_heads(jnp.einsum("bkh,bknh->bn", mean, index))


def _first(layer: int) -> int:
  """All layers do the same."""
  return 0
