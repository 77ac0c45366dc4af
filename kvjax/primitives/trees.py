"""Dataclasses that are pytrees."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax

T = TypeVar("T")


def pytree(*static: str) -> Callable[[type[T]], type[T]]:
  """Registers a frozen dataclass as a pytree; `static` names the fields that are not arrays."""

  def register(cls: type[T]) -> type[T]:
    fields = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    data = [name for name in fields if name not in static]
    return jax.tree_util.register_dataclass(cls, data, list(static))

  return register
