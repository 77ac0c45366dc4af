"""Shapes of what moves are handed and hand back."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float

from kvjax.core.context import At, Turn
from kvjax.core.slots import Slots


def parts(at: At, move: str, found: Any, **kinds: type | tuple[type, ...]) -> Any:
  """The result of a move; raises TypeError unless it is a tuple of these kinds."""
  several = isinstance(found, tuple)
  if several and len(found) == len(kinds) and all(map(isinstance, found, kinds.values())):
    return found
  said = f"({', '.join(map(_kind, found))})" if several else _kind(found)
  raise TypeError(f"{at.name}: {move}: found {said}, expected ({', '.join(kinds)})")


def _kind(x: Any) -> str:
  return "array" if isinstance(x, jax.Array) else type(x).__name__


def ranked(at: At, turn: Turn) -> tuple[Float[Array, "B K S"], Slots]:
  """Result of `rank`, checked."""
  made = at.top.rank(at, turn)
  priority, staged = parts(at, "rank", made, priority=jax.Array, staged=dict)
  check_shape(at, "rank", priority, staged["pos"].shape)
  return priority, staged


def check_shape(at: At, name: str, x: Any, expected: tuple[int | None, ...]) -> None:
  """Raises ValueError for an array of another shape; None stands for any size."""
  found = tuple(x.shape)
  fits = len(found) == len(expected)
  if not fits or [n for n, m in zip(expected, found, strict=True) if n not in (None, m)]:
    sizes = ", ".join("any" if n is None else str(n) for n in expected)
    raise ValueError(
      f"{at.name}: {name}: found shape {found}, expected ({sizes}), as its cache has "
      "rows, key/value heads, slots and channels"
    )
