"""A module as flat leaves: what jitted functions are dispatched with.

Dispatching a module of a few hundred arrays costs tens of milliseconds through `nnx.jit`, and a
third of a millisecond as a list of arrays behind a static description.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from kvjax.runtime import sharding


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
  """All of a module but its arrays; modules of one form share one object.

  It is compared by what it is: to hash the description anew would take a third of a dispatch.
  """

  graph: Any
  tree: Any

  def module(self, leaves: Sequence[Array]) -> Any:
    """The module of these arrays, of the shapes that it had when it was split."""
    return nnx.merge(self.graph, jax.tree.unflatten(self.tree, list(leaves)))


_form = functools.cache(Form)


class _Known(NamedTuple):
  """The last `split` of a module.

  Attributes:
    facts: names of all attributes in it, and their values; types in the place of modules and
      variables.
    form: the description.
    order: for each leaf the number of the variable that holds it.
  """

  facts: list[Any]
  form: Form
  order: list[int]

  def holds(self, facts: list[Any]) -> bool:
    """True if a module of these facts has the same description."""
    return len(facts) == len(self.facts) and all(map(operator.is_, facts, self.facts))


_known: weakref.WeakKeyDictionary[nnx.Module, _Known] = weakref.WeakKeyDictionary()


def split(model: nnx.Module) -> tuple[Form, list[Array]]:
  """A module as a static, hashable description and its flat arrays; `join` is the inverse.

  For own decode loops: pass the description as a static argument and the list as a traced one. The
  arrays keep their shapes. A
  module in which nothing but arrays changed is not described again: that takes 20 times as long.
  """
  facts: list[Any] = []
  variables: list[nnx.Variable] = []
  _look(model, facts, variables)
  known = _known.get(model)
  if known is not None and known.holds(facts):
    return known.form, [variables[i].get_raw_value() for i in known.order]
  graph, state = nnx.split(model)
  leaves, tree = jax.tree.flatten(state)
  form = _form(graph, tree)
  number = {id(variable.get_raw_value()): i for i, variable in enumerate(variables)}
  # Not one of which variables share an array, nor one with arrays outside of variables.
  if len(number) == len(variables) == len(leaves) and all(id(x) in number for x in leaves):
    _known[model] = _Known(facts, form, [number[id(x)] for x in leaves])
  return form, leaves


def _look(module: nnx.Pytree, facts: list[Any], variables: list[nnx.Variable]) -> None:
  """Collects what a module and those in it consist of; flax's own notes are left out."""
  facts.append(type(module))
  for name, value in vars(module).items():
    if name.startswith("_pytree__"):
      continue
    facts.append(name)
    if isinstance(value, nnx.Variable):
      facts.append(type(value))
      variables.append(value)
    elif isinstance(value, nnx.Pytree):
      _look(value, facts, variables)
    else:
      facts.append(value)


def join(form: Form, leaves: Sequence[Array]) -> Any:
  """The module of `split`, from arrays of the shapes that it gave, inside jit or out."""
  return form.module(leaves)


_OWN: list[Any] = []


def own(function: Any) -> Any:
  """A jitted function, noted: its programs count among those that `drop` drops."""
  _OWN.append(function)
  return function


def held() -> int:
  """The number of programs that the noted functions hold."""
  return sum(function._cache_size() for function in _OWN)


def drop() -> None:
  """Drops their programs; what is needed again is compiled again, or read from disk."""
  for function in _OWN:
    function.clear_cache()


def jitted(function: Callable[..., Any], static: int, mesh: Mesh | None) -> Callable[..., Any]:
  """function(`static` settings, leaves, caches, …), compiled for a mesh; caches are donated."""
  return _jitted(function, static, tuple(sharding.compiler_options(mesh).items()))


@functools.cache
def _jitted(
  function: Callable[..., Any], static: int, options: tuple[tuple[str, str], ...]
) -> Callable[..., Any]:
  return own(
    jax.jit(
      function,
      static_argnums=range(static),
      donate_argnums=static + 1,
      compiler_options=dict(options) or None,
    )
  )
