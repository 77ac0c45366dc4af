"""Queries, keys and values of SmolLM2's layers over a text: inputs of bounds on activations."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import Full, Wrapper
from kvjax.models.decode.generate import join, prefill, split
from kvjax.models.io import convert

GOLDEN = pathlib.Path(__file__).parent / "goldens" / "smollm2.npz"


@dataclasses.dataclass(frozen=True)
class Recorded(Wrapper):
  """Reports the queries of every step, and all keys and values, as they are cached."""

  def observe(self, at, cache, q, plan, attended):
    cache, aux = self.base.observe(at, cache, q, plan, attended)
    return cache, {**aux, "q": q, "k": cache.slots["k"], "v": cache.slots["v"]}


def activations(checkpoint, steps):
  """The last queries [L, K, G, steps, H] of a text, and its keys and values [L, K, T, H]."""
  model, _ = convert.load(checkpoint, dtype=jnp.float32, impl="reference")
  with np.load(GOLDEN) as stored:
    tokens = stored["tokens"][:1]
  method, size = Recorded(Full()), tokens.shape[1]
  graph, leaves = split(model)

  @functools.partial(jax.jit, donate_argnums=2)
  def step(leaves, token, caches):
    return join(graph, leaves).decode(token, caches, method, with_aux=True)

  caches = method.init_caches(model.spec(1, size))
  _, caches = prefill(model, tokens[:, : size - steps], [size - steps], caches, method)
  queries = []
  for i in range(size - steps, size):
    _, caches, aux = step(leaves, tokens[:, i], caches)
    queries.append(np.stack([layer["q"][0] for layer in aux]))
  keys, values = (np.stack([layer[name][0] for layer in aux]) for name in ("k", "v"))
  return np.stack(queries, 3), keys, values
