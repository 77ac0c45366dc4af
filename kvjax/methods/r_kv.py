"""R-KV: keep what is attended to and not said twice (Cai et al., NeurIPS 2025)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.core import settings, slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Turn
from kvjax.core.fields import between, expect, least, number, odd, one_of
from kvjax.core.leaves import Leaf
from kvjax.core.plan import Attended, Plan
from kvjax.families.bounded import Bounded
from kvjax.families.method import Aux, Method
from kvjax.ops import attention


@dataclasses.dataclass(frozen=True)
class RKV(Bounded):
  """Fills a buffer, then compresses cache and buffer to the budget (§3).

  The newest `window_size` tokens stay; of the older ones those of highest

      weight · importance − (1 − weight) · redundancy.

  Importance is the softmax probability that the window's queries give a token, over the older
  tokens alone, mean over queries and over the query heads of a KV head, then the largest among
  `pool` neighbours. Redundancy is the softmax, over all cached tokens, of a token's mean cosine
  similarity to them, where each token spares its latest similar one: of a group of like tokens
  the newest stays. The queries are kept in the cache.

  The cache has budget + buffer slots. A row is compressed when a token arrives and all of them
  are taken; a prompt or a further turn after which more than `budget` tokens are cached, at its
  end. Prefill attention is dense.

  Attributes:
    budget: tokens kept per KV head by a compression, the window included.
    buffer: tokens per KV head beyond the budget before the next one (128).
    window_size: newest tokens, whose queries observe (8).
    pool: width of the max-pooling over positions, odd (7).
    weight: λ, the share of importance (the authors' runs: 0.1; their class's default: 0.07).
    threshold: cosine from which on two keys are similar (0.5).
    group: how the query heads of a KV head are joined: "mean" of their probabilities, or "max" of
      their logits before the softmax (`repo`).
    spare_oldest: whether a token that has no similar one spares the oldest (`repo`).
  """

  buffer: int = least(1, 128)
  window_size: int = least(1, 8)
  pool: int = odd(7)
  weight: float = between(0, 1, 0.1)
  threshold: float = number(0.5)
  group: str = one_of(("mean", "max"), "mean")
  spare_oldest: bool = False

  def __post_init__(self):
    window = self.window_size
    expect(self, "budget", self.budget > window, f"more than window_size = {window}")

  def _most(self, spec: CacheSpec, layer: int) -> int:
    return self.budget + self.buffer

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    shape = self.window_size, spec.groups, spec.head_dim
    return {**super().leaves(spec, layer), "queries": Leaf("heads", shape, spec.dtype)}

  def insert(
    self,
    at: At,
    cache: Cache,
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    live: Bool[Array, " B"],
  ) -> Cache:
    """Makes room first: full rows are compressed, one after the other; mostly there are none."""
    full = live & (cache.used == cache.size)
    rows = jnp.argsort(~full)  # the full ones first

    def compress_next(i: Array, cache: Cache) -> Cache:
      return self._compress_row(at, cache, rows[i])

    cache = jax.lax.fori_loop(0, full.sum(), compress_next, cache)
    return super().insert(at, cache, k, v, live)

  def _compress_row(self, at: At, cache: Cache, b: Int[Array, ""]) -> Cache:
    """Row b with its best `budget` tokens; the other rows' arrays are not touched."""

    def row(x: Array) -> Array:
      return jax.lax.dynamic_slice_in_dim(x, b, 1)

    held = {name: row(cache.slots[name]) for name in ("k", "pos")}
    priority = self._priority(at, held, row(cache.heads["queries"]), row(cache.seen))
    most = min(self.budget, cache.size - 1)  # of rows beyond a capacity below the budget, too
    order, pos = (x[0] for x in slots.best(held["pos"], priority, most))
    heads = jnp.arange(order.shape[0])[:, None]
    kept = {n: x.at[b, :, :most].set(x[b, heads, order]) for n, x in cache.slots.items()}
    pos = jnp.pad(pos, ((0, 0), (0, cache.size - most)), constant_values=-1)
    used = cache.used.at[b].set(most)
    return cache.put(slots={**kept, "pos": cache.pos.at[b].set(pos)}, rows={"used": used})

  def observe(
    self, at: At, cache: Cache, q: Array, plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    """Remembers the newest query."""
    newest = (cache.seen - 1)[:, None]
    return cache.put(heads={"queries": self._remember(cache, q[:, :, None], newest)}), {}

  def _remember(
    self, cache: Cache, q: Float[Array, "B K T G H"], qpos: Int[Array, "B T"]
  ) -> Float[Array, "B K W G H"]:
    """A ring of the newest queries: that of position p stands at p mod W; −1 = padding.

    One that is not finite leaves its predecessor in place.
    """
    real = (qpos >= 0)[:, None] & jnp.isfinite(q).all((3, 4))
    place = jnp.where(real, (qpos % self.window_size)[:, None], self.window_size)
    return slots.put(cache.heads["queries"], place, q)

  def keep(self, at: At, cache: Cache, turn: Turn, new: slots.Slots) -> Cache:
    """The best `budget` tokens of old and new, ranked as in decode."""
    last, last_pos, _ = attention.last_queries(turn, self.window_size)
    queries = self._remember(cache, jnp.moveaxis(last, 3, 2), last_pos)
    staged = new if turn.prompt.past == 0 else slots.join(cache.slots, new)
    seen = cache.seen + turn.prompt.valid
    most = min(self.budget, cache.size)
    if staged["pos"].shape[2] > most:
      priority = self._priority(at, staged, queries, seen)
      staged = slots.keep_best(staged, priority, most)
    rows = {"seen": seen, "used": jnp.minimum(cache.used + turn.prompt.valid, most)}
    kept = slots.resize(staged, cache.size)
    cache = dataclasses.replace(cache, slots=kept).put(heads={"queries": queries}, rows=rows)
    return at.top.settle(at, cache, turn.prompt)

  def _priority(
    self, at: At, held: slots.Slots, queries: Float[Array, "B K W G H"], end: Int[Array, " B"]
  ) -> Float[Array, "B K S"]:
    """Worth of older tokens; infinite for the window, the newest tokens before `end`.

    Tokens whose keys are not finite count as absent, and for nothing.
    """
    sound = jnp.isfinite(held["k"]).all(-1)
    pos = jnp.where(sound, held["pos"], -1)
    k = jnp.where((pos >= 0)[..., None], held["k"], 0)  # empty slots may hold NaN
    past = (pos >= 0) & (pos < (end - self.window_size)[:, None, None])
    importance = self._importance(at, queries, k, pos, past)
    score = self.weight * importance - (1 - self.weight) * self._redundancy(k, pos)
    return jnp.where(past, score, jnp.where(sound, jnp.inf, -jnp.inf))

  def _importance(
    self,
    at: At,
    queries: Float[Array, "B K W G H"],
    k: Float[Array, "B K S H"],
    pos: Int[Array, "B K S"],
    past: Bool[Array, "B K S"],
  ) -> Float[Array, "B K S"]:
    """Probability that the window's queries give to each older token, pooled."""

    def add(i: Array, total: Array) -> Array:
      query, cap = queries[:, :, i, :, None], at.env.soft_cap
      logits = attention.logits_of(query, k, cap)[:, :, :, 0]  # [B, K, G, S]
      if self.group == "max":
        logits = logits.max(2, keepdims=True)
      return total + jax.nn.softmax(jnp.where(past[:, :, None], logits, -jnp.inf), -1).mean(2)

    total = jax.lax.fori_loop(0, self.window_size, add, jnp.zeros(pos.shape, jnp.float32))
    return slots.pool(total / self.window_size, pos, past, self.pool, "max")

  def _redundancy(
    self, k: Float[Array, "B K S H"], pos: Int[Array, "B K S"]
  ) -> Float[Array, "B K S"]:
    """softmax_j of mean_i cos(k_i, k_j), i ≠ j and j not the one that i spares.

    In blocks of i, so that no map is larger than the keys in float32.
    """
    size, block = k.shape[2], min(k.shape[2], k.shape[3])
    norm = jnp.linalg.norm(k.astype(jnp.float32), axis=-1)
    inverse = 1 / jnp.where(norm == 0, 1, norm)
    oldest = jnp.where(pos >= 0, pos, jnp.iinfo(jnp.int32).max).min(-1)[..., None, None]

    def add(i: Array, total: Array) -> Array:
      index = i * block + jnp.arange(block)  # past the end: taken as empty

      def cut(x: Array, fill: int) -> Array:
        return x.at[:, :, index].get(mode="fill", fill_value=fill)

      own = cut(pos, -1)[..., None]
      cos = jnp.einsum("bkih,bkjh->bkij", cut(k, 0), k, preferred_element_type=jnp.float32)
      cos *= cut(inverse, 0)[..., None] * inverse[:, :, None]
      other = pos[:, :, None]
      cos = jnp.where((own >= 0) & (own != other), cos, 0)
      spared = jnp.where(cos > self.threshold, other, -1).max(-1, keepdims=True)
      if self.spare_oldest:
        spared = jnp.maximum(spared, oldest)
      return total + jnp.where(other == spared, 0, cos).sum(2)

    total = jax.lax.fori_loop(0, -(-size // block), add, jnp.zeros(pos.shape, jnp.float32))
    mean = total / (pos >= 0).sum(-1, keepdims=True)
    return jax.nn.softmax(jnp.where(pos >= 0, mean, -jnp.inf), -1)


def _example(cls: type[RKV], budget: int) -> Method:
  """`budget` slots in all, the buffer's included."""
  buffer = min(128, max(1, budget // 4))
  kept = budget - buffer
  return cls(budget=kept, buffer=buffer, window_size=min(8, max(1, kept // 2)))


settings.register(
  RKV,
  example=_example,
  neutral=lambda cls, length: cls(budget=length + 1, buffer=1, window_size=min(8, length)),
  # The authors' repository, with the λ of their runs. The query heads of a KV head are joined
  # before the softmax, and a token that has no similar one spares the oldest (an index left at
  # zero).
  repo=lambda cls, budget: cls(budget=budget, group="max", spare_oldest=True),
)
