"""Keys and values in 8, 4 or 2 bits, under any method that keeps them in slots."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.core import settings, slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Carry, Prompt, Turn
from kvjax.core.fields import least, one_of
from kvjax.core.leaves import Leaf, New
from kvjax.core.plan import Attended, Plan
from kvjax.families import entrance
from kvjax.families.coded import Coded
from kvjax.families.full import Full
from kvjax.families.method import Method
from kvjax.families.wrapper import of_base
from kvjax.ops import decode
from kvjax.primitives.codes import WORDS, Codes, dequantise, quantise, rounded_query

BITS = (8, 4, 2)


@dataclasses.dataclass(frozen=True)
class Quantised(Coded):
  """Stores the base's keys and values as codes of a few bits (`kvjax.primitives.codes`).

  Every token and head has its own scale, or one for each group of channels: symmetric codes of 8
  bits, as vLLM's `int8_per_token_head` and MaxText's int8 caches have them, or codes of 4 or 2 bits
  with a zero point, as KIVI has for values (Liu et al., 2024, §3.2). Codes move with their scales:
  whatever the base evicts, compacts or selects, it does so with them.

  Keys are rounded less their mean over the row's first chunk of prompt (SageAttention: Zhang et
  al., ICLR 2025, §4.2). In many models some channels of all keys are large and alike, and would
  leave few levels to the others. A query's product with the mean is the same for all keys: softmax,
  and so a kernel, need not know of it. Under a soft cap they would: there the mean is 0, as in rows
  that had no prompt.

  A prompt is attended to in full precision; what is cached of it is rounded, after RoPE (KIVI,
  §3.3). Everything that reads a cache, the base's scores and summaries too, sees the numbers that
  codes stand for. A decode step's query is rounded to 8 bits a head for its attention: q·k is a
  product of integers then.

  The base may not have its own `insert` or `stage`, nor heads of unequal length: R-KV,
  StreamingLLM's turns, streams, AdaKV and DuoAttention are refused. Layers with a window of the
  model's own are left as they are.

  >>> import kvjax
  >>> spec = kvjax.CacheSpec(batch=1, capacity=4096, kv_heads=2, groups=4, head_dim=64, layers=4)
  >>> full, four = kvjax.Full(), kvjax.Quantised(kvjax.Full(), bits=4)
  >>> taken = [kvjax.plan_memory(spec, method).device for method in (four, full)]
  >>> round(taken[0] / taken[1], 2)
  0.32

  Attributes:
    base: the method whose keys and values these are.
    bits: of a code, 8, 4 or 2. Per slot and head of H channels keys and values take H·bits/4 bytes
      and 8 for the scales of each group, and 8 more for its zero points with 4 and 2 bits; per row
      and head the mean takes 4·H.
    exact_layers: first layers whose keys and values stay as they are.
    group: channels that share a scale, a divisor of H; 0 or H: all of a head. The kernel takes
      whole heads of 8 and 4 bits, the reference the rest.
  """

  entry = "enter_codes"
  _covers = of_base("_covers")  # tokens lie where the base's do
  base: Method = dataclasses.field(default_factory=Full)
  bits: int = one_of(BITS, 8)
  exact_layers: int = least(0, 0)
  group: int = least(0, 0)

  # ---- what is stored

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    """The base's, but k and v in words, with scales (and zero points) beside them.

    Raises:
      ValueError: heads of this size do not fill whole words or groups.
    """
    leaves = self.base.leaves(spec, layer)
    if layer < self.exact_layers:
      return leaves
    width = self.group or spec.head_dim
    if spec.head_dim % width:
      raise ValueError(
        f"{type(self).__name__}.group: found {self.group} for heads of {spec.head_dim} channels, "
        "expected a divisor of them, or 0 for the whole head"
      )
    parts = Leaf("slots", (spec.head_dim // width,)[: width < spec.head_dim], in_place=True)
    mean = {"k_mean": Leaf("heads", (spec.head_dim,), in_place=True)}
    return {**leaves, **self._words(spec), **dict.fromkeys(self._beside, parts), **mean}

  @property
  def _beside(self) -> list[str]:
    """Scales of k and v, then their zero points."""
    parts = [_parts(name, self.bits) for name in WORDS]
    return [name for pair in zip(*parts, strict=True) for name in pair]

  def _of_base(self, cache: Cache) -> Cache:
    """The base's own cache: k and v are the numbers, in float32, that codes stand for."""
    if not _coded(cache):
      return cache
    held = {name: x for name, x in cache.slots.items() if name not in self._beside}
    for name in WORDS:
      parts = [cache.slots[part] for part in _parts(name, self.bits)]
      held[name] = dequantise(Codes(cache.slots[name], *parts), self.bits)
    held["k"] = held["k"] + cache.heads["k_mean"][:, :, None]
    return self._numbers(cache, held)

  def _with_words(self, cache: Cache) -> Cache:
    """The same, and beside the numbers their words, scales and zero points, to move with them."""
    if not _coded(cache):
      return cache
    kept = {_WORDS[name]: cache.slots[name] for name in WORDS}
    kept |= {name: cache.slots[name] for name in self._beside}
    held = self._of_base(cache)
    return dataclasses.replace(held, slots={**held.slots, **kept})

  def _stored(self, before: Cache, after: Cache) -> Cache:
    """The cache as it is kept, after a move of the base on one `_with_words`."""
    rest = {name: x for name, x in after.slots.items() if name not in _WORDS.values()}
    words = {name: after.slots[beside] for name, beside in _WORDS.items()}
    return dataclasses.replace(after, slots={**rest, **words}, kinds=before.kinds)

  def _codes(self, new: New, mean: Float[Array, "B K H"]) -> New:
    """Words, scales and zero points of new tokens [B, K, T, H], by the names of their leaves."""
    made: New = {}
    new = {**new, "k": new["k"].astype(jnp.float32) - mean[:, :, None]}
    for name, word in WORDS.items():
      codes = quantise(new[name], self.bits, word, self.group)
      parts = [x for x in codes if x is not None]
      made |= dict(zip((name, *_parts(name, self.bits)), parts, strict=True))
    return made

  def _rounded(self, codes: New, mean: Float[Array, "B K H"]) -> New:
    """The numbers that new tokens' codes stand for."""
    parts = {name: [codes[x] for x in (name, *_parts(name, self.bits))] for name in WORDS}
    new = {name: dequantise(Codes(*of), self.bits) for name, of in parts.items()}
    return {**new, "k": new["k"] + mean[:, :, None]}

  # ---- moves: decode

  def insert(
    self,
    at: At,
    cache: Cache,
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    live: Bool[Array, " B"],
  ) -> Cache:
    """The base's, of rounded keys and values; their codes go where they go."""
    if not _coded(cache):
      return self.base.insert(at, cache, k, v, live)
    mean = cache.heads["k_mean"]
    codes = self._codes({"k": k[:, :, None], "v": v[:, :, None]}, mean)
    new = self._rounded(codes, mean)
    entered = self.base.insert(at, self._of_base(cache), new["k"][:, :, 0], new["v"][:, :, 0], live)
    slot = entrance.landing(at, cache, live)[:, :, None]
    written = {name: slots.put(cache.slots[name], slot, x) for name, x in codes.items()}
    slots_of = {**entered.slots, **written}
    return dataclasses.replace(entered, slots=slots_of, kinds=cache.kinds)

  def plan_and_attend(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan, carry: Carry
  ) -> tuple[Plan, Attended, Carry]:
    """The base's, over the numbers; the plan has the codes."""
    visible = self._with_codes(at, cache, visible, q)
    return super().plan_and_attend(at, cache, q, visible, carry)

  def attend(self, at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Attended:
    """The base's, for queries rounded to 8 bits a head."""
    plan = self._with_codes(at, cache, plan, q)
    if plan.codes is None:
      return self.base.attend(at, cache, plan, q)
    attended = self.base.attend(decode.sparing(at), self._of_base(cache), plan, rounded_query(q))
    return decode.rounded(attended, q.dtype)

  def _with_codes(self, at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Plan:
    """The plan with the codes that the cache holds, if it does."""
    if not _coded(cache):
      return plan
    return decode.with_codes(at, cache, plan, q, self._beside, self.bits)

  # ---- moves: prompt

  def keep(self, at: At, cache: Cache, turn: Turn, new: slots.Slots) -> Cache:
    """The base's, of rounded keys and values, with which their codes move."""
    if not _coded(cache):
      return self.base.keep(at, cache, turn, new)
    mean = _mean_key(at, cache, new)
    codes = self._codes(new, mean)
    rounded = {**self._rounded(codes, mean), "pos": new["pos"]}
    rounded |= self._of_base(cache).of_new(rounded)
    codes |= {beside: codes[name] for name, beside in _WORDS.items()}
    new = {**codes, **rounded}
    held = self._with_words(cache)
    kept = self.base.keep(at, held, turn, new)
    return self._stored(cache, kept.put(heads={"k_mean": mean}))

  def settle(self, at: At, cache: Cache, prompt: Prompt) -> Cache:
    """The base's, of the numbers; `keep` asks for it where these have their words beside them."""
    if not _coded(cache):
      return self.base.settle(at, cache, prompt)
    return self._stored(cache, self.base.settle(at, self._with_words(cache), prompt))


def _mean_key(at: At, cache: Cache, new: slots.Slots) -> Float[Array, "B K H"]:
  """Mean that stored keys lack, after a chunk: of the row's first chunk; 0 under a soft cap."""
  held = cache.heads["k_mean"]
  if at.env.soft_cap is not None:
    return held
  k = new["k"].astype(jnp.float32)
  counts = (new["pos"] >= 0)[..., None] & jnp.isfinite(k)
  mean = jnp.where(counts, k, 0).sum(2) / jnp.maximum(counts.sum(2), 1)
  return jnp.where((cache.seen == 0)[:, None, None], mean, held)


_WORDS = {name: f"{name}_words" for name in WORDS}  # beside the numbers, while tokens move


def _parts(name: str, bits: int) -> tuple[str, ...]:
  """The leaves that make numbers of the words in leaf `name`."""
  return (f"{name}_scale",) if bits == 8 else (f"{name}_scale", f"{name}_zero")


def _coded(cache: Cache) -> bool:
  """True if k and v are words: not in first layers, nor where they are numbers just now."""
  return cache.leaf("k").bits is not None


settings.register(
  Quantised,
  example=lambda cls, budget: cls(),
  # Layers that are all kept as they are.
  neutral=lambda cls, length: cls(exact_layers=1 << 10),
)
