"""Types and bounds of dataclass fields, checked where values come from users."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import types
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_INTERVALS = {
  "[]": "{} to {}",
  "[)": "{} or more, below {}",
  "(]": "more than {} and at most {}",
}


def bound(holds: Callable[[Any], Any], expected: str, default: Any) -> Any:
  """A field whose values satisfy `holds`, described by `expected`; None is also allowed.

  `check` asks, and a subclass that gives the field another default keeps the bound.
  """
  return dataclasses.field(default=default, metadata={"bound": (holds, expected)})


def least(minimum: int | float, default: Any = dataclasses.MISSING) -> Any:
  """A field of numbers from `minimum` on, required where no default is given."""
  return bound(lambda x: x >= minimum, f"{minimum} or more", default)


def between(low: int | float, high: int | float, default: Any, ends: str = "[]") -> Any:
  """A field of numbers from `low` to `high`; "[)" leaves out the highest, "(]" the lowest."""
  outside = [x for x, end in zip((low, high), ends, strict=True) if end in "()"]
  expected = _INTERVALS[ends].format(low, high)
  return bound(lambda x: low <= x <= high and x not in outside, expected, default)


def finite_above(low: int | float, default: Any) -> Any:
  """A field of finite numbers above `low`."""
  return bound(lambda x: low < x < math.inf, f"a finite number above {low}", default)


def number(default: Any) -> Any:
  """A field of any number; NaN is none."""
  return bound(lambda x: x == x, "a number", default)


def odd(default: Any) -> Any:
  """A field of odd numbers from 1 on."""
  return bound(lambda x: x >= 1 and x % 2, "an odd number", default)


def one_of(values: tuple[Any, ...], default: Any) -> Any:
  """A field of one of these values."""
  expected = " or ".join(map(repr, values)) if len(values) == 2 else f"one of {values}"
  return bound(lambda x: x in values, expected, default)


def expect(owner: Any, name: str, holds: Any, expected: str) -> None:
  """Raises ValueError about the field `name` unless `holds`: how it relates to the others."""
  if not holds:
    found = getattr(owner, name)
    raise ValueError(f"{type(owner).__name__}.{name}: found {found!r}, expected {expected}")


def check(cls: type, values: dict[str, Any]) -> None:
  """Raises TypeError for a value whose type is not what the field of that name says, ValueError for
  one outside the field's bound, be it given or the default.

  Integers pass for floats; booleans for neither. Nothing converts in silence. Fields of other than
  plain types and tuples are let through, and so is what tuples hold.
  """
  for name, kinds in _plain_types(cls).items():
    if name in values and not any(_fits(values[name], kind) for kind in kinds):
      expected = " or ".join("None" if k is types.NoneType else k.__name__ for k in kinds)
      raise TypeError(f"{cls.__name__}.{name}: found {values[name]!r}, expected {expected}")
  for name, (holds, expected, default) in _bounds(cls).items():
    value = values.get(name, default)
    if value is not None and value is not dataclasses.MISSING and not _holds(holds, value):
      raise ValueError(f"{cls.__name__}.{name}: found {value!r}, expected {expected}")


def _holds(holds: Callable[[Any], Any], value: Any) -> bool:
  """False also of what a bound cannot look at: a tuple that holds other things than it should."""
  try:
    return bool(holds(value))
  except (TypeError, ValueError):
    return False


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
def _bounds(cls: type) -> dict[str, tuple[Callable[[Any], Any], str, Any]]:
  """The check of each argument, its description and its default, by name."""
  bounds = {}
  for base in reversed(cls.__mro__):
    for field in vars(base).get("__dataclass_fields__", {}).values():
      if "bound" in field.metadata:
        bounds[field.name] = field.metadata["bound"]
  arguments = [f for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
  return {f.name: (*bounds[f.name], f.default) for f in arguments if f.name in bounds}


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
