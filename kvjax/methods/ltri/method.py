"""Ltri-LLM: spans of triangular attention, retrieved from host memory (Tang et al., 2025)."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.core import slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Carry, Env, OwnRows
from kvjax.core.fields import bound, expect, least, one_of
from kvjax.core.leaves import Leaf
from kvjax.core.plan import Attended
from kvjax.core.traits import Stream, Traits
from kvjax.families import retrieval
from kvjax.families.streamed import Streamed
from kvjax.methods.ltri import evidence, kernel, spans, vectors
from kvjax.methods.ltri.vectors import INDICES, MODES
from kvjax.ops import offload
from kvjax.primitives import softmax_state
from kvjax.primitives.softmax_state import State


def _each(most: int | float, default: tuple[float, ...]) -> Any:
  """A field of numbers for the layers, one or more."""
  return bound(
    lambda values: values and all(0 <= x <= most for x in values),
    f"numbers in [0, {most}]",
    default,
  )


@dataclasses.dataclass(frozen=True)
class Ltri(Streamed, moves=("divide",)):
  """Divides the context into spans by its own attention, and retrieves blocks by their spans.

  The map of a block is what its queries give to its keys, as probabilities over everything they
  attend to, less a threshold of each head, summed over heads. Its spans are the triangles of
  largest sum, thinned out by non-maximum suppression (§3.2). Each has index vectors, the more the
  less the rest of the block knows of it: the keys of its tokens that gathered most votes from the
  window (§3.3).

  A chunk's queries are divided into spans by the chunk's attention to itself, and the similarity of
  two spans is Σ_m Σ_n q[m]·k[n] over their vectors (Eq. 8), of two blocks that of their best spans
  (Eq. 9). As this is (Σ_m q[m])·(Σ_n k[n]), a span is kept as the sum of its vectors, in float32.

  In a layer with a retrieval head that head's similarities choose; every layer's choice is a vote
  for its blocks with the head's score as weight, handed on to the layers above, and a layer
  retrieves the blocks of most votes, its own among them (§3.5). Layers below the first retrieval
  head retrieve nothing.

  Differs from the paper, or completes it: r_a is read from a figure (`vectors.ratios`); the "score
  decay" among its settings is that of InfLLM's replacement of device copies, no part of votes; the
  spans of a chunk's queries come from probabilities over the chunk alone, since what is retrieved
  is not yet known; spans that would have more than M vectors share them in proportion; voting by
  rank, `from_top` and `beside` are additions; `quantile` and `overlap` are typical values, those
  that the authors' search found for one model are in their Tabs. 6 and 7.

  >>> import kvjax
  >>> spec = kvjax.CacheSpec(
  ...   batch=1, capacity=1_000_000, kv_heads=2, groups=4, head_dim=64, layers=4
  ... )
  >>> plan = kvjax.plan_memory(spec, kvjax.Ltri(local=4096), apart=True)
  >>> plan.host > 20 * plan.device  # of a million tokens, most are in the host's memory
  True

  Attributes:
    init_tokens, local, block, retrieved, chunk, held, inject: as in `Streamed`.
    spans: C, spans per block (4; RULER 6).
    vectors: M, index vectors per block at most (12; RULER 24).
    index: the vectors of a span: "dynamic", keys of most votes, as many as Eq. 7 says; "static", as
      many in every span, M / C; "mean", the mean of all of its keys.
    rate: λ of Eq. 7, one for every layer, the last for all further ones.
    ratio: neighbours that r_a is taken over: "row", "col" or "rowcol".
    quantile: of the lower triangle of each head's map that is its θ, one for every layer as `rate`.
    overlap: φ, largest intersection over union of two spans, one for every layer as `rate`.
    last: Q, last tokens of a turn, which are read as a chunk of their own; 0: none.
    heads: retrieval heads as (layer, query head, score), at most one per layer; None: in every
      layer all heads together, score 1.
    persistent: whether decoding goes on with the blocks of the last chunk; else every token
      retrieves as a span of one vector.
    voting: whether the layers below have a say.
    ballot: a head's vote for each of its blocks: its "score" (§3.5), or by "rank" score / r for the
      r-th best.
    from_top: whether decoding goes on, in every layer, with the blocks that the top one retrieved
      for the last chunk of a turn: layers below the first retrieval head have none of their own.
    beside: how many of the best blocks are retrieved with both neighbours, in the place of the last
      ones: a fact may lie across a border, and either part alone ask for little.
    prefetch: whether layers with a retrieval head fetch what has most votes before their own
      queries are known, beside the layer below where the device runs both at once, and then what is
      still missing; layers without one do so anyway. Results are the same.
  """

  spans: int = least(1, 4)
  vectors: int = 12
  rate: tuple[float, ...] = _each(math.inf, (20.0, 20.0, 20.0, 20.0, 3.0))
  ratio: str = one_of(MODES, "row")
  index: str = one_of(INDICES, "dynamic")
  quantile: tuple[float, ...] = _each(1, (0.9,))
  overlap: tuple[float, ...] = _each(1, (0.1,))
  last: int = least(0, 32)
  heads: tuple[tuple[int, int, float], ...] | None = bound(
    evidence.one_per_layer, "one or more, one per layer, with finite scores", None
  )
  persistent: bool = True
  voting: bool = True
  ballot: str = one_of(evidence.BALLOTS, "score")
  from_top: bool = False
  beside: int = least(0, 0)
  prefetch: bool = False

  def __post_init__(self):
    super().__post_init__()
    expect(self, "vectors", self.vectors >= self.spans, f"{self.spans} or more")
    kept = self.persistent and self.last > 0
    expect(self, "from_top", kept or not self.from_top, "False without persistent or last")

  @property
  def traits(self) -> Traits:
    how = self.chunk, self.last, self.persistent, self._alike, self._no_votes
    return super().traits.but(stream=Stream(*how))

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
      "map": Leaf("heads", (spec.groups, self.block, self.block), in_place=True),
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
    """Adds the new queries' rows to the maps of their blocks; divides those a chunk makes whole."""
    if not _indexes(cache):
      return cache
    tokens = qpos.shape[1]
    start = jnp.maximum(qpos[:, 0], 0)  # the first new token; padding stands after
    end = jnp.maximum(qpos.max(1) + 1, start)
    first = slots.quotient(jnp.maximum(start - self.init_tokens, 0), self.block)
    blocks = -(-tokens // self.block) + (tokens > 1)
    block = first[:, None] + jnp.arange(blocks, dtype=jnp.int32)
    token = jnp.arange(self.block, dtype=jnp.int32)
    pos = self.init_tokens + block[..., None] * self.block + token  # [B, E, U]
    maps = self._maps(at, cache, near, q, attended, pos, start, end)
    if blocks == 1:
      return cache.put(heads={"map": maps[:, :, :, 0]})
    whole = (pos[..., -1] < end[:, None]) & (pos[..., -1] >= start[:, None])
    cache = self._divided(at, cache, maps, block, whole)
    newest = jnp.clip(slots.quotient(end - self.init_tokens, self.block) - first, 0, blocks - 1)
    newest = jnp.expand_dims(newest, range(1, maps.ndim))
    newest = jnp.take_along_axis(maps, newest, 3, mode="clip")[:, :, :, 0]
    return cache.put(heads={"map": newest})

  def _complete(self, at: At, cache: Cache, end: Int[Array, " B"], ok: Bool[Array, " B"]) -> Cache:
    """Divides the map of the block whose last token is at `end` − 1."""
    if not _indexes(cache):
      return cache
    beyond = end - self.init_tokens
    whole = ok & (beyond > 0) & (slots.remainder(beyond, self.block) == 0)
    block = slots.quotient(jnp.maximum(beyond - 1, 0), self.block)
    maps = cache.heads["map"][:, :, :, None]
    return self._divided(at, cache, maps, block[:, None], whole[:, None])

  def _divided(
    self,
    at: At,
    cache: Cache,
    maps: Float[Array, "B K G E U U"],
    block: Int[Array, "B E"],
    whole: Bool[Array, "B E"],
  ) -> Cache:
    """The cache that knows the spans of the blocks that are whole."""
    found = self.divide(at, cache, maps, jnp.where(whole, self.block, 0))
    ring = cache.rows["spans"].shape[1]
    into = jnp.where(whole, slots.remainder(block, ring), ring)
    return cache.put(
      rows={"spans": slots.overlaid(cache.rows["spans"], into, vectors.packed(*found))}
    )

  def divide(
    self, at: At, cache: Cache, maps: Float[Array, "B K G E U U"], length: Int[Array, "B E"] | None
  ) -> tuple[Int[Array, "B E C"], Int[Array, "B E C"], Int[Array, "B E C"], Float[Array, "B E C"]]:
    """Starts, stops, numbers of vectors, and r_a of each map's spans, by the layer's settings."""
    rate, overlap = (cache.rows[name][:, None] for name in ("rate", "overlap"))
    every, theta = spans.summed(at, maps, cache.rows["quantile"], length)
    found = kernel.divide(at, every, theta, length, overlap, self.spans, self.ratio)
    if found is None:
      start, stop = spans.divide(every, theta, overlap, self.spans, length)
      found = start, stop, vectors.ratios(every, start, stop, self.ratio)
    (start, stop, ratio), size = found, found[1] - found[0]
    if self.index == "dynamic":
      count = vectors.vector_counts(size, ratio, rate, self.vectors)
    else:
      count = vectors.static_counts(size, self.vectors if self.index == "static" else self.spans)
    return start, stop, count, ratio

  def _maps(
    self, at: At, cache: Cache, near: slots.Slots, q: Array, attended: Attended, *where: Array
  ) -> Float[Array, "B K G E U U"]:
    """Maps of the blocks of tokens `pos` [B, E, U], of which those of [start, end) are new."""
    (pos, start, end), size = where, cache.size
    flat = pos.reshape(pos.shape[0], -1)
    slot = self._slot_of(flat, size)
    if near["pos"].shape[2] > size:  # the new tokens stand after the slots
      slot = jnp.where(flat < start[:, None], slot, size + flat - start[:, None])
    slot = jnp.broadcast_to(slot[:, None], (*near["pos"].shape[:2], flat.shape[1]))
    blocks, state = pos.shape[1], attended.state
    if attended.logits is not None:  # of a token that is decoded: one row
      ok = (pos[:, 0] <= start[:, None]) & (start < end)[:, None]
      x = jnp.take_along_axis(attended.logits, slot[:, :, None], 3, mode="clip")
      asked = State(*(of_one[:, :, :, 0] for of_one in (q, state.m, state.l)))
      row = softmax_state.probabilities(asked, jnp.where(ok[:, None, None], x, -jnp.inf))
      # In place. Rows after it are another block's, and are written before this one is whole.
      counts = (start < end) if attended.counted is None else attended.counted & (start < end)
      index = jnp.where(counts, start - pos[:, 0, 0], self.block)
      held = cache.heads["map"].at[jnp.arange(index.size), :, :, index]
      return held.set(row, mode="drop")[:, :, :, None]
    index = flat - start[:, None]
    asks = (index >= 0) & (flat < end[:, None])
    k = spans.cut(slots.take(near["k"], slot), 2, blocks)
    q, m, l = (spans.cut(spans.queries(x, index), 3, blocks) for x in (q, state.m, state.l))
    token = jnp.arange(self.block)
    ok = asks.reshape(pos.shape)[..., None] & (token <= token[:, None])  # P (Eq. 2)
    known = cache.heads["map"][:, :, :, None]  # of the first block: rows of tokens before
    after = (pos - start[:, None, None])[:, None, None, ..., None]
    return jnp.where(after < 0, known, spans.maps_of(at, k, State(q, m, l), ok))

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
    rows, size = cache.rows, cache.rows["spans"].shape[1]
    place = slots.remainder(block, size)[:, :, None, None]
    found = jnp.take_along_axis(rows["spans"], place, 1, mode="clip")
    start, stop, count, _ = vectors.unpacked(found)
    every = at.sum_heads(votes.sum(1))  # Eq. 6; the mean over a group ranks as its sum does
    weight = vectors.weights(every, start, stop, count, self.index)
    b = jnp.arange(block.shape[0])[:, None]
    found = rows["found"].of["spans"].at[b, block].set(found, mode="drop")
    cache = cache.put(rows={"found": OwnRows({"spans": found})})
    if self.heads is None:
      index = cache.heads["index"].of["sum"]
      into = jnp.broadcast_to(block[:, None], k.shape[:3])
      new = jnp.einsum("becu,bkeuh->bkech", weight, k)
      return cache.put(heads={"index": OwnRows({"sum": slots.put(index, into, new)})})
    held_by = cache.heads["retrieval"].any(2)
    new = jnp.einsum("becu,beuh->bech", weight, evidence.of_head(at, held_by, k))
    index = rows["index"].of["sum"].at[b, block].set(new, mode="drop")
    return cache.put(rows={"index": OwnRows({"sum": index})})

  # ---- queries

  def _no_votes(self, cache: Any) -> Carry:
    """Votes of 0 for every block; where a layer fetches what it foresees by them, none at all."""
    if not self.voting or self.prefetch:
      return Carry()
    sizes = cache.rows["gone"].shape[0], offload.blocks_of(cache.heads["store"])
    return Carry(rows={"votes": jnp.zeros(sizes)})

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
      turned = evidence.of_head(at, cache.heads["retrieval"], turned)  # [B, T, H]
    sums, some = self._asked(at, cache, turned, q, k, qpos)
    index = (cache.heads if self.heads is None else cache.rows)["index"].of["sum"]
    return evidence.similarity(at, sums, some, index, cache.rows["found"].of["spans"])

  def _asked(
    self,
    at: At,
    cache: Cache,
    turned: Float[Array, "B *some T H"],
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K T H"] | None,
    qpos: Int[Array, "B T"],
  ) -> tuple[Float[Array, "B *some J H"], Bool[Array, "B J"]]:
    """Sums of the vectors that stand for the queries' spans, and which spans are real (§3.4).

    Args:
      at: where this runs.
      cache: the layer's, for its settings.
      turned: queries of one head or more, at the angle `local`.
      q, k, qpos: all heads' queries and keys, as in `similarity`; they say which spans there are.
    """
    if k is None:  # one token: a span of one vector
      return turned, jnp.ones(qpos.shape, bool)
    maps, votes, length = evidence.chunk_maps(at, q, k, qpos, self.block)
    start, stop, count, _ = self.divide(at, cache, maps, length)
    return evidence.sums_of(turned, vectors.weights(votes, start, stop, count, self.index))

  def choose(
    self, at: At, cache: Cache, similarity: Float[Array, "B N"] | None, carry: Carry
  ) -> tuple[Int[Array, "B R"] | None, Carry]:
    """The blocks of most votes; ties to the layer's own similarity, then to the oldest."""
    votes = carry.rows.get("votes")
    if similarity is None:
      if votes is None or not (self.prefetch and self.voting and _indexes(cache)):
        return None, carry
      return retrieval.best(cache, [evidence.some(votes)], self.retrieved), carry
    if not self.voting:
      return self._best(cache, [similarity]), carry
    votes = jnp.zeros_like(similarity) if votes is None else votes
    if _indexes(cache):
      votes = evidence.voted(cache, votes, similarity, self.retrieved, self.ballot)
    carry = dataclasses.replace(carry, rows={**carry.rows, "votes": votes})
    return self._best(cache, [evidence.some(votes), similarity]), carry

  def _best(self, cache: Cache, keys: list[Array]) -> Int[Array, "B R"]:
    """The blocks that go first by `keys`, with neighbours of some."""
    blocks = retrieval.best(cache, keys, self.retrieved)
    return retrieval.beside(cache, blocks, self.beside) if self.beside else blocks

  # ---- after the last chunk

  def _form(self, move: str) -> Any:
    """No layer waits for the others where none needs to."""
    return Streamed.conclude if move == "conclude" and not self.from_top else super()._form(move)

  def conclude(self, env: Env, caches: tuple[Any, ...], valid: Int[Array, " B"]) -> tuple[Any, ...]:
    """Has every layer hold the top one's blocks once the end of a turn was read (`from_top`).

    Pieces before it may be as short. What they hold is not used: the next one retrieves anew.
    """
    if not self.from_top:
      return caches
    ends, top = (valid > 0) & (valid <= self.last), retrieval.kept(caches[-1])
    return tuple(
      retrieval.hold(
        self.at(env, layer),
        cache,
        jnp.where(ends[:, None], top, retrieval.kept(cache)),
      )
      for layer, cache in enumerate(caches)
    )


def _indexes(cache: Cache) -> bool:
  """True where a layer keeps vectors of its blocks."""
  return "found" in cache.rows


def _of(values: tuple[float, ...], layer: int) -> float:
  """A layer's value; the last one holds for all further layers."""
  return values[min(layer, len(values) - 1)]
