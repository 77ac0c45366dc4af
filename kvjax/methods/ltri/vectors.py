"""Index vectors of spans: how many of a span's keys stand for it (Ltri-LLM §3.3).

Maps and spans are those of `kvjax.methods.ltri.spans`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.families import retrieval

MODES = ("row", "col", "rowcol")
INDICES = ("dynamic", "static", "mean")


def inside(
  start: Int[Array, "*batch C"], stop: Int[Array, "*batch C"], size: int
) -> Bool[Array, "*batch C U"]:
  """Tokens that each span holds."""
  token = jnp.arange(size)
  return (token >= start[..., None]) & (token < stop[..., None])


def ratios(
  maps: Float[Array, "*batch U U"],
  start: Int[Array, "*batch C"],
  stop: Int[Array, "*batch C"],
  mode: str,
) -> Float[Array, "*batch C"]:
  """r_a: a span's share of the attention that it and its neighbours hold (§3.3.2, Fig. 5).

  Neighbours are, for "row", the span's queries over earlier keys; for "col", later queries over the
  span's keys; for "rowcol" both. The paper gives no formula: this is the reading of its figure.
  Without any attention the share is 1.
  """
  size = maps.shape[-1]
  held = inside(start, stop, size).astype(maps.dtype)
  token = jnp.arange(size)
  earlier = (token < start[..., None]).astype(maps.dtype)
  later = (token >= stop[..., None]).astype(maps.dtype)

  def total(queries: Array, keys: Array) -> Array:
    return jnp.einsum("...ci,...ij,...cj->...c", queries, maps, keys)

  own = every = total(held, held)
  if mode in ("row", "rowcol"):
    every = every + total(held, earlier)
  if mode in ("col", "rowcol"):
    every = every + total(later, held)
  share = own / jnp.where(every > 0, every, 1)
  return jnp.where(every > 0, jnp.minimum(share, 1), 1.0)  # x / x of a GPU may be above 1


def vector_counts(
  length: Int[Array, "*batch C"],
  ratio: Float[Array, "*batch C"],
  rate: float | Float[Array, " *#batch"],
  most: int,
) -> Int[Array, "*batch C"]:
  """n = ⌈length · r_v⌉, r_v = exp(−λ(1 − r_a)) (Eq. 7), in a block at most M; 0 for no token.

  A block whose spans would have more keeps one for each, and the other M − C are shared in
  proportion to what they would have beyond it (the paper bounds a block, and does not say how).
  """
  n = jnp.ceil(length * jnp.exp(-jnp.asarray(rate)[..., None] * (1 - ratio))).astype(jnp.int32)
  one = (length > 0).astype(jnp.int32)
  more = jnp.where(length > 0, jnp.maximum(n - 1, 0), 0)
  total, room = (x[..., None] for x in (more.sum(-1), most - one.sum(-1)))
  upto = jnp.cumsum(more, -1) * room // jnp.maximum(total, 1)
  shared = jnp.diff(upto, axis=-1, prepend=0)
  return one + jnp.where(total > room, shared, more)


def static_counts(length: Int[Array, "*batch C"], most: int) -> Int[Array, "*batch C"]:
  """M / C vectors for each span, as long as it has as many tokens (§3.3.1)."""
  return jnp.minimum(length, most // length.shape[-1])


def weights(
  votes: Float[Array, "*batch U"],
  start: Int[Array, "*batch C"],
  stop: Int[Array, "*batch C"],
  count: Int[Array, "*batch C"],
  index: str,
) -> Float[Array, "*batch C U"]:
  """Weights of tokens in the sum that stands for a span: 1 for the `count` of most votes (Eq. 6).

  With the index "mean", 1 / length for all of its tokens: the mean of their vectors (§3.3.1).
  """
  held = inside(start, stop, votes.shape[-1])
  if index == "mean":
    return held / jnp.maximum(stop - start, 1)[..., None].astype(jnp.float32)
  return retrieval.elect(votes, held, count).astype(jnp.float32)


def packed(start: Array, stop: Array, count: Array, ratio: Array) -> Float[Array, "*batch 4 C"]:
  """All that is known of blocks' spans as one array; the integers are small enough for it."""
  return jnp.stack([x.astype(jnp.float32) for x in (start, stop, count, ratio)], -2)


def unpacked(spans: Float[Array, "*batch 4 C"]) -> tuple[Array, Array, Array, Array]:
  """Starts, stops, numbers of vectors, int32, and r_a."""
  start, stop, count = (spans[..., i, :].astype(jnp.int32) for i in range(3))
  return start, stop, count, spans[..., 3, :]
