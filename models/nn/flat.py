"""A module as flat leaves: what jitted functions are dispatched with.

Dispatching a module of a few hundred arrays costs tens of milliseconds through `nnx.jit`, and a
third of a millisecond as a list of arrays behind a static description.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from kvjax.runtime import sharding

# All of a module but its arrays.
Form: TypeAlias = jax.tree_util.PyTreeDef

# Forms that are alike are one object: to compare two would take a tenth of a dispatch.
_one = functools.cache(lambda form: form)


def split(model: nnx.Module) -> tuple[Form, list[Array]]:
  """A module as a static, hashable description and its flat arrays; `join` is the inverse.

  For own decode loops: pass the description as a static argument and the list as a traced one. The
  arrays keep their shapes. As a tree a module is described in a tenth of the time that `nnx.split`
  takes, which looks for variables that are shared: such a one is two arrays here.
  """
  leaves, form = jax.tree.flatten(model)
  return _one(form), leaves


def join(form: Form, leaves: Sequence[Array]) -> Any:
  """The module of `split`, from arrays of the shapes that it gave, inside jit or out."""
  return jax.tree.unflatten(form, leaves)


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


@functools.cache
def jitted(function: Callable[..., Any], static: int, mesh: Mesh | None) -> Callable[..., Any]:
  """function(`static` settings, leaves, caches, …), compiled for a mesh; caches are donated."""
  options = sharding.compiler_options(mesh) or None
  how: Any = {"static_argnums": range(static), "donate_argnums": static + 1}
  return own(jax.jit(function, **how, compiler_options=options))
