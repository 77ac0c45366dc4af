"""Methods with a cache in host memory: window, blocks, retrieval, persistence.

The context is the first tokens, evicted blocks, and a window of newest tokens, in this order:

    [ init ‖ block 0 ‖ block 1 ‖ … ‖ window ]

Blocks leave the window whole, as soon as `local` newer tokens have come, and go to a store in host
memory; on the device remain vectors that stand for them. A chunk of a prompt, or a decoded token,
attends to the first tokens, the blocks that its queries retrieve, the window and itself.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.core import settings, slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Carry, Env, Prompt, Turn
from kvjax.core.fields import expect, least
from kvjax.core.leaves import Layout, Leaf
from kvjax.core.plan import Attended, Plan
from kvjax.core.traits import Stream, Traits
from kvjax.families import forms, leaving, retrieval
from kvjax.families.method import Aux, Method
from kvjax.ops import decode, insertion, offload, prefill
from kvjax.primitives import softmax_state


@dataclasses.dataclass(frozen=True)
class Streamed(Method, moves=("summaries", "summarise", "similarity", "choose", "learn")):
  """A window on the device, blocks in host memory, retrieval of some of them.

  A subclass defines which vectors represent a block (`summaries`, `summarise`), how similar they
  are to the queries of a chunk or of a step (`similarity`), and, unless the most similar blocks
  are chosen, which ones are (`choose`).

  Positions: within the window and the chunk distances are true. Once a block has left, the first
  tokens and all retrieved ones are seen at the distance `local`, whatever their position: their
  keys are not rotated, and the query is taken at the angle `local`.

  Reading a prompt by one call of the model's `prefill` is reading one chunk of it;
  `kvjax.models.decode.generate.prefill` cuts prompts into the method's chunks.

  Attributes:
    init_tokens: first tokens, which always stay.
    local: newest tokens that are always in the window, and the distance at which others are seen.
    block: tokens per block.
    retrieved: blocks that are attended to in addition to the window.
    chunk: tokens of a prompt that are read at a time.
    held: retrieved blocks of which the device keeps copies; the least recently used leave.
    inject: how many blocks a caller can force into what is retrieved, see
      `kvjax.families.retrieval.injected`.
  """

  init_tokens: int = least(0, 128)
  local: int = least(1, 4096)
  block: int = least(1, 128)
  retrieved: int = least(1, 16)
  chunk: int = least(1, 512)
  held: int = 32
  inject: int = least(0, 0)
  _spares: ClassVar[Any] = ("k", "v", "pos", "held_k", "held_v")

  def __post_init__(self):
    retrieved = self.retrieved
    expect(self, "held", self.held >= retrieved, f"at least retrieved = {retrieved}")
    expect(self, "inject", self.inject <= retrieved, f"at most retrieved = {retrieved}")

  @property
  def traits(self) -> Traits:
    usual = super().traits.but(positional=False, chunkable=False, wants_logits=True)
    return usual.but(endless=True, by_layer=True, stream=Stream(self.chunk))

  # ---- shapes

  def capacity(self, spec: CacheSpec, layer: int) -> int:
    """First tokens, and a ring of the window with room for two blocks that are about to leave."""
    reach = min(self.local, max(spec.capacity - self.init_tokens, 1))
    return self.init_tokens + (-(-reach // self.block) + 2) * self.block

  def _stored_blocks(self, spec: CacheSpec) -> int:
    """Blocks that can leave the window within the capacity, at least 1."""
    return max(1, -(-(spec.capacity - self.init_tokens - self.local) // self.block))

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    """Per-slot votes; the store and the device's copies; which blocks are copied and retrieved.

    Behind the copies stand the first tokens once more, as they are seen from afar: not rotated.
    """
    sizes = spec.batch, spec.kv_heads, self._stored_blocks(spec), self.block, spec.head_dim
    held = min(self.held, self._stored_blocks(spec))  # no more than there will ever be
    size = held * self.block + self.init_tokens
    copies = Leaf("heads", (size, spec.head_dim), spec.dtype, in_place=True)
    store = functools.partial(offload.empty, *sizes, spec.dtype)

    def blocks(count: int) -> Leaf:
      return Leaf("rows", (count,), jnp.int32, -1, in_place=True)  # as the copies that they name

    return {
      **super().leaves(spec, layer),
      "votes": Leaf("slots", standing=True),  # `observe` clears those of a slot's last token
      "held_k": copies,
      "held_v": copies,
      "store": Leaf("heads", layout=Layout.HOSTED, made=store),
      "gone": Leaf("rows", dtype=jnp.int32),
      "held": blocks(held),
      "used_at": blocks(held),
      "kept": blocks(self.retrieved),
      # No empty array: over several devices jax 0.11 does not compile one.
      **({"inject": blocks(self.inject)} if self.inject else {}),
      **self.summaries(spec, layer),
    }

  # ---- what a subclass says

  def summaries(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    """Leaves of the summaries that stand for blocks."""
    raise NotImplementedError(f"{type(self).__name__}.summaries")

  def summarise(
    self,
    at: At,
    cache: Cache,
    k: Float[Array, "B K E U H"],
    votes: Float[Array, "B K E U"],
    block: Int[Array, "B E"],
  ) -> Cache:
    """Stores the vectors of blocks that leave, keys not rotated; ignores numbers past the end."""
    raise NotImplementedError(f"{type(self).__name__}.summarise")

  def similarity(
    self,
    at: At,
    cache: Cache,
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K T H"] | None,
    qpos: Int[Array, "B T"],
  ) -> Float[Array, "B N"]:
    """Similarity of a chunk's queries to each block; k: the chunk's keys, None in a decode step."""
    raise NotImplementedError(f"{type(self).__name__}.similarity")

  def choose(
    self, at: At, cache: Cache, similarity: Float[Array, "B N"] | None, carry: Carry
  ) -> tuple[Int[Array, "B R"] | None, Carry]:
    """The blocks to retrieve, best first (−1 = none): the forced ones, then the most similar.

    Without a similarity: those that the layer will probably retrieve, from what the layers below
    hand on; they are fetched as soon as they are known, which does not wait for the layer's
    queries. None: no idea.
    """
    return None if similarity is None else retrieval.best(
      cache, [similarity], self.retrieved
    ), carry

  def learn(
    self, at: At, cache: Cache, near: slots.Slots, q: Array, qpos: Array, attended: Attended
  ) -> Cache:
    """Notes what else to remember of a chunk's attention, q [B, K, G, A, H], before it is kept."""
    return cache

  def _complete(self, at: At, cache: Cache, end: Int[Array, " B"], ok: Bool[Array, " B"]) -> Cache:
    """Notes what is known of a block once its last token, the row's newest, has been decoded.

    Args:
      at: where this runs.
      cache: after `learn`.
      end: tokens seen, the new one included; it may be in the middle of a block.
      ok: rows that take part.
    """
    return cache

  # ---- geometry

  def _first(self, cache: Cache) -> Int[Array, " B"]:
    """Position of the oldest token that is near: of all, as long as none has left."""
    gone = cache.rows["gone"]
    return jnp.where(gone > 0, self.init_tokens + gone * self.block, 0)

  def _slot_of(self, pos: Int[Array, "*any"], size: int) -> Int[Array, "*any"]:
    """Slot of a position: the first tokens in their place, the others in a ring after them."""
    beyond = pos - self.init_tokens
    turned = self.init_tokens + slots.remainder(beyond, size - self.init_tokens)
    return jnp.where(beyond < 0, pos, turned)

  def _near(self, cache: Cache, new: slots.Slots) -> slots.Slots:
    """Window and chunk side by side; position −1 where a token has left, or is far."""
    joined = slots.join(cache.slots, new)
    near = joined["pos"] >= self._first(cache)[:, None, None]
    return {**joined, "pos": jnp.where(near, joined["pos"], -1)}

  def _turned(self, at: At, q: Array, qpos: Int[Array, "B T"]) -> Array:
    """Queries [B, K, G, T, H] at the angle `local`, from which they see retrieved tokens."""
    return at.env.rope.shift(q, (self.local - qpos)[:, None, None])

  # ---- retrieval

  def _retrieve(
    self, at: At, cache: Cache, similarity: Array, carry: Carry, ok: Bool[Array, "B 1"]
  ) -> tuple[Cache, Carry]:
    """The cache that holds what the layer chooses in rows that are ok, and what it hands on."""
    old = cache
    foreseen, _ = self.choose(at, cache, None, carry)
    if foreseen is not None:
      cache = retrieval.hold(at, cache, jnp.where(ok, foreseen, -1))
      # What turns out not to be wanted has to leave before what is.
      before = cache.seen[:, None] - 1
      cache = cache.put(rows={"used_at": jnp.minimum(cache.rows["used_at"], before)})
    wanted, carry = self.choose(at, cache, similarity, carry)
    assert wanted is not None
    cache = retrieval.hold(at, cache, jnp.where(ok, wanted, -1))
    named = "held", "used_at", "kept"
    return cache.put(rows={n: jnp.where(ok, cache.rows[n], old.rows[n]) for n in named}), carry

  def _far_tiles(self, cache: Cache) -> Int[Array, "B W"]:
    """Tiles of `block` copies: of the first tokens where they are far, of retrieved blocks, −1."""
    count, kept = cache.rows["held"].shape[1], cache.rows["kept"]
    first = count + jnp.arange(-(-self.init_tokens // self.block), dtype=jnp.int32)
    first = jnp.where(cache.rows["gone"][:, None] > 0, first, -1)
    return jnp.concatenate([first, kept], 1)

  def _far(self, cache: Cache) -> slots.Slots:
    """First tokens and retrieved blocks; position 0, which every query may see, or −1."""
    tiles, token = self._far_tiles(cache), jnp.arange(self.block, dtype=jnp.int32)
    slot = (tiles[..., None] * self.block + token).reshape(tiles.shape[0], 1, -1)
    slot = jnp.broadcast_to(slot, (*cache.pos.shape[:2], slot.shape[2]))
    blocks = {name: slots.take(cache.heads[f"held_{name}"], slot) for name in ("k", "v")}
    there = (slot >= 0) & (slot < cache.heads["held_k"].shape[2])
    return {**blocks, "pos": jnp.where(there, 0, -1)}

  # ---- moves: prompt

  def stage(
    self,
    at: At,
    cache: Cache,
    new: slots.Slots,
    q: Float[Array, "B K G A H"],
    prompt: Prompt,
    carry: Carry,
  ) -> tuple[slots.Slots, Cache, Carry]:
    """Retrieves blocks, and shows them with the window and the chunk."""
    if prompt.index is not None:
      raise NotImplementedError(
        f"{at.name}: found layers that compute a part of a prompt, expected layers that compute "
        "all of it: blocks depend on all queries"
      )
    index = prompt.query_index()
    qpos = jnp.where(index < prompt.valid[:, None], cache.seen[:, None] + index, -1)
    similarity = self.similarity(at, cache, q, new["k"], qpos)
    cache, carry = self._retrieve(at, cache, similarity, carry, prompt.valid[:, None] > 0)
    far = {f"far_{name}": x for name, x in self._far(cache).items()}
    return {**self._near(cache, new), **far}, cache, carry

  def attend_prompt(
    self, at: At, staged: slots.Slots, q: Array, qpos: Int[Array, "B A"], prompt: Prompt
  ) -> Attended:
    """Softmax over near and retrieved tokens together."""
    far = {name: staged[f"far_{name}"] for name in ("k", "v", "pos")}
    near = {name: staged[name] for name in ("k", "v", "pos")}
    sizes = near["pos"].shape[2] - q.shape[3], far["pos"].shape[2]
    # All of the chunk sees what is staged before it, unless somebody else staged.
    before, retrieved = (0, 0) if forms.overrides(at.top, "stage", Streamed) else sizes
    state = softmax_state.merge(
      prefill.attend_anywhere(at, near, q, qpos, past=before),
      prefill.attend_anywhere(at, far, self._turned(at, q, qpos), qpos, past=retrieved),
    )
    count = (staged["pos"] >= 0).sum(-1, dtype=jnp.int32)
    return Attended(state, None, None, count + (far["pos"] >= 0).sum(-1, dtype=jnp.int32))

  def keep(self, at: At, cache: Cache, turn: Turn, new: slots.Slots) -> Cache:
    """Counts votes, writes the chunk into the window, and sends off the blocks that leave."""
    q, qpos, attended, prompt = turn.q, turn.qpos, turn.attended, turn.prompt
    near = self._near(cache, new)
    votes = prefill.column_mass(at, q, qpos, near, None, attended.state, past=cache.size)
    near = {**near, "votes": near["votes"] + votes}
    cache = self.learn(at, cache, near, q, qpos, attended)
    ok, end = prompt.valid > 0, cache.seen + prompt.valid
    if prompt.tokens == 1:
      cache = self._complete(at, cache, end, ok)
    if at.env.check_nan:
      ok &= insertion.finite_rows(at, attended.state.o)
    most = prompt.tokens // self.block + 2
    cache, gone = leaving.evicted(self, at, cache, near, end, ok, most, attended.state.o)
    size, last = cache.size, end[:, None]
    pos = cache.seen[:, None] + jnp.arange(prompt.tokens, dtype=jnp.int32)
    # Of a chunk longer than the ring the last tokens stay.
    stays = (pos < self.init_tokens) | (pos >= last - (size - self.init_tokens))
    slot = jnp.where(stays & (pos < last), self._slot_of(pos, size), size)
    slot = slots.after(slot, near["votes"], attended.state.o, gone)
    slot = jnp.broadcast_to(slot[:, None], (*cache.pos.shape[:2], prompt.tokens))
    old = {**cache.slots, "votes": near["votes"][:, :, :size]}
    new = {**new, "votes": near["votes"][:, :, size:]}
    held = {name: slots.put(x, slot, new[name]) for name, x in old.items()}
    cache = cache.put(slots=held, rows={"seen": end, "used": jnp.minimum(end, size)})
    return leaving.with_first(self, at, cache, attended.state.o)

  # ---- moves: decode

  def victim(self, at: At, cache: Cache) -> Int[Array, "B K"]:
    """The next slot of the ring: its token has left long ago."""
    slot = self._slot_of(cache.seen, cache.size)
    return jnp.broadcast_to(slot[:, None], cache.pos.shape[:2])

  def plan_and_attend(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan, carry: Carry
  ) -> tuple[Plan, Attended, Carry]:
    """Of everything near and far, once the step's blocks are on the device; notes `Retrieved`."""
    for move in ("window", "span"):  # nothing here would ask for it
      if forms.overrides(at.top, move):
        raise NotImplementedError(
          f"{at.name}.{move}: found an override over {type(self).__name__}, expected none: it "
          "attends to its own window and to retrieved blocks"
        )
    stream = self.traits.stream
    if stream is None or not stream.persists:
      assert visible.live is not None  # of a step
      qpos, live = (cache.seen - 1)[:, None], visible.live[:, None]
      similarity = self.similarity(at, cache, q[:, :, :, None], None, qpos)
      cache, carry = self._retrieve(at, cache, similarity, carry, live)
    plan, attended, carry = super().plan_and_attend(at, cache, q, visible, carry)
    return plan, attended.noting(retrieval.Retrieved(cache)), carry

  def attend(self, at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Attended:
    """Softmax over near and retrieved tokens; the logits are those of the slots."""
    k, v = cache.slots["k"], cache.slots["v"]
    first = self._first(cache)[:, None]
    start, count = self._slot_of(first, cache.size), cache.seen[:, None] - first
    # Beyond the last slot the window goes on at the beginning of the ring.
    near, logits = decode.attend_ring(at, q, k, v, start, start + count, self.init_tokens)
    turned = self._turned(at, q[:, :, :, None], (cache.seen - 1)[:, None])[:, :, :, 0]
    held, tiles = (cache.heads["held_k"], cache.heads["held_v"]), self._far_tiles(cache)
    far = decode.attend_entries(at, turned, *held, tiles, self.block)
    kept, gone = cache.rows["kept"], cache.rows["gone"][:, None]
    firsts = jnp.where(gone > 0, self.init_tokens, 0)
    blocks = (kept >= 0).sum(-1, keepdims=True, dtype=jnp.int32)
    visited = jnp.broadcast_to(count + firsts + self.block * blocks, cache.pos.shape[:2])
    slot = jnp.broadcast_to(jnp.arange(cache.size, dtype=jnp.int32), cache.pos.shape)
    return Attended(softmax_state.merge(near, far), logits, slot, visited)

  def observe(
    self, at: At, cache: Cache, q: Array, plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    """Counts votes and sends off the block that leaves. Reports `retrieved`, int32 [B, R]."""
    retrieved = attended.noted(retrieval.Retrieved)
    cache = cache if retrieved is None else retrieved.cache
    assert attended.logits is not None
    p = softmax_state.probabilities(attended.state, attended.logits).mean(2)
    last = (cache.seen - 1)[:, None]
    votes = jnp.where(cache.pos == last[:, :, None], 0, cache.slots["votes"]) + p
    near = {**cache.slots, "votes": votes}
    cache = cache.put(slots={"votes": votes})
    one = jax.tree.map(lambda x: x[:, :, :, None], attended.state)
    cache = self.learn(
      at, cache, near, q[:, :, :, None], last, dataclasses.replace(attended, state=one)
    )
    if not at.env.defers:
      ok = insertion.finite_rows(at, attended.state.o if at.env.check_nan else attended.state.l)
      (cache,) = leaving.at_block_ends(self, [at], [cache], ok, attended.state.o)
    return cache, {"retrieved": retrieval.kept(cache)}

  def _conclude_step(
    self, env: Env, caches: tuple[Any, ...], sound: Bool[Array, " B"]
  ) -> tuple[Any, ...]:
    """Settles the blocks that end with the step, of all layers under one condition."""
    places = [self.at(env, layer) for layer in range(len(caches))]
    return leaving.at_block_ends(self, places, caches, sound, sound.astype(jnp.float32))


def _example(cls: type[Streamed], budget: int) -> Method:
  """About `budget` tokens: a quarter of them retrieved, the rest first and newest ones."""
  block = 1
  while block * 12 <= budget and block < 128:
    block *= 2
  retrieved = max(1, budget // (4 * block))
  local = max(1, budget - (retrieved + 1) * block)
  return cls(block, local, block, retrieved, chunk=min(512, 4 * block), held=2 * retrieved)


settings.register(
  Streamed,
  example=_example,
  neutral=lambda cls, length: cls(
    init_tokens=4, local=length, block=4, retrieved=1, chunk=8, held=1
  ),
)
