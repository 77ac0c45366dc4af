"""Methods on plain arrays, for attention layers that know nothing of this library.

    caches = kvjax.empty_caches(
      kvjax.SnapKV(1024), batch=2, capacity=8192, heads=12, kv_heads=2, head_dim=128, layers=28
    )
    out, cache = kvjax.prefill(caches[i], q, k, v, lengths)  # in layer i, a prompt
    out, cache = kvjax.decode(cache, q, k, v)  # then a token at a time

Arrays have the order that attention layers give them: q [B, T, N, H], k and v [B, T, K, H] (BTNH
and BSKH), query head n beside key/value head n // (N / K). All is pure and runs under `jax.jit`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, overload

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from kvjax.core.cache import Cache
from kvjax.core.context import At, Carry, Prompt
from kvjax.families import entrance, forms, sliding
from kvjax.primitives.traced_layer import TracedLayer
from kvjax.runtime import arguments, drivers
from kvjax.runtime.layer_cache import LayerCache, check_kinds, of_layers


@overload
def decode(
  cache: LayerCache,
  q: ArrayLike,
  k: ArrayLike,
  v: ArrayLike,
  *,
  live: ArrayLike | None = ...,
  sinks: ArrayLike | None = ...,
  carry: None = ...,
) -> tuple[Array, LayerCache]: ...


@overload
def decode(
  cache: LayerCache,
  q: ArrayLike,
  k: ArrayLike,
  v: ArrayLike,
  *,
  live: ArrayLike | None = ...,
  sinks: ArrayLike | None = ...,
  carry: Carry,
) -> tuple[Array, LayerCache, Carry]: ...


def decode(
  cache: LayerCache,
  q: ArrayLike,
  k: ArrayLike,
  v: ArrayLike,
  *,
  live: ArrayLike | None = None,
  sinks: ArrayLike | None = None,
  carry: Carry | None = None,
) -> tuple[Array, LayerCache] | tuple[Array, LayerCache, Carry]:
  """Attention of one new token per row, which enters the cache.

  >>> import jax.numpy as jnp
  >>> import kvjax
  >>> sizes = {"batch": 1, "capacity": 32, "heads": 2, "kv_heads": 1, "head_dim": 8}
  >>> (empty,) = kvjax.empty_caches(kvjax.Knorm(budget=4), **sizes)
  >>> q, k = jnp.ones((1, 2, 8)), jnp.ones((1, 1, 8))
  >>> out, cache = kvjax.decode(empty, q, k, k)
  >>> out.shape, cache.cache.used.item()
  ((1, 2, 8), 1)

  Args:
    cache: this layer's; donate it to the program around this call.
    q, k, v: projections of the token, [B, N, H] and [B, K, H], or with an axis of one token after
      the rows.
    live: bool [B], rows that take part; the others' caches stay as they are, and their output means
      nothing. None: all.
    sinks: [N], a logit of each head in the denominator of its softmax (gpt-oss); None: no such.
    carry: for methods that hand something from layer to layer: `kvjax.Carry()` in the first layer,
      and in the others what the layer before returned.

  Returns:
    out [B, N, H] or [B, 1, N, H] in q's dtype, and the cache; with `carry` this, too.

  Raises:
    ValueError: arrays that do not fit the cache, a prompt that was not finished, or, outside of a
      program, no room for a token where none leaves.
    TypeError: the method needs a `carry` or the layer's number, which it was not given.
  """
  check_kinds(cache, carry)
  if not cache.ended:
    raise ValueError(
      f"cache: found a prompt that {_name(cache)} has not settled, expected kvjax.finish(caches, "
      "lengths) after the last layer has read it"
    )
  dtype, q, k, v = _projections(cache, q, k, v)
  rows, kv_heads, width = _sizes(cache)
  one = (1,) * (q.ndim == 4)
  groups = _groups(cache, q, (rows, *one))
  for name, x in (("k", k), ("v", v)):
    arguments.check_shape(name, x, (rows, *one, kv_heads, width))
  k, v = k.reshape(rows, kv_heads, width), v.reshape(rows, kv_heads, width)
  scaled = _scaled(cache, q).reshape(rows, kv_heads, groups, width)
  live = arguments.rows_that_take_part(live, rows)
  arguments.check_room(cache.cache, entrance.room(cache.method, cache.cache), live)
  at, sunk = _place(cache, sinks)
  done = drivers.step(at, cache.cache, scaled, k, v, live, carry or Carry(), sunk)
  return _result(cache, done[0].reshape(q.shape).astype(dtype), done[1], carry, done[2])


@overload
def prefill(
  cache: LayerCache,
  q: ArrayLike,
  k: ArrayLike,
  v: ArrayLike,
  lengths: ArrayLike | None = ...,
  *,
  starts: ArrayLike | None = ...,
  total: ArrayLike | None = ...,
  past: int | None = ...,
  sinks: ArrayLike | None = ...,
  wo: ArrayLike | None = ...,
  carry: None = ...,
) -> tuple[Array, LayerCache]: ...


@overload
def prefill(
  cache: LayerCache,
  q: ArrayLike,
  k: ArrayLike,
  v: ArrayLike,
  lengths: ArrayLike | None = ...,
  *,
  starts: ArrayLike | None = ...,
  total: ArrayLike | None = ...,
  past: int | None = ...,
  sinks: ArrayLike | None = ...,
  wo: ArrayLike | None = ...,
  carry: Carry,
) -> tuple[Array, LayerCache, Carry]: ...


def prefill(
  cache: LayerCache,
  q: ArrayLike,
  k: ArrayLike,
  v: ArrayLike,
  lengths: ArrayLike | None = None,
  *,
  starts: ArrayLike | None = None,
  total: ArrayLike | None = None,
  past: int | None = 0,
  sinks: ArrayLike | None = None,
  wo: ArrayLike | None = None,
  carry: Carry | None = None,
) -> tuple[Array, LayerCache] | tuple[Array, LayerCache, Carry]:
  """Causal attention of a prompt, of a chunk of one, or of a later turn, which enters the cache.

  >>> import jax.numpy as jnp
  >>> import kvjax
  >>> sizes = {"batch": 2, "capacity": 32, "heads": 2, "kv_heads": 1, "head_dim": 8}
  >>> (empty,) = kvjax.empty_caches(kvjax.Knorm(budget=4), **sizes)
  >>> q, k = jnp.ones((2, 12, 2, 8)), jnp.ones((2, 12, 1, 8))
  >>> out, cache = kvjax.prefill(empty, q, k, k, jnp.array([12, 3]))
  >>> out.shape, cache.cache.seen.tolist(), cache.cache.used.tolist()
  ((2, 12, 2, 8), [12, 3], [4, 3])

  Args:
    cache: this layer's; donate it to the program around this call.
    q, k, v: projections of the tokens, [B, T, N, H] and [B, T, K, H], padded on the right, or with
      `starts` on the left.
    lengths: integers [B], tokens of each row; 0 leaves a row as it is. None: all from `starts` on.
    starts: integers [B], where in its row the first token is, of prompts that are padded on the
      left; earlier places are not read. None: 0.
    total: integers [B], tokens of the whole prompt, where these are a chunk of it, for methods that
      need not see it at once; None: `lengths`.
    past: static bound on the tokens that rows have cached already; 0: none; None: not known.
    sinks, carry: as in `decode`.
    wo: [N, H, D], the layer's output projection, for methods that weigh by it (`kvjax.CriticalKV`).

  Returns:
    out [B, T, N, H] in q's dtype, whose padding means nothing, and the cache; with `carry` this,
    too.

  Raises:
    ValueError: arrays that do not fit the cache, tokens that reach past T, more cached tokens than
      `past` says, or no room; within a program none can raise for values, and tokens past T are not
      there.
    TypeError: the method needs a `carry`, `wo` or the layer's number, which it was not given.
    NotImplementedError: the method decides what a layer computes or reads a prompt in pieces of its
      own, which only a decoder can do that asks it; or it has to see a prompt at once, and `total`
      says that this is a part of one (within a program: `total` is given).
  """
  check_kinds(cache, carry)
  name, method = _name(cache), cache.method
  if forms.overrides(method, "active") or method.traits.stream is not None:
    raise NotImplementedError(
      f"{name}: found a method that decides which tokens of a prompt a layer computes, expected "
      "one that takes them as they come: kvjax.models runs it"
    )
  dtype, q, k, v = _projections(cache, q, k, v)
  rows, kv_heads, width = _sizes(cache)
  tokens = max(1, q.shape[1]) if q.ndim > 1 else 1
  groups = _groups(cache, q, (rows, tokens))
  for each, x in (("k", k), ("v", v)):
    arguments.check_shape(each, x, (rows, tokens, kv_heads, width))
  first, valid = arguments.span(rows, tokens, starts, lengths)
  whole = arguments.whole(method, valid, total)
  whole = valid if whole is None else whole
  arguments.check_past(cache.cache.seen, valid, past)
  arguments.check_room(cache.cache, entrance.room(method, cache.cache), valid)
  q, k, v = (_rolled(x, first) for x in (q, k, v))
  prompt = Prompt(valid, whole, None, tokens, past, wo=_projection(cache, wo, groups))
  scaled = _scaled(cache, q).reshape(rows, tokens, kv_heads, groups, width)
  q_in = jnp.moveaxis(scaled, 1, 3)  # [B, K, G, T, H]
  k, v = jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2)  # [B, K, T, H]
  at, sunk = _place(cache, sinks)
  done = drivers.read(at, cache.cache, q_in, k, v, prompt, carry or Carry(), sunk)
  out = _rolled(jnp.moveaxis(done[0], 3, 1).reshape(q.shape), None if first is None else -first)
  now = dataclasses.replace(cache, ended=not forms.overrides(method, "conclude"))
  return _result(now, out.astype(dtype), done[1], carry, done[2])


def finish(caches: Sequence[LayerCache], lengths: ArrayLike) -> tuple[LayerCache, ...]:
  """The caches after all layers have read a prompt, for methods that settle something then.

  Args:
    caches: of all layers, in order.
    lengths: integers [B], as given to `prefill`.

  Raises:
    ValueError: there are not as many caches as layers, or not as many lengths as rows.
  """
  caches = of_layers(caches)
  served = [i for i, cache in enumerate(caches) if not isinstance(cache.method, sliding.Sliding)]
  done = list(caches)
  if served:
    first, before = caches[served[0]], tuple(caches[i].cache for i in served)
    if len(served) != first.env.layers:
      raise ValueError(
        f"caches: found {len(served)} that {_name(first)} keeps, expected {first.env.layers}, one "
        "for each of its layers"
      )
    lengths = arguments.counts("lengths", lengths, _sizes(first)[0])
    after = first.method.conclude(first.env, before, lengths)
    for i, new in zip(served, after, strict=True):
      done[i] = dataclasses.replace(caches[i], cache=new, ended=True)
  return tuple(done)


# ---- checks and shapes


def _name(cache: LayerCache) -> str:
  return type(cache.method).__name__


def _sizes(cache: LayerCache) -> tuple[int, int, int]:
  """B, K and H."""
  held = cache.cache
  return held.slots["k"].shape[0], held.kv_heads, held.head_dim


def _projections(cache: LayerCache, *given: ArrayLike) -> tuple[Any, Array, Array, Array]:
  """q's dtype; and q, k and v as floats, of 64 bits only where the cache has such."""
  wide = cache.cache.slots["k"].dtype == jnp.float64
  q, k, v = (arguments.floats(*x, wide) for x in zip("qkv", given, strict=True))
  return arguments.floats("q", given[0], True).dtype, q, k, v


def _groups(cache: LayerCache, q: Array, leading: tuple[int, ...]) -> int:
  """G, query heads per key/value head, of a q that fits."""
  _, kv_heads, width = _sizes(cache)
  heads = q.shape[-2] if q.ndim > 1 else 0
  origin = cache.cache.origin
  known = heads if origin is None else origin.groups * kv_heads
  arguments.check_shape("q", q, (*leading, known, width))
  if heads % kv_heads:
    raise ValueError(f"q: found {heads} heads, expected a multiple of the {kv_heads} of the cache")
  return heads // kv_heads


def _projection(cache: LayerCache, wo: ArrayLike | None, groups: int) -> Array | None:
  """The output projection [K, G, H, D], where the method weighs by it."""
  if not cache.method.traits.weighs_outputs:
    return None
  _, kv_heads, width = _sizes(cache)
  if wo is None:
    raise TypeError(
      f"wo: found None, expected the layer's output projection [N, H, D], as {_name(cache)} "
      "weighs values by it"
    )
  wo = arguments.floats("wo", wo)
  arguments.check_shape("wo", wo, (kv_heads * groups, width, *wo.shape[2:3]))
  return wo.reshape(kv_heads, groups, width, -1)


def _rolled(x: Array, shift: Array | None) -> Array:
  """Rows of x [B, T, …], each begun at its shift."""
  if shift is None:
    return x
  turn = (jnp.arange(x.shape[1]) + shift[:, None]) % x.shape[1]  # [B, T]
  return jnp.take_along_axis(x, turn[:, :, None, None], 1)


def _place(cache: LayerCache, sinks: ArrayLike | None) -> tuple[At, Array | None]:
  """Site where the method runs, and the sinks [K, G]."""
  method, (_, kv_heads, _) = cache.method, _sizes(cache)
  layer = TracedLayer(None, method) if cache.layer is None else cache.layer
  env = dataclasses.replace(cache.env, lse=sinks is not None)
  if sinks is None:
    return method.at(env, layer), None
  sunk, origin = arguments.floats("sinks", sinks).astype(jnp.float32), cache.cache.origin
  heads = kv_heads * origin.groups if origin else sunk.size
  if sunk.shape != (heads,) or heads % kv_heads:
    raise ValueError(f"sinks: found shape {sunk.shape}, expected ({heads},), one for a query head")
  return method.at(env, layer), sunk.reshape(kv_heads, -1)


def _scaled(cache: LayerCache, q: Array) -> Array:
  """q, so that the scale of attention is H^−½."""
  if cache.scale is None:
    return q
  factor = cache.scale * q.shape[-1] ** 0.5
  return (q.astype(jnp.float32) * factor).astype(q.dtype)


def _result(
  cache: LayerCache, out: Array, new: Cache, given: Carry | None, handed: Carry
) -> tuple[Array, LayerCache] | tuple[Array, LayerCache, Carry]:
  """The result of a call; raises an error for a carry that the caller would lose."""
  after = dataclasses.replace(cache, cache=new)
  if given is not None:
    return out, after, handed
  if handed.heads or handed.rows:
    raise TypeError(
      f"{_name(cache)} hands something from layer to layer: found no carry, expected kvjax.Carry() "
      "in the first layer, and the previous layer's in the others"
    )
  return out, after
