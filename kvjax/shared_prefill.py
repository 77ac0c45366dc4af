"""One prompt pass for several methods whose prefill attention is dense."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array

from kvjax.method import Aux, Method
from kvjax.ops import slots
from kvjax.types import At, CacheSpec, Carry, Prompt


@dataclasses.dataclass(frozen=True)
class SharedPrefill(Method):
  """Computes a prompt once, as under the full cache, and fills every member's cache from it.

  Its caches hold, per layer, a tuple with one cache per member; `take` picks one member's out for
  decoding. It serves a first turn in one chunk (`past=0`) and does not decode.

  Attributes:
    members: methods with `dense_prefill`; others raise ValueError.
  """

  members: tuple[Method, ...] = ()

  def __post_init__(self):
    wrong = [repr(m) for m in self.members if not m.dense_prefill]
    if wrong or not self.members:
      raise ValueError(
        f"SharedPrefill.members: found {', '.join(wrong) or 'none'}, expected methods that leave "
        "prefill attention dense"
      )

  @property
  def positional(self) -> bool:
    return any(m.positional for m in self.members)

  def init(self, spec: CacheSpec, layer: int) -> Any:
    return tuple(m.init(spec, layer) for m in self.members)

  def prefill(
    self, at: At, cache: Any, q: Array, k: Array, v: Array, prompt: Prompt, carry: Carry
  ) -> tuple[Array, Any, Carry, Aux]:
    if prompt.past != 0:
      raise ValueError(f"SharedPrefill: found past = {prompt.past}, expected 0 (empty caches)")
    sites = [method.at(at.env, at.layer) for method in self.members]
    entered = [
      s.top.enter(s, own, q, k, v, prompt, carry) for s, own in zip(sites, cache, strict=True)
    ]
    q, qpos, new, _ = entered[0]
    attended = self.members[0].attend_prompt(sites[0], new, q, qpos, prompt)
    kept = []
    for s, own, (q_, qpos_, new_, _) in zip(sites, cache, entered, strict=True):
      after = s.top.keep(s, own, new_, q_, qpos_, attended, prompt)
      kept.append(slots.choose_rows(prompt.valid > 0, after, own))
    return attended.state.o.astype(q.dtype), tuple(kept), carry, {}

  def decode_step(self, *args, **kwargs):
    raise ValueError("SharedPrefill fills caches; decode with a member and take(caches, member)")


def take(caches: tuple, member: int) -> tuple:
  """The caches of one member, as its own `init_caches` would lay them out."""
  return tuple(layer[member] for layer in caches)
