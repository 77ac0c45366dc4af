"""A module as flat leaves: what jitted functions are dispatched with.

Dispatching a module of a few hundred arrays costs tens of milliseconds through `nnx.jit`, and a
third of a millisecond as a list of arrays behind a static description.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from .. import sharding


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
  """All of a module but its arrays; modules of one form share one object.

  It is compared by what it is: to hash the description anew would take a third of a dispatch.
  """

  graph: Any
  tree: Any

  def module(self, leaves: Sequence[Array]) -> Any:
    return nnx.merge(self.graph, jax.tree.unflatten(self.tree, list(leaves)))


_form = functools.cache(Form)


def split(model: nnx.Module) -> tuple[Form, list[Array]]:
  """A module as a static, hashable description and its flat arrays; `join` is the inverse.

  For own decode loops: pass the description as a static argument and the list as a traced one.
  """
  graph, state = nnx.split(model)
  leaves, tree = jax.tree.flatten(state)
  return _form(graph, tree), leaves


def join(form: Form, leaves: Sequence[Array]) -> Any:
  """The module of `split`, inside jit or out."""
  return form.module(leaves)


def jitted(function: Callable[..., Any], static: int, mesh: Mesh | None) -> Callable[..., Any]:
  """function(`static` settings, leaves, caches, …), compiled for a mesh; caches are donated."""
  return _jitted(function, static, tuple(sharding.compiler_options(mesh).items()))


@functools.cache
def _jitted(
  function: Callable[..., Any], static: int, options: tuple[tuple[str, str], ...]
) -> Callable[..., Any]:
  return jax.jit(
    function,
    static_argnums=range(static),
    donate_argnums=static + 1,
    compiler_options=dict(options) or None,
  )
