"""One prompt pass for several methods whose prefill attention is dense."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.core import slots
from kvjax.core.cache import CacheSpec, Origin
from kvjax.core.context import At, Carry, Env, Prompt, Turn
from kvjax.core.leaves import Layout
from kvjax.core.traits import Traits
from kvjax.families import entrance, forms
from kvjax.families.method import Aux, Method, checked_rows, lse_of
from kvjax.methods.registry import check_method
from kvjax.primitives.trees import pytree


@pytree("positional", "origin")
@dataclasses.dataclass(frozen=True)
class Members:
  """One layer's caches of all members; `positional` says which of them are.

  Each member's cache has the member's `origin`, and all together that of `SharedPrefill`.
  """

  layout: ClassVar[Layout] = Layout.DENSE  # as drivers ask; each member's cache has its own
  caches: tuple[Any, ...]
  positional: tuple[bool, ...]
  origin: Origin | None = None

  @property
  def seen(self) -> Array:
    return self.caches[0].seen

  @property
  def size(self) -> int:
    """Tokens that every member has room for."""
    sizes = [c.size for c, bounded in zip(self.caches, self.positional, strict=True) if bounded]
    return min(sizes, default=self.caches[0].size)


@dataclasses.dataclass(frozen=True)
class SharedPrefill(Method):
  """Computes a prompt once, as under the full cache, and fills every member's cache from it.

  Its caches hold, per layer, one cache per member; `take` picks one member's out for decoding. It
  serves a first turn in one chunk (`past=0`) and does not decode.

  Attributes:
    members: methods whose prompts are dense (`kvjax.families.forms`); others raise ValueError.
  """

  members: tuple[Method, ...] = ()

  def __post_init__(self):
    name = f"{type(self).__name__}.members"
    for i, member in enumerate(self.members):
      check_method(f"{name}[{i}]", member)
    wrong = [repr(m) for m in self.members if not forms.dense_prefill(m)]
    if wrong or not self.members:
      raise ValueError(
        f"{name}: found {', '.join(wrong) or 'none'}, expected methods that leave "
        "prefill attention dense"
      )

  @property
  def traits(self) -> Traits:
    positional = any(m.traits.positional for m in self.members)
    weighs = any(m.traits.weighs_outputs for m in self.members)
    spreads = all(m.traits.spreads for m in self.members)
    own = {"positional": positional, "weighs_outputs": weighs, "spreads": spreads}
    return super().traits.but(chunkable=False, **own)

  def init_caches(self, spec: CacheSpec) -> tuple[Any, ...]:
    own = zip(*(m.init_caches(spec) for m in self.members), strict=True)
    windows = spec.windows or (None,) * spec.layers
    positional = tuple(m.traits.positional for m in self.members)
    origin = Origin.of(self, spec)
    return tuple(
      Members(caches, positional, origin)
      if window is None
      else dataclasses.replace(caches[0], origin=origin)
      for caches, window in zip(own, windows, strict=True)
    )

  def prefill(
    self, at: At, cache: Any, q: Array, k: Array, v: Array, prompt: Prompt, carry: Carry
  ) -> tuple[Array, Any, Carry, Aux]:
    if prompt.past != 0:
      raise ValueError(
        f"{type(self).__name__}: found past = {prompt.past}, expected 0 (empty caches)"
      )
    entrance.check_prompt(at, cache.caches[0], q, k, v, prompt)
    sites = [at.under(method) for method in self.members]
    pairs = list(zip(sites, cache.caches, strict=True))
    entered = [entrance.enter(site, own, q, k, v, prompt, carry) for site, own in pairs]
    q, qpos, new, _ = entered[0]
    attended = self.members[0].attend_prompt(sites[0], new, q, qpos, prompt)
    rows = prompt.valid > 0
    if at.env.check_nan:
      rows = entrance.with_room(at, cache, rows, prompt.valid)
      rows = checked_rows(at, attended.state.o, cache, rows)
    kept = []
    for (site, own), (_, _, own_new, _) in zip(pairs, entered, strict=True):
      after = site.top.keep(site, own, Turn(own_new, q, qpos, attended, prompt), own_new)
      kept.append(slots.choose_rows(rows, after, own))
    cache = dataclasses.replace(cache, caches=tuple(kept))
    out = attended.state.o.astype(q.dtype) if attended.out is None else attended.out
    return out, cache, carry, lse_of(at, attended)

  def conclude(self, env: Env, caches: tuple[Any, ...], valid: Array) -> tuple[Any, ...]:
    own = [m.conclude(env, take(caches, i), valid) for i, m in enumerate(self.members)]
    layers = zip(caches, zip(*own, strict=True), strict=True)
    return tuple(dataclasses.replace(layer, caches=members) for layer, members in layers)

  def decode_step(self, *args, **kwargs):
    raise ValueError("SharedPrefill fills caches; decode with a member and take(caches, member)")


def take(caches: tuple, member: int) -> tuple:
  """The caches of one member, as its own `init_caches` would lay them out.

  Layers with a window of the model's own (`kvjax.families.sliding`) have one cache for all members:
  each member gets a copy.
  """
  own = [layer.caches[member] if isinstance(layer, Members) else layer for layer in caches]
  origin = next((x.origin for x, y in zip(own, caches, strict=True) if x is not y), None)
  return tuple(
    dataclasses.replace(jax.tree.map(jnp.copy, x), origin=origin) if x is y else x
    for x, y in zip(own, caches, strict=True)
  )
