"""Ada-KV: a layer's budget goes to the heads whose scores need it (Feng et al., NeurIPS 2025)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core import settings, slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Prompt, Turn
from kvjax.core.fields import between, expect, least
from kvjax.core.leaves import Layout, Leaf
from kvjax.core.plan import Span, Window
from kvjax.core.traits import Traits
from kvjax.families import forms
from kvjax.families.bounded import InTurn
from kvjax.families.method import Method
from kvjax.families.prompt_scored import PromptScored, Scored
from kvjax.families.shapes import ranked
from kvjax.families.wrapper import Wrapper
from kvjax.methods.snapkv import SnapKV
from kvjax.ops import shared_slots
from kvjax.primitives import ring

LAST = jnp.iinfo(jnp.int32).max
# What is done here in place of the base, or reads slots as those of a head: forms that are known.
KNOWN: dict[str, type] = {
  "victim": InTurn,
  "settle": Scored,
  **dict.fromkeys(("window", "span", "insert", "plan", "attend", "plan_and_attend"), Method),
  **dict.fromkeys(("observe", "keep"), Method),
}


@dataclasses.dataclass(frozen=True)
class AdaKV(Wrapper):
  """Cuts a prompt to the best tokens of all heads together (Alg. 1), each head to its share.

  A layer whose base keeps n tokens in each of K heads has K·n slots. The scores of its heads are
  pooled and the K·n best tokens stay, wherever they are: of all choices this one has the least
  bound on the change of the layer's output (Thm. 3.1). Every head keeps its n_safe = max(1, ⌊α·n⌋)
  best ones, the window's first (§3.3), so that lengths differ by head and row and their sum does
  not. As kvpress has it, the window counts. Then each head holds its length: a token that is
  decoded takes the slot of the oldest of the head's window, as `PromptScored` says.

  Heads lie one after the other in one array, so that what is freed is freed: a layer has K·n slots.
  Scores of different heads have to be comparable, as probabilities are.

  Attributes:
    base: what scores the tokens, a `PromptScored` method or `KVzip`, and what its budgets are.
    safeguard: α (0.2), share of its budget that every head keeps; 1 is the base.
    rounded: as the authors' code has it, a head's length is round((1 − α)·f + ⌊α·m⌋) with f of the
      K·m best tokens before the window, m = n − window_size, and the window on top: the sum may
      miss K·n by rounding.
    pools: heads are pooled in so many parts, each with slots of its own: a multiple of the devices
      that heads are split over.
  """

  base: Method = dataclasses.field(default_factory=SnapKV)
  safeguard: float | int = between(0, 1, 0.2)
  rounded: bool = False
  pools: int = least(1, 1)

  def __post_init__(self):
    super().__post_init__()
    scored = isinstance(self.base, Scored)
    expect(self, "base", scored, "a method that cuts prompts by a score of tokens (PromptScored)")
    window = not self.rounded or isinstance(self.base, PromptScored)
    expect(self, "rounded", window, f"False: {self.base!r} has no window_size")
    own = [move for move, cls in KNOWN.items() if forms.overrides(self.base, move, cls)]
    expect(self, "base", not own, f"a method without {', '.join(own)} of its own")

  @property
  def traits(self) -> Traits:
    return super().traits.but(uneven=self._uneven)

  def _uneven(self, spec: CacheSpec, parts: int) -> str:
    """Reason against splitting heads over so many devices; empty: none (`Traits.uneven`)."""
    if self.pools % parts == 0:
      return ""
    return f"expected pools = {self.pools} to be a multiple: a device's heads share its slots"

  # ---- shapes

  def _sharers(self, spec: CacheSpec) -> int:
    """P, the heads of a pool."""
    if spec.kv_heads % self.pools:
      raise ValueError(
        f"{type(self).__name__}.pools: found {self.pools}, expected a divisor of the "
        f"{spec.kv_heads} key/value heads"
      )
    return spec.kv_heads // self.pools

  def capacity(self, spec: CacheSpec, layer: int) -> int:
    """Slots of a pool: P·n, and what rounding may add."""
    heads = self._sharers(spec)
    return heads * self.base.capacity(spec, layer) + (heads // 2 if self.rounded else 0)

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    """The base's, in pools; of each head the first slot and the number of slots ("place")."""
    held, n = self.base.leaves(spec, layer), self.base.capacity(spec, layer)
    own = {
      name: dataclasses.replace(x, heads=self.pools) if x.shelf == "slots" else x
      for name, x in held.items()
    }
    equal = tuple((head % self._sharers(spec) * n, n) for head in range(spec.kv_heads))
    return {**own, "place": Leaf("heads", (2,), jnp.int32, equal, layout=Layout.SHARED)}

  # ---- decode

  def span(self, at: At, cache: Cache, window: Window | None) -> Span:
    first, _, occupied = shared_slots.lies(cache)
    return Span(first, first + occupied)

  def victim(self, at: At, cache: Cache) -> Int[Array, "B K"]:
    """The oldest of the head's tokens that no prompt selected."""
    first, length, _ = shared_slots.lies(cache)
    staying, since = jnp.moveaxis(cache.heads["ring"], -1, 0)
    return first + ring.place_of(staying, since, cache.seen[:, None], length)

  # ---- prompt

  def keep(self, at: At, cache: Cache, turn: Turn, new: slots.Slots) -> Cache:
    """Of each head as many of its best tokens as it has of the pool's."""
    prompt = turn.prompt
    staged = new if prompt.past == 0 else slots.join(shared_slots.by_head(cache), new)
    priority, staged = ranked(at, dataclasses.replace(turn, staged=staged))
    total = cache.used + prompt.valid
    cache = cut(self, cache, staged, priority, total, shared_slots.tokens(cache))
    cache = cache.put(rows={"seen": cache.seen + prompt.valid})
    return at.top.settle(at, cache, prompt)

  def _lengths(
    self, key: Float[Array, "B K S"], time: Int[Array, "B K S"], n: int, heads: int
  ) -> Int[Array, "B K"]:
    """Number of tokens that each head keeps of a prompt that is longer than n; both best first."""
    if not self.rounded:
      safe = max(1, int(self.safeguard * n))
      forced = (jnp.arange(key.shape[-1]) < safe) & (time < LAST)
      key = jnp.where(forced, -jnp.inf, key)
      return _of_each(key, time, heads * n, heads)
    window = self.base.window_size  # type: ignore[attr-defined]
    m, past = n - window, jnp.isfinite(key)
    f = _of_each(jnp.where(past, key, jnp.inf), jnp.where(past, time, LAST), heads * m, heads)
    share = jnp.round((1 - self.safeguard) * f + int(self.safeguard * m)).astype(jnp.int32)
    return share + window

  def settle(self, at: At, cache: Cache, prompt: Prompt) -> Cache:
    """Selected tokens stay; each head goes round the slots of the others, as the base does."""
    score = jnp.where(cache.pos >= 0, cache.slots["score"], jnp.inf)
    selected = (cache.pos >= 0) & ~jnp.isinf(score)
    staying = shared_slots.of_head(cache, selected).sum(-1, dtype=jnp.int32)
    _, length, occupied = shared_slots.lies(cache)
    since = cache.seen[:, None] + length - occupied
    closed = jnp.stack([staying, since], -1)
    return cache.put(slots={"score": score}, heads={"ring": closed})


def cut(
  method: AdaKV,
  cache: Cache,
  staged: slots.Slots,
  priority: Float[Array, "B K S"],
  total: Int[Array, " B"],
  most: int,
) -> Cache:
  """The cache with the best of `staged` in it, most·K of them, each head's in its own slots.

  Where there are more, each head has n − most free slots after its tokens; else all stay.

  Args:
    method: says how many each head keeps.
    cache: of n slots a head on average, of which heads may have unequal numbers.
    staged: slots [B, K, S, ...], head by head.
    priority: what they are worth.
    total: tokens of each row, on average over the heads.
    most: how many stay, likewise.
  """
  heads, n = shared_slots.sharers(cache), shared_slots.tokens(cache)
  key, time, slot = _sorted(priority, staged["pos"])
  lengths, more = method._lengths(key, time, most, heads), total[:, None] > most
  count = jnp.where(more, lengths, (time < LAST).sum(-1, dtype=jnp.int32))
  length = jnp.where(more, lengths + n - most, cache.heads["place"][..., 1])
  length = length.reshape(len(total), -1, heads)
  place = jnp.stack([jnp.cumsum(length, -1) - length, length], -1)  # [B, R, P, 2]
  stays = jnp.arange(time.shape[-1]) < count[..., None]
  order = jax.lax.sort((jnp.where(stays, time, LAST), slot), num_keys=1)[1]
  kept = shared_slots.packed(staged, order, count, place, cache.size)
  used = {"used": jnp.minimum(total, most)}
  cache = dataclasses.replace(cache, slots=kept)
  return cache.put(heads={"place": place.reshape(*count.shape, 2)}, rows=used)


def _sorted(
  priority: Float[Array, "B K S"], pos: Int[Array, "B K S"]
) -> tuple[Float[Array, "B K S"], Int[Array, "B K S"], Int[Array, "B K S"]]:
  """−priority, positions and slots of each head's tokens, best first; ties to the lowest position.

  Empty slots come last, with ∞ and `LAST`; so does, among tokens, a priority of NaN.
  """
  held = pos >= 0
  key = jnp.where(held & ~jnp.isnan(priority), -priority, jnp.inf)
  slot = jnp.broadcast_to(jnp.arange(pos.shape[2], dtype=jnp.int32), pos.shape)
  key, time, slot = jax.lax.sort((key, jnp.where(held, pos, LAST), slot), num_keys=2)
  return key, time, slot


def _of_each(
  key: Float[Array, "B K S"], time: Int[Array, "B K S"], size: int, heads: int
) -> Int[Array, "B K"]:
  """Each head's number of a pool's `size` tokens of lowest key; ties as in time, then heads."""
  head = jnp.arange(key.shape[1], dtype=jnp.int32) % heads
  each = [shared_slots.pooled(x, heads) for x in (key, time)]
  owner = shared_slots.pooled(jnp.broadcast_to(head[:, None], key.shape), heads)
  _, time, owner = jax.lax.sort((*each, owner), num_keys=3)
  owner = jnp.where(time < LAST, owner, heads)[..., :size]
  counts = (owner[..., None] == jnp.arange(heads)).sum(2, dtype=jnp.int32)  # [B, R, P]
  return counts.reshape(key.shape[:2])


settings.register(
  AdaKV,
  example=lambda cls, budget: cls(settings.example(SnapKV, budget)),
  neutral=lambda cls, length: cls(settings.neutral(SnapKV, length)),
  # The authors' code over its SnapKV: lengths are rounded, the window counts beside.
  repo=lambda cls, budget: cls(settings.repo(SnapKV, budget), rounded=True),
)
