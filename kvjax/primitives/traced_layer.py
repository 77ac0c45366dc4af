"""The number of a layer that is not known while a program is traced."""

from __future__ import annotations

from typing import Any

_ASKS = (
  *("bool", "int", "index", "float", "hash", "contains"),
  *("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs"),
  *(
    side + name
    for name in ("add", "sub", "mul", "floordiv", "truediv", "mod")
    for side in ("", "r")
  ),
)


class TracedLayer:
  """A layer's number under `jax.lax.scan`: layers share one program, which cannot tell them apart.

  What does the same in every layer never asks for it, and jax takes it as the array that it is
  (`jnp.uint32(layer)`). Comparisons and arithmetic raise: what they decide is decided at tracing.

  Args:
    number: int32 [], traced; None: there is none.
    method: the outermost method, for the message.
  """

  def __init__(self, number: Any, method: Any):
    self.number: Any = number.number if isinstance(number, TracedLayer) else number
    self.method = method

  def __jax_array__(self) -> Any:
    return self.ask() if self.number is None else self.number

  def __repr__(self) -> str:
    return "(traced)"

  def ask(self, *_: Any) -> Any:
    raise TypeError(different_layers(self.method))


for _name in _ASKS:
  setattr(TracedLayer, f"__{_name}__", TracedLayer.ask)


def different_layers(method: Any) -> str:
  """Message for a method that needs to know the layer."""
  return (
    f"{type(method).__name__}: found a traced layer number, expected an int: it does not do the "
    f"same in every layer, so layers under jax.lax.scan cannot share its program; {remedy(method)}"
  )


def remedy(method: Any) -> str:
  """The remedy for layers that differ, be it for a method's base."""
  own = getattr(method, "dense_layers", 0)
  if own and not getattr(method, "minds_depth", False):
    return "unroll them, or set dense_layers=0"
  base = getattr(method, "base", None)
  return "unroll them" if own or base is None else remedy(base)
