"""Ltri-LLM: spans of triangular attention, retrieved from host memory (Tang et al., 2025)."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.core import slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Carry, OwnRows
from kvjax.core.fields import bound, expect, least, one_of
from kvjax.core.leaves import Leaf
from kvjax.core.plan import Attended
from kvjax.core.traits import Stream, Traits
from kvjax.families import retrieval, spans
from kvjax.families.spans import MODES
from kvjax.families.streamed import Streamed
from kvjax.ops import attention, offload
from kvjax.primitives import softmax_state
from kvjax.primitives.softmax_state import State

# Retrieval heads of Llama-3-8B-Instruct-262K: layer, query head, score (App. C).
LLAMA_3_8B_HEADS = (
  *((5, 8, 0.21), (8, 1, 0.49), (10, 14, 0.45), (13, 6, 0.15), (14, 18, 0.15), (15, 30, 0.90)),
  *((16, 1, 0.50), (17, 29, 0.12), (19, 3, 0.30), (20, 14, 0.44), (22, 14, 0.33), (24, 27, 0.46)),
  *((26, 15, 0.14), (27, 7, 0.30)),
)


def _each(most: int | float, default: tuple[float, ...]) -> Any:
  """A field of numbers for the layers, one or more."""
  return bound(
    lambda values: values and all(0 <= x <= most for x in values),
    f"numbers in [0, {most}]",
    default,
  )


def _one_per_layer(heads: tuple[tuple[int, int, float], ...]) -> bool:
  layers = {layer for layer, _, _ in heads}
  return 0 < len(heads) == len(layers) and all(min(head[:2]) >= 0 for head in heads)


@dataclasses.dataclass(frozen=True)
class Ltri(Streamed, moves=("divide",)):
  """Divides the context into spans by its own attention, and retrieves blocks by their spans.

  The map of a block is what its queries give to its keys, as probabilities over everything they
  attend to, summed over heads. Its spans are the triangles of largest sum above a threshold,
  thinned out by non-maximum suppression (§3.2). Each has index vectors, the more the less the rest
  of the block knows of it: the keys of its tokens that gathered most votes from the window (§3.3).
  A chunk's queries are divided into spans by the chunk's attention to itself, and the similarity of
  two spans is Σ_m Σ_n q[m]·k[n] over their vectors (Eq. 8), of two blocks that of their best spans
  (Eq. 9). As this is (Σ_m q[m])·(Σ_n k[n]), a span is kept as the sum of its vectors, in float32.

  In a layer with a retrieval head that head's similarities choose; every layer's choice is a vote
  for its blocks with the head's score as weight, handed on to the layers above, and a layer
  retrieves the blocks of most votes, its own among them (§3.5). Layers below the first retrieval
  head retrieve nothing.

  Differs from the paper, or completes it: r_a is read from a figure
  (`kvjax.families.spans.ratios`); the "score decay" among its settings is that of InfLLM's
  replacement of device copies and has no part in votes; the spans of a chunk's queries come from
  probabilities over the chunk alone, since what is retrieved is not yet known; `quantile` and
  `overlap` are the typical values, those found by the authors' search for one model are in their
  Tabs. 6 and 7.

  Attributes:
    init_tokens, local, block, retrieved, chunk, held, inject: as in `Streamed`.
    spans: C, spans per block (4; RULER 6).
    vectors: M, index vectors per block at most (12; RULER 24).
    rate: λ of Eq. 7, one for every layer, the last for all further ones.
    ratio: neighbours that r_a is taken over: "row", "col" or "rowcol".
    quantile: of the map's lower triangle that is θ, one for every layer as `rate`.
    overlap: φ, largest intersection over union of two spans, one for every layer as `rate`.
    last: Q, last tokens of a turn, which are read as a chunk of their own; 0: none.
    heads: retrieval heads as (layer, query head, score), at most one per layer; None: in every
      layer all heads together, score 1.
    persistent: whether decoding goes on with the blocks of the last chunk; else every token
      retrieves as a span of one vector.
    voting: whether the layers below have a say.
    prefetch: whether layers with a retrieval head fetch what has most votes before their own
      queries are known, beside the layer below where the device runs both at once, and then what is
      still missing; layers without one do so anyway. Results are the same.
  """

  spans: int = least(1, 4)
  vectors: int = 12
  rate: tuple[float, ...] = _each(math.inf, (20.0, 20.0, 20.0, 20.0, 3.0))
  ratio: str = one_of(MODES, "row")
  quantile: tuple[float, ...] = _each(1, (0.9,))
  overlap: tuple[float, ...] = _each(1, (0.1,))
  last: int = least(0, 32)
  heads: tuple[tuple[int, int, float], ...] | None = bound(
    _one_per_layer, "one or more, one per layer", None
  )
  persistent: bool = True
  voting: bool = True
  prefetch: bool = False

  def __post_init__(self):
    super().__post_init__()
    expect(self, "vectors", self.vectors >= self.spans, f"{self.spans} or more")

  @property
  def traits(self) -> Traits:
    """The last `last` tokens are a piece on their own."""
    return super().traits.but(stream=Stream(self.chunk, self.last, self.persistent, self._alike))

  def _head(self, layer: int) -> tuple[int, float] | None:
    """The retrieval head of a layer and its score; None: the layer has none."""
    found = [(head, score) for at, head, score in self.heads or () if at == layer]
    return found[0] if found else None

  def _alike(self, layer: int) -> int:
    """The first layer that has a retrieval head if this one has, or none: caches hold the rest."""
    return next(i for i in range(layer + 1) if bool(self._head(i)) == bool(self._head(layer)))

  def summaries(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    """Sums of the spans' vectors, of the retrieval head or of every head, and their numbers.

    Beside them, what is known of blocks in the window: the map of the newest, and the spans of
    the whole ones, in a ring. The layer's settings are arrays too, so that one program serves all
    layers that have a retrieval head, and another one those that have none and nothing of this.

    Raises:
      ValueError: a retrieval head that the model does not have.
    """
    head = self._head(layer)
    if self.heads is not None and head is None:
      return {}
    blocks, spans = self._stored_blocks(spec), (4, self.spans)
    sizes = blocks, self.spans, spec.head_dim
    ring = (self.capacity(spec, layer) - self.init_tokens) // self.block

    def own(shelf: str, name: str, *shape: int) -> Leaf:
      """Written row by row, in a shelf."""
      return Leaf(shelf, made=lambda: OwnRows({name: jnp.zeros(shape)}))

    each = {"rate": self.rate, "quantile": self.quantile, "overlap": self.overlap}
    held = {
      **{name: Leaf("rows", fill=_of(values, layer)) for name, values in each.items()},
      "score": Leaf("rows", fill=1.0 if head is None else head[1]),
      "map": Leaf("rows", (self.block, self.block)),
      "spans": Leaf("rows", (ring, *spans)),
      "found": own("rows", "spans", spec.batch, blocks, *spans),
    }
    if head is None:
      return {**held, "index": own("heads", "sum", spec.batch, spec.kv_heads, *sizes)}
    heads = spec.kv_heads * spec.groups
    if head[0] >= heads:
      raise ValueError(
        f"{type(self).__name__}.heads: found query head {head[0]} of layer {layer}, expected one "
        f"of {heads} heads"
      )
    chosen = np.arange(heads).reshape(spec.kv_heads, -1) == head[0]
    held["retrieval"] = Leaf("heads", (spec.groups,), bool, chosen)
    return {**held, "index": own("rows", "sum", spec.batch, *sizes)}

  # ---- blocks: their maps, their spans, their vectors

  def learn(
    self, at: At, cache: Cache, near: slots.Slots, q: Array, qpos: Array, attended: Attended
  ) -> Cache:
    """Adds the new queries' rows to the maps of their blocks, and divides those that are whole."""
    if not _indexes(cache):
      return cache
    size, tokens = cache.size, qpos.shape[1]
    start = jnp.maximum(qpos[:, 0], 0)  # the first new token; padding stands after
    end = jnp.maximum(qpos.max(1) + 1, start)
    first = slots.quotient(jnp.maximum(start - self.init_tokens, 0), self.block)
    blocks = -(-tokens // self.block) + (tokens > 1)
    block = first[:, None] + jnp.arange(blocks, dtype=jnp.int32)
    token = jnp.arange(self.block, dtype=jnp.int32)
    pos = self.init_tokens + block[..., None] * self.block + token  # [B, E, U]
    flat = pos.reshape(pos.shape[0], -1)
    behind = near["pos"].shape[2] > size  # whether the new tokens stand after the slots
    slot = self._slot_of(flat, size)
    if behind:
      slot = jnp.where(flat < start[:, None], slot, size + flat - start[:, None])
    slot = jnp.broadcast_to(slot[:, None], (*near["pos"].shape[:2], flat.shape[1]))
    index = flat - start[:, None]
    asks = (index >= 0) & (flat < end[:, None])
    q, m, l = (_cut(_queries(x, index), 3, blocks) for x in (q, attended.state.m, attended.state.l))
    k = _cut(slots.take(near["k"], slot), 2, blocks)
    maps = self._maps(at, k, State(q, m, l), asks.reshape(pos.shape))
    maps = at.sum_heads(maps.sum(1))  # [B, E, U, U]
    # Rows of tokens that came before, all of them in the first block.
    maps = jnp.where((pos < start[:, None, None])[..., None], cache.rows["map"][:, None], maps)
    whole = (pos[..., -1] < end[:, None]) & (pos[..., -1] >= start[:, None])

    def divided(maps: Array) -> Array:
      return spans.packed(*self.divide(cache, maps, None))

    if tokens > 1:
      found = divided(maps)
    else:  # a block becomes whole once in many steps
      shape = jax.eval_shape(divided, maps)
      found = jax.lax.cond(
        whole.any(), divided, lambda _: jnp.zeros(shape.shape, shape.dtype), maps
      )
    ring = cache.rows["spans"].shape[1]
    into = jnp.where(whole, slots.remainder(block, ring), ring)
    rows = {"spans": slots.overlaid(cache.rows["spans"], into, found)}
    newest = slots.quotient(end - self.init_tokens, self.block)
    newest = jnp.clip(newest - first, 0, blocks - 1)
    rows["map"] = jnp.take_along_axis(maps, newest[:, None, None, None], 1, mode="clip")[:, 0]
    return cache.put(rows=rows)

  def divide(
    self, cache: Cache, maps: Float[Array, "B E U U"], length: Int[Array, "B E"] | None
  ) -> tuple[Int[Array, "B E C"], Int[Array, "B E C"], Int[Array, "B E C"], Float[Array, "B E C"]]:
    """Starts, stops, numbers of vectors, and r_a of the spans of each map, as the layer of the
    cache divides them.
    """
    rate, quantile, overlap = (cache.rows[n][:, None] for n in ("rate", "quantile", "overlap"))
    start, stop = spans.divide(maps, quantile, overlap, self.spans, length)
    ratio = spans.ratios(maps, start, stop, self.ratio)
    count = spans.vector_counts(stop - start, ratio, rate, self.vectors // self.spans)
    return start, stop, count, ratio

  def _maps(
    self, at: At, k: Float[Array, "B K E U H"], asked: State, asks: Bool[Array, "B E U"]
  ) -> Float[Array, "B K E U U"]:
    """Probability that each query of a block gives to each of its keys, summed over the group.

    `asked` holds the queries [B, K, G, E, U, H] in the place of o, and their m and l.
    """
    logits = jnp.einsum("bkgeuh,bkevh->bkgeuv", asked.o, k, preferred_element_type=jnp.float32)
    logits = softmax_state.capped(logits * k.shape[-1] ** -0.5, at.env.soft_cap)
    token = jnp.arange(asks.shape[-1])
    ok = asks[..., None] & (token <= token[:, None])
    logits = jnp.where(ok[:, None, None], logits, -jnp.inf)
    return softmax_state.probabilities(asked, logits).sum(2)

  def summarise(
    self,
    at: At,
    cache: Cache,
    k: Float[Array, "B K E U H"],
    votes: Float[Array, "B K E U"],
    block: Int[Array, "B E"],
  ) -> Cache:
    if not _indexes(cache):
      return cache
    rows = cache.rows
    place = slots.remainder(block, rows["spans"].shape[1])[:, :, None, None]
    found = jnp.take_along_axis(rows["spans"], place, 1, mode="clip")
    start, stop, count, _ = spans.unpacked(found)
    every = at.sum_heads(votes.sum(1))  # Eq. 6; the mean over a group ranks as its sum does
    chosen = spans.elect(every, spans.inside(start, stop, self.block), count)
    weight = chosen.astype(jnp.float32)
    b = jnp.arange(block.shape[0])[:, None]
    found = rows["found"].of["spans"].at[b, block].set(found, mode="drop")
    cache = cache.put(rows={"found": OwnRows({"spans": found})})
    if self.heads is None:
      index = cache.heads["index"].of["sum"]
      into = jnp.broadcast_to(block[:, None], k.shape[:3])
      new = jnp.einsum("becu,bkeuh->bkech", weight, k)
      return cache.put(heads={"index": OwnRows({"sum": slots.put(index, into, new)})})
    held_by = cache.heads["retrieval"].any(2)
    new = jnp.einsum("becu,beuh->bech", weight, _of_head(at, held_by, k))
    index = rows["index"].of["sum"].at[b, block].set(new, mode="drop")
    return cache.put(rows={"index": OwnRows({"sum": index})})

  # ---- queries

  def similarity(
    self,
    at: At,
    cache: Cache,
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K T H"] | None,
    qpos: Int[Array, "B T"],
  ) -> Float[Array, "B N"]:
    """Of the best pair of a query's and a block's span (Eqs. 8, 9); −∞ where there is none."""
    if not _indexes(cache):
      blocks = offload.blocks_of(cache.heads["store"])
      return jnp.full((q.shape[0], blocks), -jnp.inf, jnp.float32)
    turned = self._turned(at, q, qpos)
    if self.heads is None:
      turned = turned.astype(jnp.float32).sum(2)  # [B, K, T, H]
    else:
      turned = _of_head(at, cache.heads["retrieval"], turned)  # [B, T, H]
    if k is None:  # one token: a span of one vector
      vectors, some = turned, jnp.ones(qpos.shape, bool)
    else:
      chosen = self._chosen_queries(at, cache, q, k, qpos)  # [B, E, C, U]
      blocks = chosen.shape[1]
      turned = _cut(_padded(turned, -2, blocks * self.block), -2, blocks)
      vectors = jnp.einsum("becu,b...euh->b...ech", chosen.astype(jnp.float32), turned)
      vectors = vectors.reshape(*vectors.shape[:-3], -1, vectors.shape[-1])  # spans in one row
      some = chosen.any(-1).reshape(chosen.shape[0], -1)
    if self.heads is None:
      pairs = jnp.einsum("bkjh,bknch->bjnc", vectors, cache.heads["index"].of["sum"])
      pairs = at.sum_heads(pairs)
    else:
      pairs = jnp.einsum("bjh,bnch->bjnc", vectors, cache.rows["index"].of["sum"])
    count = spans.unpacked(cache.rows["found"].of["spans"])[2]
    real = some[:, :, None, None] & (count > 0)[:, None]
    return jnp.where(real, pairs, -jnp.inf).max((1, 3))

  def _chosen_queries(
    self,
    at: At,
    cache: Cache,
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K T H"],
    qpos: Int[Array, "B T"],
  ) -> Bool[Array, "B E C U"]:
    """Which queries of a chunk stand for which of its spans, by blocks from the chunk's start."""
    batch, tokens = qpos.shape
    blocks = -(-tokens // self.block)
    size = blocks * self.block
    q, k, pos = _padded(q, 3, size), _padded(k, 2, size), _padded(qpos, 1, size, -1)

    def of_block(start: Array) -> tuple[Array, Array]:
      """Attention of one block's queries to the chunk: their map, and their votes for all keys."""
      mine = jax.lax.dynamic_slice_in_dim(q, start, self.block, 3)
      asked = jax.lax.dynamic_slice_in_dim(pos, start, self.block, 1)[..., None]
      ok = (asked >= 0) & (pos[:, None] >= 0) & (pos[:, None] <= asked)
      x = jnp.where(ok[:, None, None], attention.logits_of(mine, k, at.env.soft_cap), -jnp.inf)
      p = jax.nn.softmax(x, -1, where=ok[:, None, None]).sum((1, 2))
      p = at.sum_heads(jnp.where(ok, p, 0))
      return jax.lax.dynamic_slice_in_dim(p, start, self.block, 2), p.sum(1)

    starts = jnp.arange(blocks, dtype=jnp.int32) * self.block
    maps, votes = jax.lax.map(of_block, starts)
    votes = votes.sum(0).reshape(batch, blocks, self.block)
    length = (pos >= 0).reshape(batch, blocks, -1).sum(-1, dtype=jnp.int32)
    start, stop, count, _ = self.divide(cache, jnp.moveaxis(maps, 0, 1), length)
    return spans.elect(votes, spans.inside(start, stop, self.block), count)

  def choose(
    self, at: At, cache: Cache, similarity: Float[Array, "B N"] | None, carry: Carry
  ) -> tuple[Int[Array, "B R"] | None, Carry]:
    """The blocks of most votes; ties to the layer's own similarity, then to the oldest."""
    votes = carry.rows.get("votes")
    if similarity is None:
      if votes is None or not (self.prefetch and self.voting and _indexes(cache)):
        return None, carry
      return retrieval.best(cache, [_some(votes)], self.retrieved), carry
    if not self.voting:
      return retrieval.best(cache, [similarity], self.retrieved), carry
    votes = jnp.zeros_like(similarity) if votes is None else votes
    if _indexes(cache):
      mine = retrieval.ranks(cache, [similarity], forces=False) < min(
        self.retrieved, similarity.shape[1]
      )
      votes = votes + jnp.where(mine, cache.rows["score"][:, None], 0.0)
    carry = dataclasses.replace(carry, rows={**carry.rows, "votes": votes})
    return retrieval.best(cache, [_some(votes), similarity], self.retrieved), carry


def _indexes(cache: Cache) -> bool:
  """Whether a layer keeps vectors of its blocks."""
  return "found" in cache.rows


def _of_head(at: At, chosen: Bool[Array, "B *heads"], x: Float[Array, "B *heads_rest"]) -> Array:
  """x of the one chosen head, float32, whichever shard holds it."""
  axes = tuple(range(1, chosen.ndim))
  chosen = jnp.expand_dims(chosen, range(chosen.ndim, x.ndim))
  return at.sum_heads(jnp.where(chosen, x, 0).astype(jnp.float32).sum(axes))


def _some(votes: Float[Array, "B N"]) -> Float[Array, "B N"]:
  """Votes; −∞ for blocks without any, which do not take part."""
  return jnp.where(votes > 0, votes, -jnp.inf)


def _queries(x: Array, index: Int[Array, "B N"]) -> Array:
  """Entries of x [B, K, G, T, …] by their index within the chunk; out of range: any."""
  index = index.reshape(index.shape[0], 1, 1, -1, *(1,) * (x.ndim - 4))
  return jnp.take_along_axis(x, index, 3, mode="clip")


def _cut(x: Array, axis: int, blocks: int) -> Array:
  """An axis of tokens as blocks and tokens."""
  axis %= x.ndim
  return x.reshape(*x.shape[:axis], blocks, -1, *x.shape[axis + 1 :])


def _padded(x: Array, axis: int, size: int, fill: int = 0) -> Array:
  """x lengthened along an axis."""
  width = [(0, 0)] * x.ndim
  width[axis] = (0, size - x.shape[axis])
  return jnp.pad(x, width, constant_values=fill)


def _of(values: tuple[float, ...], layer: int) -> float:
  """A layer's value; the last one holds for all further layers."""
  return values[min(layer, len(values) - 1)]
