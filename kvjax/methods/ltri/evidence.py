"""Blocks that a chunk's queries ask for: similarity of spans (Ltri-LLM §3.4), votes (§3.5)."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.core.cache import Cache
from kvjax.core.context import At
from kvjax.families import retrieval
from kvjax.methods.ltri import vectors
from kvjax.methods.ltri.spans import cut, padded
from kvjax.ops import attention

LOGITS = 1 << 26  # of a chunk's queries and keys, that are held at once

# ---- §3.4: the chunk's spans and the blocks' (Eqs. 8, 9)


def chunk_maps(
  at: At,
  q: Float[Array, "B K G T H"],
  k: Float[Array, "B K T H"],
  qpos: Int[Array, "B T"],
  size: int,
) -> tuple[Float[Array, "B K G E U U"], Float[Array, "B E U"], Int[Array, "B E"]]:
  """Maps of a chunk's blocks of `size` tokens, votes for its keys (Eq. 6), and real tokens."""
  batch, tokens = qpos.shape
  blocks = -(-tokens // size)
  logits = q.size // q.shape[-1] * blocks * size  # of all queries
  few = max(1, min(blocks, blocks * LOGITS // logits))  # blocks at a time
  pieces = -(-blocks // few)
  whole = pieces * few * size
  q, k, pos = padded(q, 3, whole), padded(k, 2, whole), padded(qpos, 1, whole, -1)

  def of_piece(start: Array) -> tuple[Array, Array]:
    """Attention of a few blocks' queries to the chunk: their maps, and their votes for all keys."""
    mine = jax.lax.dynamic_slice_in_dim(q, start, few * size, 3)
    asked = jax.lax.dynamic_slice_in_dim(pos, start, few * size, 1)[..., None]
    ok = (asked >= 0) & (pos[:, None] >= 0) & (pos[:, None] <= asked)
    x = jnp.where(ok[:, None, None], attention.logits_of(mine, k, at.env.soft_cap), -jnp.inf)
    p = jnp.where(ok[:, None, None], jax.nn.softmax(x, -1, where=ok[:, None, None]), 0)
    rows = jnp.split(p, few, 3)
    maps = (jax.lax.dynamic_slice_in_dim(x, start + i * size, size, 4) for i, x in enumerate(rows))
    return jnp.stack([*maps], 3), p.sum((1, 2, 3))

  if pieces == 1:
    maps, votes = of_piece(jnp.int32(0))
  else:
    maps, votes = jax.lax.map(of_piece, jnp.arange(pieces, dtype=jnp.int32) * (few * size))
    maps = jnp.moveaxis(maps, 0, 3)
    maps, votes = maps.reshape(*maps.shape[:3], -1, *maps.shape[5:]), votes.sum(0)
  votes = at.sum_heads(votes).reshape(batch, -1, size)[:, :blocks]
  length = (pos >= 0).reshape(batch, -1, size).sum(-1, dtype=jnp.int32)[:, :blocks]
  return maps[:, :, :, :blocks], votes, length


def sums_of(
  turned: Float[Array, "B *K T H"], weights: Float[Array, "B E C U"]
) -> tuple[Float[Array, "B *K J H"], Bool[Array, "B J"]]:
  """Σ_m q[m] over the queries that stand for each span, and which spans have any (Eq. 8)."""
  blocks, size = weights.shape[1], weights.shape[3]
  turned = cut(padded(turned, -2, blocks * size), -2, blocks)
  sums = jnp.einsum("becu,b...euh->b...ech", weights, turned)
  sums = sums.reshape(*sums.shape[:-3], -1, sums.shape[-1])  # spans in one row
  return sums, (weights > 0).any(-1).reshape(weights.shape[0], -1)


def similarity(
  at: At,
  sums: Float[Array, "B *K J H"],
  some: Bool[Array, "B J"],
  index: Float[Array, "B *K N C H"],
  found: Float[Array, "B N 4 C"],
) -> Float[Array, "B N"]:
  """Of each block that of the best pair of a query's and a block's span; −∞ where there is none.

  Args:
    sums, some: of the queries' spans, as from `sums_of`, of a retrieval head or of all KV heads.
    index: Σ_n k[n] over the vectors of each block's spans.
    found: what is known of those spans, as `vectors.packed` puts it.
  """
  if sums.ndim == 4:
    pairs = at.sum_heads(jnp.einsum("bkjh,bknch->bjnc", sums, index))  # Eq. 8
  else:
    pairs = jnp.einsum("bjh,bnch->bjnc", sums, index)
  return best_pairs(pairs, some, found)


def best_pairs(
  pairs: Float[Array, "B *heads J N C"], some: Bool[Array, "B J"], found: Float[Array, "B N 4 C"]
) -> Float[Array, "B *heads N"]:
  """Of each block the best similarity of its spans to the queries'; −∞ without any (Eq. 9)."""
  count = vectors.unpacked(found)[2]
  real = some[:, :, None, None] & (count > 0)[:, None]
  real = jnp.expand_dims(real, range(1, pairs.ndim - 3))
  return jnp.where(real, pairs, -jnp.inf).max((-3, -1))


# ---- §3.5: retrieval heads, collaborative voting

BALLOTS = ("score", "rank")

# Retrieval heads of Llama-3-8B-Instruct-262K: layer, query head, score (App. C).
LLAMA_3_8B_HEADS = (
  *((5, 8, 0.21), (8, 1, 0.49), (10, 14, 0.45), (13, 6, 0.15), (14, 18, 0.15), (15, 30, 0.90)),
  *((16, 1, 0.50), (17, 29, 0.12), (19, 3, 0.30), (20, 14, 0.44), (22, 14, 0.33), (24, 27, 0.46)),
  *((26, 15, 0.14), (27, 7, 0.30)),
)


def one_per_layer(heads: tuple[tuple[int, int, float], ...]) -> bool:
  """True for one head or more, at most one in a layer, with finite scores."""
  layers = {layer for layer, _, score in heads if math.isfinite(score)}
  return 0 < len(heads) == len(layers) and all(min(head[:2]) >= 0 for head in heads)


def of_head(at: At, chosen: Bool[Array, "B *heads"], x: Float[Array, "B *heads_rest"]) -> Array:
  """x of the one chosen head, float32, whichever shard holds it."""
  axes = tuple(range(1, chosen.ndim))
  chosen = jnp.expand_dims(chosen, range(chosen.ndim, x.ndim))
  return at.sum_heads(jnp.where(chosen, x, 0).astype(jnp.float32).sum(axes))


def voted(
  cache: Cache, votes: Float[Array, "B N"], similarity: Float[Array, "B N"], count: int, ballot: str
) -> Float[Array, "B N"]:
  """Votes of the layers below and of this one: its head's score, for its `count` best blocks.

  With the ballot "rank" its r-th best block gets score / r: later heads that agree on their first
  ones overturn what earlier ones found in passing.
  """
  rank = retrieval.ranks(cache, [similarity], forces=False)
  score = cache.rows["score"][:, None] / (1 + rank if ballot == "rank" else 1)
  return votes + jnp.where(rank < min(count, similarity.shape[1]), score, 0.0)


def some(votes: Float[Array, "B N"]) -> Float[Array, "B N"]:
  """Votes; −∞ for blocks without any, which do not take part."""
  return jnp.where(votes > 0, votes, -jnp.inf)
