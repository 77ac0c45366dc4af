"""Live full caches, cut to what a method keeps: no prompt is read again."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jaxtyping import Array, Float

from kvjax.core import slots
from kvjax.core.cache import Cache, CacheSpec, Origin
from kvjax.core.context import At, Prompt, Turn
from kvjax.core.plan import Attended
from kvjax.families import forms, sliding
from kvjax.families.full import Full
from kvjax.families.method import Method
from kvjax.methods.registry import check_method
from kvjax.models.decode import checks
from kvjax.models.nn.transformer import Caches, Transformer
from kvjax.primitives.softmax_state import State

TILE = 64  # tokens that are ranked are a multiple of: few sizes, few compilations


def compress(model: Transformer, caches: Caches, method: Method) -> Caches:
  """Converts full caches to those that a method would have after reading the same tokens at once.

  For methods that depend on keys, values and positions, up to ties in rounding: `Knorm`, `KeyDiff`,
  `LagKV`, `Random`; and for those that keep all tokens and index or round them: `Quest`,
  `Quantised`, `KIVI`. Queries are not cached, so methods that rank tokens by queries raise an error
  and have to read the prompt themselves.

  Args:
    model: the decoder.
    caches: of `Full`, live; not changed. Delete them to free their memory.
    method: whose caches are wanted.

  Returns:
    The method's caches, one per layer, to continue from the same logits.

  Raises:
    TypeError: `method` is no method, or `caches` no caches.
    ValueError: the caches are not those of the full cache of this model, or were donated before.
    NotImplementedError: the method looks at a prompt's queries, reads prompts in a way of its own,
      or has to have them repeated (`kvjax.models.decode.reconstruct`); the model is spread over
      devices.
  """
  check_method("method", method)
  checks.laid_out(caches, Full(), model.spec(1, 1))
  if model.mesh is not None:
    raise NotImplementedError("model: found a mesh of several devices, expected one device")
  _check_reads_as_full(method)
  size = max(cache.size for cache in sliding.served(caches) or caches)
  spec = model.spec(len(caches[0].seen), size, caches[0].slots["k"].dtype)
  width = min(size, -(-max(1, int(np.max(caches[0].seen))) // TILE) * TILE)
  origin, made = Origin.of(method, spec), []
  layers = zip(model.places(method), model.layers, sliding.windows_of(caches), strict=True)
  for cache, (at, layer, window) in zip(caches, layers, strict=True):
    if window is None:
      wo = layer.attention.wo[...] if method.traits.weighs_outputs else None
      prompt = Prompt(cache.seen, cache.seen, None, width, 0, wo=wo)
      held = {name: cache.slots[name][:, :, :width] for name in ("k", "v", "pos")}
      run = functools.partial(kept, at, spec, held, prompt)
      _check_asks_no_queries(run, method, spec, held)
      nothing = jnp.zeros_like(held["k"])[:, :, None]  # in place of queries: nothing looks at it
      cache = run(nothing, nothing, *[nothing[..., 0]] * 2)
    else:
      cache = jax.tree.map(jnp.array, cache)
    made.append(dataclasses.replace(cache, origin=origin))
  return tuple(made)


def _check_reads_as_full(method: Method) -> None:
  """Raises unless a prompt's keys and values are the full cache's under a method."""
  if method.traits.repeats:
    raise NotImplementedError(
      f"method: found {method!r}, which scores a context by having the model repeat it, expected "
      "one that does not: kvjax.models.decode.reconstruct does that"
    )
  own = [move for move in ("conclude", "init_caches") if forms.overrides(method, move)]
  if own or not forms.dense_prefill(method):
    raise NotImplementedError(
      f"method: found {method!r}, expected one that reads a prompt as the full cache does, "
      "each layer by itself"
    )


def _check_asks_no_queries(
  run: Callable[..., Cache], method: Method, spec: CacheSpec, held: dict[str, Array]
) -> None:
  """Raises where `run` looks at q, o, m or l: queries, and what they attended to."""
  batch, heads, width, size = held["k"].shape
  shape = batch, heads, spec.groups, width
  q = jax.ShapeDtypeStruct((*shape, size), spec.dtype)
  o = jax.ShapeDtypeStruct((*shape, size), jnp.float32)
  m = jax.ShapeDtypeStruct(shape, jnp.float32)
  program = jax.make_jaxpr(run)(q, o, m, m).jaxpr
  asked = {x for eqn in program.eqns for x in eqn.invars if not isinstance(x, Literal)}
  if not asked.isdisjoint(program.invars):
    raise NotImplementedError(
      f"method: found {method!r}, which depends on a prompt's queries, expected one that needs "
      "only keys, values and positions: caches hold no queries (prefill with the method instead)"
    )


def kept(
  at: At,
  spec: CacheSpec,
  held: dict[str, Array],
  prompt: Prompt,
  q: Float[Array, "B K G A H"],
  o: Float[Array, "B K G A H"],
  m: Float[Array, "B K G A"],
  l: Float[Array, "B K G A"],
) -> Cache:
  """The cache that a method keeps of a layer, as at the end of `Method.prefill`.

  Args:
    at: the method and the layer.
    spec: sizes of the new cache.
    held: "k", "v" [B, K, A, H] and "pos" [B, K, A] of the tokens; −1: none.
    prompt: how many of them are real.
    q: their queries, and o, m, l the softmax state of what these attended to.
  """
  there = held["pos"] >= 0
  new: dict[str, Any] = {name: jnp.where(there[..., None], held[name], 0) for name in ("k", "v")}
  new["pos"] = held["pos"]
  empty = Cache.empty(at.top, spec, at.layer)
  new |= empty.of_new(new)
  attended = Attended(State(o, m, l), None, None, there.sum(-1, dtype=jnp.int32))
  turn = Turn(new, q, held["pos"][:, 0], attended, prompt)
  made = at.top.keep(at, empty, turn, new)
  return slots.choose_rows(prompt.valid > 0, made, empty)
