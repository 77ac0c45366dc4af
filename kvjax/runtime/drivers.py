"""A method's drivers in a layer, with sinks: what the front door and the decoder both call."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jaxtyping import Array, Bool, Float

from kvjax.core.context import At, Carry, Prompt
from kvjax.families.method import Aux


def step(
  at: At,
  cache: Any,
  q: Float[Array, "B K G H"],
  k: Float[Array, "B K H"],
  v: Float[Array, "B K H"],
  live: Bool[Array, " B"],
  carry: Carry,
  sinks: Float[Array, "K G"] | None = None,
) -> tuple[Float[Array, "B K G H"], Any, Carry, Aux]:
  """A method's decode step (`Method.decode_step`); with `sinks`, under `Env.lse`."""
  if (twin := twin_of(at)) is None:
    done = at.top.decode_step(at, cache, q, k, v, live, carry)
  else:
    done = _once("decode_step", twin, cache, q, k, v, live, carry)
  return _sunk(*done, sinks)


def read(
  at: At,
  cache: Any,
  q: Float[Array, "B K G A H"],
  k: Float[Array, "B K C H"],
  v: Float[Array, "B K C H"],
  prompt: Prompt,
  carry: Carry,
  sinks: Float[Array, "K G"] | None = None,
) -> tuple[Float[Array, "B K G A H"], Any, Carry, Aux]:
  """A method's prompt (`Method.prefill`); with `sinks`, under `Env.lse`."""
  if (twin := twin_of(at)) is None:
    done = at.top.prefill(at, cache, q, k, v, prompt, carry)
  else:
    done = _once("prefill", twin, cache, q, k, v, prompt, carry)
  return _sunk(*done, sinks)


def twin_of(at: At) -> At | None:
  """The first layer that does just what this one does (`Stream.alike`): they share a program, which
  is traced and lowered once. None: there is none.
  """
  stream = at.top.traits.stream
  if stream is None or stream.alike is None or at.env.check_nan:  # whose errors name the layer
    return None
  return At(at.of_layer(stream.alike), at.env, at.top)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _once(driver: str, at: At, *given: Any) -> Any:
  return getattr(at.top, driver)(at, *given)


def _sunk(o: Array, cache: Any, carry: Carry, aux: Aux, sinks: Array | None) -> Any:
  """Attention with a sink s in its denominator Σ = e^lse: o·Σ/(Σ + eˢ) = o·σ(lse − s)."""
  if sinks is None:
    return o, cache, carry, aux
  lse = aux["lse"]
  share = jax.nn.sigmoid(lse - sinks.reshape(*sinks.shape, *[1] * (lse.ndim - 3)))
  rest = {name: x for name, x in aux.items() if name != "lse"}
  return (o * share[..., None]).astype(o.dtype), cache, carry, rest
