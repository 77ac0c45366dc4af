"""Layers with a sliding window of the model's own, which have the same cache under any method.

A model of the Gemma 3 or gpt-oss kind has layers that see everything and layers that see their
newest W tokens. The latter keep just these, in a ring of W slots at their true positions. A method
serves the former: it sees a model of these layers alone, numbered from 0, and never hears of the
others, so that its budgets by layer, votes and shared selections go from one of its layers to the
next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.core import slots
from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import At, Env, Turn
from kvjax.core.plan import Span, Window
from kvjax.core.traits import Traits
from kvjax.families.bounded import InTurn
from kvjax.families.method import Method
from kvjax.primitives.rope import Rope


@dataclasses.dataclass(frozen=True)
class Sliding(InTurn):
  """Keeps the newest `budget` tokens, all that a query of such a layer sees: nothing is lost."""

  @property
  def traits(self) -> Traits:
    return super().traits.but(chunkable=True, order_independent=True)

  def window(self, at: At, qpos: Int[Array, "B T"]) -> Window | None:
    return Window(0, qpos - self.budget + 1)

  def span(self, at: At, cache: Cache, window: Window | None) -> Span:
    """All occupied slots: what left the window has been overwritten."""
    stop = cache.used[:, None]
    return Span(jnp.zeros_like(stop), stop)

  def rank(self, at: At, turn: Turn) -> tuple[Float[Array, "B K S"], slots.Slots]:
    """The newest."""
    return turn.staged["pos"].astype(jnp.float32), turn.staged


def places(
  method: Method, env: Env, windows: Sequence[int | None], rope: Rope | None = None
) -> list[At]:
  """Sites of attention in a model, one a layer.

  Args:
    method: of the layers that see everything.
    env: of the model.
    windows: as in `CacheSpec`; (): all of `env.layers` are the method's.
    rope: rotary embedding of the layers with a window; None: `env.rope`.
  """
  if not windows:
    return [At(i, env, method) for i in range(env.layers)]
  served = [i for i, window in enumerate(windows) if window is None]
  own = dataclasses.replace(env, layers=max(1, len(served)))
  local = dataclasses.replace(own, rope=rope or env.rope)
  return [
    At(served.index(i), own, method) if window is None else At(0, local, Sliding(window))
    for i, window in enumerate(windows)
  ]


def init_caches(method: Method, spec: CacheSpec) -> list[Any]:
  """Empty caches of all layers."""
  at = places(method, Env(max(1, spec.layers)), spec.windows)
  return [Cache.empty(where.top, spec, where.layer) for where in at]


Method._caches_of_layers = staticmethod(init_caches)


def windows_of(caches: Sequence[Any]) -> tuple[int | None, ...]:
  """Each layer's window, None where it is the method's, as all of unknown origin are."""
  origin = getattr(caches[0], "origin", None) if caches else None
  return (origin and origin.windows) or (None,) * len(caches)


def served(caches: Sequence[Any]) -> tuple[Any, ...]:
  """The caches of the method's layers."""
  return tuple(c for c, w in zip(caches, windows_of(caches), strict=True) if w is None)


def rejoined(caches: Sequence[Any], own: Sequence[Any]) -> tuple[Any, ...]:
  """All layers' caches, those of the method's layers replaced by `own`."""
  new = iter(own)
  return tuple(
    next(new) if w is None else c for c, w in zip(caches, windows_of(caches), strict=True)
  )
