"""A decoder whose layers are compiled one at a time, for methods of very many operations.

One program for all layers is what a step costs least with, and what compiles longest: where a
method streams, with blocks, spans and votes in every layer, minutes. Layers that are alike share
one program here, which is compiled once and dispatched for each; what stands between them runs
operation by operation. The host stays ahead of the device as long as a layer takes longer than its
dispatch, a few tenths of a millisecond.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Int

from kvjax import offload
from kvjax.method import Method
from kvjax.types import At, Prompt
from models.transformer import Caches, Transformer


def suits(model: Transformer, method: Method) -> bool:
  """Whether the method asks for it and the model can: on one device, and without a NaN guard."""
  return method.by_layer and model.mesh is None and not model.env.check_nan


class ByLayer:
  """`prefill` and `decode` of a model, to be called outside of `jax.jit`; caches are donated.

  Args:
    model: the decoder, on one device. Later changes of its weights are not seen.
  """

  def __init__(self, model: Transformer):
    self.model = model
    self.layers = [_Layer(layer) for layer in model.layers]

  def prefill(
    self,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    caches: Caches,
    method: Method,
    *,
    total: Int[Array, " B"] | None = None,
    past: int | None = 0,
    all_logits: bool = False,
    with_aux: bool = False,
  ) -> Any:
    """As `Transformer.prefill`."""
    total = lengths if total is None else total
    options = past, all_logits, with_aux
    read = self.model.read_prompt
    logits, caches, aux = read(caches, tokens, lengths, total, method, *options, self.layers)
    return (logits, caches, aux) if with_aux else (logits, caches)

  def decode(
    self,
    tokens: Int[Array, " B"],
    caches: Caches,
    method: Method,
    live: Bool[Array, " B"] | None = None,
    *,
    with_aux: bool = False,
  ) -> Any:
    """As `Transformer.decode`."""
    live = jnp.ones(tokens.shape, bool) if live is None else live
    logits, caches, aux = self.model.step(caches, tokens, live, method, with_aux, self.layers)
    return (logits, caches, aux) if with_aux else (logits, caches)


@dataclasses.dataclass(frozen=True, eq=False)
class _Form:
  """What layers of equal shapes have in common; one object for all, compared by what it is: to
  hash the description anew would take a third of a dispatch.
  """

  graph: Any
  tree: Any

  def layer(self, leaves: list[Array]) -> Any:
    return nnx.merge(self.graph, jax.tree.unflatten(self.tree, leaves))


_form = functools.cache(_Form)


class _Layer:
  """A layer by its form and its arrays."""

  def __init__(self, layer: nnx.Module):
    graph, state = nnx.split(layer)
    self.leaves, tree = jax.tree.flatten(state)
    self.form = _form(graph, tree)

  def prefill(self, at: At, x: Any, cache: Any, prompt: Prompt, carry: Any) -> Any:
    return _prefill(self.form, _alike(at), self.leaves, cache, x, prompt, carry)

  def decode(self, at: At, x: Any, parts: Any, cache: Any, live: Any, carry: Any) -> Any:
    return _decode(self.form, _alike(at), self.leaves, cache, x, parts, live, carry)


def _alike(at: At) -> At:
  """The first place where a layer does the same."""
  return At(at.top.alike(at.layer), at.env, at.top)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _prefill(
  form: _Form, at: At, leaves: Any, cache: Any, x: Any, prompt: Prompt, carry: Any
) -> Any:
  x, cache, carry, aux = form.layer(leaves).prefill(at, x, cache, prompt, carry)
  return x, offload.settled(cache), carry, aux


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _decode(
  form: _Form, at: At, leaves: Any, cache: Any, x: Any, parts: Any, live: Any, carry: Any
) -> Any:
  x, parts, cache, carry, aux = form.layer(leaves).decode(at, x, parts, cache, live, carry)
  return x, parts, offload.settled(cache), carry, aux
