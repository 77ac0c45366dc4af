"""A layer's cache of random tokens, and a decode step of the layer, of several suites."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import kvjax
from kvjax.core.leaves import Layout


@functools.partial(jax.jit, static_argnums=(0, 1, 3))
def holding(
  method: kvjax.Method, spec: kvjax.CacheSpec, tokens: Any, layer: int = 0
) -> kvjax.Cache:
  """A layer's cache whose rows hold `tokens` random tokens, alike; statistics are 1."""
  cache = kvjax.Cache.empty(method, spec, layer)
  slot = jnp.arange(cache.size, dtype=jnp.int32)
  slots = {n: jnp.ones(x.shape, x.dtype) for n, x in cache.slots.items()}
  for name, key in zip(("k", "v"), jax.random.split(jax.random.key(0)), strict=True):
    shape, dtype = cache.slots[name].shape, cache.slots[name].dtype
    if cache.leaf(name).bits:  # any word holds codes
      words = jax.random.bits(key, shape[1:], f"uint{8 * dtype.itemsize}")
      one, slots[f"{name}_scale"] = words.astype(dtype), slots[f"{name}_scale"] / 64
    else:
      one = jax.random.normal(key, shape[1:], spec.dtype)
    slots[name] = jnp.broadcast_to(one, shape)
  slots["pos"] = jnp.broadcast_to(jnp.where(slot < tokens, slot, -1), cache.pos.shape)
  rows = {n: jnp.full(spec.batch, tokens, jnp.int32) for n in ("seen", "used")}
  apart = cache.layout is Layout.SPLIT
  heads = {"apart": _window(cache.heads["apart"], tokens)} if apart else {}
  return cache.put(slots=slots, heads=heads, rows=rows)


def _window(apart: Any, tokens: Any) -> Any:
  """Slots of heads that hold a full window, random too; the oldest of it is the next to leave."""
  named = zip(("k", "v"), jax.random.split(jax.random.key(1)), strict=True)
  full = {n: jax.random.normal(key, apart[n].shape, apart[n].dtype) for n, key in named}
  size, first = apart["pos"].shape[2], apart["ring"][..., :1]  # what stays: the first tokens
  slot = jnp.arange(size, dtype=jnp.int32)
  pos = jnp.where(slot < first, slot, tokens - size + slot)
  return {**apart, **full, "pos": pos, "ring": apart["ring"].at[..., 1].set(tokens)}


def projected(spec: kvjax.CacheSpec) -> tuple[jax.Array, jax.Array]:
  """Queries, key and value of each KV head in one array, as a decoder's product, and live rows."""
  shape = spec.batch, spec.kv_heads, spec.groups + 2, spec.head_dim
  return jax.random.normal(jax.random.key(0), shape, spec.dtype), jnp.ones(spec.batch, bool)


def step_of(
  method: kvjax.Method, impl: str, layers: int, *, layer: int = 0, with_aux: bool = False
) -> Callable:
  """A decode step of a layer: (cache, qkv, live) to the cache and the output.

  With `with_aux` what the method tells of it stands beside the output.
  """
  at = method.at(kvjax.Env(layers, kvjax.Rope(), impl=impl), layer)

  def step(cache: Any, qkv: Any, live: Any) -> tuple[Any, Any]:
    q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
    out, cache, _, aux = method.decode_step(at, cache, q, k, v, live, kvjax.Carry())
    return cache, (out, aux) if with_aux else out

  return step


def compared(cis: kvjax.CIS, cpe: kvjax.CPE, budget: int) -> list[tuple[str, kvjax.Method]]:
  """The other columns of PrHS's Tabs. IV and V at as many tokens, named as there.

  For a layer by itself, HShare shares between steps, and with no other layer.
  """
  half, more = ({"layers": share, "heads": share} for share in (1 / 2, 3 / 4))
  shared = kvjax.HShare(budget, cis.sinks, cis.local)
  return [
    ("CPE-8", dataclasses.replace(cpe, block=8)),
    ("CIS-8", dataclasses.replace(cis, block=8)),
    ("CIS-16", dataclasses.replace(cis, block=16)),
    ("HShare-0", dataclasses.replace(shared, **more)),
    ("HShare-1", dataclasses.replace(shared, **half)),
    ("Double Sparsity", kvjax.DoubleSparsity(budget)),
    ("Quest", kvjax.Quest(budget, dense_layers=0)),
    ("H2O", kvjax.settings.example(kvjax.H2O, budget)),
  ]
