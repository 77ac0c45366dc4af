"""Base of methods that store keys and values as codes of any kind."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core import slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Carry, Env, Prompt
from kvjax.core.leaves import Leaf
from kvjax.core.plan import Attended, Plan
from kvjax.core.traits import Traits
from kvjax.families.method import Aux
from kvjax.families.wrapper import Wrapper, of_base
from kvjax.ops import decode
from kvjax.primitives.codes import WORDS


class Coded(Wrapper):
  """Stores the base's keys and values as codes of a few bits (`kvjax.primitives.codes`).

  Everything that reads a cache, the base's scores too, sees the numbers that codes stand for. A
  prompt is attended to as it is; what was cached before it, as it is stored.

  A subclass defines what is stored (`leaves`, and in `_beside` which slots the base does not know),
  which numbers that is (`_of_base`), and how tokens enter it (`insert`, `keep`).

  `bits` of a code is a field of the subclasses.
  """

  replaces: ClassVar[tuple[str, ...]] = ("insert", "stage")
  placement = of_base("placement")
  bits: int

  @property
  def traits(self) -> Traits:
    """The base's, but that what has been cached is not what has been attended to."""
    return self.base.traits.but(chunkable=False, order_independent=False, spreads=False)

  def _form(self, move: str) -> Any:
    """The base's, of moves that only see its cache as the base does."""
    own = move in ("insert", "attend", "leaves", "traits")
    return super()._form(move) if own else self.base._form(move)

  # ---- what a subclass says

  @property
  def _beside(self) -> list[str]:
    """The slots that the base does not know."""
    raise NotImplementedError

  def _of_base(self, cache: Cache) -> Cache:
    """The base's own cache: k and v are numbers, in float32; such a cache is returned as it is."""
    raise NotImplementedError

  # ---- what follows from it

  def _words(self, spec: CacheSpec) -> dict[str, Leaf]:
    """The words of k and v; ValueError where heads do not fill whole ones."""
    leaves = {}
    for name, word in WORDS.items():
      codes = 8 * jnp.dtype(word).itemsize // self.bits  # of a word
      if spec.head_dim % codes:
        raise ValueError(
          f"{type(self).__name__}: found head_dim = {spec.head_dim} and bits = {self.bits}, "
          f"expected a head_dim that is a multiple of {codes}"
        )
      leaves[name] = Leaf("slots", (spec.head_dim // codes,), word, bits=self.bits)
    return leaves

  def _numbers(self, cache: Cache, held: slots.Slots) -> Cache:
    """The cache with these slots, whose k and v are numbers: no leaf says that they are words."""
    kinds = tuple((name, leaf) for name, leaf in cache.kinds if name not in WORDS)
    return dataclasses.replace(cache, slots=held, kinds=kinds)

  def _after(self, before: Cache, after: Cache) -> Cache:
    """The cache as it is stored, after a move of the base that left k and v alone."""
    own = {name: before.slots[name] for name in (*WORDS, *self._beside) if name in before.slots}
    return dataclasses.replace(after, slots={**after.slots, **own}, kinds=before.kinds)

  def victim(self, at: At, cache: Cache) -> Int[Array, "B K"]:
    return self.base.victim(at, self._of_base(cache))

  def plan(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan, carry: Carry
  ) -> tuple[Plan, Carry]:
    return self.base.plan(at, self._of_base(cache), q, visible, carry)

  def order(self, at: At, cache: Cache) -> Float[Array, "B K S"] | None:
    return self.base.order(at, self._of_base(cache))

  def plan_and_attend(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], visible: Plan, carry: Carry
  ) -> tuple[Plan, Attended, Carry]:
    """The base's, over the numbers: `plan` and `attend` find these in place of the codes."""
    return self.base.plan_and_attend(at, self._of_base(cache), q, visible, carry)

  def attend(self, at: At, cache: Cache, plan: Plan, q: Float[Array, "B K G H"]) -> Attended:
    """The base's, over the numbers."""
    attended = self.base.attend(decode.sparing(at), self._of_base(cache), plan, q)
    return decode.rounded(attended, q.dtype)

  def observe(
    self, at: At, cache: Cache, q: Float[Array, "B K G H"], plan: Plan, attended: Attended
  ) -> tuple[Cache, Aux]:
    after, aux = self.base.observe(at, self._of_base(cache), q, plan, attended)
    return self._after(cache, after), aux

  def stage(
    self,
    at: At,
    cache: Cache,
    new: slots.Slots,
    q: Float[Array, "B K G A H"],
    prompt: Prompt,
    carry: Carry,
  ) -> tuple[slots.Slots, Cache, Carry]:
    """The cached tokens, as they are stored, and the chunk itself in full precision."""
    seen = self._of_base(cache)
    chunk = {name: x for name, x in new.items() if name in seen.slots}
    staged, seen, carry = self.base.stage(at, seen, chunk, q, prompt, carry)
    staged |= {name: staged[name].astype(new[name].dtype) for name in WORDS}
    return staged, cache, carry

  def conclude(self, env: Env, caches: tuple[Any, ...], valid: Int[Array, " B"]) -> tuple[Any, ...]:
    seen = tuple(self._of_base(x) if isinstance(x, Cache) else x for x in caches)
    after = self.base.conclude(env, seen, valid)
    return tuple(
      self._after(old, new) if isinstance(old, Cache) else new
      for old, new in zip(caches, after, strict=True)
    )
