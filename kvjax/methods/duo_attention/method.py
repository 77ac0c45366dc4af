"""DuoAttention: retrieval heads keep all tokens, the others a window (Xiao et al., ICLR 2025)."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from kvjax.core import settings, slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Carry, Prompt
from kvjax.core.fields import expect, least
from kvjax.core.leaves import Layout, Leaf
from kvjax.core.traits import Traits
from kvjax.families import entrance
from kvjax.families.full import Full
from kvjax.families.method import Aux, Method, checked_rows
from kvjax.methods.duo_attention import apart
from kvjax.methods.duo_attention.gates import Pattern, pattern_of, read_gates, read_sizes
from kvjax.methods.streaming_llm import StreamingLLM

# What heads do is what the methods of the two kinds do: nothing else asks for these moves.
OF_HEADS = (
  *("window", "span", "victim", "insert", "plan", "order", "attend", "plan_and_attend", "observe"),
  *("active", "fill", "stage", "rank", "keep", "settle", "attend_prompt"),
)


@dataclasses.dataclass(frozen=True)
class Streaming(StreamingLLM):
  """A streaming head: no more slots than a row will ever have tokens."""

  def capacity(self, spec: CacheSpec, layer: int) -> int:
    return min(self.budget, spec.capacity)


@dataclasses.dataclass(frozen=True)
class DuoAttention(Method):
  """Retrieval heads see every token, streaming heads the first and the newest ones (§2.1, §2.3).

  A pattern says which is which; all query heads of a key/value head go with it. Positions are
  those of the tokens. Streaming heads hold sinks + recent slots, so that their memory is freed
  and not hidden: a layer has the slots of each kind apart, as the authors' code does, and its heads
  go through `Full` and `StreamingLLM`, prompts too (§2.3: chunks see what streaming heads hold).

  Heads split over devices need as many retrieval heads on each of them, in every layer: other
  patterns are refused (`kvjax.methods.duo_attention.gates.pattern_of` makes such from gates).

  Attributes:
    pattern: for every layer and key/value head of the model, whether it is a retrieval head; or
      "alternate": every other one is, a pattern for demos that no model was asked about.
    sinks: S_s, first tokens that streaming heads keep (128, as published with the patterns; the
      paper's deployment has 64).
    recent: S_r, newest tokens that they keep (256).
  """

  pattern: Pattern | str
  sinks: int = least(0, 128)
  recent: int = least(1, 256)

  def __init_subclass__(cls, **options: Any) -> None:
    super().__init_subclass__(**options)
    own = [move for move in OF_HEADS if getattr(cls, move) is not getattr(DuoAttention, move)]
    if own:
      raise TypeError(
        f"{cls.__name__}.{own[0]}: found an override, expected none: heads of DuoAttention run "
        "under Full and StreamingLLM, which would ignore it"
      )

  def __post_init__(self):
    if isinstance(self.pattern, str):
      expect(self, "pattern", self.pattern == "alternate", "a tuple of tuples, or 'alternate'")
      return
    rows = all(isinstance(row, tuple) and len(row) == len(self.pattern[0]) for row in self.pattern)
    expect(self, "pattern", rows and self.pattern and self.pattern[0], "a tuple of equal tuples")
    marks = all(x in (0, 1) for row in self.pattern for x in row)
    expect(self, "pattern", marks, "True for a retrieval head and False for a streaming head")

  @classmethod
  def from_tsv(
    cls,
    path: str | os.PathLike[str],
    sparsity: float | int = 0.5,
    *,
    sinks: int | None = None,
    recent: int | None = None,
    shards: int = 1,
  ) -> DuoAttention:
    """The method with a published pattern, or one of `kvjax retrieval-heads --pattern`.

    Args:
      path: a file of gates, as `read_gates` takes it.
      sparsity: share of streaming heads (§3.1: ½ where key/value heads are shared, ¾ elsewhere).
      sinks, recent: as in the class; None: what `config.json` beside the file says (sink_size,
        recent_size), or else the defaults.
      shards: devices that heads will be split over (`pattern_of`).

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it does not hold gates, or an argument is out of range.
    """
    given = {"sinks": sinks, "recent": recent}
    sizes = read_sizes(path) | {name: x for name, x in given.items() if x is not None}
    return cls(pattern_of(read_gates(path), sparsity, shards), **sizes)

  @property
  def traits(self) -> Traits:
    """Tokens are bounded by the capacity as long as any head keeps all of them."""
    usual = super().traits.but(order_independent=True, uneven=self._uneven)
    return usual.but(positional=isinstance(self.pattern, str) or any(map(any, self.pattern)))

  # ---- which head is which

  def _retrieves(self, layer: int, kv_heads: int) -> tuple[bool, ...]:
    """Of each of a layer's heads whether it is a retrieval head."""
    if isinstance(self.pattern, str):
      return tuple((layer + head) % 2 == 0 for head in range(kv_heads))
    return tuple(map(bool, self.pattern[layer]))

  def _checked(self, spec: CacheSpec, layer: int) -> tuple[bool, ...]:
    """`_retrieves` of a model's layer; ValueError for a pattern of another model."""
    if not isinstance(self.pattern, str):
      found = len(self.pattern), len(self.pattern[0])
      if found != (spec.layers, spec.kv_heads):
        raise ValueError(
          f"{type(self).__name__}.pattern: found {found[0]} layers of {found[1]} key/value heads, "
          f"expected {spec.layers} of {spec.kv_heads} as the model has"
        )
    return self._retrieves(layer, spec.kv_heads)

  def _uneven(self, spec: CacheSpec, parts: int) -> str:
    """Reason against splitting heads over so many devices; empty: none (`Traits.uneven`)."""
    if spec.kv_heads % parts:
      return f"expected a divisor of its {spec.kv_heads} key/value heads"
    for layer in range(spec.layers):
      counts = np.reshape(self._checked(spec, layer), (parts, -1)).sum(1)
      if len({*counts}) > 1:
        return _unbalanced(layer, counts)
    return ""

  def _order(self, at: At, kv_heads: int) -> tuple[Any, Any]:
    """The layer's heads on this device, retrieval heads first, and the place of each in that."""
    row = at.of_layer(lambda layer: self._retrieves(layer, at.heads_in_all(kv_heads)))
    blocks = np.reshape(row, (-1, kv_heads))
    if len({*blocks.sum(1)}) > 1:
      raise ValueError(f"mesh: found {self!r}, {_unbalanced(at.layer, blocks.sum(1))}")
    orders = np.argsort(~blocks, axis=1, kind="stable")
    places = np.argsort(orders, axis=1)
    if len(blocks) == 1:
      return orders[0], places[0]
    shard = jax.lax.axis_index(at.env.head_axis)
    return jnp.asarray(orders)[shard], jnp.asarray(places)[shard]

  # ---- caches

  def _streaming(self) -> Streaming:
    """The method of streaming heads."""
    return Streaming(self.sinks + self.recent, self.sinks, "original")

  def _room(self, spec: CacheSpec) -> CacheSpec:
    """The spec that says how many slots streaming heads have."""
    if self.traits.positional:
      return spec
    return dataclasses.replace(spec, capacity=max(spec.capacity, self.sinks + self.recent))

  def capacity(self, spec: CacheSpec, layer: int) -> int:
    """Of retrieval heads; of streaming heads where a layer has no others."""
    if any(self._checked(spec, layer)):
      return spec.capacity
    return self._streaming().capacity(self._room(spec), layer)

  def leaves(self, spec: CacheSpec, layer: int) -> dict[str, Leaf]:
    """A layer of one kind has its cache; one of both has the streaming heads' "apart"."""
    full = sum(self._checked(spec, layer))
    streaming = spec.kv_heads - full
    if full == 0:
      return self._streaming().leaves(self._room(spec), layer)
    held = super().leaves(spec, layer)
    if streaming == 0:
      return held
    own = {
      name: dataclasses.replace(x, heads=full) for name, x in held.items() if x.shelf == "slots"
    }
    made = functools.partial(apart.empty, self._streaming(), spec, streaming, layer)
    return {**held, **own, "apart": Leaf("heads", layout=Layout.SPLIT, made=made)}

  # ---- drivers

  def decode_step(
    self,
    at: At,
    cache: Cache,
    q: Float[Array, "B K G H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    live: Bool[Array, " B"],
    carry: Carry,
  ) -> tuple[Float[Array, "B K G H"], Cache, Carry, Aux]:
    """A step of `Full` for retrieval heads, of `StreamingLLM` for the others."""
    entrance.check_step(at, cache, q, k, v, live)

    def step(where: At, part: Cache, q: Array, k: Array, v: Array) -> Any:
      return where.top.decode_step(where, part, q, k, v, live, Carry())

    out, new, aux = self._by_kind(at, cache, (q, k, v), step)
    return out, _guarded(at, out, new, cache, live, live), carry, aux

  def prefill(
    self,
    at: At,
    cache: Cache,
    q: Float[Array, "B K G A H"],
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    prompt: Prompt,
    carry: Carry,
  ) -> tuple[Float[Array, "B K G A H"], Cache, Carry, Aux]:
    """A chunk under `Full` for retrieval heads, under `StreamingLLM` for the others."""
    entrance.check_prompt(at, cache, q, k, v, prompt)

    def read(where: At, part: Cache, q: Array, k: Array, v: Array) -> Any:
      return where.top.prefill(where, part, q, k, v, prompt, Carry())

    out, new, aux = self._by_kind(at, cache, (q, k, v), read)
    return out, _guarded(at, out, new, cache, prompt.valid > 0, prompt.valid), carry, aux

  def _by_kind(
    self, at: At, cache: Cache, new: tuple[Array, Array, Array], driver: Callable[..., Any]
  ) -> tuple[Array, Cache, Aux]:
    """Each kind of heads through a driver; outputs and reports in the order of the heads."""
    kinds = {False: at.under(Full()), True: at.under(self._streaming())}
    if at.env.check_nan:  # looked at here, for both kinds at once
      env = dataclasses.replace(at.env, check_nan=False)
      kinds = {kind: dataclasses.replace(where, env=env) for kind, where in kinds.items()}
    if cache.layout is not Layout.SPLIT:
      out, after, _, aux = driver(kinds[cache.layout is Layout.RING], cache, *new)
      return out, after, aux
    order, place = self._order(at, cache.kv_heads)
    first = cache.pos.shape[1]
    full, streaming = apart.split(cache)
    out, full, _, aux = driver(kinds[False], full, *(x[:, order[:first]] for x in new))
    more, streaming, _, others = driver(kinds[True], streaming, *(x[:, order[first:]] for x in new))

    def together(x: Array, y: Array) -> Array:
      return jnp.concatenate([x, y], 1)[:, place]

    after = apart.joined(cache, full, streaming)
    return together(out, more), after, jax.tree.map(together, aux, others)


def _unbalanced(layer: Any, counts: Any) -> str:
  return (
    f"expected as many retrieval heads on each: layer {layer} has {[int(x) for x in counts]} "
    "(pattern_of(gates, sparsity, shards=...) balances them)"
  )


def _guarded(
  at: At, out: Array, new: Cache, old: Cache, rows: Bool[Array, " B"], tokens: Array
) -> Cache:
  """With `env.check_nan`, the old cache where attention is not finite, which raises."""
  if not at.env.check_nan:
    return new
  rows = entrance.with_room(at, old, rows, tokens)
  return slots.choose_rows(checked_rows(at, out, old, rows), new, old)


settings.register(
  DuoAttention,
  # Streaming heads keep about so many tokens, a third of them first ones.
  example=lambda cls, budget: cls(
    "alternate", sinks=budget // 3, recent=max(1, budget - budget // 3)
  ),
  neutral=lambda cls, length: cls("alternate", sinks=0, recent=length),
)
