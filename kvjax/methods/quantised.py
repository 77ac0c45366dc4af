"""Keys and values in 8 or 4 bits, under any method that keeps them in slots."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import dispatch, entrance, forms, settings
from kvjax.fields import least, one_of
from kvjax.full import Full
from kvjax.leaves import Leaf, New
from kvjax.method import Aux, Method
from kvjax.ops import slots
from kvjax.ops.quantised import WORDS, Codes, dequantise, quantise, rounded_query
from kvjax.plans import Attended, Plan
from kvjax.traits import Traits
from kvjax.types import At, Cache, CacheSpec, Carry, Env, Prompt
from kvjax.wrapper import Wrapper

BITS = (8, 4)


@dataclasses.dataclass(frozen=True)
class Quantised(Wrapper):
  """Stores the base's keys and values as codes of a few bits (`kvjax.ops.quantised`).

  Every token and head has its own scale: symmetric codes of 8 bits, as vLLM's
  `int8_per_token_head` and MaxText's int8 caches have them, or codes of 4 bits with a zero point,
  as KIVI has for values (Liu et al., 2024, §3.2). Codes and scales move together: whatever the base
  evicts, compacts or selects, it does so with them.

  A prompt is attended to in full precision; what is cached of it is rounded, after RoPE (KIVI,
  §3.3). Everything that reads a cache, the base's scores and summaries too, sees the numbers that
  codes stand for. A decode step's query is rounded to 8 bits a head for its attention: q·k is a
  product of integers then.

  The base may not have its own `insert` or `stage`, nor heads of unequal length: R-KV,
  StreamingLLM's turns, streams, AdaKV and DuoAttention are refused. Layers with a window of the
  model's own are left as they are.

  Attributes:
    base: the method whose keys and values these are.
    bits: of a code, 8 or 4. Per slot and head of H channels keys and values take H·bits/4 bytes and
      8 for their scales, and 8 more for zero points with 4 bits.
    exact_layers: first layers whose keys and values stay as they are.
  """

  replaces: ClassVar[tuple[str, ...]] = ("insert", "stage")
  base: Method = dataclasses.field(default_factory=Full)
  bits: int = one_of(BITS, 8)
  exact_layers: int = least(0, 0)

  @property
  def traits(self) -> Traits:
    """The base's, but that what has been cached is not what has been attended to."""
    return self.base.traits.but(chunkable=False, order_independent=False, spreads=False)

  def _form(self, move: str) -> Any:
    """The base's, of moves that only see its cache as the base does."""
    own = move in ("insert", "attend", "leaves", "traits")
    return super()._form(move) if own else self.base._form(move)

  def _lineage(self) -> list[type]:
    return self.base._lineage()

  # ---- what is stored

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    """The base's, but k and v in words, with scales (and zero points) beside them.

    Raises:
      ValueError: heads of this size do not fill whole words.
    """
    leaves = self.base.leaves(spec, layer)
    if layer < self.exact_layers:
      return leaves
    for name, word in WORDS.items():
      codes = 8 * jnp.dtype(word).itemsize // self.bits  # of a word
      if spec.head_dim % codes:
        raise ValueError(
          f"{type(self).__name__}: found head_dim = {spec.head_dim} and bits = {self.bits}, "
          f"expected a head_dim that is a multiple of {codes}"
        )
      leaves[name] = Leaf("slots", (spec.head_dim // codes,), word, bits=self.bits)
      leaves |= dict.fromkeys(_parts(name, self.bits), Leaf("slots", in_place=True))
    return leaves

  def _of_base(self, cache: Cache) -> Cache:
    """What the base has in its cache: k and v are the numbers, in float32, that codes stand for."""
    if not _coded(cache):
      return cache
    held = {name: x for name, x in cache.slots.items() if name not in _own(self.bits)}
    for name in WORDS:
      parts = [cache.slots[part] for part in _parts(name, self.bits)]
      held[name] = dequantise(Codes(cache.slots[name], *parts), self.bits)
    return dataclasses.replace(cache, slots=held)

  def _with_words(self, cache: Cache) -> Cache:
    """The same, and beside the numbers their words, scales and zero points, to move with them."""
    if not _coded(cache):
      return cache
    kept = {_WORDS[name]: cache.slots[name] for name in WORDS}
    kept |= {name: cache.slots[name] for name in _own(self.bits)}
    held = self._of_base(cache)
    return dataclasses.replace(held, slots={**held.slots, **kept})

  def _stored(self, cache: Cache) -> Cache:
    """The cache as it is kept, of one `_with_words`."""
    if _WORDS["k"] not in cache.slots:
      return cache
    rest = {name: x for name, x in cache.slots.items() if name not in _WORDS.values()}
    words = {name: cache.slots[beside] for name, beside in _WORDS.items()}
    return dataclasses.replace(cache, slots={**rest, **words})

  def _after(self, before: Cache, after: Cache) -> Cache:
    """The cache as it is kept, after a move of the base that left k and v alone."""
    own = {name: before.slots[name] for name in (*WORDS, *_own(self.bits)) if name in before.slots}
    return dataclasses.replace(after, slots={**after.slots, **own})

  def _codes(self, new: New) -> New:
    """Words, scales and zero points of new tokens [B, K, T, H], by the names of their leaves."""
    made: New = {}
    for name, word in WORDS.items():
      codes = quantise(new[name], self.bits, word)
      parts = [x for x in codes if x is not None]
      made |= dict(zip((name, *_parts(name, self.bits)), parts, strict=True))
    return made

  def _rounded(self, codes: New) -> New:
    """The numbers that new tokens' codes stand for."""
    parts = {name: [codes[x] for x in (name, *_parts(name, self.bits))] for name in WORDS}
    return {name: dequantise(Codes(*of), self.bits) for name, of in parts.items()}

  # ---- moves: decode

  def victim(self, at: At, cache: Cache) -> Int[Array, "B K"]:
    return self.base.victim(at, self._of_base(cache))

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
    codes = self._codes({"k": k[:, :, None], "v": v[:, :, None]})
    new = self._rounded(codes)
    entered = self.base.insert(at, self._of_base(cache), new["k"][:, :, 0], new["v"][:, :, 0], live)
    slot = entrance.landing(at, cache, live)[:, :, None]
    written = {name: slots.put(cache.slots[name], slot, x) for name, x in codes.items()}
    return dataclasses.replace(entered, slots={**entered.slots, **written})

  def plan(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan, carry: Carry
  ) -> tuple[Plan, Carry]:
    return self.base.plan(at, self._of_base(cache), q, visible, carry)

  def order(self, at: At, cache: Cache) -> Float[Array, "B K S"] | None:
    return self.base.order(at, self._of_base(cache))

  def attend(self, at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Attended:
    """The base's, for queries rounded to 8 bits a head."""
    if not _coded(cache):
      return self.base.attend(at, cache, plan, q)
    seen = self._of_base(cache)
    if not forms.overrides(self.base, "attend"):
      per_slot = [cache.slots[name] for name in _own(self.bits)]
      return dispatch.attend_quantised(at, cache, seen, plan, q, per_slot, self.bits)
    attended = self.base.attend(dispatch.sparing(at), seen, plan, rounded_query(q))
    return dispatch.rounded(attended, q.dtype)

  def observe(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    after, aux = self.base.observe(at, self._of_base(cache), q, plan, attended)
    return self._after(cache, after), aux

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
    """What is cached, as its codes have it, and the chunk itself in full precision."""
    seen = self._of_base(cache)
    chunk = {name: x for name, x in new.items() if name in seen.slots}
    staged, seen, carry = self.base.stage(at, seen, chunk, q, prompt, carry)
    staged |= {name: staged[name].astype(new[name].dtype) for name in WORDS}
    return staged, cache, carry

  def keep(
    self,
    at: At,
    cache: Cache,
    new: slots.Slots,
    q: Float[Array, "B K G A H"],
    qpos: Int[Array, "B A"],
    attended: Attended,
    prompt: Prompt,
  ) -> Cache:
    """The base's, of rounded keys and values, with which their codes move."""
    if not _coded(cache):
      return self.base.keep(at, cache, new, q, qpos, attended, prompt)
    codes = self._codes(new)
    rounded = {**self._rounded(codes), "pos": new["pos"]}
    rounded |= self._of_base(cache).of_new(rounded)
    codes |= {beside: codes[name] for name, beside in _WORDS.items()}
    new = {**codes, **rounded}
    held = self._with_words(cache)
    return self._stored(self.base.keep(at, held, new, q, qpos, attended, prompt))

  def conclude(self, env: Env, caches: tuple[Any, ...], valid: Int[Array, " B"]) -> tuple[Any, ...]:
    seen = tuple(self._of_base(x) if isinstance(x, Cache) else x for x in caches)
    after = self.base.conclude(env, seen, valid)
    return tuple(
      self._after(old, new) if isinstance(old, Cache) else new
      for old, new in zip(caches, after, strict=True)
    )


_WORDS = {name: f"{name}_words" for name in WORDS}  # beside the numbers, while tokens move


def _parts(name: str, bits: int) -> tuple[str, ...]:
  """The leaves that make numbers of the words in leaf `name`."""
  return (f"{name}_scale",) if bits == 8 else (f"{name}_scale", f"{name}_zero")


def _own(bits: int) -> list[str]:
  """The leaves that the base does not know: scales of k and v, then their zero points."""
  parts = [_parts(name, bits) for name in WORDS]
  return [name for pair in zip(*parts, strict=True) for name in pair]


def _coded(cache: Cache) -> bool:
  """Whether k and v are words: not in first layers, nor where numbers have words beside them."""
  return "k_scale" in cache.slots and _WORDS["k"] not in cache.slots


def _example(cls: type[Quantised], budget: int) -> Method:
  return cls()


def _neutral(cls: type[Quantised], length: int) -> Method:
  """Layers that are all kept as they are."""
  return cls(exact_layers=1 << 10)


settings.register(Quantised, example=_example, neutral=_neutral)
