"""Shapes of what moves are handed and hand back."""

from __future__ import annotations

from typing import Any

from kvjax.core.context import At


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
