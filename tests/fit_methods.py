"""The hard cases in deliberately tiny form: what the protocol must carry without a change.

Each stands for one published system and keeps only what strains the protocol. None of them is the
method; the methods have files of their own under kvjax/methods.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from kvjax import Attended, Method, Plan, Span, View, Wrapper, softmax_state
from kvjax.ops import slots as slot_ops
from kvjax.ops.attention import logits_of


@dataclasses.dataclass(frozen=True)
class Pages(Method):
  """Selection with tile statistics (Quest): key bounds per page, kept as tokens arrive."""

  pages: int = 2
  page: int = 4
  dense_layers: int = 1

  def extra(self, spec, layer):
    count = -(-spec.capacity // self.page)
    bounds = (spec.batch, spec.kv_heads, count, spec.head_dim)
    low, high = jnp.full(bounds, jnp.inf), jnp.full(bounds, -jnp.inf)
    return {}, {"low": low, "high": high}, {}

  def settle(self, at, cache, prompt):
    filled = (cache.pos >= 0)[..., None]
    k = cache.slots["k"].astype(jnp.float32)
    paged = (*k.shape[:2], -1, self.page, k.shape[-1])
    low = jnp.where(filled, k, jnp.inf).reshape(paged).min(3)
    high = jnp.where(filled, k, -jnp.inf).reshape(paged).max(3)
    return cache.put(heads={"low": low, "high": high})

  def insert(self, at, cache, k, v, live):
    page = jnp.where(live, cache.seen // self.page, cache.heads["low"].shape[2])
    b, h = jnp.ogrid[: k.shape[0], : k.shape[1]]
    low = cache.heads["low"].at[b, h, page[:, None]].min(k, mode="drop")
    high = cache.heads["high"].at[b, h, page[:, None]].max(k, mode="drop")
    return super().insert(at, cache, k, v, live).put(heads={"low": low, "high": high})

  def score(self, at, cache, q):
    if at.layer < self.dense_layers:
      return None
    mean = q.mean(2)[:, :, None]
    low, high = cache.heads["low"], cache.heads["high"]
    empty = jnp.isinf(high[..., 0])
    bound = jnp.maximum(mean * low, mean * high)
    return jnp.where(empty, -jnp.inf, jnp.where(empty[..., None], 0, bound).sum(-1))

  def select(self, at, cache, scores, ratio=1.0):
    newest = ((cache.seen - 1) // self.page)[:, None, None]
    scores = jnp.where(jnp.arange(scores.shape[-1]) == newest, jnp.inf, scores)
    best, table = jax.lax.top_k(scores, min(int(ratio * self.pages) + 1, scores.shape[-1]))
    count = (best > -jnp.inf).sum(-1, dtype=jnp.int32)
    span = at.top.span(at, cache, at.top.window(at, (cache.seen - 1)[:, None]))
    return Plan(span, table, count, best, unit=self.page, pinned=1)


@dataclasses.dataclass(frozen=True)
class EarlyStop(Wrapper):
  """A walk that stops when its output stops moving (ART), over any base with a plan."""

  replaces: ClassVar[tuple[str, ...]] = ("attend",)
  tau: float = 1e-5
  patience: float = float("inf")

  def plan(self, at, cache, q, carry):
    plan, carry = self.base.plan(at, cache, q, carry)
    if plan.table is None:
      tiles = -(-cache.size // plan.unit)
      priority = at.top.order(at, cache)
      if priority is None:  # newest first
        newest = jnp.pad(cache.pos, ((0, 0), (0, 0), (0, tiles * plan.unit - cache.size)))
        priority = newest.reshape(*cache.pos.shape[:2], tiles, plan.unit).max(-1)
      table = jnp.argsort(-priority, -1).astype(jnp.int32)
      count = jnp.full(table.shape[:2], tiles, jnp.int32)
      plan = dataclasses.replace(plan, table=table, count=count)
    return plan, carry

  def attend(self, at, cache, plan, q):
    width = plan.table.shape[-1]
    view = at.top.read(at, cache, plan)
    ok = view.pos >= 0
    window = at.top.window(at, (cache.seen - 1)[:, None])
    if window is not None:
      ok &= window.sees(view.pos)[:, :, 0]
    logits = logits_of(q[:, :, :, None], view.k)[:, :, :, 0]
    logits = jnp.where(ok[:, :, None], logits, -jnp.inf)
    v = jnp.where(ok[..., None], view.v, 0)

    def tile(carry, i):
      state, calm, going, visited = carry

      def cut(x, axis):
        return jax.lax.dynamic_slice_in_dim(x, i * plan.unit, plan.unit, axis)

      new = softmax_state.merge(state, softmax_state.of_logits(cut(logits, 3), cut(v, 2)))
      moved = jnp.linalg.norm(new.o - state.o, axis=-1).max(-1)
      calm = jnp.where(going & (moved < self.tau), calm + 1, 0)
      state = jax.tree.map(
        lambda a, b: jnp.where(going.reshape(going.shape + (1,) * (a.ndim - 2)), a, b), new, state
      )
      visited += jnp.where(going, cut(ok, 2).sum(-1), 0)
      return (state, calm, going & (calm < self.patience), visited), None

    start = softmax_state.empty(q.shape[:3], q.shape[-1])
    calm = jnp.zeros(q.shape[:2], jnp.int32)
    carry = (start, calm, calm == 0, calm)
    (state, _, _, visited), _ = jax.lax.scan(tile, carry, jnp.arange(width))
    return Attended(state, None, None, visited)


@dataclasses.dataclass(frozen=True)
class PredictRepair(Wrapper):
  """Attends to a predicted selection, then folds in what it missed (PRR), over a selection."""

  replaces: ClassVar[tuple[str, ...]] = ("plan", "attend")
  ratio: float = 1.5

  def extra(self, spec, layer):
    in_slots, in_heads, in_rows = self.base.extra(spec, layer)
    level = jnp.zeros(in_heads["low"].shape[:3])
    return in_slots, {**in_heads, "level": level}, in_rows

  def plan(self, at, cache, q, carry):
    scores = at.top.score(at, cache, q)
    if scores is None:
      return at.top.everything(at, cache), carry
    level = jnp.where(scores > -jnp.inf, cache.heads["level"], -jnp.inf)
    guess = at.top.select(at, cache, level, self.ratio)
    true = at.top.select(at, cache, scores)
    return dataclasses.replace(true, memo={"guess": guess, "scores": scores}), carry

  def attend(self, at, cache, plan, q):
    if plan.memo is None:
      return self.base.attend(at, cache, plan, q)
    guess = plan.memo["guess"]
    listed = jnp.arange(guess.table.shape[-1]) < guess.count[..., None]
    hit = ((plan.table[..., None] == guess.table[:, :, None]) & listed[:, :, None]).any(-1)
    missed = jnp.where(hit, -1, plan.table)
    early = self.base.attend(at, cache, guess, q)
    repair = self.base.attend(at, cache, dataclasses.replace(plan, table=missed, memo=None), q)
    state = softmax_state.merge(early.state, repair.state)
    return Attended(state, None, None, early.visited + repair.visited)

  def observe(self, at, cache, q, plan, attended):
    if plan.memo is None:
      return cache, {"missed": jnp.zeros(q.shape[:2])}
    seen = plan.memo["scores"] > -jnp.inf
    level = jnp.where(seen, plan.memo["scores"], cache.heads["level"])
    return cache.put(heads={"level": level}), {}


@dataclasses.dataclass(frozen=True)
class Evict(Method):
  """Importance-based eviction: a window's attention ranks the prompt, each step names a victim."""

  budget: int = 12
  observed: int = 4

  @property
  def positional(self):
    return False

  @property
  def wants_logits(self):
    return True

  def capacity(self, spec, layer):
    return self.budget

  def extra(self, spec, layer):
    return {}, {"victim": jnp.zeros((spec.batch, spec.kv_heads), jnp.int32)}, {}

  def victim(self, at, cache):
    return cache.heads["victim"]

  def rank(self, at, staged, q, qpos, attended, prompt):
    """Mass that the last `observed` queries give to each slot; those tokens themselves stay."""
    end = qpos.max(1, keepdims=True)
    asks = (qpos > end - self.observed)[:, None, None, :, None]
    pos = staged["pos"]
    causal = (pos >= 0)[:, :, None] & (pos[:, :, None] <= qpos[:, None, :, None])
    logits = jnp.where(causal[:, :, None], logits_of(q, staged["k"]), -jnp.inf)
    p = softmax_state.probabilities(attended.state, logits)
    mass = jnp.where(asks, p, 0).sum((2, 3))
    return jnp.where(pos > (end - self.observed)[:, :, None], jnp.inf, mass), staged

  def observe(self, at, cache, q, plan, attended):
    p = softmax_state.probabilities(attended.state, attended.logits)
    victim = self.least(cache.pos, p, cache.slots["v"])
    return cache.put(heads={"victim": victim}), {}

  def least(self, pos, p, v):
    """Slot of smallest Σ_g p·‖v‖₁, the newest token excepted."""
    norm = jnp.where(pos >= 0, jnp.abs(v).sum(-1), 0)
    score = jnp.where(pos < pos.max(-1, keepdims=True), p.sum(2) * norm, jnp.inf)
    return jnp.argmin(jnp.where(pos >= 0, score, jnp.inf), -1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class FusedEvict(Evict):
  """The same method with its step as one piece (LongFlow): an implementation, not a definition."""

  def decode_step(self, at, cache, q, k, v, live, carry):
    rope, pos = at.env.rope, cache.seen
    q, k = rope.rotate(q, pos[:, None, None]), rope.rotate(k, pos[:, None])
    room = cache.used < cache.size
    slot = jnp.where(room[:, None], cache.used[:, None], cache.heads["victim"])
    slot = jnp.where(live[:, None], slot, cache.size)[:, :, None]
    place = jnp.broadcast_to(pos[:, None, None], slot.shape)
    new = {"k": k[:, :, None], "v": v[:, :, None], "pos": place}
    held = {name: slot_ops.put(x, slot, new[name]) for name, x in cache.slots.items()}
    ok = held["pos"] >= 0
    logits = jnp.where(ok[:, :, None], jnp.einsum("bkgh,bksh->bkgs", q, held["k"]) / 4, -jnp.inf)
    state = softmax_state.of_logits(logits, jnp.where(ok[..., None], held["v"], 0))
    p = softmax_state.probabilities(state, logits)
    victim = self.least(held["pos"], p, held["v"])
    victim = jnp.where(live[:, None], victim, cache.heads["victim"])
    rows = {"seen": pos + live, "used": cache.used + (live & room)}
    cache = dataclasses.replace(cache, slots=held, heads={"victim": victim}, rows=rows)
    return state.o, cache, carry, {}


@dataclasses.dataclass(frozen=True)
class Pyramid(Evict):
  """Less room in every deeper layer (PyramidKV)."""

  def capacity(self, spec, layer):
    return self.budget - 2 * layer


@dataclasses.dataclass(frozen=True)
class Offload(Method):
  """A window on the device, all blocks in a store, blocks retrieved by votes of all layers (Ltri).

  A chunk's queries score the stored blocks; the scores of this layer and of those below it, of
  all heads, add up in the carry; the best blocks are read back and stay for decoding.
  """

  recent: int = 8
  block: int = 4
  retrieved: int = 2

  @property
  def positional(self):
    return False

  def capacity(self, spec, layer):
    return self.recent

  def extra(self, spec, layer):
    blocks = -(-spec.capacity // self.block)
    kv = (spec.batch, spec.kv_heads, blocks, self.block, spec.head_dim)
    store = {"store_k": jnp.zeros(kv, spec.dtype), "store_v": jnp.zeros(kv, spec.dtype)}
    return {}, store, {"kept": jnp.full((spec.batch, self.retrieved), -1, jnp.int32)}

  def victim(self, at, cache):
    return jnp.argmin(cache.pos, -1).astype(jnp.int32)

  def rank(self, at, staged, q, qpos, attended, prompt):
    return staged["pos"].astype(jnp.float32), staged

  def stage(self, at, cache, new, q, prompt, carry):
    store = cache.heads["store_k"]
    asked = jnp.where(
      (jnp.arange(q.shape[3]) < prompt.valid[:, None])[:, None, None, :, None], q, 0
    )
    match = jnp.einsum("bkgth,bknuh->bn", asked, store)
    votes = carry.rows.get("votes", 0) + at.sum_heads(match)
    first = cache.seen - cache.used  # tokens before it are in the store alone
    gone = jnp.arange(store.shape[2]) * self.block < first[:, None]
    best, kept = jax.lax.top_k(jnp.where(gone, votes, -jnp.inf), self.retrieved)
    kept = jnp.where(best > -jnp.inf, kept, -1).astype(jnp.int32)
    cache = cache.put(rows={"kept": kept})
    far = self.fetch(cache, first)
    staged = slot_ops.join({name: far[name] for name in new}, slot_ops.join(cache.slots, new))
    return staged, cache, dataclasses.replace(carry, rows={"votes": votes})

  def keep(self, at, cache, new, q, qpos, attended, prompt):
    position = jnp.where(new["pos"] >= 0, new["pos"], cache.heads["store_k"].shape[2] * self.block)
    heads = dict(cache.heads)
    for name in ("k", "v"):
      store = heads[f"store_{name}"]
      flat = store.reshape(*store.shape[:2], -1, store.shape[-1])
      heads[f"store_{name}"] = slot_ops.put(flat, position, new[name]).reshape(store.shape)
    kept = super().keep(at, cache, new, q, qpos, attended, prompt)
    return dataclasses.replace(kept, heads=heads)

  def insert(self, at, cache, k, v, live):
    heads = dict(cache.heads)
    for name, x in (("k", k), ("v", v)):
      store = heads[f"store_{name}"]
      flat = store.reshape(*store.shape[:2], -1, store.shape[-1])
      where = jnp.where(live, cache.seen, flat.shape[2])
      where = jnp.broadcast_to(where[:, None, None], (*flat.shape[:2], 1))
      heads[f"store_{name}"] = slot_ops.put(flat, where, x[:, :, None]).reshape(store.shape)
    return dataclasses.replace(super().insert(at, cache, k, v, live), heads=heads)

  def fetch(self, cache, first):
    """The kept blocks, out of the store, as slots; tokens from `first` on are on the device."""
    b = jnp.arange(first.shape[0])[:, None]
    kept = cache.rows["kept"]
    pos = kept[..., None] * self.block + jnp.arange(self.block)
    pos = jnp.where((kept >= 0)[..., None] & (pos < first[:, None, None]), pos, -1)
    out = {}
    for name in ("k", "v"):
      blocks = jnp.moveaxis(cache.heads[f"store_{name}"], 1, 2)[b, kept]  # [B, R, K, U, H]
      blocks = jnp.moveaxis(blocks, 2, 1)
      out[name] = blocks.reshape(*blocks.shape[:2], -1, blocks.shape[-1])
    flat = pos.reshape(pos.shape[0], 1, -1)
    return {**out, "pos": jnp.broadcast_to(flat, out["k"].shape[:3])}

  def span(self, at, cache, window):
    stop = jnp.broadcast_to(cache.used[:, None], cache.pos.shape[:2])
    return Span(jnp.zeros_like(stop), stop)

  def read(self, at, cache, plan):
    far = self.fetch(cache, cache.seen - cache.used)
    near = super().read(at, cache, plan)
    beyond = jnp.full(far["pos"].shape, cache.size, jnp.int32)
    joined = [
      jnp.concatenate(pair, 2)
      for pair in (
        (near.k, far["k"]),
        (near.v, far["v"]),
        (near.pos, far["pos"]),
        (near.slot, beyond),
      )
    ]
    return View(*joined)


@dataclasses.dataclass(frozen=True)
class Freeze(Wrapper):
  """Upper layers compute only the sinks and the end of a prompt (ETF)."""

  first_layer: int = 2
  sinks: int = 2
  frozen: float = 0.5

  def active(self, at, tokens, total):
    if at.layer < self.first_layer:
      return None
    count = min(tokens, self.sinks + tokens - int(self.frozen * tokens))
    i = jnp.arange(count, dtype=jnp.int32)
    start = jnp.maximum((self.frozen * total).astype(jnp.int32), self.sinks)
    index = jnp.where(i < self.sinks, i, start[:, None] + i - self.sinks)
    return jnp.where(index < total[:, None], index, tokens)

  def fill(self, at, k, v, prompt, carry):
    if prompt.index is not None:
      to = jnp.broadcast_to(prompt.index[:, None], k.shape[:3])
      k, v = (slot_ops.put(carry.heads[n], to, x) for n, x in (("k", k), ("v", v)))
    return k, v, dataclasses.replace(carry, heads={**carry.heads, "k": k, "v": v})
