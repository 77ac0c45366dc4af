"""ART: stop walking the cache when the output has stopped moving (ART, §3, Alg. 1)."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import dispatch, mass_bound, ring, softmax_state
from kvjax.fields import between, bound, expect, least, one_of
from kvjax.leaves import Leaf
from kvjax.method import Aux, Method
from kvjax.methods.full import Full
from kvjax.methods.quest import Quest
from kvjax.ops import attention, slots
from kvjax.softmax_state import State
from kvjax.types import At, Attended, Cache, CacheSpec, Plan, Prompt, Span
from kvjax.wrapper import Wrapper

LARGEST_TILE = 256  # that the kernel takes
PROBES = 32  # dimensions of the output that a strided probe looks at
ROW_WALKS = 128  # of one row, over its KV heads, under splits = "auto": enough to fill a GPU


def usual_splits(kv_heads: int, tiles: int) -> int:
  """P of splits = "auto", for rows of so many KV heads and an order of so many tiles."""
  return max(1, min(ROW_WALKS // kv_heads, tiles))


def _fits_splits(splits: int | str) -> bool:
  return splits in ("auto", "fill") if isinstance(splits, str) else splits >= 1


def spares_half(tiles: int, splits: int, patience: float | int) -> bool:
  """Whether walks are long enough to leave out half of their tiles: each reads p + 1 at least."""
  return -(-tiles // splits) >= 2 * (patience + 1)


@dataclasses.dataclass(frozen=True)
class ART(Wrapper):
  """Walks what the base method would read tile by tile, and stops once the output is stable.

  After tile t the probe x(t), a fixed part of the normalised output so far, is compared with the
  last one. Stable means that it moved by less than τ and turned by less than φ; after p stable
  tiles in a row the walk ends (Eq. 3). A tile in which the query sees no key is no step.

  The base's selection and cache are left as they are; only the order matters. A plan with a table
  is walked as it is listed: first tokens, newest ones, then by score. Without one, slots that carry
  a priority (`order`) are walked by it, and others newest first (§3.3); first tokens that the base
  always attends to come before both, and the walk does not end before they are read.

  Caches that use their slots in turn (`kvjax.ring`) are walked by whole tiles too, as they lie:
  from the tile of the newest token down, and around; or, where slots carry a priority, from the
  last tile down, for which the slots are put in order once, behind each prompt. Within a tile the
  order is not the priority's.

  The price is known: a needle far back in a cache that is walked from its end is missed (§4.3).

  One walk per KV head leaves most of a GPU idle where there are few of them. With P splits, split s
  walks tiles s, s + P, … of the order and stops by itself, by the output of its own tiles; what
  all of them have read is joined. Each needs its own p stable tiles, so that together they read
  more than one walk would; and none of them knows how little its part weighs in the whole. Where
  splits = "auto" leaves a walk fewer than 2·(p + 1) tiles, so that it could not spare half of them,
  the base attends and everything is read.

  With certify = ε nothing is left to the detector. Tiles keep the least and the largest of their
  keys, channel by channel, as Quest's pages do. The newest tile and those of the first tokens come
  first, the others by the share of the mass that their bounds allow them; and the walk ends only
  once what it has not read cannot move the output by more than ε·max‖v‖ (`kvjax.mass_bound`). The
  query is rounded to the cache's dtype first: bounds and output are those of the rounded query. The
  certificate is ours, not the paper's, and asks for a base that reads everything that it keeps in
  place.

  Attributes:
    base: the method whose plan is walked.
    tau: τ, largest movement of the probe that counts as stable.
    phi: φ, largest 1 − cosine of two probes that counts as stable.
    patience: p, stable tiles in a row that end the walk; infinity never ends it.
    tile: keys per step of the walk (128).
    probe: "strided32", every H/32-th dimension of the output, or "full", all of them.
    stop: "group", the query heads of a KV head go on until all of them are stable at once, as they
      share what is loaded; or "head", each stops by itself, as in the paper.
    splits: P; 1 is the paper's walk. "auto": 128 over the number of KV heads, so that results are
      the same on every device and at every batch size. "fill": as many as fill the device, fewer at
      larger batches, and 1 on a CPU.
    sinks: first tokens whose tiles come first over a cache that is walked from its end, whatever
      the base says of them. The paper has none (0), and pays: where attention rests on the first
      tokens, a walk that stops before them is far off (`scripts.art_study`).
    certify: ε, below 2; None: the detector decides. τ, φ, p and the probe then mean nothing.
  """

  replaces: ClassVar[tuple[str, ...]] = ("attend",)

  base: Method = dataclasses.field(default_factory=Full)
  tau: float | int = least(0, 1e-5)
  phi: float | int = least(0, 1e-3)
  patience: float | int = least(1, 5)
  tile: int = least(1, 128)
  probe: str = one_of(("strided32", "full"), "strided32")
  stop: str = one_of(("group", "head"), "group")
  splits: int | str = bound(_fits_splits, "1 or more, 'auto' or 'fill'", "auto")
  sinks: int = least(0, 0)
  certify: float | None = between(0, 2, None, "[)")

  def __post_init__(self):
    super().__post_init__()
    if self.certify is None:
      return
    expect(self, "splits", self.splits in ("auto", 1), "1 with certify")
    chooses = any(map(self.base.overrides, ("score", "select", "plan", "everything", "order")))
    if chooses or not self.base.positional:
      raise ValueError(
        f"{type(self).__name__}.certify: found base {self.base!r}, expected one that keeps every "
        "token in place and selects none"
      )

  @classmethod
  def example(cls, budget: int) -> Method:
    return cls(tau=0.5, phi=0.1, patience=1, tile=max(1, budget // 6), splits=1)

  @classmethod
  def usual(cls, budget: int) -> Method:
    return cls(splits=1)

  @classmethod
  def neutral(cls, length: int) -> Method:
    return cls(patience=math.inf, splits=1)

  @property
  def order_independent(self) -> bool:
    """A decoded token may stop early; a prompt's never does."""
    return False

  @property
  def _pages(self) -> Quest:
    """Keeps the bounds of every tile's keys for the certificate."""
    return Quest(budget=self.tile, page=self.tile)

  def _by_tiles(self, cache: Cache) -> bool:
    """Whether a cache that uses its slots in turn is walked by tiles, as it lies."""
    return "ring" in cache.heads and not self.base.wants_logits

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    pages = {} if self.certify is None else self._pages.summaries(spec)
    return {**self.base.leaves(spec, layer), **pages}

  def settle(self, at: At, cache: Cache, prompt: Prompt) -> Cache:
    cache = self.base.settle(at, cache, prompt)
    if self._by_tiles(cache):
      return self._in_order(at, cache)
    if self.certify is None:
      return cache
    return self._pages.summarise(cache, cache.seen - prompt.valid, prompt.tokens)

  def _in_order(self, at: At, cache: Cache) -> Cache:
    """Slots behind the first tokens by priority, the highest last; as they are without one."""
    if at.top.order(at, cache) is None:
      return cache
    span, slot = at.top.everything(at, cache).span, jnp.arange(cache.size, dtype=jnp.int32)
    rank = jnp.where(slot < span.sinks, -jnp.inf, self._ranks(at, cache, span))
    index = jnp.argsort(jnp.where(span.holds(slot), rank, jnp.inf), -1, stable=True)
    moved = {name: slots.take(x, index) for name, x in cache.slots.items()}
    return dataclasses.replace(cache, slots=moved)

  def attend(self, at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Attended:
    """Algorithm 1 for all heads at once; those that have stopped keep their state."""
    if self._spares_nothing(at, cache, plan):
      return self._read_all(at, cache, plan, q)
    impl = dispatch.choose("art", at.env.impl, q, cache.slots["k"])
    beyond = dispatch.beyond_kernel(at, cache, impl, logits=False, turned=False)
    if self.tile > LARGEST_TILE:
      beyond = f"walks tiles of {self.tile}; the {impl!r} kernel takes up to {LARGEST_TILE}"
    if impl == "reference" or (beyond and at.env.impl == "auto"):
      return self._walk(at, cache, plan, q)
    run = dispatch.kernel("art", impl)
    if beyond:
      raise NotImplementedError(f"art: {type(at.top).__name__} {beyond}")
    return self._walk_by(run, at, cache, plan, q)

  # ---- how many walks

  def _splits(self, at: At, cache: Cache, tiles: int) -> int:
    """P, of an order of so many tiles."""
    if self.certify is not None:
      return 1
    batch, heads = cache.pos.shape[:2]
    if self.splits == "auto":
      return usual_splits(at.heads_in_all(heads), tiles)
    if self.splits == "fill":
      return dispatch.filling_splits(batch * heads, tiles * self.tile, self.tile)
    return min(int(self.splits), tiles)

  def _tiles(self, cache: Cache, plan: Plan) -> int:
    """Tiles of the order."""
    slots = cache.size if plan.table is None else plan.table.shape[-1] * plan.unit
    return -(-slots // self.tile)

  def _spares_nothing(self, at: At, cache: Cache, plan: Plan) -> bool:
    """Whether the walks of "auto" are too short to end before half of their tiles."""
    if self.splits != "auto" or self.certify is not None:
      return False
    tiles = self._tiles(cache, plan)
    return not spares_half(tiles, self._splits(at, cache, tiles), self.patience)

  def _read_all(self, at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Attended:
    """The base's attention; every walk took all of its tiles."""
    attended = self.base.attend(at, cache, plan, q)
    listed = self._listed(at, cache, plan)
    every = jnp.full((*cache.pos.shape[:2], 1, q.shape[2]), self._tiles(cache, listed), jnp.int32)
    tiles, _ = self._read_by(listed, cache.size, every)
    return dataclasses.replace(attended, memo=tiles)

  # ---- the order

  def _arithmetic(self, at: At, cache: Cache, plan: Plan) -> bool:
    """Whether the order is one of whole tiles that needs no table: newest first after the first."""
    if plan.table is not None:
      return False
    return self._by_tiles(cache) or (at.top.positional and at.top.order(at, cache) is None)

  def _goes_round(self, at: At, cache: Cache) -> Int[Array, "B K 2"] | None:
    """The ring that a walk goes round; None: it begins at the end of what is cached."""
    around = self._by_tiles(cache) and at.top.order(at, cache) is None
    return cache.heads["ring"] if around else None

  def _listed(self, at: At, cache: Cache, plan: Plan) -> Plan:
    """A plan with a table: of tiles, newest first, or of single slots by priority."""
    if plan.table is not None:
      return plan
    if self._arithmetic(at, cache, plan):
      return self._newest_first(at, cache, plan)
    span = plan.span
    count = jnp.broadcast_to(span.length(), cache.pos.shape[:2])
    table = self._by_rank(at, cache, span)
    return dataclasses.replace(plan, table=table, count=count, unit=1, pinned=span.sinks)

  def _newest_first(self, at: At, cache: Cache, plan: Plan) -> Plan:
    """First tiles, then from the newest one down (§3.3); around, where slots are used in turn."""
    span = plan.span
    pinned = -(-max(span.sinks, self.sinks) // self.tile)
    last = jnp.broadcast_to((span.stop + self.tile - 1) // self.tile - 1, cache.pos.shape[:2])
    oldest, newest = jnp.maximum(span.start // self.tile, pinned), last
    if (turning := self._goes_round(at, cache)) is not None:
      slot = ring.place(turning, (cache.seen - 1)[:, None], cache.size)
      newest = jnp.maximum(jnp.maximum(slot, 0) // self.tile, pinned - 1)
    count = jnp.minimum(pinned, last + 1) + jnp.maximum(last - oldest + 1, 0)
    t = jnp.arange(-(-cache.size // self.tile), dtype=jnp.int32)
    tile = (newest + pinned)[..., None] - t
    around = tile + (last - pinned + 1)[..., None]
    table = jnp.where(t < pinned, t, jnp.where(tile < pinned, around, tile))
    table = jnp.where(t < count[..., None], table, -1)
    return dataclasses.replace(plan, table=table, count=count, unit=self.tile, pinned=pinned)

  def _ranks(self, at: At, cache: Cache, span: Span) -> Float[Array, "B K S"]:
    """What slots are walked by, highest first: the first ones, then by priority or newest first."""
    priority = at.top.order(at, cache)
    rank = (cache.pos if priority is None else priority).astype(jnp.float32)
    return jnp.where(jnp.arange(cache.size) < span.sinks, jnp.inf, rank)

  def _by_rank(self, at: At, cache: Cache, span: Span) -> Int[Array, "B K S"]:
    """The slots of the span in the order of their ranks, equal ones by index; −1 behind them."""
    slot = jnp.arange(cache.size, dtype=jnp.int32)
    key = jnp.where(span.holds(slot), -self._ranks(at, cache, span), jnp.inf)
    table = jnp.argsort(key, -1, stable=True).astype(jnp.int32)
    return jnp.where(slot < span.length()[..., None], table, -1)

  def _by_bound(self, at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Plan:
    """A table of all tiles, by what they may weigh; its memo is the `unread_mass` behind each.

    q is the query that is walked with, in the dtype of the keys: bounds of another prove nothing.
    The newest tile's bounds do not know the new token yet: it is one of those that are read first.
    """
    window = at.top.window(at, (cache.seen - 1)[:, None])
    if window is not None and window.view is not None:
      raise NotImplementedError(
        f"{type(self).__name__}.certify: {type(at.top).__name__} turns its query for its sinks"
      )
    span, size = plan.span, -(-cache.size // self.tile)
    slot = jnp.arange(size * self.tile, dtype=jnp.int32)
    held = jnp.broadcast_to(span.holds(slot), (*cache.pos.shape[:2], slot.shape[0]))
    keys = held.reshape(*cache.pos.shape[:2], size, self.tile).sum(-1, dtype=jnp.int32)
    bounds, errors = mass_bound.logit_bounds(q, cache.heads["key_min"], cache.heads["key_max"])
    # The most that any head of the group may give a tile.
    share = jax.nn.softmax(mass_bound.tile_mass(bounds, keys), -1).max(2)
    t, pinned = jnp.arange(size, dtype=jnp.int32), -(-span.sinks // self.tile)
    newest = (span.stop - 1)[..., None] // self.tile
    rank = jnp.where(t < pinned, 3.0, jnp.where(t == newest, 2.0, share))
    _, table = dispatch.other_tiles(at, rank, span, unit=self.tile, sinks=0, local=0, k=size)

    def ordered(x: Array) -> Array:
      index = jnp.maximum(table, 0)
      return jnp.take_along_axis(x, index if x.ndim == 3 else index[:, :, None], -1)

    listed = jnp.where(table >= 0, ordered(keys), 0)
    unread = mass_bound.unread_mass(ordered(bounds), ordered(errors), listed)
    count = (table >= 0).sum(-1, dtype=jnp.int32)
    return dataclasses.replace(
      plan, table=table, count=count, unit=self.tile, pinned=pinned + 1, memo=unread
    )

  # ---- the walk

  def _walk_by(self, run: Callable, at: At, cache: Cache, plan: Plan, q: Array) -> Attended:
    """The same by a kernel."""
    certified = self.certify is not None
    k, v, span = cache.slots["k"], cache.slots["v"], plan.span
    rounded = q.astype(k.dtype)
    listed = (
      self._by_bound(at, cache, plan, rounded) if certified else self._listed(at, cache, plan)
    )
    direct = not certified and self._arithmetic(at, cache, plan)
    around = self._goes_round(at, cache) if direct else None
    assert listed.table is not None and listed.count is not None  # it is listed
    state, out, walked = run(
      rounded,
      k,
      v,
      None if direct else listed.table,
      None if direct else listed.count,
      span.start,
      span.stop,
      unit=listed.unit,
      sinks=span.sinks,
      tile=self.tile,
      tau=self.tau,
      phi=self.phi,
      patience=self.patience,
      full=self.probe == "full",
      per_head=self.stop == "head",
      kept=-(-listed.pinned * listed.unit // self.tile),
      splits=self._splits(at, cache, self._tiles(cache, listed)),
      unread=listed.memo if certified else None,
      log_ratio=None if self.certify is None else mass_bound.log_ratio(self.certify),
      ring=around,
      seen=None if around is None else cache.seen,
    )
    tiles, visited = self._read_by(listed, cache.size, walked)
    return Attended(state, None, None, visited, out.astype(q.dtype), memo=tiles)

  def _read_by(
    self, plan: Plan, size: int, walked: Int[Array, "B K P G"]
  ) -> tuple[Int[Array, "B K G"], Int[Array, "B K"]]:
    """Tiles with a key that each query head took, and slots that any of a KV head's read.

    Split s of P has walked its first `walked` tiles s, s + P, … of the plan's table.
    """
    assert plan.table is not None and plan.count is not None
    tiles, splits = -(-plan.table.shape[-1] * plan.unit // self.tile), walked.shape[2]
    key = jnp.arange(tiles * self.tile, dtype=jnp.int32)
    entry = jnp.take(plan.table, key // plan.unit, 2, mode="fill", fill_value=-1)
    slot = entry * plan.unit + key % plan.unit
    real = (key // plan.unit < plan.count[..., None]) & (entry >= 0) & (slot < size)
    held = (real & plan.span.holds(slot)).reshape(*slot.shape[:2], tiles, self.tile)
    held = held.sum(-1, dtype=jnp.int32)[:, :, None]  # keys of every tile
    t = jnp.arange(tiles, dtype=jnp.int32)
    read = t // splits < jnp.moveaxis(walked, 2, 3)[..., t % splits]
    return (read & (held > 0)).sum(-1, dtype=jnp.int32), jnp.where(read, held, 0).sum(-1).max(-1)

  def _walk(self, at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Attended:
    """The reference: Algorithm 1, line by line, split by split."""
    certified = self.certify is not None
    if certified:
      q = q.astype(cache.slots["k"].dtype)
    plan = self._by_bound(at, cache, plan, q) if certified else self._listed(at, cache, plan)
    assert plan.table is not None  # it is listed
    tiles = self._tiles(cache, plan)
    splits = self._splits(at, cache, tiles)
    logits = None
    if at.top.wants_logits:
      logits = jnp.full((*cache.pos.shape, q.shape[2]), -jnp.inf)
    walks: list[Walk] = []
    for first in range(splits):
      steps = jnp.arange(first, tiles, splits, dtype=jnp.int32)
      walks.append(self._walk_tiles(at, cache, plan, q, steps, splits, logits))
      logits = walks[-1].logits
    state = functools.reduce(softmax_state.merge, (w.state for w in walks))
    taken = sum((w.tiles for w in walks[1:]), walks[0].tiles)
    visited = sum((w.keys for w in walks[1:]), walks[0].keys).max(-1)
    if logits is None:
      return Attended(state, None, None, visited, memo=taken)
    every = jnp.broadcast_to(jnp.arange(cache.size, dtype=jnp.int32), cache.pos.shape)
    return Attended(state, jnp.moveaxis(logits, 3, 2), every, visited, memo=taken)

  def _walk_tiles(
    self,
    at: At,
    cache: Cache,
    plan: Plan,
    q: Float[Array, "B K G H"],
    tiles: Int[Array, " T"],
    stride: int,
    logits: Float[Array, "B K S G"] | None,
  ) -> "Walk":
    """One walk over some tiles of the order, `stride` apart; `logits` are those read so far."""
    heads = q.shape[:3]
    kept = -(-plan.pinned * plan.unit // self.tile)  # tiles that are never skipped

    def step(walk: "Walk", t: Array) -> tuple["Walk", None]:
      logits, v, slot, ok = self._load(at, cache, plan, q, t)
      new = softmax_state.merge(walk.state, softmax_state.of_logits(logits, v))
      stable = self._is_stable(self._look(new.o), self._look(walk.state.o))
      counts = ok.any(-1)[..., None] & walk.going
      calm = jnp.where(counts, jnp.where(stable, walk.calm + 1, 0), walk.calm)
      done = calm >= self.patience
      if self.certify is not None:
        done = mass_bound.proven(plan.memo[..., t + 1], new.lse, self.certify)
      if self.stop == "group":
        done = done.all(-1, keepdims=True)
      seen = walk.logits
      if seen is not None:
        shown = jnp.where(counts[..., None], logits, -jnp.inf)
        seen = slots.put(seen, slot, jnp.moveaxis(shown, 2, 3))
      return Walk(
        state=jax.tree.map(lambda a, b: _where(counts, a, b), new, walk.state),
        calm=calm,
        going=walk.going & ~(done & (t + stride >= kept)),
        tiles=walk.tiles + counts,
        keys=walk.keys + jnp.where(counts, ok.sum(-1, dtype=jnp.int32)[..., None], 0),
        logits=seen,
      ), None

    zero = jnp.zeros(heads, jnp.int32)
    empty = softmax_state.empty(heads, q.shape[-1])
    start = Walk(empty, calm=zero, going=zero == 0, tiles=zero, keys=zero, logits=logits)
    return jax.lax.scan(step, start, tiles)[0]

  def form(self, move: str) -> Any:
    if move == "observe" and self.certify is None:  # reports, and keeps nothing of its own
      return self.base.form(move)
    return super().form(move)

  def observe(
    self, at: At, cache: Cache, q: Array, plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    """Reports `tiles` [B, K, G], the steps that every query head took."""
    tiles = attended.memo
    cache, aux = self.base.observe(at, cache, q, plan, dataclasses.replace(attended, memo=None))
    if self.certify is not None:
      cache = self._pages.renew(at, cache)
    return cache, {**aux, "tiles": tiles}

  def _load(
    self, at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"], t: Int[Array, ""]
  ) -> tuple[Float[Array, "B K G T"], Array, Int[Array, "B K T"], Bool[Array, "B K T"]]:
    """Logits, values and slots of the keys of tile t, and which of them the query sees."""
    assert plan.table is not None and plan.count is not None
    key = t * self.tile + jnp.arange(self.tile, dtype=jnp.int32)
    entry = jnp.take(plan.table, key // plan.unit, 2, mode="clip")
    listed = (key // plan.unit < plan.count[..., None]) & (entry >= 0)
    slot = jnp.where(listed, entry * plan.unit + key % plan.unit, -1)
    full = jnp.full_like(plan.count, self.tile)
    view = at.top.read(at, cache, dataclasses.replace(plan, table=slot, count=full, unit=1))
    qpos = (cache.seen - 1)[:, None]
    window = at.top.window(at, qpos)
    ok = (view.pos >= 0) & plan.span.holds(view.slot)
    if window is not None:
      ok &= window.sees(view.pos)[:, :, 0]
    x = attention.windowed_logits(at, q[:, :, :, None], qpos, view.k, view.pos, window)[:, :, :, 0]
    x = jnp.where(ok[:, :, None], x, -jnp.inf)
    v = jnp.where(ok[..., None], view.v, 0)  # empty slots may hold NaN
    return x, v, view.slot, ok

  def _look(self, o: Float[Array, "B K G H"]) -> Float[Array, "B K G P"]:
    """x = Probe(o): the dimensions ⌊i·H/32⌋, i < 32; all where there are no more."""
    size = o.shape[-1]
    if self.probe == "full" or size <= PROBES:
      return o
    return o[..., [i * size // PROBES for i in range(PROBES)]]

  def _is_stable(self, new: Float[Array, "B K G P"], old: Array) -> Bool[Array, "B K G"]:
    """d_scale < τ and d_direction < φ; a probe of norm 0, the first one too, is not (§3.2)."""
    scale = jnp.linalg.norm(new - old, axis=-1)  # ‖x(t) − x(t−1)‖₂
    norms = jnp.linalg.norm(new, axis=-1) * jnp.linalg.norm(old, axis=-1)
    cosine = (new * old).sum(-1) / jnp.where(norms > 0, norms, 1.0)
    return (norms > 0) & (scale < self.tau) & (1 - cosine < self.phi)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Walk:
  """A walk between two tiles, per query head [B, K, G].

  Attributes:
    state: softmax state of the tiles read.
    calm: c, stable tiles in a row.
    going: whether it goes on.
    tiles, keys: steps taken (tiles with a key in them), and keys read.
    logits: of the keys read, float32 [B, K, S, G], −∞ elsewhere; None where nobody asks.
  """

  state: State
  calm: Array
  going: Array
  tiles: Array
  keys: Array
  logits: Array | None


def _where(ok: Bool[Array, "B K G"], new: Array, old: Array) -> Array:
  return jnp.where(ok.reshape(ok.shape + (1,) * (new.ndim - 3)), new, old)
