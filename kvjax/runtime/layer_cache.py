"""One layer's cache on plain arrays: what it is, empty ones, and layers under a scan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core.cache import Cache, CacheSpec
from kvjax.core.context import Carry, Env
from kvjax.families import sliding
from kvjax.families.method import Method
from kvjax.methods.registry import check_method
from kvjax.primitives.rope import Rope
from kvjax.primitives.traced_layer import remedy
from kvjax.primitives.trees import pytree
from kvjax.runtime import arguments


@pytree("method", "env", "layer", "scale", "ended")
@dataclasses.dataclass(frozen=True)
class LayerCache:
  """One layer's cache, with the method that keeps it; a pytree of `cache`'s arrays.

  Attributes:
    cache: the arrays.
    method: the KV-cache method (static).
    env: what its moves know of the model: layers, rotary embedding, soft cap, implementation
      (static).
    layer: the layer's number; None: not known, as under `jax.lax.scan` (static).
    scale: factor on q · k; None: H^−½ (static).
    ended: False after a prompt that its method still has to settle over all layers (`finish`).
  """

  cache: Cache
  method: Method
  env: Env
  layer: int | None
  scale: float | None = None
  ended: bool = True


def empty_caches(
  method: Method,
  *,
  batch: int,
  capacity: int,
  heads: int,
  kv_heads: int,
  head_dim: int,
  layers: int = 1,
  windows: Sequence[int | None] = (),
  dtype: Any = jnp.bfloat16,
  rope: Rope | None = None,
  scale: float | None = None,
  soft_cap: float | None = None,
  impl: str = "auto",
) -> tuple[LayerCache, ...]:
  """Empty caches, one per layer.

  >>> import kvjax
  >>> sizes = {"batch": 2, "capacity": 64, "heads": 4, "kv_heads": 2, "head_dim": 16}
  >>> caches = kvjax.empty_caches(kvjax.SnapKV(48), **sizes, layers=3)
  >>> len(caches), caches[0].cache.slots["k"].shape
  (3, (2, 2, 48, 16))

  Args:
    method: for example `kvjax.SnapKV(1024)`.
    batch: rows B.
    capacity: tokens of the longest row, prompt and generation together. No program can raise for
      a longer one: within it, methods that keep every token drop what comes after. A budget above
      it takes no more than it asks.
    heads: query heads N, a multiple of `kv_heads`.
    kv_heads: K.
    head_dim: H.
    layers: L, the layers of the model.
    windows: for each layer the newest tokens that its queries see, or None where they see all; ():
      all see all. A layer with a window keeps exactly these, under any method.
    dtype: of stored keys and values.
    rope: rotary embedding, if q and k come without it; None: they are rotated already, and methods
      that move tokens to other positions are refused when they do.
    scale: factor on q · k; None: H^−½.
    soft_cap: c of logits c·tanh(x/c), x being the scaled q · k (Gemma 2); None: x itself.
    impl: implementation of the method's operations, as in `kvjax.Env`.

  Raises:
    TypeError: `method` is no method, or an argument is of another type.
    ValueError: sizes that do not fit.
  """
  check_method("method", method)
  heads = arguments.integer("heads", heads, 1)
  kv_heads = arguments.integer("kv_heads", kv_heads, 1)
  if heads % kv_heads:
    raise ValueError(f"heads: found {heads}, expected a multiple of the {kv_heads} kv_heads")
  scale = None if scale is None else arguments.positive("scale", scale)
  if isinstance(windows, str) or not np.iterable(windows):
    raise TypeError(f"windows: found {windows!r}, expected one for each of {layers} layers")
  windows = tuple(windows)
  if windows and len(windows) != layers:
    raise ValueError(f"windows: found {len(windows)}, expected one for each of {layers} layers")
  served = [*windows].count(None) if windows else layers
  sizes = kv_heads, heads // kv_heads, head_dim
  spec = CacheSpec(batch, capacity, *sizes, served, dtype, windows)
  env = Env(layers, rope or Rope.none(), impl, soft_cap=soft_cap)
  return tuple(
    LayerCache(cache, at.top, at.env, at.layer, scale)
    for at, cache in zip(
      sliding.places(method, env, spec.windows), method.init_caches(spec), strict=True
    )
  )


def stacked(caches: Sequence[LayerCache]) -> LayerCache:
  """The caches of layers that share a program under `jax.lax.scan`: each array leads with L.

  >>> import kvjax
  >>> sizes = {"batch": 2, "capacity": 64, "heads": 4, "kv_heads": 2, "head_dim": 16}
  >>> caches = kvjax.empty_caches(kvjax.SnapKV(48), **sizes, layers=3)
  >>> kvjax.stacked(caches).cache.slots["k"].shape
  (3, 2, 2, 48, 16)

  Raises:
    ValueError: the layers' caches are not of one size, or there are none.
  """
  caches = of_layers(caches)
  alike = [dataclasses.replace(cache, layer=None) for cache in caches]
  shapes = [[jax.typeof(x) for x in jax.tree.leaves(cache)] for cache in alike]
  kinds = [jax.tree.structure(cache) for cache in alike]
  if any(x != y[0] for y in (shapes, kinds) for x in y):
    raise ValueError(
      f"caches: found layers of different sizes of {caches[0].method!r}, expected equal layers: "
      f"{remedy(caches[0].method)}"
    )
  return jax.tree.map(lambda *layers: jnp.stack(layers), *alike)


def check_kinds(cache: Any, carry: Any = None) -> None:
  """Raises TypeError for what is no cache of a layer, or no carry."""
  if not isinstance(cache, LayerCache):
    raise TypeError(
      f"cache: found {type(cache).__name__}, expected that of one layer, of kvjax.empty_caches"
    )
  if carry is not None and not isinstance(carry, Carry):
    raise TypeError(f"carry: found {type(carry).__name__}, expected kvjax.Carry(), or None")


def of_layers(caches: Any) -> list[LayerCache]:
  """The caches of some layers, one at least."""
  if isinstance(caches, LayerCache | str) or not np.iterable(caches):
    found = type(caches).__name__
    raise TypeError(f"caches: found {found}, expected those of kvjax.empty_caches, in order")
  if not (listed := list(caches)):
    raise ValueError("caches: found none, expected one for each layer")
  for cache in listed:
    check_kinds(cache)
  return listed
