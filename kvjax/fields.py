"""Types and bounds of dataclass fields, checked where values come from users."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import types
import typing
from typing import Any

import jax
import jax.numpy as jnp


def least(minimum: int | float, default: Any) -> Any:
  """A field of numbers from `minimum` on."""
  return dataclasses.field(default=default, metadata={"least": minimum})


def check(cls: type, values: dict[str, Any]) -> None:
  """Raises TypeError for a value whose type is not what the field of that name says, ValueError for
  one below the `least` that it allows.

  Integers pass for floats; booleans for neither. Nothing converts in silence. Fields of other than
  plain types and tuples are let through, and so is what tuples hold.
  """
  for name, kinds in _plain_types(cls).items():
    if name in values and not any(_fits(values[name], kind) for kind in kinds):
      expected = " or ".join("None" if k is types.NoneType else k.__name__ for k in kinds)
      raise TypeError(f"{cls.__name__}.{name}: found {values[name]!r}, expected {expected}")
  for field in dataclasses.fields(cls):  # type: ignore[arg-type]
    least = field.metadata.get("least")
    if least is not None and field.name in values and not values[field.name] >= least:
      raise ValueError(
        f"{cls.__name__}.{field.name}: found {values[field.name]}, expected {least} or more"
      )


def check_float(name: str, dtype: Any) -> None:
  """Raises TypeError for a dtype that is no float, or that jax would replace by a narrower one."""
  try:
    found = jnp.dtype("none" if dtype is None else dtype)  # NumPy reads None as float64
  except TypeError:
    raise TypeError(f"{name}: found {dtype!r}, expected a dtype of floats") from None
  if not jnp.issubdtype(found, jnp.floating):
    raise TypeError(f"{name}: found {found.name}, expected a dtype of floats, such as bfloat16")
  kept = jax.dtypes.canonicalize_dtype(found)
  if kept != found:
    raise TypeError(
      f"{name}: found {found.name}, expected {kept.name}, or jax_enable_x64 turned on"
    )


def named_arguments(cls: type, args: tuple[Any, ...]) -> dict[str, Any]:
  """A dataclass's positional arguments by name."""
  fields = dataclasses.fields(cls)  # type: ignore[arg-type]
  names = [f.name for f in fields if f.init and not f.kw_only]
  return dict(zip(names, args, strict=False))


def _fits(value: Any, kind: type) -> bool:
  if kind in (int, float):
    number: type = numbers.Integral if kind is int else numbers.Real
    return isinstance(value, number) and not isinstance(value, bool)
  return isinstance(value, kind)


@functools.cache
def _plain_types(cls: type) -> dict[str, tuple[type, ...]]:
  """The types of each field that takes nothing but classes: int, str | None, Method."""
  hints = typing.get_type_hints(cls)
  found = {}
  for field in dataclasses.fields(cls):  # type: ignore[arg-type]
    hint = hints[field.name]
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if union else (hint,)
    kinds = tuple(tuple if typing.get_origin(kind) is tuple else kind for kind in kinds)
    if all(isinstance(kind, type) and kind is not Any for kind in kinds) and not any(
      map(typing.get_origin, kinds)
    ):
      found[field.name] = kinds
  return found
