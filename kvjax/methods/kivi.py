"""KIVI: keys rounded by channel, values by token, the newest exact (Liu et al., ICML 2024)."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.core import settings, slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Turn
from kvjax.core.fields import expect, least, one_of
from kvjax.core.leaves import Leaf, New
from kvjax.core.plan import Attended, Plan
from kvjax.families.coded import Coded
from kvjax.families.full import Full
from kvjax.families.method import Aux, Method
from kvjax.primitives.codes import WORDS, levels, of_levels, packed, unpacked

STORED = jnp.float16  # scales and zero points, as in the authors' code
PARTS = ("scale", "zero", "power")  # what makes numbers of codes


@dataclasses.dataclass(frozen=True)
class KIVI(Coded):
  """Stores keys and values in 2 or 4 bits, but for the newest (Liu et al., 2024, §3.3).

  Codes have a zero point (`kvjax.primitives.codes`), after RoPE, for each KV head:

      keys      per channel, in groups of G_q tokens
      values    per token, in groups of G_q channels

  Keys wait in full precision until there are R of them, which are then rounded at once: after a
  prompt of T tokens T mod R are left, and when a decode step completes R, its own attention still
  sees them as they are. Of values the newest R are exact, that of the step among them; in the
  authors' code the step sees one more, and rounds it afterwards. No token ever leaves. A prompt is
  attended to as it is; a further turn, or a further chunk of a prompt, sees the tokens before it as
  they are stored.

  The newest keys and values lie in a ring of R slots, in the dtype of the cache. Codes of values
  are written as tokens come, and read once the ring has dropped the value: the same numbers.
  Codes are nearest by the scale and the zero point as stored, in float16. A group whose numbers
  are all alike has scale 0, by which the authors' code divides, and is its zero point. Numbers of
  2^15 and more, which float16 does not hold, are stored over a power of two of their group's own.

  The base keeps every token and attends as the full cache does: its slots are positions, and
  `insert`, `stage` and `attend` are not its own. Summaries by which it selects are made as tokens
  come, of what is stored then: `Quest`'s bounds of pages that divide R are of exact keys.

  Attributes:
    base: the method whose keys and values these are.
    bits: b of a code. The authors advise 4 where query heads share keys, 2 elsewhere.
    group: G_q. A head's keys take b·H/8 bytes a token, and 5·H for the scales, zero points and
      powers of G_q tokens; its values b·H/8 bytes a token, and 5 for those of G_q channels. A
      token's values in a head of fewer channels are one group.
    residual: R, a multiple of G_q. More than a row's tokens: nothing is ever rounded.
  """

  replaces: ClassVar[tuple[str, ...]] = ("insert", "stage", "attend")
  base: Method = dataclasses.field(default_factory=Full)
  bits: int = one_of((4, 2), 2)
  group: int = least(1, 32)
  residual: int = least(1, 128)

  def __post_init__(self):
    super().__post_init__()
    expect(self, "base", self.base.traits.positional, "a method whose slots are positions")
    multiple = self.residual % self.group == 0
    expect(self, "residual", multiple, f"a multiple of group = {self.group}")

  # ---- what is stored

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    """The base's, but k and v in words, and what makes numbers of them; the newest beside them.

    Raises:
      ValueError: heads of this size do not fill whole words or groups.
    """
    width = min(self.group, spec.head_dim)
    if spec.head_dim % width:
      raise ValueError(
        f"{type(self).__name__}.group: found {self.group} for heads of {spec.head_dim} channels, "
        "expected a divisor of them"
      )
    groups = -(-self.capacity(spec, layer) // self.group)
    by_token = Leaf("slots", (spec.head_dim // width,), STORED, in_place=True)
    by_channel = Leaf("heads", (groups, spec.head_dim), STORED, in_place=True, along_slots=True)
    parts = {
      f"{name}_{part}": dataclasses.replace(like, dtype=jnp.int8 if part == "power" else STORED)
      for name, like in (("k", by_channel), ("v", by_token))
      for part in PARTS
    }
    newest = Leaf("heads", (self.residual, spec.head_dim), spec.dtype, in_place=True)
    return {
      **self.base.leaves(spec, layer),
      **self._words(spec),
      **parts,
      **dict.fromkeys(("k_newest", "v_newest"), newest),
      "rounded": Leaf("rows", dtype=jnp.int32, in_place=True),  # how many of a row's keys are codes
    }

  @property
  def _beside(self) -> list[str]:
    return [f"v_{part}" for part in PARTS]

  def _of_base(self, cache: Cache) -> Cache:
    """The base's own cache: k and v as codes have them, but for the newest."""
    if cache.leaf("k").bits is None:
      return cache
    held = {name: x for name, x in cache.slots.items() if name not in self._beside}
    slot = jnp.arange(cache.size, dtype=jnp.int32)
    exact = {"k": cache.rows["rounded"], "v": cache.used - self.residual}
    coded = {"k": self._keys(cache), "v": self._values(cache)}
    for name, first in exact.items():
      newest = jnp.take(cache.heads[f"{name}_newest"], slot % self.residual, axis=2)
      stays = (slot >= first[:, None])[:, None, :, None]
      held[name] = jnp.where(stays, newest.astype(jnp.float32), coded[name])
    return self._numbers(cache, held)

  def _keys(self, cache: Cache) -> Float[Array, "B K S H"]:
    """Codes of keys as numbers: X'_K, in groups of tokens."""
    code = unpacked(cache.slots["k"], self.bits).astype(jnp.float32)
    group = jnp.arange(cache.size, dtype=jnp.int32) // self.group
    scale, zero, power = (
      jnp.take(cache.heads[f"k_{part}"], group, axis=2).astype(jnp.float32) for part in PARTS
    )
    return _raised(code * scale + zero, power)

  def _values(self, cache: Cache) -> Float[Array, "B K S H"]:
    """Codes of values as numbers: X'_V, in groups of channels."""
    code = unpacked(cache.slots["v"], self.bits)
    scale, zero, power = (cache.slots[name] for name in self._beside)
    x = of_levels(code.reshape(*scale.shape, -1), scale, zero)
    return _raised(x, power[..., None].astype(jnp.float32)).reshape(code.shape)

  # ---- how tokens enter

  def _written(self, old: Cache, after: Cache, new: New) -> Cache:
    """`after`, which has taken in new tokens [B, K, T, H], with what is stored of them.

    As many as `used` has grown by since `old`; what follows them in `new` is padding.
    """
    heads, tokens = new["k"].shape[1:3]
    slot = old.used[:, None] + jnp.arange(tokens, dtype=jnp.int32)
    fresh = slot < after.used[:, None]
    newest = fresh & (slot >= after.used[:, None] - self.residual)
    turn = _for_heads(jnp.where(newest, slot % self.residual, self.residual), heads)
    rings = {f"{n}_newest": slots.put(old.heads[f"{n}_newest"], turn, new[n]) for n in WORDS}
    k, v = (new[n].astype(rings[f"{n}_newest"].dtype) for n in WORDS)  # as they wait
    into = _for_heads(jnp.where(fresh, slot, old.size), heads)
    values = {n: slots.put(old.slots[n], into, x) for n, x in self._codes_of_values(v).items()}
    keys, scales = self._codes_of_keys(old, after, k)
    return after.put(slots={**values, **keys}, heads={**rings, **scales})

  def _codes_of_values(self, v: Float[Array, "B K T H"]) -> New:
    """Per token, in groups of channels."""
    parted = v.reshape(*v.shape[:3], -1, min(self.group, v.shape[3]))
    code, parts = self._levels(parted)
    words = packed(code.reshape(v.shape), self.bits, WORDS["v"])
    return {"v": words, **dict(zip(self._beside, parts, strict=True))}

  def _codes_of_keys(self, old: Cache, after: Cache, k: Float[Array, "B K T H"]) -> tuple[New, New]:
    """Per channel, in groups of tokens: all words, and their scales and zero points.

    To those of `old` come those of blocks that are complete now: keys that waited, and new ones.
    """
    waiting = old.used % self.residual
    first = old.used - waiting
    _, heads, tokens, width = k.shape
    blocks = -(-(self.residual - 1 + tokens) // self.residual)
    index = jnp.arange(blocks * self.residual, dtype=jnp.int32)
    # [keys that waited ‖ new keys] of the blocks from the first incomplete one on.
    waits = index < waiting[:, None]
    source = jnp.where(waits, index, self.residual + index - waiting[:, None])
    both = jnp.concatenate([old.heads["k_newest"], k], 2)
    block = slots.take(both, _for_heads(source, heads))
    by_channel = block.reshape(*k.shape[:2], -1, self.group, width).swapaxes(3, 4)
    code, parts = self._levels(by_channel)  # [B, K, P, H, G_q], [B, K, P, H]
    words = packed(code.swapaxes(3, 4).reshape(block.shape), self.bits, WORDS["k"])
    whole = index < self._whole(after.used - first)[:, None]
    slot = _for_heads(jnp.where(whole, first[:, None] + index, old.size), heads)
    group = jnp.where(whole, (first[:, None] + index) // self.group, old.size)[:, :: self.group]
    group = _for_heads(group, heads)
    scales = {
      f"k_{part}": slots.put(old.heads[f"k_{part}"], group, x)
      for part, x in zip(PARTS, parts, strict=True)
    }
    return {"k": slots.put(old.slots["k"], slot, words)}, scales

  def _levels(self, x: Float[Array, "*some X"]) -> tuple[Int[Array, "*some X"], list[Array]]:
    """Codes of groups along the last axis, and of each a, z and the power of 2 they are over."""
    x = x.astype(jnp.float32)
    largest = jnp.abs(x).max(-1)
    _, exponent = jnp.frexp(jnp.where(jnp.isfinite(largest), largest, 0))
    power = jnp.maximum(exponent - 15, 0)  # a group's range is below 2^16 then
    code, parts = levels(jnp.ldexp(x, -power[..., None]), self.bits, STORED)
    return code, [*parts, power.astype(jnp.int8)]

  def _whole(self, tokens: Int[Array, " B"]) -> Int[Array, " B"]:
    """The tokens of complete blocks of R."""
    return tokens // self.residual * self.residual

  # ---- moves

  def insert(
    self,
    at: At,
    cache: Cache,
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    live: Bool[Array, " B"],
  ) -> Cache:
    """The base's; keys of a block that the token completes are read as codes after this step."""
    entered = self._after(cache, self.base.insert(at, self._of_base(cache), k, v, live))
    return self._written(cache, entered, {"k": k[:, :, None], "v": v[:, :, None]})

  def observe(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    """The base's, in rows that take part: of others it would summarise what are codes since."""
    assert attended.live is not None  # filled in after `attend`
    made, aux = super().observe(at, cache, q, plan, attended)
    heads = slots.choose_rows(attended.live, made.heads, cache.heads)
    return made.put(heads=heads, rows={"rounded": self._whole(cache.used)}), aux

  def keep(self, at: At, cache: Cache, turn: Turn, new: slots.Slots) -> Cache:
    """The base's, of the tokens as they are, and what is stored of them."""
    seen = self._of_base(cache)
    kept = self._after(cache, self.base.keep(at, seen, turn, new))
    kept = self._written(cache, kept, new)
    return kept.put(rows={"rounded": self._whole(kept.used)})


def _raised(x: Float[Array, "*some"], power: Float[Array, "*#some"]) -> Float[Array, "*some"]:
  """x · 2^power, and of what rounding took past the largest float the largest."""
  most = jnp.finfo(jnp.float32).max
  return jnp.where(power > 0, jnp.clip(x * jnp.exp2(power), -most, most), x)


def _for_heads(index: Int[Array, "B W"], heads: int) -> Int[Array, "B K W"]:
  """The same for each head."""
  return jnp.broadcast_to(index[:, None], (index.shape[0], heads, index.shape[1]))


def _example(cls: type[KIVI], budget: int) -> Method:
  """About so many tokens are exact, the default's 128 at most, in groups of 32 at most."""
  group = min(32, 1 << max(0, budget.bit_length() - 2))
  return cls(group=group, residual=min(128, budget // group * group))


settings.register(
  KIVI,
  example=_example,
  # Keys and values that wait as long as any token comes.
  neutral=lambda cls, length: cls(group=2, residual=length + 2 - length % 2),
)
